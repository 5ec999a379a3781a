# pyright: reportUnknownArgumentType=false
"""pass@k: the probability that at least one of k samples of a prompt is correct."""

import numbers

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pass_at_k(correct: ArrayLike, k: int) -> NDArray[np.float64]:
    """Return the unbiased estimate of pass@k for each prompt (Chen et al. 2021, Codex, section 2.1).

    With c correct samples out of G, the estimate is ``1 - C(G - c, k) / C(G, k)``: the probability that k samples drawn
    from the group without replacement contain a correct one. The function computes the ratio as a product of factors
    from 0 to 1, so it does not overflow for large groups.

    Args:
        correct: ``bool[B, G]``, whether sample g of prompt b is correct. With ``samples_per_prompt=G``, reshape one
            value per row of the output to ``(-1, G)``.
        k: the number of samples that a user would draw, in 1..G.

    Returns:
        ``float64[B]``, one estimate per prompt. Its mean over prompts is the score of a benchmark.

    Raises:
        ValueError: `correct` is not boolean or has another shape, or `k` is not in 1..G.
    """
    groups = np.asarray(correct)
    if groups.ndim != 2 or groups.shape[1] == 0:
        raise ValueError(
            f"correct has shape {list(groups.shape)}; pass one row per prompt and one column per sample, such as "
            "correct.reshape(-1, samples_per_prompt)."
        )
    if groups.dtype != np.bool_:
        raise ValueError(f"correct has dtype {groups.dtype}; pass booleans, such as scores == 1.")
    size = groups.shape[1]
    if isinstance(k, bool) or not isinstance(k, numbers.Integral) or not 1 <= k <= size:
        raise ValueError(f"k is {k!r}, but each prompt has {size} samples; pass an integer from 1 to {size}.")
    # C(G - c, k) / C(G, k) is the product of 1 - k / i over i from G - c + 1 to G, and 0 if fewer than k samples fail.
    factors = np.maximum(1 - int(k) / np.arange(size, 0, -1), 0)
    all_fail = np.concatenate([[1.0], np.cumprod(factors)])
    return 1 - all_fail[groups.sum(axis=1)]
