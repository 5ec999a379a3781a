"""Invalid arguments of roll-outs, full rows, and drafters that a roll-out cannot use."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from support import toys
from support.matrix import pair
from support.rollouts import BATCH, LENGTH, K, caches, prompts, same

pytestmark = pytest.mark.usefixtures("quick_compile")

STARTS = {
    "keys": ({"keys": jax.random.split(jax.random.key(0), 3)}, ValueError, r"keys has shape \(3,\); expected \(5,\)"),
    "raw keys": ({"keys": jax.random.PRNGKey(0)}, TypeError, "keys must be typed PRNG keys"),
    "wide": ({"max_length": 5}, ValueError, "tokens has 6 columns, but max_length is 5"),
    "no length": ({"max_length": 0}, ValueError, "max_length must be a Python int of at least 1"),
    "long": ({"max_length": 5000}, ValueError, "max_length=5000 is more than the 4096 positions of the target model"),
    "auto": ({"num_draft_tokens": "auto"}, ValueError, '"auto" is not available in a roll-out'),
    "class": ({"draft": jspec.NGramDrafter}, TypeError, "draft is the class NGramDrafter"),
    "rule": ({"accept": "greedy"}, ValueError, "accept"),
}


@pytest.mark.parametrize("mistake", STARTS)
def test_mistakes_in_start(mistake):
    options, error, message = STARTS[mistake]
    target, draft = pair()
    tokens, lengths, keys = prompts()
    arguments = {"tokens": tokens, "lengths": lengths, "keys": keys, "draft": draft, "max_length": LENGTH} | options
    with pytest.raises(error, match=message):
        jspec.Rollout.start(target, **arguments)


def test_drafter_that_cannot_read_is_refused():
    class Whole(jspec.NGramDrafter):
        def init(self, tokens, num_slots, signals=None):
            return tokens

    Whole = jax.tree_util.register_static(Whole)
    with pytest.raises(ValueError, match=r"Whole cannot read appended tokens.*pass the whole text to jspec\.spec"):
        jspec.Rollout.start(pair()[0], Whole(), *prompts(), max_length=LENGTH)


TURNS = {
    "new": ({"max_new_tokens": 0}, "max_new_tokens must be a Python int of at least 1"),
    "room": ({"max_new_tokens": 61}, "Row 0 has 4 tokens, and 61 more would exceed max_length=64; set max_tok"),
    "active": ({"active": np.ones(3, bool)}, r"active must be booleans of shape \[5\], one for each row; got bool of"),
    "numbers": ({"active": [0, 1, 0, 1, 0]}, "active must be booleans"),
    "sampling": ({"sampling": jspec.SamplingParams(top_p=2.0)}, "top_p must be above 0"),
    "eos": ({"eos_ids": 8}, "eos_ids holds 8, outside the vocabulary"),
    "no draft": ({"draft": None}, "draft is None, but the roll-out was started with a draft; pass the same draft"),
    "draft": ({"draft": jspec.NGramDrafter()}, "draft is of type NGramDrafter, which does not fit the caches"),
    "layers": ({"draft": toys.tiny_llama(3, 2)}, "draft is of type ModelDrafter, which does not fit the caches"),
    "target": ({"target": toys.tiny_llama(3, 1)}, "target is of type Llama, which does not fit the caches"),
}


@pytest.mark.parametrize("mistake", TURNS)
def test_mistakes_in_generate(mistake):
    options, message = TURNS[mistake]
    target, draft = pair()
    rollout = jax.block_until_ready(jspec.Rollout.start(target, draft, *prompts(), max_length=LENGTH))
    with pytest.raises(ValueError, match=message):
        rollout.generate(**{"target": target, "draft": draft, "max_new_tokens": 4} | options)


APPENDED = {
    "lengths": ({"lengths": [0, 1, 2, 3, 5]}, r"lengths\[4\] is 5, but tokens has room for 0 to 4 tokens per row"),
    "negative": ({"lengths": [0, -1, 2, 3, 4]}, r"lengths\[1\] is -1, but tokens"),
    "batch": ({"tokens": np.zeros((4, 4), int)}, r"tokens must be integers of shape \[5, M\], one row for each row of"),
    "kind": ({"tokens": np.zeros((5, 4))}, "tokens must be integers"),
    "shape": ({"lengths": [1]}, r"lengths must be integers of shape \[5\], one for each row of tokens"),
    "vocabulary": ({"tokens": np.full((5, 4), 8)}, r"tokens\[1, 0\] is 8, outside the vocabulary of 8 tokens"),
    "wide": ({"tokens": np.zeros((5, 65), int)}, "tokens has 65 columns; expected 1 to 64, the max_length"),
    "room": (
        {"tokens": np.zeros((5, 64), int), "lengths": [1, 1, 61, 1, 1]},
        "Row 2 has 4 tokens, and 61 more would exceed max_length=64; appe",
    ),
    "draft": ({"draft": None}, "draft is None, but the roll-out was started with a draft"),
}


@pytest.mark.parametrize("mistake", APPENDED)
def test_mistakes_in_append(mistake):
    options, message = APPENDED[mistake]
    target, draft = pair()
    rollout = jax.block_until_ready(jspec.Rollout.start(target, draft, *prompts(), max_length=LENGTH))
    arguments = {"target": target, "draft": draft, "tokens": np.zeros((5, 4), int), "lengths": [0, 1, 2, 3, 4]}
    with pytest.raises(ValueError, match=message):
        rollout.append(**arguments | options)


def test_full_rows_are_errors_even_if_the_last_turn_is_still_running():
    target, draft = pair()
    rollout = jspec.Rollout.start(target, draft, *prompts(), max_length=40)
    rollout, _ = rollout.generate(target, draft, max_new_tokens=30)
    with pytest.raises(ValueError, match="30 more would exceed max_length=40"):
        rollout.generate(target, draft, max_new_tokens=30)


def test_counts_beyond_the_tokens_append_only_these_tokens():
    """Inside `jax.jit`, values are not checked."""
    target, draft = pair()
    rollout = jspec.Rollout.start(target, draft, *prompts(), max_length=LENGTH, num_draft_tokens=K)
    new = np.tile([4, 5], (BATCH, 1))
    longer = jax.jit(lambda rollout, counts: rollout.append(target, draft, new, counts))(rollout, jnp.full(BATCH, 6))
    expected = rollout.append(target, draft, new, np.full(BATCH, 2))
    same((longer.tokens, longer.lengths, caches(longer)), (expected.tokens, expected.lengths, caches(expected)))


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["max_ngram", "min_ngram", "tree"])
@dataclasses.dataclass(frozen=True)
class Counting(jspec.NGramDrafter):
    """A drafter that counts its rounds, in a state without rows."""

    def init(self, tokens, num_slots, signals=None):
        return jnp.int32(0)

    def read(self, state, tokens, start, count, signals):
        return state

    def commit(self, state, draft, verdict, signals):
        return state + 1


def test_drafters_without_rows_in_their_state_are_rejected():
    target, _ = pair()
    with pytest.raises(ValueError, match="Counting keeps state that does not have one row per text"):
        jspec.Rollout.start(target, Counting(), *prompts(), max_length=LENGTH, num_draft_tokens=K)
