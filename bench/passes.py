"""Measure isolated forward passes. Many passes run in one compiled loop, each on the previous pass's tokens."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jspec
from bench.pairs import weight_bytes
from bench.timing import seconds, spread

# The duration of a loop, long enough to make the cost of calling it negligible.
LOOP_SECONDS = 0.2


@functools.partial(jax.jit, static_argnames="layers")
def _loop(
    model: jspec.Llama,
    tokens: jax.Array,
    cache: Any,
    start: jax.Array,
    count: jax.Array,
    layers: tuple[int, ...] | None,
) -> jax.Array:
    """Run `count` passes over ``tokens[B, S]`` at positions `start`, each with different tokens."""

    def step(_: Any, carry: tuple) -> tuple:
        tokens, cache = carry
        hidden, cache = model.forward(tokens, cache, start, layers=layers)
        return jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32), cache

    return lax.fori_loop(0, count, step, (tokens, cache))[0]


class Pass:
    """A forward pass with logits over `rows` positions of `batch` requests with `context` tokens in the cache.

    It runs `layers`, or all layers. `bytes` counts all layers.
    """

    def __init__(
        self,
        model: jspec.Llama,
        rows: int,
        batch: int = 1,
        context: int = 64,
        slots: int | None = None,
        layers: Sequence[int] | None = None,
    ):
        self.layers = None if layers is None else tuple(layers)
        slots = slots or context + rows
        self.arguments = (
            model,
            jnp.ones((batch, rows), jnp.int32),
            model.new_cache(batch, slots),
            jnp.full(batch, context),
        )
        cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.arguments[2]))
        self.bytes = weight_bytes(model) + cache_bytes
        self._run(1)
        self.count = max(3, int(LOOP_SECONDS / (seconds(lambda: self._run(3)) / 3)))

    def _run(self, count: int) -> jax.Array:
        return _loop(*self.arguments, jnp.int32(count), self.layers)

    def __call__(self) -> jax.Array:
        """Run `count` passes."""
        return self._run(self.count)


def pass_seconds(passes: dict[str, Pass], times: dict[str, Any]) -> dict[str, float]:
    """Return each pass's median seconds, from the results of `bench.timing.in_turns` for `passes`."""
    return {name: spread(times[name]).median / passes[name].count for name in passes}
