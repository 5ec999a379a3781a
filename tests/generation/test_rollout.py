"""Roll-outs of several turns, compared with a fresh call on the whole text so far."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from support import drafters, oracle
from support.law import VOCAB, exact_law
from support.matrix import pair
from support.rollouts import BATCH, LENGTH, NEW, OWN_TREES, K, caches, make, prompts, reply, same, whole_text

pytestmark = pytest.mark.usefixtures("quick_compile")
# These drafters remember earlier rounds, so a fresh call drafts other tokens.
REMEMBERING = ("recycling", "lookahead", "vectors")


@pytest.mark.parametrize("name", [*drafters.NAMES, *drafters.TREE_NAMES, *OWN_TREES])
def test_each_turn_equals_fresh_call_on_whole_text(name):
    """The output and the accepted drafts are equal. Sampling parameters, limits and EOS ids differ by row.

    Some rows end in the middle of a round, before a turn with appended tokens and before one without.
    """
    target, drafter, k = make(name)
    tokens, lengths, keys = prompts()
    options = drafters.every_parameter(BATCH, VOCAB) | {"max_new_tokens": NEW}
    rollout = jspec.Rollout.start(target, drafter, tokens, lengths, keys, max_length=LENGTH, accept="coupled", **k)
    for seed in (None, None, 5, 6):
        if seed is not None:
            before, ends = whole_text(rollout)
            new, counts = reply(seed)
            rollout = rollout.append(target, drafter, new, counts)
            for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
                expected = [*before[row, :end], *new[row, :count]]
                np.testing.assert_array_equal(rollout.tokens[row, : end + count], expected)
                assert rollout.lengths[row] == end + count
        batch = *whole_text(rollout), keys
        rollout, out = rollout.generate(target, drafter, **options)
        fresh = jspec.speculative_generate(target, drafter, *batch, accept="coupled", **k, **options)
        if name in REMEMBERING:
            out, fresh = ((each.tokens, each.lengths, each.logprobs) for each in (out, fresh))
        same(out, fresh)


@pytest.mark.parametrize("name", [None, "model"])
def test_first_turn_is_that_of_an_ordinary_call(name):
    target, draft = pair()
    options = drafters.every_parameter(BATCH, VOCAB) | {"max_new_tokens": NEW}
    if name is None:
        rollout = jspec.Rollout.start(target, None, *prompts(), max_length=LENGTH)
        expected = jspec.generate(target, *prompts(), **options)
        _, out = rollout.generate(target, None, **options)
    else:
        rollout = jspec.Rollout.start(target, draft, *prompts(), max_length=LENGTH)
        expected = jspec.speculative_generate(target, draft, *prompts(), **options)
        _, out = rollout.generate(target, draft, **options)
    same(out, expected)


@pytest.mark.parametrize("name", ["eagle", "medusa", "recycling", "lookahead", "vectors"])
def test_rows_that_wait_for_others_keep_their_drafts(name):
    """Under "rejection", drafts affect the tokens. In the second turn, they do not depend on how long a row waited."""
    target, drafter, k = make(name)
    begun, outs = jspec.Rollout.start(target, drafter, *prompts(), max_length=LENGTH, **k), []
    for others in (2, NEW):
        limits = jspec.SamplingParams(max_tokens=np.array([2, 2, *[others] * (BATCH - 2)]))
        rollout, _ = begun.generate(target, drafter, max_new_tokens=NEW, sampling=limits)
        limits = jspec.SamplingParams(max_tokens=np.full(BATCH, NEW))
        outs.append(rollout.generate(target, drafter, max_new_tokens=NEW, sampling=limits)[1])
    same(*([getattr(out, field)[:2] for field in ("tokens", "logprobs", "origins")] for out in outs), atol=1e-5)


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_row_may_end_anywhere_in_a_round(name):
    """Two likely tokens make most drafts agree, so a row's limit often discards accepted tokens."""
    target, drafter, k = make(name)
    begun = jspec.Rollout.start(target, drafter, *prompts(), max_length=LENGTH, accept="coupled", **k)
    bias = np.where(np.isin(np.arange(VOCAB), (2, 5)), np.float32(4), np.float32(0))
    for limit in range(1, 7):
        limits = [jspec.SamplingParams(max_tokens=np.full(BATCH, n), logit_bias=bias) for n in (limit, NEW)]
        rollout, _ = begun.generate(target, drafter, max_new_tokens=NEW, sampling=limits[0])
        options = {"max_new_tokens": NEW, "sampling": limits[1]}
        _, out = rollout.generate(target, drafter, **options)
        batch = *whole_text(rollout), prompts()[2]
        same(out, jspec.speculative_generate(target, drafter, *batch, accept="coupled", **k, **options))


@pytest.mark.parametrize("kind", ["model", "features"])
def test_part_that_did_not_draft_reads_committed_tokens(kind):
    """Lookup drafts the whole first turn. The other part has cached drafts of its own, which were never committed."""
    target, draft = pair()
    tokens, lengths, keys = prompts()
    greedy = jspec.SamplingParams(temperature=0.0)
    continued = jspec.generate(target, tokens, lengths, keys, max_new_tokens=NEW, sampling=greedy)
    texts, ends = continued.with_prompts(tokens, lengths)
    corpus = np.concatenate([row[:end] for row, end in zip(np.asarray(texts), ends, strict=True)])
    other = draft if kind == "model" else jspec.MixtureDrafter(drafters.make("eagle", target, draft), draft, 0.05)
    drafter = jspec.FallbackDrafter(jspec.RetrievalDrafter.from_tokens(corpus, VOCAB, 6, 2), other)
    start = functools.partial(jspec.Rollout.start, max_length=LENGTH, num_draft_tokens=K, accept="coupled")
    rollout, out = start(target, drafter, tokens, lengths, keys).generate(
        target, drafter, max_new_tokens=9, sampling=greedy
    )
    assert out.stats.accepted.sum() > 4 * BATCH
    rollout = rollout.append(target, drafter, reply(0)[0], np.array([4, 1, 2, 3, 4]))
    same(*map(caches, (rollout, start(target, drafter, *whole_text(rollout), keys))))


@functools.partial(jax.jit, static_argnames=("accept", "num_draft_tokens"))
def two_turns(target, drafter, tokens, lengths, keys, **options):
    """Return three tokens per row, where some rows stop after the first while others go on to the third."""
    rollout = jspec.Rollout.start(target, drafter, tokens, lengths, keys, max_length=16, **options)
    first = 1 + jnp.arange(len(tokens)) % 3
    rollout, _ = rollout.generate(target, drafter, max_new_tokens=3, sampling=jspec.SamplingParams(max_tokens=first))
    rest = jspec.SamplingParams(max_tokens=jnp.maximum(3 - first, 1))
    rollout, _ = rollout.generate(target, drafter, max_new_tokens=2, sampling=rest, active=first < 3)
    new = rollout.tokens[jnp.arange(len(tokens))[:, None], lengths[:, None] + jnp.arange(3)]
    return new @ jnp.array([VOCAB**2, VOCAB, 1])


@pytest.mark.parametrize(
    ("name", "accept"),
    [
        ("eagle", "rejection"),
        ("medusa", "rejection"),
        ("recycling", "rejection"),
        ("model", "block"),
        (drafters.TREE_NAMES[0], "rejection"),
        (drafters.TREE_NAMES[0], "traversal"),
    ],
)
def test_two_turns_have_exact_distribution(name, accept, report):
    """A row that ended in the middle of a round continues with the target's distribution."""
    target, drafter, k = make(name)
    draws, prompt = 1 << 16, (2, 7)
    tokens = jnp.broadcast_to(jnp.array(prompt), (draws, 2))
    keys = jax.random.split(jax.random.key(3), draws)
    texts = np.asarray(two_turns(target, drafter, tokens, jnp.full(draws, 2), keys, accept=accept, **k))
    law = exact_law(target, prompt, {"temperature": 1.0})
    p_values = [oracle.p_value(np.bincount(texts[i::3], minlength=VOCAB**3), law) for i in range(3)]
    report(texts=draws, p_values=[f"{p:.2g}" for p in p_values], alpha_over_all=oracle.ALPHA)
    assert min(p_values) > oracle.ALPHA / 6


def test_environment_inside_one_program():
    """A scan over turns alternates with an environment, which ends some episodes and answers the others."""
    target, draft = pair()
    tokens, lengths, keys = prompts()
    options = {"max_new_tokens": 5, "sampling": jspec.SamplingParams(temperature=0.8), "eos_ids": (3,)}

    def answer(out):
        last = jnp.take_along_axis(out.tokens, jnp.maximum(out.lengths - 1, 0)[:, None], axis=1)[:, 0]
        new = (out.tokens.sum(axis=1)[:, None] + jnp.arange(3)) % VOCAB
        return new, 1 + last % 3, last != 0

    @jax.jit
    def program(target, draft, tokens, lengths, keys):
        begun = jspec.Rollout.start(target, draft, tokens, lengths, keys, max_length=LENGTH, accept="coupled")

        def turn(carry, _):
            rollout, active = carry
            rollout, out = rollout.generate(target, draft, active=active, **options)
            new, counts, goes_on = answer(out)
            active &= goes_on
            return (rollout.append(target, draft, new, jnp.where(active, counts, 0)), active), (out, active)

        (rollout, _), outs = jax.lax.scan(turn, (begun, jnp.ones(BATCH, bool)), length=4)
        return rollout, outs

    rollout, (outs, actives) = program(target, draft, tokens, lengths, keys)
    texts, ends, active = np.pad(tokens, ((0, 0), (0, LENGTH - 6))), lengths.copy(), np.ones(BATCH, bool)
    for turn in range(4):
        expected = jspec.generate(target, texts, ends, keys, **options)
        out = jax.tree.map(lambda leaf, turn=turn: np.asarray(leaf[turn]), outs)
        np.testing.assert_array_equal(out.lengths, np.where(active, expected.lengths, 0))
        np.testing.assert_array_equal(out.tokens, np.where(active[:, None], expected.tokens, 0))
        np.testing.assert_allclose(out.logprobs, np.where(active[:, None], expected.logprobs, 0), atol=1e-4)
        new, counts, goes_on = map(np.asarray, answer(out))
        now = active & goes_on
        np.testing.assert_array_equal(actives[turn], now)
        for row in np.flatnonzero(active):
            added = [*out.tokens[row, : out.lengths[row]], *new[row, : counts[row] if now[row] else 0]]
            texts[row, ends[row] : ends[row] + len(added)] = added
            ends[row] += len(added)
        active = now
    assert 0 < active.sum() < BATCH
    np.testing.assert_array_equal(rollout.lengths, ends)
    for row in range(BATCH):
        np.testing.assert_array_equal(rollout.tokens[row, : ends[row]], texts[row, : ends[row]])


@pytest.mark.parametrize("name", [None, "model", "combined heads"])
def test_rows_may_become_full(name):
    """Inside jit, tokens without room are dropped, and full rows gain nothing.

    Near the end of the caches, `append` reads a wide block from an earlier position.
    """
    target, drafter, k = (pair()[0], None, {}) if name is None else make(name)
    tokens, lengths, keys = prompts()
    rollout = jspec.Rollout.start(target, drafter, tokens, lengths, keys, max_length=20, accept="coupled", **k)
    new = np.random.default_rng(0).integers(VOCAB, size=(BATCH, 18))
    counts = np.array([13, 2, 14, 0, 18])

    @jax.jit
    def grow(rollout, counts):
        rollout = rollout.append(target, drafter, new, counts)
        return rollout.append(target, drafter, new, jnp.array([1, 0, 2, 3, 1]))

    grown = grow(rollout, counts)
    np.testing.assert_array_equal(grown.lengths, [18, 3, 20, 6, 20])
    np.testing.assert_array_equal(grown.tokens[4], [*tokens[4, :2], *new[4]])
    np.testing.assert_array_equal(grown.tokens[0, :18], [*tokens[0, :4], *new[0, :13], new[0, 0]])
    grown, out = jax.jit(lambda rollout: rollout.generate(target, drafter, max_new_tokens=6))(grown)
    np.testing.assert_array_equal(out.lengths, [2, 6, 0, 6, 0])
    texts, ends = np.asarray(grown.tokens), np.array([18, 3, 20, 6, 20])
    fresh = jspec.generate(target, texts, ends, keys, max_new_tokens=6)
    for row in (0, 1, 3):
        count = out.lengths[row]
        np.testing.assert_array_equal(out.tokens[row, :count], fresh.tokens[row, :count])
        np.testing.assert_allclose(out.logprobs[row, :count], fresh.logprobs[row, :count], atol=1e-4)
    assert not out.tokens[2].any() and not out.logprobs[4].any()


def test_rows_that_are_inactive_do_not_change():
    target, draft = pair()
    begun = jspec.Rollout.start(target, draft, *prompts(), max_length=LENGTH, accept="coupled")
    active = np.array([True, False, True, False, True])
    rollout, out = begun.generate(target, draft, max_new_tokens=NEW, pad_id=7, active=active)
    assert (out.lengths == np.where(active, NEW, 0)).all() and (out.tokens[~active] == 7).all()
    assert not out.stats.rounds[~active].any()
    _, later = rollout.generate(target, draft, max_new_tokens=NEW, active=~active)
    _, expected = begun.generate(target, draft, max_new_tokens=NEW)
    same(*([each[~active] for each in (out.tokens, out.logprobs, out.stats.accepted)] for out in (later, expected)))


def test_samples_and_selected_rows():
    """Each prompt is prefilled once for its samples. Every leaf has one entry per row, so rows can be selected."""
    target, _ = pair()
    tokens, lengths, _ = prompts()
    keys = jax.random.split(jax.random.key(2), 2 * BATCH)
    rollout = jspec.Rollout.start(target, None, tokens, lengths, keys, max_length=LENGTH, samples_per_prompt=2)
    rows = np.array([7, 2, 2])
    expected = jspec.generate(target, np.repeat(tokens, 2, 0), np.repeat(lengths, 2), keys, max_new_tokens=NEW)
    _, out = rollout.generate(target, None, max_new_tokens=NEW)
    _, chosen = jax.tree.map(lambda leaf: leaf[rows], rollout).generate(target, None, max_new_tokens=NEW)
    same(out, expected)
    same(chosen, jax.tree.map(lambda leaf: leaf[rows], expected))


def test_varying_draft_lengths_and_checks():
    target, draft = pair()
    tokens, lengths, keys = prompts()
    options = {"num_draft_tokens": jspec.Heuristic(4), "accept": "coupled"}
    with jax.enable_checks(True):
        rollout = jspec.Rollout.start(target, draft, tokens, lengths, keys, max_length=LENGTH, **options)
        for seed in range(2):
            rollout = rollout.append(target, draft, *reply(seed))
            expected = jspec.generate(target, *whole_text(rollout), keys, max_new_tokens=NEW)
            rollout, out = rollout.generate(target, draft, max_new_tokens=NEW)
            np.testing.assert_array_equal(out.tokens, expected.tokens)


@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_rollout_on_a_mesh(kind):
    target, draft = pair()
    new, counts = map(jnp.asarray, reply(1))
    types = jax.sharding.AxisType
    mesh = jax.make_mesh((1,), ("x",), axis_types=(types.Explicit if kind == "explicit" else types.Auto,))
    rows, nowhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()

    def turns(target, draft, tokens, lengths, keys, new, counts):
        rollout = jspec.Rollout.start(target, draft, tokens, lengths, keys, max_length=LENGTH)
        rollout, _ = rollout.generate(target, draft, max_new_tokens=4)
        return rollout.append(target, draft, new, counts).generate(target, draft, max_new_tokens=4)[1]

    batch = *map(jnp.asarray, prompts()[:2]), prompts()[2], new, counts
    expected = turns(target, draft, *batch)
    if kind == "explicit":
        with jax.set_mesh(mesh):
            found = turns(target, draft, *jax.device_put(batch, jax.NamedSharding(mesh, rows)))
    else:
        specs = (nowhere, nowhere, *[rows] * 5)
        found = jax.jit(jax.shard_map(turns, mesh=mesh, in_specs=specs, out_specs=rows))(target, draft, *batch)
    same(found, expected, atol=1e-5)


def test_second_turn_compiles_nothing(compilations):
    target, draft = pair()
    rollout = jspec.Rollout.start(target, draft, *prompts(), max_length=LENGTH)
    for turn in range(3):
        if turn == 1:
            before = compilations()
        rollout, _ = rollout.append(target, draft, *reply(turn)).generate(target, draft, max_new_tokens=4)
    assert compilations() == before


def test_append_reads_only_the_new_tokens(report):
    """Compare the operations of `append` with those of a prefill of the whole text."""
    target, draft = pair()
    start = functools.partial(jspec.Rollout.start, max_length=LENGTH)
    tokens, lengths = np.ones((BATCH, LENGTH), np.int32), np.full(BATCH, LENGTH)
    rollout, keys = start(target, draft, *prompts()), prompts()[2]
    prefill = jax.jit(start).lower(target, draft, tokens, lengths, keys)
    append = jax.jit(type(rollout).append).lower(rollout, target, draft, *reply(0))
    counts = [one.compile().cost_analysis()["flops"] for one in (append, prefill)]
    report(flops_over_prefill=f"{counts[0] / counts[1]:.3f}", tokens_over_prefill=f"{4 / LENGTH:.3f}")
    assert counts[0] < counts[1] / 4
