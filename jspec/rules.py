"""Building blocks for writing your own acceptance rules. See docs/write-your-own.md for examples.

A rule derives from `Rule`, or has the same attributes and methods. A rule that verifies a chain token by token needs
only a bound (`accept_tokens`). A tree rule verifies siblings one after another (`kept_in_turn`) and follows the
accepted siblings (`follow`). It then samples the next token from the remaining probability mass (`next_probs_at`).
"""

from jspec.acceptance import RULES, Block, Coupled, KSeq, Rejection, Rule, Traversal
from jspec.acceptance.coupled import accept_coupled
from jspec.acceptance.lossy import Lenient, Relaxed, Threshold, TopK, Typical, accept_longest
from jspec.acceptance.rejection import accept_nodes, accept_tokens, count_accepted, next_probs
from jspec.acceptance.walk import (
    Bound,
    along,
    at_parents,
    end_of,
    excess,
    follow,
    follow_longest,
    is_guess,
    kept_in_turn,
    length_of_prefix,
    next_probs_at,
    sibling_uniforms,
)
from jspec.core.keys import Purpose, of_sibling, positions_from, stream, target_noise, uniform
from jspec.core.probs import at_tokens, residual, sample, sample_with_noise
from jspec.core.types import Draft, Verdict

law_behind = next_probs_at  # the former name, for rules written by users

__all__ = [
    "RULES",
    "Block",
    "Bound",
    "Coupled",
    "Draft",
    "KSeq",
    "Lenient",
    "Purpose",
    "Rejection",
    "Relaxed",
    "Rule",
    "Threshold",
    "TopK",
    "Traversal",
    "Typical",
    "Verdict",
    "accept_coupled",
    "accept_longest",
    "accept_nodes",
    "accept_tokens",
    "along",
    "at_parents",
    "at_tokens",
    "count_accepted",
    "end_of",
    "excess",
    "follow",
    "follow_longest",
    "is_guess",
    "kept_in_turn",
    "length_of_prefix",
    "next_probs",
    "next_probs_at",
    "of_sibling",
    "positions_from",
    "residual",
    "sample",
    "sample_with_noise",
    "sibling_uniforms",
    "stream",
    "target_noise",
    "uniform",
]
