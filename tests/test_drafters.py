"""Drafters other than a model: whatever they remember, the law of the text stays the target's."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import toys

import jspec
from jspec.types import Draft, pytree

DRAWS = 200_000


@pytree
class Memorising:
    """Two tokens of two; what it guesses next depends on the guess that was discarded behind a rejected one.

    With noise that is the same whenever a position is drafted, its guess would not have the law it states.
    """

    vocab: jax.Array
    max_positions = None

    @property
    def vocab_size(self):
        return self.vocab.size

    def init(self, tokens, num_slots):
        return jnp.full(tokens.shape[0], 2)  # 2: nothing was discarded

    def propose(self, state, context, num_draft_tokens):
        first = jnp.array([[0.8, 0.2], [0.5, 0.5], [0.9, 0.1]])[state]
        probs = jnp.stack([first, jnp.full_like(first, 0.5)], axis=1)
        return Draft(jnp.stack([context.draw(k, probs[:, k]) for k in range(2)], axis=1), probs), state

    def commit(self, state, draft, verdict, hidden):
        return jnp.where(verdict.num_accepted == 0, draft.tokens[:, 1], 2)


def test_a_drafter_may_learn_from_what_was_discarded(report):
    target = toys.MarkovModel(jnp.zeros((2, 2)))  # three fair coins
    keys = jax.random.split(jax.random.key(0), DRAWS)
    out = jspec.speculative_generate(
        target, Memorising(jnp.zeros(2)), np.zeros((DRAWS, 1), int), np.ones(DRAWS, int), keys,
        max_new_tokens=3, num_draft_tokens=2,
    )  # fmt: skip
    counts = np.bincount(np.asarray(out.tokens) @ [4, 2, 1], minlength=8)
    p = oracle.p_value(counts, np.full(8, 1 / 8))
    report(texts=DRAWS, p=f"{p:.2g}", alpha=oracle.ALPHA, sees_tv=f"{oracle.detectable(DRAWS, 7):.4f}")
    assert p > oracle.ALPHA
