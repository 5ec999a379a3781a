"""Planted bugs in block drafters. `test_block_mutants` says what catches each bug."""

import dataclasses

import jax.numpy as jnp

from jspec.core.probs import at_tokens
from jspec.core.sampling import token_probs
from jspec.drafters import BlockDrafter
from jspec.drafters.heads.block_module import Block
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.models.rope import rope_tables


def q_of_rows_without_a_draft(patch):
    """Report a distribution for the mask row after a draft's end, where no token was drawn from it."""
    propose = AutoregressiveDrafter.propose

    def mutant(self, state, context, num_draft_tokens):
        draft, state = propose(self, state, context, num_draft_tokens)
        ended = ~draft.probs.any(-1)
        soft = jnp.full(draft.probs.shape, 1 / draft.probs.shape[-1])
        tokens, probs = jnp.where(ended, 0, draft.tokens), jnp.where(ended[..., None], soft, draft.probs)
        return dataclasses.replace(draft, tokens=tokens, probs=probs), state

    patch(BlockDrafter, "propose", mutant)


def q_without_the_correction(patch):
    """Draw a token with the Markov head's correction, and report the distribution of its row without it."""
    draw = AutoregressiveDrafter._draw

    def mutant(self, carry, logits, progress, k, context):
        drawn = draw(self, carry, logits, progress, k, context)
        row = jnp.take(carry.logits, jnp.atleast_1d(k), axis=1)
        probs = token_probs(row, context.transforms, progress.token_counts)[:, 0]
        return dataclasses.replace(drawn, probs=jnp.where(drawn.probs.any(-1, keepdims=True), probs, 0))

    patch(BlockDrafter, "_draw", mutant)


def _discard(patch, is_kept):
    """Discard a draft token, and end the draft, unless ``is_kept(self, drawn, carry, k)``."""
    draw = AutoregressiveDrafter._draw

    def mutant(self, carry, logits, progress, k, context):
        drawn = draw(self, carry, logits, progress, k, context)
        kept = is_kept(self, drawn, carry, k)
        progress = dataclasses.replace(drawn.progress, continues=drawn.progress.continues & kept)
        return dataclasses.replace(drawn, probs=jnp.where(kept[:, None], drawn.probs, 0), progress=progress)

    patch(BlockDrafter, "_draw", mutant)


def confidence_of_the_token_itself(patch):
    """Decide by the probability of token k whether to keep token k."""
    _discard(patch, lambda self, drawn, carry, k: at_tokens(drawn.probs, drawn.token) > 0.25)


def confidence_one_row_ahead(patch):
    """Decide whether to keep token k by the confidence head's estimate for token k + 1, which reads token k."""

    def is_kept(self, drawn, carry, k):
        row = jnp.take(carry.hidden, jnp.atleast_1d(k), axis=1)
        return self.block.confidence(row, drawn.token[:, None])[:, 0] > 0

    _discard(patch, is_kept)


def block_keys_kept(patch):
    """Keep a block's own keys and values in the cache, in place of those of the target's states at these tokens."""
    commit = BlockDrafter.commit

    def without_reading(self, state, draft, verdict, signals):
        return dataclasses.replace(commit(self, state, draft, verdict, signals), cache=state.cache)

    patch(BlockDrafter, "commit", without_reading)


def features_one_layer_off(patch):
    """Read what enters the layers that the files name, instead of what leaves them."""
    features = BlockDrafter.features.fget
    patch(BlockDrafter, "features", property(lambda self: tuple(max(0, i - 1) for i in features(self))))


def positions_by_row(patch):
    """Rotate a block by the number of each row in the block, whatever the sequence's length."""
    places = Block._places

    def mutant(self, start, count):
        body = self.config.body
        return places(self, start, count)[0], rope_tables(jnp.arange(count)[None], body.rope, body.head_dim)

    patch(Block, "_places", mutant)


def positions_of_the_first_sequence(patch):
    """Rotate every row of a batch as if its sequence were as long as the first one."""
    places = Block._places

    def mutant(self, start, count):
        return places(self, start, count)[0], places(self, jnp.broadcast_to(start[:1], start.shape), count)[1]

    patch(Block, "_places", mutant)
