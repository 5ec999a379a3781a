"""GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1) with speculative roll-outs: SmolLM2 learns to count.

Each step samples a group of answers to one question, compares their rewards with the group's mean, and takes one Adam
step. The drafter retrieves from earlier answers, and a planner turns drafting on and off. The roll-outs use the
"coupled" rule, so answers, rewards and weights are the same without drafts, up to rounding.

    python examples/grpo.py --steps 40
"""

import argparse
import dataclasses
import functools
import operator
import re
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jspec
from jspec.text import load_tokenizer

SAMPLES, NEW_TOKENS, WIDTH = 8, 40, 32
OPTIMIZER = optax.adam(1e-5)


@dataclasses.dataclass(frozen=True)
class Question:
    """A task whose answer a program can check."""

    first: int

    @property
    def prompt(self) -> str:
        return f"Count from {self.first} to {self.first + 9}: {self.first}, {self.first + 1},"

    def reward(self, answer: str) -> float:
        """Return the share of correct numbers, from the first one to the first mistake, in the longer of both lists."""
        words, expected = re.findall(r"\w+", answer), [str(self.first + i) for i in range(2, 10)]
        correct = [*map(operator.eq, words, expected), False].index(False)
        return correct / max(len(words), len(expected))


def loss(policy: jspec.Llama, texts: Array, lengths: Array, starts: Array, advantages: Array) -> Array:
    """Return the negative mean of advantage times ratio, over all new tokens.

    The roll-outs come from the policy itself, so the ratio is 1, its clipping has no effect, and only its gradient
    matters.
    """
    logprobs = jspec.logprobs(policy, texts, lengths, prompt_lengths=starts).logprobs
    index = jnp.arange(texts.shape[1])
    is_new = (index >= starts[:, None]) & (index < lengths[:, None])
    ratios = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    return -(advantages[:, None] * ratios).mean(where=is_new)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def update(policy: jspec.Llama, state: optax.OptState, *batch: Array) -> tuple[jspec.Llama, optax.OptState]:
    """Return the policy and the optimiser's state after one step."""
    updates, state = OPTIMIZER.update(jax.grad(loss)(policy, *batch), state)
    return optax.apply_updates(policy, updates), state


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """Return each reward's distance from the group's mean, in standard deviations."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def train(policy: jspec.Llama, tokenizer, questions: list[Question], steps: int, ends: list[int]) -> Iterator[dict]:
    """Train `policy`, and yield each step's mean reward, acceptance rate, draft length and roll-out time."""
    state, drafts, planner = OPTIMIZER.init(policy), jspec.online.Retrieval(policy), jspec.online.Planner((0, 2, 4))
    for step in range(steps):
        question = questions[step % len(questions)]
        (batch,) = jspec.batches([question.prompt], tokenizer, widths=(WIDTH,))
        keys = jax.random.split(jax.random.key(step), SAMPLES)  # new keys: the drafter knows the noise of the old ones
        options = {"max_new_tokens": NEW_TOKENS, "eos_ids": ends, "samples_per_prompt": SAMPLES}
        began, k = time.perf_counter(), planner.num_draft_tokens
        if k:
            options |= {"num_draft_tokens": jspec.UpTo(k), "accept": "coupled"}
            out = jspec.speculative_generate(policy, drafts.drafter, batch.tokens, batch.lengths, keys, **options)
        else:
            out = jspec.generate(policy, batch.tokens, batch.lengths, keys, **options)
        out = jax.block_until_ready(out)
        seconds = time.perf_counter() - began
        planner.record(out, seconds)
        drafts.learn([tokenizer.encode(question.prompt)] * SAMPLES, out)

        answers = [tokenizer.decode(row[:length]) for row, length in zip(out.tokens, out.lengths, strict=True)]
        rewards = np.array([question.reward(answer) for answer in answers])
        texts, lengths = out.with_prompts(batch.tokens, batch.lengths)
        starts = jnp.repeat(batch.lengths, SAMPLES)
        policy, state = update(policy, state, texts, lengths, starts, advantages_of(rewards))
        rate = float(out.stats.accepted.sum() / max(1, out.stats.judged.sum()))
        yield {"reward": rewards.mean(), "acceptance": rate, "k": k, "seconds": seconds, "answer": answers[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    policy, tokenizer = jspec.load("smollm2", packed=False), load_tokenizer("smollm2")
    ends = [*policy.config.eos_token_ids, tokenizer.encode("\n")[0]]
    questions = [Question(first) for first in (3, 14, 27, 58)]
    for step, row in enumerate(train(policy, tokenizer, questions, steps, ends)):
        print(
            step,
            " ".join(f"{name}={value:.3g}" for name, value in row.items() if name != "answer"),
            repr(row["answer"]),
        )


if __name__ == "__main__":
    main()
