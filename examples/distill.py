"""On-policy distillation (Agarwal et al. 2024, "GKD"): a student learns from its teacher's scores of its own texts.

The student, a small model, samples texts. The teacher, a larger model, scores every token. The loss is the reverse KL
divergence, KL(student || teacher), at each new token. A student that is close to its teacher is also a good draft, so
the example ends with the number of tokens that the teacher commits per pass, before and after training.

    python examples/distill.py 60
"""

import functools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array

import jspec
from jspec.core.tokenizer import Tokenizer

SAMPLES, NEW_TOKENS, WIDTH = 4, 48, 16
OPTIMIZER = optax.adam(3e-4)
PROMPTS = (
    "import os\n",
    "def read(path):\n",
    "class Node:\n",
    "for i in range(",
    "if __name__ ==",
    "    return self.",
    "def test_",
    "raise ValueError(",
)
HELD_OUT = ("from typing import", "def write(path, text):\n", "class Stack:\n", "while True:\n")


def loss(student: jspec.Llama, teacher: jspec.Llama, texts: Array, lengths: Array, starts: Array) -> Array:
    """Return the mean of KL(student || teacher) over all new tokens, in nats."""
    scores = jspec.logprobs(student, texts, lengths, reference=teacher)
    index = jnp.arange(texts.shape[1])
    return scores.kl.mean(where=(index >= starts[:, None]) & (index < lengths[:, None]))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(
    student: jspec.Llama, state: optax.OptState, teacher: jspec.Llama, tokens: Array, lengths: Array, keys: Array
) -> tuple[jspec.Llama, optax.OptState, Array]:
    """Sample, score and update in one program."""
    out = jspec.generate(student, tokens, lengths, keys, max_new_tokens=NEW_TOKENS, samples_per_prompt=SAMPLES)
    texts, text_lengths = out.with_prompts(tokens, lengths)
    starts = jnp.repeat(lengths, SAMPLES)
    value, gradient = jax.value_and_grad(loss)(student, teacher, texts, text_lengths, starts)
    updates, state = OPTIMIZER.update(gradient, state)
    return optax.apply_updates(student, updates), state, value


def train(
    teacher: jspec.Llama, student: jspec.Llama, tokenizer: Tokenizer, prompts: Sequence[str], steps: int
) -> tuple[jspec.Llama, list[float]]:
    """Return the trained student and the loss of each step. The student that was passed is donated."""
    state, losses = OPTIMIZER.init(student), list[float]()
    (batch,) = jspec.batches(list(prompts), tokenizer, widths=(WIDTH,))
    for number in range(steps):
        keys = jax.random.split(jax.random.key(number), len(prompts) * SAMPLES)
        student, state, value = step(student, state, teacher, batch.tokens, batch.lengths, keys)
        losses.append(float(value))
    return student, losses


def tokens_per_round(teacher: jspec.Llama, student: jspec.Llama, tokenizer: Tokenizer) -> float:
    """Return the mean number of tokens that the teacher commits per pass on held-out prompts, with four drafted."""
    (batch,) = jspec.batches(list(HELD_OUT), tokenizer, widths=(WIDTH,))
    keys = jax.random.split(jax.random.key(2**31), len(HELD_OUT) * SAMPLES)
    out = jspec.speculative_generate(
        teacher,
        student,
        batch.tokens,
        batch.lengths,
        keys,
        max_new_tokens=NEW_TOKENS,
        num_draft_tokens=4,
        samples_per_prompt=SAMPLES,
    )
    return float(out.lengths.sum() / out.stats.rounds.sum())


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    teacher, student, tokenizer = jspec.demo_pair(packed=False)
    print(f"before: {tokens_per_round(teacher, student, tokenizer):.2f} tokens per round of the teacher")
    student, losses = train(teacher, student, tokenizer, PROMPTS, steps)
    print("KL:", *(f"{value:.3f}" for value in losses))
    print(f"after: {tokens_per_round(teacher, student, tokenizer):.2f} tokens per round of the teacher")


if __name__ == "__main__":
    main()
