"""GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1) with speculative roll-outs: SmolLM2 learns to count.

Each step samples a group of answers to one question, compares their rewards with the group's mean, and takes one Adam
step. The drafter retrieves from earlier answers, and a controller chooses the number of draft tokens. Under the
"coupled" rule, all weights are the same without drafts, up to rounding. Unlike the paper's, the loss averages over all
tokens of the group, and has no KL term.

    python examples/grpo.py 40
"""

import dataclasses
import functools
import operator
import re
import sys
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
    """A question whose answer a program can check."""

    first: int

    @property
    def prompt(self) -> str:
        return f"Count from {self.first} to {self.first + 9}: {self.first}, {self.first + 1},"

    def reward(self, answer: str) -> float:
        """Return the number of correct numbers before the first mistake, divided by the length of the longer list."""
        words, expected = re.findall(r"\w+", answer), [str(self.first + i) for i in range(2, 10)]
        correct = [*map(operator.eq, words, expected), False].index(False)
        return correct / max(len(words), len(expected))


def loss(policy: jspec.Llama, texts: Array, lengths: Array, starts: Array, advantages: Array) -> Array:
    """Return the negative mean of advantage times ratio over all new tokens. The ratio is 1, so none is clipped."""
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
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    texts, lengths = out.with_prompts(batch.tokens, batch.lengths)
    policy, state = update(policy, state, texts, lengths, jnp.repeat(batch.lengths, SAMPLES), advantages)
    return *jax.block_until_ready((policy, state)), rewards  # otherwise, the next roll-out's time would include this


def train(policy: jspec.Llama, tokenizer: Tokenizer, questions: Sequence[Question], steps: int) -> Iterator[dict]:
    """Train `policy`, and yield the metrics of each step."""
    ends = [*policy.config.eos_token_ids, tokenizer.encode("\n")[0]]
    retrieval, controller = jspec.online.Retrieval(policy), jspec.online.DraftLengthController()
    state = OPTIMIZER.init(policy)
    for step in range(steps):
        question = questions[step % len(questions)]
        (batch,) = jspec.batches(question.prompt, tokenizer, widths=(WIDTH,))
        # Every step has new keys, because the drafter has learned from the outputs of earlier keys.
        keys = jax.random.split(jax.random.key(step), SAMPLES)
        k, start = controller.num_draft_tokens, time.perf_counter()
        out = roll_out(policy, retrieval.drafter, k, batch, keys, ends)
        seconds = time.perf_counter() - start
        controller.record(out, seconds)
        retrieval.learn([tokenizer.encode(question.prompt)] * SAMPLES, out)
        answers = [tokenizer.decode(row[:length]) for row, length in zip(out.tokens, out.lengths, strict=True)]
        policy, state, rewards = learn(policy, state, question, batch, out, answers)
        accepted = out.stats.accepted.sum() / out.lengths.sum()
        yield {"reward": rewards.mean(), "accepted": accepted, "k": k, "seconds": seconds, "answer": answers[0]}


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    policy, tokenizer = jspec.load("smollm2", packed=False), load_tokenizer("smollm2")
    for step, row in enumerate(train(policy, tokenizer, [Question(first) for first in (3, 14, 27, 58)], steps)):
        text = "reward {reward:.2f}, accepted {accepted:.2f}, k {k}, {seconds:.1f} s, {answer!r}"
        print(f"step {step}:", text.format(**row))


if __name__ == "__main__":
    main()
