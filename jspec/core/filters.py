# pyright: reportUnknownArgumentType=false
"""The top-k and top-p filters at one position.

Thresholds are found by bisection over the bits of a float, which is exact and avoids sorting the vocabulary. Still, a
filter reads all values more than 32 times, so it is skipped if no row uses it.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.core.sharding import vary_like

Setting = float | Array | np.ndarray  # of one row or of all rows


class UsedFilters(NamedTuple):
    """Which filters at least one row uses: a ``bool[]`` each, or None for a filter that the program leaves out."""

    top_k: Array | None
    top_p: Array | None


def used_filters(temperature: Setting, top_k: Setting | None, tail_mass: Setting | None) -> UsedFilters:
    """Return which filters at least one row uses. Greedy rows use none, and 0 disables a filter."""
    samples = jnp.asarray(temperature) > 0
    return UsedFilters(*(None if rows is None else jnp.any(samples & (rows > 0)) for rows in (top_k, tail_mass)))


def keep_top_k(values: Array, k: Setting, used: UsedFilters) -> Array:
    """Return ``values[V]`` with -inf for all values below the k-th largest. 0 and more than V disable the filter."""

    def filtered() -> Array:
        return jnp.where(values >= _kth_largest(values, k), values, -jnp.inf)

    return cast(Array, lax.cond(used.top_k, filtered, lambda: values))


def nucleus(probs: Array, tail_mass: Setting, used: UsedFilters) -> Array:
    """Return a mask of the tokens that top-p keeps, ``bool[V]``. It drops a total probability of up to `tail_mass`."""
    return cast(Array, lax.cond(used.top_p, lambda: _nucleus(probs, tail_mass), lambda: probs >= 0))


def _kth_largest(values: Array, k: Setting) -> Array:
    """Return the k-th largest of ``values[V]``, or -inf if k is 0 or above V."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    # Flip all bits of negative floats and the sign bit of the others, so that unsigned order equals float order.
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    threshold = _largest_where(lambda candidate: jnp.sum(order >= candidate).astype(jnp.float32) >= k, order)
    kth = jnp.min(jnp.where(order >= threshold, values, jnp.inf))
    return jnp.where((k > 0) & (k <= values.size), kth, -jnp.inf)


def _nucleus(probs: Array, tail_mass: Setting) -> Array:
    """Return a mask of the tokens that top-p keeps.

    Top-p drops the least likely tokens, up to a total probability of `tail_mass`. Ties are broken by index.
    """
    bits = lax.bitcast_convert_type(probs, jnp.uint32)  # in the order of the floats, because none is negative
    below: Callable[[Array], Array] = lambda candidate: jnp.sum(jnp.where(bits < candidate, probs, 0))  # noqa: E731
    threshold = _largest_where(lambda candidate: below(candidate) <= tail_mass, bits)
    tied = bits == threshold
    dropped_with_ties = below(threshold) + jnp.cumsum(jnp.where(tied, probs, 0))
    keep = (bits > threshold) | (tied & (dropped_with_ties > tail_mass))
    last_largest = probs.size - 1 - jnp.argmax(probs[::-1])
    return keep | (~jnp.any(keep) & (jnp.arange(probs.size) == last_largest))


def _largest_where(holds: Callable[[Array], Array], values: Array) -> Array:
    """Return the largest uint32 for which `holds`, which reads `values`, is true. Larger numbers must make it false."""

    def try_bit(i: Array, found: Array) -> Array:
        # With jax.disable_jit, `i` is a Python int.
        candidate = found | (jnp.uint32(1 << 31) >> jnp.asarray(i).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    return cast("Array", lax.fori_loop(0, 32, try_bit, vary_like(jnp.uint32(0), values)))
