"""Closed-form predictions of the gain from speculative decoding, in NumPy float64.

Every function maps acceptance rates and cost ratios to a number that can be compared with a measurement. No
function runs a model. As in both papers, `p` is the target's distribution and `q` the draft's. `k` is the number of
draft tokens per round (gamma in Leviathan et al., T in Stratos). Arguments broadcast against one another, and scalar
arguments produce a scalar result. Every invalid value raises ValueError.

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
