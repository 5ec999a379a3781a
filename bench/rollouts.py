"""GRPO on SmolLM2 (examples/grpo.py): roll-outs with and without drafters that learn."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.report import RESULTS, publish
from examples import grpo
from jspec.drafters.combine.fallback import FallbackDrafter
from jspec.text import load_tokenizer

_QUESTIONS = [grpo.Question(first) for first in (3, 14, 27, 58)]
_HEAD_TOKENS, _RETRIEVED_TOKENS = 2, 4
_RATE = 1e-3  # learning rate of the online head


class _Method:
    """One method to roll out: a drafter, the number of draft tokens, and what it learns from outputs."""

    def __init__(self, drafter: Callable[[], Any], k: Callable[[], int]):
        self.drafter, self.k = drafter, k
        self.seconds, self.learning, self.accepted = list[float](), list[float](), list[float]()


def run(steps: int, folder: Path = RESULTS) -> None:
    """Train once, roll out with every method and the same keys in every step, and publish times and acceptance."""
    policy, tokenizer = jspec.load("smollm2", packed=False), load_tokenizer("smollm2")
    ends = [*policy.config.eos_token_ids, tokenizer.encode("\n")[0]]
    _, bundled, _ = jspec.pretrained("smollm2")
    assert isinstance(bundled, FallbackDrafter)
    head, retrieval, controller = bundled.second, jspec.online.Retrieval(policy), jspec.online.DraftLengthController()
    learner = jspec.online.Learner(policy, head, rate=_RATE, depth=_HEAD_TOKENS, batch=grpo.SAMPLES, length=64)
    methods = {
        "plain": _Method(lambda: None, lambda: 0),
        "frozen head": _Method(lambda: head, lambda: _HEAD_TOKENS),
        "online head": _Method(lambda: learner.drafter, lambda: _HEAD_TOKENS),
        "retrieval": _Method(lambda: retrieval.drafter, lambda: _RETRIEVED_TOKENS),
        "retrieval, controlled": _Method(lambda: retrieval.drafter, lambda: controller.num_draft_tokens),
    }
    state, rewards, same, chosen = grpo.OPTIMIZER.init(policy), list[float](), True, list[int]()
    for step in range(-1, steps):  # step -1 compiles
        question = _QUESTIONS[step % len(_QUESTIONS)]
        (batch,) = jspec.batches(question.prompt, tokenizer, widths=(grpo.WIDTH,))
        keys, outs = jax.random.split(jax.random.key(step + 1), grpo.SAMPLES), dict[str, jspec.Output]()
        call = functools.partial(grpo.roll_out, policy, batch=batch, keys=keys, ends=ends)
        if step < 0:
            for drafter, k in ((None, 0), (head, _HEAD_TOKENS), (retrieval.drafter, 2), (retrieval.drafter, 4)):
                call(drafter=drafter, k=k)
            continue
        chosen.append(controller.num_draft_tokens)
        for name, method in methods.items():
            began = time.perf_counter()
            outs[name] = call(drafter=method.drafter(), k=method.k())
            method.seconds.append(time.perf_counter() - began)
            method.accepted.append(float(outs[name].stats.accepted.sum() / outs[name].lengths.sum()))
            same &= bool(np.array_equal(outs[name].tokens, outs["plain"].tokens))
        controller.record(outs["retrieval, controlled"], methods["retrieval, controlled"].seconds[-1])
        prompts = [tokenizer.encode(question.prompt)] * grpo.SAMPLES
        for name, learn in (
            ("retrieval", retrieval.learn),
            ("online head", functools.partial(learner.learn, target=policy)),
        ):
            began = time.perf_counter()
            learn(prompts, outs[name])
            methods[name].learning.append(time.perf_counter() - began)
        out = outs["plain"]
        answers = [tokenizer.decode(row[:length]) for row, length in zip(out.tokens, out.lengths, strict=True)]
        policy, state, reward = grpo.learn(policy, state, question, batch, out, answers)
        rewards.append(float(reward.mean()))
    _publish(methods, rewards, same, chosen, folder)


def _publish(methods: dict[str, _Method], rewards: list[float], same: bool, chosen: list[int], folder: Path) -> None:
    plain, quarter = np.array(methods["plain"].seconds), max(1, len(rewards) // 4)
    rows = [
        {
            "method": name,
            "s": sum(method.seconds),
            "x plain": sum(method.seconds) / plain.sum(),
            "x plain, last quarter": sum(method.seconds[-quarter:]) / plain[-quarter:].sum(),
            "accepted, first quarter": float(np.mean(method.accepted[:quarter])),
            "accepted, last quarter": float(np.mean(method.accepted[-quarter:])),
            "learning, s": sum(method.learning),
        }
        for name, method in methods.items()
    ]
    publish(
        f"rollouts-smollm2-{jax.default_backend()}",
        f"GRPO on SmolLM2-135M: {len(rewards)} roll-outs of {grpo.SAMPLES} answers, float32",
        rows,
        plots.rollouts({name: method.accepted for name, method in methods.items() if name != "plain"}, rewards),
        notes=[
            f"Mean reward: {np.mean(rewards[:quarter]):.2f} in the first quarter of the steps,"
            f" {np.mean(rewards[-quarter:]):.2f} in the last. All methods returned the same tokens: {same}.",
            "s: time of all roll-outs, which take turns in every step. accepted: share of the new tokens that were"
            " accepted draft tokens. learning: time in which the drafter learned, in addition to s.",
        ],
        folder=folder,
        rewards=rewards,
        same=same,
        chosen_lengths=chosen,
        accepted={name: method.accepted for name, method in methods.items()},
        seconds={name: method.seconds for name, method in methods.items()},
    )
