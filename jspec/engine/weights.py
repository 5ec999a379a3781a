"""The weights that an engine's programs read: checks that the models still hold them, and their replacement."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Literal, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp

from jspec.core.types import PyTree

_Leaves: TypeAlias = list[tuple[tuple[object, ...], object]]
Running: TypeAlias = Literal["finish", "restart", "abort"]


@dataclasses.dataclass(eq=False)
class Update:
    """New weights for an engine.

    Attributes:
        target, drafter: the models that hold the new weights.
        has_target: whether the target's weights change.
        running: what happens to running requests if they do. See `jspec.engine.Engine.update`.
        done: an event that is set when the weights are in use, or when the update has failed.
        error: the error that made the update fail.
    """

    target: PyTree
    drafter: PyTree
    has_target: bool
    running: Running
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: Exception | None = None

    def __post_init__(self) -> None:
        if self.running not in get_args(Running):
            raise ValueError(f'running={self.running!r} is not supported; use "finish", "restart" or "abort".')

    def wait(self) -> None:
        """Wait until the weights are in use. Raise the error that made the update fail, if any."""
        self.done.wait()
        if self.error is not None:
            raise self.error

    @property
    def waits(self) -> bool:
        """Whether running requests finish before the update."""
        return self.has_target and self.running == "finish"


def check_replacement(name: str, new: PyTree, old: PyTree) -> None:
    """Raise ValueError unless the programs that were compiled for the model `old` can read the weights of `new`.

    Args:
        name: the name of the model in messages.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            f"The new {name} differs from the engine's in more than its weights: in its class, its configuration, its "
            "dtype or how it is packed or quantised; create a new Engine for it."
        )
    weights = cast(list[object], jax.tree.leaves(old))
    for (path, leaf), weight in zip(cast(_Leaves, jax.tree.leaves_with_path(new)), weights, strict=True):
        if not _have_one_type(leaf, weight):
            raise ValueError(
                f"The new {name} has {_described(leaf)} at {jax.tree_util.keystr(path)}, where the engine's programs "
                f"read {_described(weight)}; pass weights of the same type on the same device."
            )


def _have_one_type(leaf: object, weight: object) -> bool:
    """Return whether a program that reads `weight` can read `leaf`. `weight` may be deleted."""
    if not (isinstance(leaf, jax.Array) and isinstance(weight, jax.Array)):
        return leaf is weight
    return jax.typeof(leaf) == jax.typeof(weight) and leaf.sharding.device_set == weight.sharding.device_set


def _described(leaf: object) -> str:
    if not isinstance(leaf, jax.Array):
        return f"an object of type {type(leaf).__name__}"
    devices = cast("set[object]", leaf.sharding.device_set)  # a deleted array has no `devices`
    return f"{jax.typeof(leaf)} on {', '.join(sorted(map(str, devices)))}"


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
                f"The weights of the {name} have changed, but the engine still has the old ones; call the engine's "
                "update() to use the current weights, or create a new Engine."
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
            "call the engine's update() with weights that exist, or create a new Engine."
        )
