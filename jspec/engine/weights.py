"""The weights that an engine's programs read: checks of these weights, and their updates."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from jspec.engine.slots import AnyDrafter
from jspec.models.llama import Llama

_Paths: TypeAlias = list[tuple[tuple[object, ...], object]]


class _Structure(Protocol):
    """A tree structure."""

    @property
    def num_leaves(self) -> int: ...


_Flat: TypeAlias = tuple[list[object], _Structure]
Running: TypeAlias = Literal["finish", "restart", "abort"]


@dataclasses.dataclass(frozen=True, eq=False)
class Models:
    """A target and a drafter, with the weights that the programs read.

    Attributes:
        structures: the tree structures of both.
        weights: the leaves of both, as they were when this object was created. Programs read them even if the models
            change.
        layouts: the memory layouts that programs require; None for leaves that are not arrays.
    """

    target: Llama
    drafter: AnyDrafter | None
    structures: tuple[_Structure, _Structure]
    weights: list[object]
    layouts: list[object]

    @classmethod
    def of(cls, target: Llama, drafter: AnyDrafter | None) -> "Models":
        """Return models with their current weights."""
        parts = [cast(_Flat, jax.tree.flatten(model)) for model in (target, drafter)]
        weights = [*parts[0][0], *parts[1][0]]
        layouts = [_layout(leaf) if isinstance(leaf, jax.Array) and not leaf.is_deleted() else None for leaf in weights]
        return cls(target, drafter, (parts[0][1], parts[1][1]), weights, layouts)

    @property
    def by_name(self) -> dict[str, tuple[_Structure, list[object]]]:
        """The structure and weights of the target and of the draft."""
        count = self.structures[0].num_leaves
        parts = self.weights[:count], self.weights[count:]
        return dict(zip(("target", "draft"), zip(self.structures, parts, strict=True), strict=True))

    def replacement(self, target: Llama | None, drafter: AnyDrafter | None) -> "Models":
        """Return `Models` with the current weights of `target` and `drafter`. None keeps the present model.

        Raises:
            ValueError: a new model differs from the present one in more than its weights.
            RuntimeError: weights were deleted.
        """
        new = Models.of(self.target if target is None else target, self.drafter if drafter is None else drafter)
        check_exist(new.weights)
        for name, (structure, weights) in new.by_name.items():
            _check_replacement(name, (structure, weights), self.by_name[name])
        return dataclasses.replace(new, weights=_match_layouts(new.weights, self.layouts), layouts=self.layouts)

    def has_other_target(self, models: "Models") -> bool:
        """Return whether `models` holds other arrays for the target than this object does.

        Equal copies of the arrays of the same model do not count. See `check_unchanged`.
        """
        new, old = models.by_name["target"][1], self.by_name["target"][1]
        if models.target is self.target:
            return not _are_equal(new, old)
        return any(array is not weight for array, weight in zip(new, old, strict=True))


@dataclasses.dataclass(eq=False)
class Update:
    """New weights for an engine.

    Attributes:
        target, drafter: the models that hold the new weights; None for the engine's own.
        running: what happens to running requests if the target's weights change. See `jspec.engine.Engine.update`.
        waits_for_running: whether running requests must finish first, because the target's weights change.
        done: an event that is set when the weights are in use, or when the update has failed.
        error: the error that made the update fail.
    """

    target: Llama | None
    drafter: AnyDrafter | None
    running: Running
    waits_for_running: bool = False
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        if self.running not in get_args(Running):
            raise ValueError(f'running={self.running!r} is not supported; use "finish", "restart" or "abort".')

    def wait(self) -> None:
        """Wait until the weights are in use. Raise the error that made the update fail, if any."""
        self.done.wait()
        if self.error is not None:
            raise self.error


def _check_replacement(name: str, new: tuple[_Structure, list[object]], old: tuple[_Structure, list[object]]) -> None:
    """Raise ValueError unless programs that were compiled for the weights `old` can read the weights `new`.

    Args:
        name: the name of the model in messages.
        new, old: the tree structure and the weights of a model.
    """
    structure, weights = new
    if structure != old[0]:
        raise ValueError(
            f"The new {name} differs from the engine's in more than its weights: in its class, its configuration, its "
            "dtype or how it is packed or quantised; create a new Engine for it."
        )
    paths = cast(_Paths, jax.tree.leaves_with_path(jax.tree.unflatten(structure, weights)))
    for (path, leaf), weight in zip(paths, old[1], strict=True):
        if not _is_compatible(leaf, weight):
            raise ValueError(
                f"The new {name} has {_described(leaf)} at {jax.tree_util.keystr(path)}, where the engine's programs "
                f"read {_described(weight)}; pass weights of the same type on the same device."
            )


def _is_compatible(leaf: object, weight: object) -> bool:
    """Return whether a program that reads `weight` can read `leaf`. `weight` may be deleted."""
    if not (isinstance(leaf, jax.Array) and isinstance(weight, jax.Array)):
        return leaf is weight
    return jax.typeof(leaf) == jax.typeof(weight) and leaf.sharding.device_set == weight.sharding.device_set


def _described(leaf: object) -> str:
    if not isinstance(leaf, jax.Array):
        return f"an object of type {type(leaf).__name__}"
    devices = cast("set[object]", leaf.sharding.device_set)  # a deleted array has no `devices`
    return f"{jax.typeof(leaf)} on {', '.join(sorted(map(str, devices)))}"


def _match_layouts(weights: Sequence[object], layouts: Sequence[object]) -> list[object]:
    """Return `weights`, with each array moved to its memory layout in `layouts`, as programs require.

    On a TPU, `jspec.models.array_layout` gives embeddings a layout that arrays from a training step do not have.
    """

    def moved(weight: object, layout: object) -> object:
        if not isinstance(weight, jax.Array) or layout is None or _layout(weight) == layout:
            return weight
        return jax.device_put(weight, Format(cast(Layout, layout), weight.sharding))

    return [moved(*pair) for pair in zip(weights, layouts, strict=True)]


def _layout(array: jax.Array) -> object:
    return cast(Format, array.format).layout  # pyright: ignore[reportAttributeAccessIssue]


def check_unchanged(models: Models) -> None:
    """Raise RuntimeError unless the models still hold the weights that an engine reads, and the weights exist.

    An engine reads the arrays that it was created with, or those of its last `update`. Its slots hold states computed
    from them. If the models changed, the engine would silently decode with the old weights.

    Replacing arrays with equal copies does not count as a change, because `flax.nnx.jit` puts new arrays into every
    model passed to it. The copies replace the originals in ``models.weights``, so that they are compared only once and
    memory holds one set.
    """
    start, weights = 0, models.weights
    for name, model in (("target", models.target), ("draft", models.drafter)):
        leaves = jax.tree.leaves(model)
        end = start + len(leaves)
        if not _are_equal(leaves, weights[start:end]):
            raise RuntimeError(
                f"The weights of the {name} have changed, but the engine still has the old ones; call the engine's "
                "update() to use the current weights, or create a new Engine."
            )
        if models.layouts[start:end] == [_layout(leaf) if isinstance(leaf, jax.Array) else None for leaf in leaves]:
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
            "Weights were deleted: a jitted step deletes the arrays that are donated to it; pass models whose arrays "
            "still exist to the engine's update(), or create a new Engine."
        )
