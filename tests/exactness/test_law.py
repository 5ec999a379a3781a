"""The distribution of rounds and whole outputs of the shipped program, against exact enumeration.

Every test samples and compares by chi-square at alpha = 1e-6 over all its settings together (Bonferroni). It prints the
smallest p and the total variation that it would have detected with power 0.999.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core import keys as streams
from jspec.core.sampling import SamplingParams
from jspec.drafters import ModelDrafter
from support import oracle, toys
from support.law import NUM_TOKENS, PROMPTS, VOCAB, default, exact_law, filled, llama_pair, text_counts
from support.oracle import ALPHA, POWER

# Sampling settings of the one-round test, each combined with every K in ROUND_DRAFTS.
ROUND_SAMPLING = {
    "plain": {},
    "T=0.6, top-k 5": {"temperature": 0.6, "top_k": 5},
    "T=1.4, top-p 0.8": {"temperature": 1.4, "top_p": 0.8},
    "min-p 0.1, draft T=1.5": {"min_p": 0.1, "draft_temperature": 1.5},
}
ROUND_DRAFTS = (1, 2, 5)
PROMPT = (3, 6)


@functools.partial(jax.jit, static_argnames="num_draft_tokens")
def round_counts(target, draft, keys, sampling, num_draft_tokens):
    """Return ``int[K + 1, V, V]``: how often one shipped round put each token at each offset after each token.

    Also return ``int[K]``: how often each draft token was accepted.
    """
    batch, vocab_size = keys.shape[0], target.config.vocab_size
    tokens = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (batch, len(PROMPT)))
    lengths = jnp.full(batch, len(PROMPT))
    transforms = toys.both_transforms(sampling, batch)
    state, new = toys.first_round(target, ModelDrafter(draft), tokens, lengths, keys, transforms, num_draft_tokens)
    offsets = jnp.arange(num_draft_tokens + 1)
    text = state.tokens[:, len(PROMPT) - 1 :]
    cells = (offsets * vocab_size + text[:, offsets]) * vocab_size + text[:, offsets + 1]
    emitted = offsets < (state.lengths - lengths)[:, None]
    counts = jnp.zeros((num_draft_tokens + 1) * vocab_size**2, jnp.int32).at[cells].add(emitted)
    return counts.reshape(-1, vocab_size, vocab_size), (offsets[:-1] < new.accepted[:, None]).sum(0)


@functools.cache
def played(draws, chunk=100_000):
    """Return the results of `draws` rounds for each setting.

    A result holds counts, acceptances, and the distributions p and q after each token, [V, V].
    """
    target, draft = toys.markov_pair(0)
    results = {}
    for k in ROUND_DRAFTS:
        for name, settings in ROUND_SAMPLING.items():
            # Each setting has its own keys: with the same keys, the first token would not depend on K.
            keys = jax.random.split(jax.random.key(1 + len(results)), (draws // chunk, chunk))
            sampling = filled(chunk, **settings)
            chunks = [jax.device_get(round_counts(target, draft, part, sampling, k)) for part in keys]
            counts, accepted = (np.sum(part, axis=0, dtype=np.int64) for part in zip(*chunks, strict=True))
            p_settings = {key: value for key, value in settings.items() if key != "draft_temperature"}
            own = {"temperature": settings["draft_temperature"]} if "draft_temperature" in settings else {}
            q_settings = {**p_settings, **own}
            p = np.stack([oracle.sampling_law(row, **p_settings) for row in np.asarray(target.table)])
            q = np.stack([oracle.sampling_law(row, **q_settings) for row in np.asarray(draft.table)])
            results[k, name] = counts, accepted, p, q
    return results


def check_round_law(report, draws):
    p_values = {}
    for (k, name), (counts, _, p, _) in played(draws).items():
        assert counts[0].sum() == draws, "every row emits at least one token"
        p_values[k, name, "first token"] = oracle.p_value(counts[0, PROMPT[-1]], p[PROMPT[-1]])
        later = [oracle.chi_square(row, law) for table in counts[1:] for row, law in zip(table, p, strict=True)]
        p_values[k, name, "later tokens"] = oracle.p_of(*np.sum(later, axis=0))
    worst = min(p_values, key=p_values.get)
    report(
        settings=len(p_values) // 2,
        rounds_each=draws,
        p_values=len(p_values),
        min_p=f"{p_values[worst]:.2g}",
        alpha_over_all=ALPHA,
        power=POWER,
        first_token_sees_tv=f"{oracle.detectable(draws, 7, ALPHA / len(p_values)):.4f}",
    )
    assert p_values[worst] * len(p_values) > ALPHA


def check_acceptance(report, draws):
    worst = 0.0
    for (k, _), (_, accepted, p, q) in played(draws).items():
        # The k-th draft token is accepted with the probability that k steps of min(p, q) leave.
        alive, both = np.eye(8)[PROMPT[-1]], np.minimum(p, q)
        for position in range(k):
            alive = alive @ both
            rate = alive.sum()
            error = max((rate * (1 - rate) / draws) ** 0.5, 1e-12)
            worst = max(worst, abs(accepted[position] / draws - rate) / error)
    positions = len(ROUND_SAMPLING) * sum(ROUND_DRAFTS)
    report(settings=len(played(draws)), positions=positions, rounds_each=draws, max_abs_z=f"{worst:.2f}", limit=4)
    assert worst <= 4


def test_one_round_has_target_distribution(report):
    check_round_law(report, 200_000)


def test_acceptance_rate_is_overlap_of_distributions(report):
    check_acceptance(report, 200_000)


@pytest.mark.slow
def test_one_round_has_target_distribution_at_length(report):
    check_round_law(report, 5_100_000)


@pytest.mark.slow
def test_acceptance_rate_is_overlap_of_distributions_at_length(report):
    check_acceptance(report, 5_100_000)


# Joint distribution of 3 tokens: (K, B, which draft). Every row of a batch has its own prompt and settings. Prompts and
# settings are used in turn, so that the few batches cover every setting, too.
FEW_BATCHES = ((1, 4, "related"), (2, 5, "unrelated"), (4, 1, "related"), (8, 1, "unrelated"))
BATCHES = (
    (1, 8, "unrelated"),
    (1, 8, "related"),
    (2, 8, "related"),
    (4, 1, "related"),
    (4, 1, "unrelated"),
    (8, 3, "unrelated"),
)
BIAS = np.array([0.7, -0.4, 0, 0, 1.1, -np.inf, 0, -1.0], np.float32)
ROW_SETTINGS = (
    {"temperature": 0.5},
    {"temperature": 1.5, "top_k": 3},
    {"top_p": 0.85, "repetition_penalty": 1.4},
    {"min_p": 0.15, "logit_bias": BIAS},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"temperature": 0.5, "draft_temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": -0.4},
    {},
    {"temperature": 1.5, "frequency_penalty": 1.0, "logit_bias": BIAS, "draft_temperature": 0.6},
)
COLUMNS = (*toys.SPREAD_PARAMS, "logit_bias")


def rows_of(batches, index):
    """Return the prompts and settings of one of `batches`; successive rows use them in turn."""
    first = sum(batch for _, batch, _ in batches[:index])
    rows = range(first, first + batches[index][1])
    return [PROMPTS[i % len(PROMPTS)] for i in rows], [ROW_SETTINGS[i % len(ROW_SETTINGS)] for i in rows]


def batch_p_values(batches, index, draws, chunk):
    """Return p of every row of one batch, from a program without the transforms that no row uses."""
    k, batch, which = batches[index]
    target, drafts = llama_pair()
    prompts, settings = rows_of(batches, index)
    tokens = np.full((batch, max(map(len, PROMPTS))), 5, np.int32)  # padded with a token of the vocabulary
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in prompts])
    columns = {
        name: np.array([row.get(name, default(name, row)) for row in settings], np.float32)
        for name in COLUMNS
        if any(name in row for row in settings)
    }
    keys = jax.random.split(jax.random.key(100 + index), (draws // chunk, chunk, batch))
    counts = np.zeros((batch, VOCAB**NUM_TOKENS), np.int64)
    for part in keys:
        counts += np.asarray(
            text_counts(target, drafts[which], tokens, lengths, part, SamplingParams(**columns), "rejection", k)
        )
    laws = [exact_law(target, *row) for row in zip(prompts, settings, strict=True)]
    return [oracle.p_value(*pair) for pair in zip(counts, laws, strict=True)]


def check_joint_law(report, batches, draws, chunk=1024):
    draws -= draws % chunk
    p_values = np.concatenate([batch_p_values(batches, i, draws, chunk) for i in range(len(batches))])
    sees = oracle.detectable(draws, VOCAB**NUM_TOKENS - 1, ALPHA / len(p_values))
    report(
        settings=len(p_values),
        texts_each=draws,
        bins=VOCAB**NUM_TOKENS,
        min_p=f"{p_values.min():.2g}",
        alpha_over_all=ALPHA,
        sees_tv=f"{sees:.4f}",
        power=POWER,
    )
    assert p_values.min() * len(p_values) > ALPHA


def test_three_tokens_have_target_joint_distribution(report):
    check_joint_law(report, FEW_BATCHES, 16_384)


@pytest.mark.slow
def test_three_tokens_have_target_joint_distribution_at_length(report):
    check_joint_law(report, BATCHES, 1_000_000)


def test_draft_equal_to_target_is_always_accepted(report):
    """With temperatures 0 and 1 in one batch, each of 1,000 rounds yields K + 1 tokens."""
    batch, rounds, k = 50, 20, 4
    target, _ = llama_pair()
    tokens = np.random.default_rng(20).integers(VOCAB, size=(batch, 7), dtype=np.int32)
    asked = tokens, jnp.arange(batch) % 7 + 1, jax.random.split(jax.random.key(21), batch)
    options = {"max_new_tokens": rounds * (k + 1), "sampling": SamplingParams(temperature=jnp.arange(batch) % 2)}
    out = jspec.speculative_generate(target, target, *asked, num_draft_tokens=k, **options)
    total, accepted = int(out.stats.rounds.sum()), int(out.stats.accepted.sum())
    report(rounds=total, drafted=int(out.stats.drafted.sum()), accepted=accepted)
    np.testing.assert_array_equal(out.stats.rounds, rounds)
    np.testing.assert_array_equal(out.stats.accepted_at, rounds)
    np.testing.assert_array_equal(out.lengths, rounds * (k + 1))


def test_no_key_is_used_twice(monkeypatch):
    """JAX's own checker follows typed keys through the whole program; it does object to a key used directly."""
    target, draft = toys.markov_pair(0)
    tokens, lengths = jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32)

    def run(seed):
        keys, transforms = jax.random.split(jax.random.key(seed), 2), toys.both_transforms(SamplingParams(), 2)
        return toys.decode(
            target, ModelDrafter(draft), tokens, lengths, keys, transforms, max_new_tokens=5, num_draft_tokens=2
        )

    with jax.debug_key_reuse(True):
        np.testing.assert_array_equal(run(22).lengths, 5)
        monkeypatch.setattr(streams, "stream", lambda keys, positions, _: keys[:, None] if positions.ndim > 1 else keys)
        with pytest.raises(jax.errors.KeyReuseError):
            run(23)
