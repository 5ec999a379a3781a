"""Closed forms that predict the gain of speculative decoding, in plain NumPy float64.

Every function maps acceptance rates and cost ratios to a number that can be compared with a measurement. None of
them runs a model. Following both papers, `p` is the target's distribution, `q` the draft's, and `k` (gamma in
Leviathan et al., T in Stratos) the number of drafted tokens in a round. Arguments broadcast against one another,
and scalars give scalars. Every invalid value raises ValueError.

References:
    Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023, sections 3.1
    to 3.5.
    Stratos, "Speculative Decoding" (notes), section 1.1.1.
"""

from jspec.theory.expected_tokens import (
    acceptance_rate,
    divergence,
    expected_tokens,
    expected_tokens_from_rates,
    operations,
    optimal_k,
    speedup,
    speedup_lower_bound,
)
from jspec.theory.tree_yield import best_tree, tree_yield

__all__ = [
    "acceptance_rate",
    "best_tree",
    "divergence",
    "expected_tokens",
    "expected_tokens_from_rates",
    "operations",
    "optimal_k",
    "speedup",
    "speedup_lower_bound",
    "tree_yield",
]
