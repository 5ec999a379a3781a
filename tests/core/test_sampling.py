"""The sampling transforms, against transformers' processors and a float64 sort at every vocabulary size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.sampling import (
    LogitsTransforms,
    SamplingParams,
    add_tokens,
    broadcast_rows,
    count_prompt,
    draft_transforms,
    target_transforms,
    token_probs,
)
from support import oracle, toys

ROWS, VOCAB = 48, 97
SETTINGS = {
    "bias": {"logit_bias": np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)},
    "repetition": {"repetition_penalty": [1.3, 0.8, 5.0]},
    "temperature": {"temperature": [0.3, 1.0, 2.5]},
    "top-k": {"top_k": [1, 7, 96, 97, 500]},
    "top-p": {"top_p": [0.1, 0.5, 0.9, 0.999]},
    "min-p": {"min_p": [0.02, 0.3, 1.0]},
}
SETTINGS["combined"] = {key: value for part in SETTINGS.values() for key, value in part.items()}


def rows_of(settings, rows):
    """Return one dict of numbers per row, cycling through the entries of each list at its own pace."""
    turns = [(key, value if isinstance(value, list) else [value]) for key, value in settings.items()]
    return [{key: values[i * (j + 1) % len(values)] for j, (key, values) in enumerate(turns)} for i in range(rows)]


def params_of(rows, vocab_size):
    """Return `SamplingParams` with an array in every field."""
    defaults = {name: getattr(SamplingParams(), name) for name in toys.SPREAD_PARAMS if name != "draft_temperature"}
    columns = {name: jnp.asarray([row.get(name, off) for row in rows], jnp.float32) for name, off in defaults.items()}
    bias = np.stack([np.broadcast_to(row.get("logit_bias", 0.0), vocab_size) for row in rows])
    return SamplingParams(**columns, logit_bias=bias)


@jax.jit
def shipped(logits, params, prompt, lengths):
    """Return the `token_probs` of ``[B, V]`` logits after a prompt."""
    token_counts = count_prompt(prompt, lengths, logits.shape[-1])
    return token_probs(logits[:, None], broadcast_rows(target_transforms(params), logits.shape[0]), token_counts)[:, 0]


def random_logits(rng, tied, rows=ROWS, vocab_size=VOCAB):
    """Return rows of logits; `tied` logits are whole numbers, so every value occurs many times."""
    logits = 2.5 * rng.normal(size=(rows, vocab_size))
    return (np.round(logits) if tied else logits).astype(np.float32)


def transformers_law(logits, prompt, settings):
    """Return one row's probabilities from transformers' processors, in the order of its `generate`."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers")
    processors = []
    if "logit_bias" in settings:
        pairs = {(i,): float(value) for i, value in enumerate(settings["logit_bias"])}
        processors.append(hf.SequenceBiasLogitsProcessor(pairs))
    if "repetition_penalty" in settings:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    kinds = {
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    processors += [kind(settings[name]) for name, kind in kinds.items() if name in settings]
    scores = torch.from_numpy(logits[None])
    for processor in processors:
        scores = processor(torch.from_numpy(prompt[None]).long(), scores)
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize("tied", [False, True], ids=["random", "tied"])
@pytest.mark.parametrize("name", SETTINGS)
def test_transforms_match_transformers(report, monkeypatch, name, tied):
    torch = pytest.importorskip("torch")
    # transformers leaves the order of ties to torch.sort, which is not stable by default; jspec orders by index.
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))
    rng = np.random.default_rng(1)
    logits, rows = random_logits(rng, tied), rows_of(SETTINGS[name], ROWS)
    prompt = rng.integers(VOCAB, size=(ROWS, 12), dtype=np.int32)
    ours = np.asarray(shipped(logits, params_of(rows, VOCAB), prompt, jnp.full(ROWS, 12)))
    theirs = np.stack([transformers_law(*row) for row in zip(logits, prompt, rows, strict=True)])
    moved, error = ((ours > 0) != (theirs > 0)).sum(), np.abs(ours - theirs).max()
    report(rows=ROWS, vocab=VOCAB, kept_differs=moved, max_error=f"{error:.1e}")
    assert moved == 0
    assert error <= 1e-6


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 1023, 8193, 128_256])
def test_transforms_equal_float64_sort_at_every_vocabulary_size(report, vocab_size):
    rng, batch = np.random.default_rng(2), 6
    settings = {
        "temperature": [0.7, 1.3],
        "top_k": [0, 3, 50],
        "top_p": [0.95, 1.0, 0.6],
        "min_p": [0.0, 0.001],
        "repetition_penalty": [1.0, 1.5],
    }
    rows = rows_of(settings, batch)
    logits = random_logits(rng, False, batch, vocab_size)
    logits[batch // 2 :] = random_logits(rng, True, batch - batch // 2, vocab_size)
    prompt = rng.integers(vocab_size, size=(batch, 5), dtype=np.int32)
    ours = np.asarray(shipped(logits, params_of(rows, vocab_size), prompt, jnp.full(batch, 5)))
    exact = np.stack([oracle.sampling_law(logits[i], prompt=prompt[i], **rows[i]) for i in range(batch)])
    moved = np.where((ours > 0) != (exact > 0), np.maximum(ours, exact), 0)
    error = np.where(moved > 0, 0, np.abs(ours - exact)).max()
    report(rows=batch, kept_differs_by_mass=f"{moved.sum():.1e}", max_error=f"{error:.1e}")
    # If float32 and float64 sums of the tail differ, a token at the very edge of top-p may fall on either side.
    assert moved.sum(-1).max() <= 1e-5
    assert error <= 1e-6
    np.testing.assert_allclose(ours.sum(-1), 1, atol=1e-5)


def test_penalties_by_position_match_definition():
    """Position s of a verify pass counts tokens in the prompt, the output, and the first s draft tokens."""
    rng, batch, k, vocab_size = np.random.default_rng(3), 5, 4, 11
    logits = random_logits(rng, False, batch * (k + 1), vocab_size).reshape(batch, k + 1, vocab_size)
    prompt, text = rng.integers(6, size=(batch, 4)), rng.integers(6, size=(batch, 3))
    drafted = rng.integers(6, size=(batch, k))
    lengths, kept = np.array([1, 2, 3, 4, 4]), np.arange(3) < np.array([0, 1, 2, 3, 3])[:, None]
    settings = {
        "repetition_penalty": [1.2, 1.0],
        "presence_penalty": [0.5, -0.3, 0.0],
        "frequency_penalty": [0.4, 0.0, -0.2],
    }
    rows = rows_of(settings, batch)
    transforms = broadcast_rows(target_transforms(params_of(rows, vocab_size)), batch)
    token_counts = add_tokens(count_prompt(prompt, lengths, vocab_size), text, kept)
    ours = jitted(logits, transforms, token_counts, drafted)
    for b in range(batch):
        for s in range(k + 1):
            history = [*text[b][kept[b]], *drafted[b, :s]]
            law = oracle.sampling_law(logits[b, s], prompt=prompt[b, : lengths[b]], generated=history, **rows[b])
            np.testing.assert_allclose(ours[b, s], law, atol=1e-6)
    # One step at a time, as in the draft model, gives the same distribution.
    for s in range(k):
        one_step = jitted(logits[:, s : s + 1], transforms, token_counts)[:, 0]
        np.testing.assert_allclose(one_step, ours[:, s], atol=1e-7)
        token_counts = add_tokens(token_counts, drafted[:, s : s + 1], np.ones((batch, 1), bool))


jitted = jax.jit(token_probs)


def law(logits, **settings):
    """Return the shipped distribution of one row, in a program without the filters that are off."""
    transforms = broadcast_rows(target_transforms(SamplingParams(**settings)), 1)
    return np.asarray(jitted(jnp.asarray(logits, jnp.float32)[None, None], transforms, None)[0, 0])


def test_temperature_0_selects_first_largest_logit():
    logits = random_logits(np.random.default_rng(4), tied=True)
    for row in logits:
        np.testing.assert_array_equal(law(row, temperature=0.0), np.eye(VOCAB)[np.argmax(row)])
    np.testing.assert_array_equal(law([1, 3, 3, 0], temperature=0, top_k=1, top_p=0.1, min_p=1.0), [0, 1, 0, 0])


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 2e-38, 1e-30, 1e-3])
def test_tiny_temperatures_do_not_overflow(temperature):
    np.testing.assert_array_equal(law([-1e4, 1e4, 1e4, 3e38], temperature=temperature), [0, 0, 0, 1])
    # A temperature below the smallest normal float32 may count as 0, which selects the first of equal logits.
    greedy = temperature < np.finfo(np.float32).tiny
    tied = law([-5.0, 7.0, 7.0, 0.0], temperature=temperature)
    np.testing.assert_array_equal(tied, [0, 1, 0, 0] if greedy and tied[1] == 1 else [0, 0.5, 0.5, 0])


def test_huge_temperature_gives_uniform_distribution():
    np.testing.assert_allclose(law([-5.0, 7.0, 1.0, 0.0], temperature=1e30), 0.25)


@pytest.mark.parametrize("bad", [np.nan, np.inf, None], ids=["NaN", "+inf", "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_logits_give_zero_mass(bad, temperature):
    logits = np.full(7, -np.inf) if bad is None else np.array([0, 1, bad, 3, -np.inf, 2, 0.5])
    for settings in ({}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}):
        np.testing.assert_array_equal(law(logits, temperature=temperature, **settings), np.zeros(7))


def test_forbidden_tokens_have_no_mass():
    logits = np.array([0.0, -np.inf, 2.0, -np.inf, 1.0])
    settings = {"top_k": 4, "top_p": 0.999}
    np.testing.assert_allclose(law(logits, **settings), oracle.sampling_law(logits, **settings), atol=1e-6)
    assert law(logits, top_k=4)[[1, 3]].max() == 0


@pytest.mark.parametrize("size", [2, 8, 97])
@pytest.mark.parametrize("top_p", [1e-9, 0.25, 0.5, 0.75])
def test_top_p_of_equal_logits_drops_first_tokens(top_p, size):
    """If all logits are tied, tokens are dropped in index order, and at least one is always kept."""
    logits = np.zeros(size)
    np.testing.assert_allclose(law(logits, top_p=top_p), oracle.sampling_law(logits, top_p=top_p), atol=1e-6)


def test_omitted_filters_equal_disabled_filters():
    logits = random_logits(np.random.default_rng(5), tied=False)
    prompt, lengths = np.zeros((ROWS, 1), np.int32), jnp.ones(ROWS, jnp.int32)
    written_out = shipped(logits, params_of([{}] * ROWS, VOCAB), prompt, lengths)
    left_out = jitted(logits[:, None], broadcast_rows(target_transforms(SamplingParams()), ROWS), None)[:, 0]
    np.testing.assert_allclose(written_out, left_out, atol=1e-7)


@pytest.mark.parametrize("used", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.6}])
def test_filters_of_other_rows_change_no_distribution(used):
    """A filter runs if any row uses it. Rows that do not use it, and greedy rows, are the same with and without it."""
    logits = random_logits(np.random.default_rng(6), tied=True)
    rows = [{}, {"temperature": 0.0, "top_p": 0.5, "top_k": 2}, {"min_p": 0.1}, used] * (ROWS // 4)
    prompt, lengths = np.zeros((ROWS, 1), np.int32), jnp.ones(ROWS, jnp.int32)
    found = shipped(logits, params_of(rows, VOCAB), prompt, lengths)
    expected = [law(row, **params) for row, params in zip(logits, rows, strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_unused_filters_do_not_run():
    """The bisections run only in branches, whose conditions are shared by all rows."""
    rows = broadcast_rows(target_transforms(SamplingParams(top_k=np.zeros(ROWS), top_p=np.ones(ROWS))), ROWS)
    program = jax.make_jaxpr(token_probs)(jnp.zeros((ROWS, 2, VOCAB)), rows, None)
    names = [equation.primitive.name for equation in program.eqns]
    assert names.count("cond") == 2 and not {"scan", "while"} & {*names}


def test_draft_may_have_its_own_temperature_and_top_p():
    params = SamplingParams(temperature=0.5, top_k=3, draft_temperature=0.9, draft_top_p=0.75)
    assert draft_transforms(params) == LogitsTransforms(np.float32(0.9), 3, 0.25, None, None, None, None, None)
    assert draft_transforms(SamplingParams(temperature=0.5)) == target_transforms(SamplingParams(temperature=0.5))
