"""GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1) with speculative roll-outs: SmolLM2 learns to count.

Each step samples a group of answers to one question, compares their rewards with the group's mean, and takes one Adam
step. The drafter retrieves from earlier answers, and a controller turns drafting on and off. The roll-outs use the
"coupled" rule, so answers, rewards and weights are the same without drafts, up to rounding.

    python examples/grpo.py --steps 40
"""

import argparse
import dataclasses
import functools
import operator
import re
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jspec
from jspec.core.tokenizer import Tokenizer
from jspec.text import load_tokenizer
from jspec.text.chat_template import Batch

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


def roll_out(policy: jspec.Llama, drafter, k: int, batch: Batch, keys: Array, ends: Sequence[int]) -> jspec.Output:
    """Sample one answer for each key, with up to `k` draft tokens per round."""
    request = policy, batch.tokens, batch.lengths, keys
    options = {"max_new_tokens": NEW_TOKENS, "eos_ids": ends, "samples_per_prompt": SAMPLES}
    if k == 0:
        return jax.block_until_ready(jspec.generate(*request, **options))
    options |= {"num_draft_tokens": jspec.UpTo(k), "accept": "coupled"}
    return jax.block_until_ready(jspec.speculative_generate(policy, drafter, *request[1:], **options))


def learn(policy: jspec.Llama, state: optax.OptState, question: Question, batch: Batch, out: jspec.Output, answers):
    """Return the policy and the optimiser's state after one step, and the rewards."""
    rewards = np.array([question.reward(answer) for answer in answers])
    texts, lengths = out.with_prompts(batch.tokens, batch.lengths)
    starts = jnp.repeat(batch.lengths, SAMPLES)
    policy, state = update(policy, state, texts, lengths, starts, advantages_of(rewards))
    return *jax.block_until_ready((policy, state)), rewards  # otherwise, the next roll-out's time would include this


def train(policy: jspec.Llama, tokenizer: Tokenizer, questions: Sequence[Question], steps: int) -> Iterator[dict]:
    """Train `policy`, and yield the figures of each step."""
    ends = [*policy.config.eos_token_ids, tokenizer.encode("\n")[0]]
    state, retrieval, controller = (
        OPTIMIZER.init(policy),
        jspec.online.Retrieval(policy),
        jspec.online.DraftLengthController(),
    )
    for step in range(steps):
        question = questions[step % len(questions)]
        (batch,) = jspec.batches(question.prompt, tokenizer, widths=(WIDTH,))
        keys = jax.random.split(jax.random.key(step), SAMPLES)  # new keys: the drafter knows the noise of the old ones
        k, began = controller.num_draft_tokens, time.perf_counter()
        out = roll_out(policy, retrieval.drafter, k, batch, keys, ends)
        seconds = time.perf_counter() - began
        controller.record(out, seconds)
        retrieval.learn([tokenizer.encode(question.prompt)] * SAMPLES, out)
        answers = [tokenizer.decode(row[:length]) for row, length in zip(out.tokens, out.lengths, strict=True)]
        policy, state, rewards = learn(policy, state, question, batch, out, answers)
        accepted = out.stats.accepted.sum() / out.lengths.sum()
        yield {"reward": rewards.mean(), "accepted": accepted, "k": k, "seconds": seconds, "answer": answers[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    policy, tokenizer = jspec.load("smollm2", packed=False), load_tokenizer("smollm2")
    for step, row in enumerate(train(policy, tokenizer, [Question(first) for first in (3, 14, 27, 58)], steps)):
        print(
            step,
            *(f"{name}={value if isinstance(value, str) else round(float(value), 2)!r}" for name, value in row.items()),
        )


if __name__ == "__main__":
    main()
