"""Argument checks for the measuring functions, performed before any measurement."""

import numbers

import jax
import jax.core
import jax.numpy as jnp

from jspec.decoding.validate_arguments import check_whole


def check_tuning(max_new_tokens: int, max_draft_tokens: int, max_nodes: object) -> None:
    """Raise ValueError if an argument is invalid, or if `max_new_tokens` is too small for `max_draft_tokens`."""
    check_whole("max_new_tokens", max_new_tokens)
    check_whole("max_draft_tokens", max_draft_tokens)
    if isinstance(max_nodes, bool) or not isinstance(max_nodes, numbers.Integral) or max_nodes < 0:
        raise ValueError(f"max_nodes must be an int of at least 0 (0 measures chains only); got {max_nodes!r}.")
    least = 4 * (max_draft_tokens + 1)
    if max_new_tokens < least:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} is too small to measure {max_draft_tokens} draft tokens per round; "
            f"use at least {least}, or a smaller max_draft_tokens."
        )


def check_measurable(*arguments: object) -> None:
    """Raise ValueError if nothing can be timed, or if several hosts might obtain different results."""
    # Inside a caller's transformation, even a new array is traced.
    leaves = jax.tree.leaves((arguments, jnp.zeros(())))
    if jax.process_count() > 1 or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise ValueError(
            'jspec.tune, jspec.best_exit and num_draft_tokens="auto" take measurements, which is not possible '
            "inside jax.jit or another transformation, or in several processes at once; call jspec.tune "
            "beforehand and pass its result."
        )
