"""Compare three tokens of a toy pair, sampled by the shipped program, with their exact joint distribution.

Every output is counted. A chi-square test compares the counts with products of the target's probabilities, which are
computed from its logits on the same device. In bfloat16 the program uses the attention kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import jspec
from bench.gpu.record import Record
from bench.pairs import llama, random_llama

_VOCAB, _TOKENS = 8, 3
_PROMPT = (3, 6, 1)
_ALPHA = 1e-6
_ROUNDED = 0.005  # chi-square beyond its degrees of freedom, per output: equivalent to relative errors of 7 %
_SHAPE = llama(vocab=_VOCAB, hidden=64, inner=96, layers=2, heads=4, groups=2, size=64)
# Dtype, rule and K.
_SETTINGS = ((jnp.bfloat16, "rejection", 4), (jnp.float32, "rejection", 2), (jnp.bfloat16, "block", 2))


def check(record: Record, rehearse: bool) -> None:
    """Add a row for each setting, with 65,536 outputs each."""
    draws, batch, layers = (1024, 512, 1) if rehearse else (65536, 8192, 2)
    shape = dataclasses.replace(_SHAPE, num_hidden_layers=layers)
    for dtype, rule, k in _SETTINGS[:1] if rehearse else _SETTINGS:
        name = f"law, {np.dtype(dtype).name}, {rule}, K={k}"
        with record.attempt(name):
            target, draft = random_llama(shape, dtype, 0), random_llama(shape, dtype, 1)
            counts, rate = _counts(target, draft, draws, batch, rule, k)
            statistic, freedom = chi_square(counts, exact(target))
            p, excess = float(stats.chi2.sf(statistic, freedom)), (statistic - freedom) / draws
            # In bfloat16, the program's passes and the enumerated pass round differently.
            ok = p > _ALPHA or (dtype == jnp.bfloat16 and excess < _ROUNDED)
            record.add(
                name,
                ok=ok,
                p=p,
                chi_square=statistic,
                freedom=freedom,
                excess=excess,
                texts=draws,
                acceptance=rate,
                distinct=int((counts > 0).sum()),
            )


def _counts(target: Any, draft: Any, draws: int, batch: int, rule: str, k: int) -> tuple[np.ndarray, float]:
    """Return how often each output was sampled, ``int[V^3]``, and how many draft tokens were accepted."""
    tokens, lengths = np.tile(np.array(_PROMPT, np.int32), (batch, 1)), np.full(batch, len(_PROMPT), np.int32)
    counts, accepted, drafted = np.zeros(_VOCAB**_TOKENS, np.int64), 0, 0
    for keys in jax.random.split(jax.random.key(7), (draws // batch, batch)):
        output = jspec.speculative_generate(
            target, draft, tokens, lengths, keys, max_new_tokens=_TOKENS, num_draft_tokens=k, accept=rule
        )
        texts = np.ravel_multi_index(tuple(np.asarray(output.tokens).T), (_VOCAB,) * _TOKENS)
        counts += np.bincount(texts, minlength=counts.size)
        accepted += int(np.sum(output.stats.accepted))
        drafted += int(np.sum(output.stats.drafted))
    return counts, accepted / drafted


def exact(target: Any) -> np.ndarray:
    """Return the probability of every output, ``float64[V^3]``, at temperature 1."""
    texts = np.stack(np.unravel_index(np.arange(_VOCAB**_TOKENS), (_VOCAB,) * _TOKENS), axis=1)
    tokens = np.concatenate(
        [np.tile(np.array(_PROMPT, np.int32), (len(texts), 1)), texts[:, :-1].astype(np.int32)], axis=1
    )
    logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(target, tokens), np.float64)
    logs = logits[:, len(_PROMPT) - 1 :]
    logs = logs - logs.max(-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    return np.exp(np.take_along_axis(logs, texts[..., None], axis=2).sum((1, 2)))


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, int]:
    """Return chi-square and its degrees of freedom. Outputs that are expected fewer than 10 times are pooled."""
    expected = law * counts.sum()
    small = expected < 10
    observed, expected = (np.append(part[~small], part[small].sum()) for part in (counts, expected))
    live = expected > 0
    statistic = ((observed - expected)[live] ** 2 / expected[live]).sum()
    return float(statistic), int(live.sum() - 1)
