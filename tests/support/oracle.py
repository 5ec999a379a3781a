"""The reference for the shipped code: float64 NumPy distributions, exact enumeration, and chi-square with its power.

Nothing here imports jspec; `acceptance_thresholds` only measures a function that it is given.
"""

import itertools

import numpy as np
from scipy import stats

ALPHA = 1e-6
POWER = 0.999


def softmax(logits):
    """Return the float64 softmax over the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def sampling_law(
    logits,
    *,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=0.0,
    prompt=(),
    generated=(),
):
    """Return the next token's distribution ``float64[V]`` after `prompt` and `generated`, by sorting.

    See `SamplingParams`.
    """
    logits = np.asarray(logits, np.float64) + np.asarray(logit_bias, np.float64)
    logits = _penalised(logits, repetition_penalty, presence_penalty, frequency_penalty, prompt, generated)
    if temperature == 0:
        return np.eye(logits.size)[np.argmax(logits)]
    scaled = (logits - logits.max()) / temperature
    if top_k:
        scaled = np.where(scaled >= np.sort(scaled)[-min(top_k, scaled.size)], scaled, -np.inf)
    probs = softmax(scaled)
    keep = nucleus(probs, 1 - top_p) & (probs >= min_p * probs.max())
    return np.where(keep, probs, 0) / probs[keep].sum()


def _penalised(logits, repetition, presence, frequency, prompt, generated):
    counts = np.bincount(np.asarray(generated, int), minlength=logits.size)
    seen = (np.bincount(np.asarray(prompt, int), minlength=logits.size) + counts) > 0
    logits = np.where(seen, np.where(logits < 0, logits * repetition, logits / repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)


def nucleus(probs, tail_mass):
    """Return which tokens top-p keeps: it drops the least likely, ties by index, while their mass is <= `tail_mass`."""
    if tail_mass <= 0:
        return np.ones(probs.size, bool)
    order = np.argsort(probs, kind="stable")
    keep = np.ones(probs.size, bool)
    keep[order] = np.cumsum(probs[order]) > tail_mass
    keep[order[-1]] = True
    return keep


def joint_law(next_law, vocab_size, num_tokens, eos=()):
    """Return the joint distribution ``float64[V^num_tokens]`` of texts as base-V numbers; zeros follow `eos`.

    Args:
        next_law: ``(generated tuple) -> float64[V]``.
    """
    joint = np.zeros((vocab_size,) * num_tokens)
    for text in itertools.product(range(vocab_size), repeat=num_tokens):
        weight, end = 1.0, next((i + 1 for i, token in enumerate(text) if token in eos), num_tokens)
        if any(text[end:]):
            continue
        for i in range(end):
            weight = weight * next_law(text[:i])[text[i]] if weight else 0.0
        joint[text] = weight
    return joint.ravel()


def sample_with_noise(noise, probs):
    """Return the float64 draws ``int[N]`` of `sample_with_noise` from noise ``[N, 2, W]`` and `probs` ``[N, V]``."""
    rows, (size, width) = np.arange(len(probs)), (probs.shape[-1], noise.shape[-1])
    blocks = np.pad(np.asarray(probs, np.float64), ((0, 0), (0, -size % width))).reshape(len(probs), -1, width)
    with np.errstate(divide="ignore"):
        block = np.argmax(np.log(blocks.sum(-1)) + noise[:, 0, : blocks.shape[1]], axis=-1)
        token = np.argmax(np.log(blocks[rows, block]) + noise[:, 1], axis=-1)
    return block * width + token


def acceptance_thresholds(accepts, shape, steps=50):
    """Return for each entry the t such that ``accepts(u)`` is true below it and false above, by bisection.

    This measures the shipped acceptance test instead of using a formula: t is 0 if u = 0 is rejected, and 1 if 1 is
    accepted.

    Args:
        accepts: ``(float64 array of `shape`) -> bool array``.
    """
    low, high = np.zeros(shape), np.ones(shape)
    never, always = ~accepts(low), accepts(high)
    for _ in range(steps):
        middle = (low + high) / 2
        accepted = accepts(middle)
        low, high = np.where(accepted, middle, low), np.where(accepted, high, middle)
    return np.where(never, 0.0, np.where(always, 1.0, high))


def chi_square(counts, law):
    """Return ``(statistic, degrees of freedom)`` of `counts` against `law`; infinite if the impossible happened.

    Cells with fewer than 10 expected draws are pooled, so that the chi-square distribution holds far out in its tail.
    """
    counts, expected = np.asarray(counts, float), np.asarray(law) * np.sum(counts)
    if counts[expected == 0].any():
        return np.inf, 1
    small = expected < 10
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    live = expected > 0
    if expected[-1] < 10 and live.sum() > 1:
        # The pool itself is too small: merge it into the smallest remaining cell.
        smallest = np.argmin(expected[:-1])
        counts[smallest] += counts[-1]
        expected[smallest] += expected[-1]
        live[-1] = False
    statistic = ((counts - expected)[live] ** 2 / expected[live]).sum()
    return statistic, live.sum() - 1


def p_value(counts, law):
    """Return the probability of a chi-square at least this large if `counts` do come from `law`."""
    statistic, freedom = chi_square(counts, law)
    return p_of(statistic, freedom)


def p_of(statistic, freedom):
    """Return the upper tail of the chi-square distribution, or 1 if there is nothing to compare."""
    return float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0


def power(draws, distance, freedom, alpha=ALPHA):
    """Return the least power at total variation `distance`, where the noncentrality is at least ``4 N d^2``."""
    return float(stats.ncx2.sf(stats.chi2.isf(alpha, freedom), freedom, 4 * draws * distance**2))


def detectable(draws, freedom, alpha=ALPHA):
    """Return the total variation that `draws` reveal at `alpha` with power 0.999."""
    distances = np.geomspace(1e-5, 1, 2000)
    powers = stats.ncx2.sf(stats.chi2.isf(alpha, freedom), freedom, 4 * draws * distances**2)
    return float(distances[np.argmax(powers >= POWER)])
