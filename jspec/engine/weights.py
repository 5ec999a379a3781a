"""A check that an engine's models still hold the weights that its programs read."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jspec.core.types import PyTree


def check_unchanged(target: PyTree, drafter: PyTree, weights: list[object]) -> None:
    """Raise RuntimeError unless the models still hold the weights that an engine reads, and the weights exist.

    An engine reads the arrays that it was created with, and its slots hold states computed from them. After an update,
    the engine would silently decode with the old weights.

    Replacing arrays with equal copies does not count as an update, because `flax.nnx.jit` puts new arrays into every
    model passed to it. The copies replace the originals in `weights`, so that they are compared only once and memory
    holds one set.

    Args:
        target: the model.
        drafter: the drafter, or None.
        weights: the leaves of ``(target, drafter)`` when the engine was created.
    """
    start = 0
    for name, model in (("target", target), ("draft", drafter)):
        leaves = jax.tree.leaves(model)
        end = start + len(leaves)
        if not _are_equal(leaves, weights[start:end]):
            raise RuntimeError(
                f"The weights of the {name} have changed since this engine was created, but the engine still has the "
                "old weights; create a new Engine from the current model."
            )
        weights[start:end] = leaves
        start = end
    check_exist(weights)


def _are_equal(leaves: list[object], weights: list[object]) -> bool:
    """Return whether a program may read `leaves` in place of `weights`. Compare values only if the objects differ."""
    if len(leaves) != len(weights):
        return False
    pairs = [(leaf, weight) for leaf, weight in zip(leaves, weights, strict=True) if leaf is not weight]
    return not pairs or (all(_are_alike(*pair) for pair in pairs) and bool(jax.device_get(_have_equal_values(pairs))))


def _are_alike(leaf: object, weight: object) -> bool:
    """Return whether two leaves are existing arrays of the same type on the same devices."""
    if not (isinstance(leaf, jax.Array) and isinstance(weight, jax.Array)):
        return False
    is_deleted = leaf.is_deleted() or weight.is_deleted()
    return not is_deleted and jax.typeof(leaf) == jax.typeof(weight) and leaf.devices() == weight.devices()


@jax.jit
def _have_equal_values(pairs: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(leaf == weight) for leaf, weight in pairs]))


def check_exist(weights: Sequence[object]) -> None:
    """Raise RuntimeError if a weight was deleted: a jitted step deletes the arrays that are donated to it."""
    if any(isinstance(weight, jax.Array) and weight.is_deleted() for weight in weights):
        raise RuntimeError(
            "Weights of this engine were deleted: a jitted step deletes the arrays that are donated to it; "
            "create a new Engine from weights that exist."
        )
