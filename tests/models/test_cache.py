"""After every round, both caches equal a fresh pass over the sequence, and no other slot matters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import ModelDrafter, SamplingParams
from jspec.acceptance import RULES
from jspec.core.sampling import broadcast_rows, draft_transforms, target_transforms
from jspec.core.tree import Branches
from jspec.core.types import Draft, pytree
from jspec.decoding.buffers import collect
from jspec.decoding.program import start
from jspec.decoding.round import decode_round
from jspec.decoding.state import RequestParams
from jspec.drafters.draft_length import Fixed
from jspec.models.kv_cache import KVCache, append, copy_slots, keep, prefill, whole_tiles, write
from support import toys

pytestmark = pytest.mark.usefixtures("quick_compile")

NEW = 24
LENGTHS = [1, 2, 3, 9, 14, 6, 1, 11]  # a draft model reads two tokens at the start of a round, so 1 is an edge case
DRAFTS = ("unrelated", "related", "itself")


@functools.partial(jax.jit, static_argnames="num_draft_tokens")
def _begin(target, drafter, request, tokens, num_draft_tokens):
    return start(target, drafter, request, tokens, NEW, Fixed(num_draft_tokens))


@functools.partial(jax.jit, static_argnames="num_draft_tokens")
def _round(target, drafter, request, state, record, num_draft_tokens):
    after, new = decode_round(target, drafter, RULES["rejection"], Fixed(num_draft_tokens), request, state)
    return after, collect(record, new, state.lengths - request.prompt_lengths, state.done)


@functools.partial(jax.jit, static_argnames="rows")
def _reread(model, prompt_lengths, prompts, tokens, rows):
    """Return the cache after a prefill and a pass over the sequence, `rows` tokens at a time, without rejections."""
    cache = prefill(model, prompts, whole_tiles(tokens.shape[1]))

    def read(cache, i):
        start = prompt_lengths - 1 + i * rows
        piece = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (rows,)))(tokens, start)
        return model.forward(piece, cache, start)[1], None

    return jax.lax.scan(read, cache, jnp.arange(-(-NEW // rows)))[0]


def _pair(toy, name):
    target = toy(0, num_hidden_layers=2)
    draft = {"unrelated": (1, 0.0), "related": (0, 0.1), "itself": (0, 0.0)}[name]
    return target, ModelDrafter(toy(*draft, num_hidden_layers=2))


def _begin_with(target, drafter, batch, sampling, num_draft_tokens):
    """Return the request and ``(state, record)`` before the first round."""
    tokens, lengths, keys = batch
    size = len(lengths)
    transforms = (broadcast_rows(make(sampling), size) for make in (target_transforms, draft_transforms))
    request = RequestParams(keys, jnp.asarray(lengths), jnp.full(size, NEW), jnp.full((size, 20), -1), *transforms)
    return request, _begin(target, drafter, request, tokens, num_draft_tokens)


def _blank(batch):
    """Return `batch` with zeros after the prompts, as the program sees it."""
    tokens, lengths, keys = batch
    return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0), lengths, keys


def _valid(cache, upto):
    """Return the keys and values of positions ``0 .. upto[b] - 1`` of each row in one flat array."""
    arrays = np.stack([np.asarray(leaf) for leaf in [*(k.swapaxes(2, 3) for k in cache.keys), *cache.values]])
    return np.concatenate([arrays[:, b, :, : max(n, 0)].ravel() for b, n in enumerate(upto)])


def _poison(cache, upto):
    """Return `cache` with a NaN key, as left by a token that broke the model, in every slot from ``upto[b]`` on."""
    behind = jnp.arange(cache.keys[0].shape[3]) >= upto[:, None]
    keys = tuple(jnp.where(behind[:, None, None, :], jnp.nan, slots) for slots in cache.keys)
    return KVCache(keys, tuple(jnp.where(behind[:, None, :, None], 1e30, slots) for slots in cache.values))


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_both_caches_equal_fresh_pass_after_every_round(toy, prompts, num_draft_tokens, report):
    """Caches are equal bit for bit if both passes read equally many rows, unlike a draft model's passes at K > 1."""
    rounds, accepted, differences = 0, set(), {"target": [], "draft": []}
    for name in DRAFTS:
        target, drafter = _pair(toy, name)
        batch = _blank(prompts(LENGTHS))
        sampling = SamplingParams(temperature=np.arange(len(LENGTHS)) % 2)
        request, (state, record) = _begin_with(target, drafter, batch, sampling, num_draft_tokens)
        while not state.done.all():
            before = record.stats.accepted
            state, record = _round(target, drafter, request, state, record, num_draft_tokens)
            accepted |= set(np.asarray(record.stats.accepted - before).tolist())
            rounds += 1
            # The target has read all but the last committed token; the draft model may lack the one before as well.
            for which, model, cache, lag in (
                ("target", target, state.cache, 1),
                ("draft", drafter.model, state.drafter, 2),
            ):
                fresh = _reread(model, request.prompt_lengths, batch[0], state.tokens, num_draft_tokens + 1)
                upto = np.asarray(state.lengths) - lag
                differences[which].append(np.abs(_valid(cache, upto) - _valid(fresh, upto)))
    target, draft = (np.concatenate(all_of) for all_of in differences.values())
    report(
        rounds=rounds,
        rows=len(LENGTHS),
        values=target.size + draft.size,
        not_bitwise_target=(target > 0).sum(),
        not_bitwise_draft=(draft > 0).sum(),
        max_difference=f"{max(target.max(), draft.max()):.1e}",
    )
    assert accepted == set(range(num_draft_tokens + 1))
    assert (target == 0).all()
    assert (draft <= 1e-5).all()


@pytest.mark.parametrize("name", DRAFTS)
def test_slots_beyond_text_never_leak(toy, prompts, name, report):
    """Output is the same with NaN in every rejected and unused slot, and junk after the sequence, before each round."""
    target, drafter = _pair(toy, name)
    request, clean = _begin_with(target, drafter, _blank(prompts(LENGTHS)), SamplingParams(), 4)
    spoiled, rounds = clean, 0
    while not clean[0].done.all():
        state, record = spoiled
        behind = jnp.arange(state.tokens.shape[1]) >= state.lengths[:, None]
        spoiled = (
            dataclasses.replace(
                state,
                tokens=jnp.where(behind, 60, state.tokens),
                cache=_poison(state.cache, state.lengths - 1),
                drafter=_poison(state.drafter, state.lengths - 2),
            ),
            record,
        )
        clean = _round(target, drafter, request, *clean, 4)
        spoiled = _round(target, drafter, request, *spoiled, 4)
        rounds += 1
        kept = np.arange(clean[0].tokens.shape[1]) < np.asarray(clean[0].lengths)[:, None]
        np.testing.assert_array_equal(clean[0].lengths, spoiled[0].lengths)
        np.testing.assert_array_equal(*(np.where(kept, state.tokens, 0) for state in (clean[0], spoiled[0])))
        new = np.arange(NEW) < np.asarray(clean[0].lengths - request.prompt_lengths)[:, None]
        logprobs = [np.where(new, record.logprobs[:, :NEW], 0) for record in (clean[1], spoiled[1])]
        np.testing.assert_array_equal(*logprobs)
        jax.tree.map(np.testing.assert_array_equal, clean[1].stats, spoiled[1].stats)
    report(rounds=rounds, rows=len(LENGTHS), leaks=0)


def test_finished_rows_are_frozen(toy, prompts, report):
    """Nothing in a row changes after it stops; rows stop one after another, at limits or at EOS tokens."""
    target, drafter = _pair(toy, "related")
    request, carry = _begin_with(target, drafter, _blank(prompts(LENGTHS)), SamplingParams(), 4)
    rows = np.arange(len(LENGTHS))
    limits = np.where(rows % 2, NEW, 1 + 3 * rows)
    eos_ids = np.where(rows[:, None] % 2, np.arange(20), -1)
    request = dataclasses.replace(request, limits=jnp.asarray(limits), eos_ids=jnp.asarray(eos_ids))
    frozen, checks = {}, 0

    def snapshot(row):
        tokens, lengths = np.asarray(carry[0].tokens), np.asarray(carry[0].lengths)
        new = lengths[row] - LENGTHS[row]
        of_row = jax.tree.map(lambda leaf: np.asarray(leaf)[row], carry[1])
        return tokens[row, : lengths[row]], of_row.logprobs[:new], of_row.origins[:new], of_row.stats

    while len(frozen) < len(LENGTHS):
        carry = _round(target, drafter, request, *carry, 4)
        for row in np.flatnonzero(np.asarray(carry[0].done)):
            frozen.setdefault(row, snapshot(row))
    for _ in range(3):
        carry = _round(target, drafter, request, *carry, 4)
        assert carry[0].done.all()
        for row, then in frozen.items():
            jax.tree.map(np.testing.assert_array_equal, then, snapshot(row))
            checks += 1
    lengths = np.asarray(carry[0].lengths) - LENGTHS
    np.testing.assert_array_equal(lengths[::2], limits[::2])
    assert (lengths[1::2] < NEW).all()
    report(rows=len(LENGTHS), checks=checks, moved=0)


@pytree
class _AlwaysOneToken:
    """A drafter that always drafts `token`; `vocab_size` is the length of `vocab`."""

    token: jax.Array
    vocab: jax.Array
    max_positions = None

    @property
    def vocab_size(self):
        return self.vocab.size

    def init(self, tokens, num_slots):
        return ()

    def propose(self, state, context, num_draft_tokens):
        tokens = jnp.broadcast_to(self.token, (context.lengths.size, num_draft_tokens))
        return Draft(tokens, jax.nn.one_hot(tokens, self.vocab_size)), state

    def commit(self, state, draft, verdict, hidden):
        return state


def test_rejected_nan_token_does_not_affect_output(toy, prompts, report):
    """A token with a NaN embedding column is drafted in every round, never accepted, and changes no output."""
    target = toy(0)
    tokens, lengths, keys = prompts(LENGTHS, seed=1)
    greedy = {"max_new_tokens": NEW, "sampling": SamplingParams(temperature=0.0)}
    expected = np.asarray(jspec.generate(target, tokens, lengths, keys, **greedy).tokens)
    written = np.concatenate([expected.ravel(), *(row[:n] for row, n in zip(tokens, lengths, strict=True))])
    broken = np.setdiff1d(np.arange(target.config.vocab_size), written)[0]
    weight = target.embed_tokens.weight
    weight[...] = weight[...].at[:, broken].set(jnp.nan)
    drafter = _AlwaysOneToken(jnp.int32(broken), jnp.zeros(target.config.vocab_size))
    out = jspec.speculative_generate(target, drafter, tokens, lengths, keys, **greedy)
    wrong = int((np.asarray(out.tokens) != expected).sum())
    report(tokens=expected.size, drafted=int(out.stats.drafted.sum()), wrong=wrong)
    assert wrong == 0 and not out.stats.accepted.any() and not out.stats.invalid.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 5])
def test_cache_write_changes_only_its_slots_without_conversion(dtype, count):
    """No slots are converted; a bfloat16 scatter on CPU would convert all slots to float32 and back at every pass."""
    rng, start = np.random.default_rng(0), np.array([0, 9, 64 - count, 65 - count], np.int32)
    for axis in (2, 3):
        shape = [4, 2, 4, 4]
        shape[axis] = 64
        whole = rng.normal(size=shape).astype(jnp.dtype(dtype))
        shape[axis] = count
        new = rng.normal(size=shape).astype(jnp.dtype(dtype))
        new[0, 0, 0, 0] = np.nan
        expected = np.moveaxis(whole.copy(), axis, 1)
        for row, at in enumerate(start[:-1]):  # the last one does not fit, so none of it is written
            expected[row, at : at + count] = np.moveaxis(new, axis, 1)[row]
        compiled = jax.jit(functools.partial(write, axis=axis)).lower(whole, new, start).compile()
        found = np.asarray(compiled(whole, new, start))
        np.testing.assert_array_equal(found.astype(np.float32), np.moveaxis(expected, 1, axis).astype(np.float32))
        assert compiled.memory_analysis().temp_size_in_bytes < whole.nbytes


def test_slots_are_copied_between_rows():
    """A block that reaches beyond the end is replaced by the last block; nothing else changes."""
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(3, 2, 4, 10)), rng.normal(size=(3, 2, 10, 4))
    for at, first in ((0, 0), (4, 4), (8, 6)):
        found = copy_slots(KVCache((keys,), (values,)), jnp.int32(2), jnp.int32(0), jnp.int32(at), 4)
        expected = keys.copy(), values.copy()
        expected[0][0, :, :, first : first + 4] = keys[2, :, :, first : first + 4]
        expected[1][0, :, first : first + 4] = values[2, :, first : first + 4]
        np.testing.assert_allclose(found.keys[0], expected[0], atol=1e-6)
        np.testing.assert_allclose(found.values[0], expected[1], atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_may_use_selected_cache_rows(dtype):
    """Reading, branching, moving a path and appending match a separate cache bit for bit; other rows stay the same."""
    rng, rows, start = np.random.default_rng(0), np.array([2, 0], np.int32), np.array([5, 9], np.int32)
    target = jax.tree.map(lambda leaf: leaf.astype(dtype), toys.tiny_llama(0, 2))
    full = target.new_cache(4, 32)
    full = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), full)
    own = jax.tree.map(lambda leaf: leaf[rows], full)
    tokens = rng.integers(target.config.vocab_size, size=(2, 4))
    seen = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)  # 1 and 2 follow 0, and 3 follows 1
    branches = Branches(np.array([0, 1, 1, 2], np.int32), seen)

    def run(cache, rows=None):
        cache = dataclasses.replace(cache, rows=rows)
        hidden, cache = target.forward(tokens, cache, start, branches=branches)
        cache = keep(cache, start, jnp.array([[2, 3], [1, 3]]))
        new = target.new_cache(2, 4)
        more, new = target.forward(tokens, new, start + 3, past=(cache, start + 3))
        return hidden, more, append(cache, new, start + 3)

    *expected, mine = jax.jit(run)(own)
    *found, theirs = jax.jit(run)(full, rows)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    leaves = (jax.tree.leaves((one.keys, one.values)) for one in (theirs, full, mine))
    for leaf, before, alone in zip(*leaves, strict=True):
        np.testing.assert_array_equal(leaf[rows], alone)
        np.testing.assert_array_equal(leaf[np.array([1, 3])], before[np.array([1, 3])])
