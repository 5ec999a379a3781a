"""Prefilling in pieces leaves a drafter in the same state as `init` on the whole prompt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.core.sampling import SamplingParams
from jspec.decoding.program import start
from jspec.decoding.round import decode_round
from jspec.drafters.base import Drafter, own_tree
from jspec.drafters.capabilities import features_of
from jspec.drafters.chunked_prefill import begin, can_read, needs_prefill, prefill_chunk
from jspec.drafters.draft_length import Fixed
from jspec.drafters.signals import NO_SIGNALS, PromptSignals
from jspec.models.kv_cache import prefill_with_features
from support import drafters, toys

pytestmark = pytest.mark.usefixtures("quick_compile")
PIECE = 3


@pytest.mark.parametrize("name", drafters.NAMES + drafters.TREE_NAMES)
def test_prefill_in_pieces_equals_whole_prompt(name, toy, prompts):
    target = toy(0, num_hidden_layers=2)
    drafter = drafters.make(name, target, toy(0, 0.3))
    assert can_read(drafter)
    tokens, lengths, keys = (jnp.asarray(part) for part in prompts([9, 2, 1, 7, 4]))
    tree = own_tree(drafter)
    length = Fixed(3 if tree is None else tree.max_depth)
    asked = toys.request(keys, lengths, 8, *toys.both_transforms(SamplingParams(temperature=0.9), len(lengths)))
    whole, _ = jax.jit(lambda: start(target, drafter, asked, tokens, 8, length))()
    read = jax.jit(_in_pieces, static_argnums=4)(target, drafter, tokens, lengths, whole.tokens.shape[1] + 8)
    pieces = dataclasses.replace(whole, drafter=read)
    decode = jax.jit(lambda state: decode_round(target, drafter, RULES["coupled"], length, asked, state))
    for _ in range(2):  # the second round depends on the state that the first one leaves
        (whole, one), (pieces, other) = decode(whole), decode(pieces)
        for field in ("tokens", "count", "drafted", "accepted"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field), field)
        assert np.asarray(one.drafted).any() or not needs_prefill(drafter)


def _in_pieces(target, drafter, tokens, lengths, num_slots):
    """Return the state of a drafter that has read all prompts but their last tokens, a few tokens at a time."""
    batch, width = tokens.shape
    state = begin(drafter, target, batch, num_slots)
    signals = NO_SIGNALS
    if features := features_of(drafter):
        _, all_of_them = prefill_with_features(target, tokens, num_slots, features)
    tokens = jnp.pad(tokens, ((0, 0), (0, PIECE + 1)))
    for at in range(0, width, PIECE):
        count = jnp.clip(lengths - 1 - at, 0, PIECE)
        if features:
            piece = jnp.pad(all_of_them, ((0, 0), (0, PIECE), (0, 0), (0, 0)))[:, at : at + PIECE]
            signals = PromptSignals(piece, None, target)
        begun = jnp.minimum(at, lengths - 1)  # must not overwrite anything after the end of a row
        state = prefill_chunk(drafter, state, tokens[:, at : at + PIECE + 1], begun, count, signals)
    return state


def test_stateful_init_without_read_cannot_be_prefilled_in_pieces(toy):
    class Reader(jspec.drafters.BigramDrafter):
        def init(self, tokens, num_slots):
            return tokens.sum(1)

    reader = jax.tree_util.register_dataclass(Reader, data_fields=["logits"], meta_fields=[]).from_tokens([1, 2, 1], 4)
    assert not can_read(reader) and not can_read(jspec.FallbackDrafter(jspec.NGramDrafter(), reader))
    assert needs_prefill(Drafter()) and not needs_prefill(type("Former", (Drafter,), {"keeps_nothing": True})())
    assert can_read(jspec.FallbackDrafter(jspec.NGramDrafter(), toy(0))) and not needs_prefill(jspec.NGramDrafter())
