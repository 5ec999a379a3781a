# pyright: reportUnknownArgumentType=false
"""Support for arrays on several devices: running one program on any mesh, and placing a model's weights.

If a mesh has automatic axes, XLA divides the work and the program needs no annotations. Explicit axes are part of every
array's type. Under `jax.shard_map`, so are the axes along which values vary. A program must then declare how each
gather is divided, and that a loop's initial values may vary. This module makes both declarations in one place.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from jspec.core.types import PyTree

T = TypeVar("T")
# The placement of arrays: one sharding for all, or a function of a name and a shape, such as "norm.weight" and (64,).
Placement = Sharding | Callable[[str, tuple[int, ...]], Sharding]


def on_any_mesh(program: Callable[..., T]) -> Callable[..., T]:
    """Make ``program(target, drafter, batch, ...)`` accept arrays on any mesh. Apply this before `jax.jit`.

    Inside the program, explicit axes become automatic. Under `jax.shard_map`, all arguments vary along the same axes.
    The results are sharded like the rows of the first array in `batch`.

    Raises, while the program is traced:
        ValueError: `jax.shard_map` divides the batch, and XLA divides other axes.
    """

    @functools.wraps(program)
    def run(target: PyTree, drafter: PyTree, batch: PyTree, *others: PyTree, **options: object) -> T:
        _check_manual_axes()
        arguments = target, drafter, batch, *others
        arguments = vary_like(arguments, arguments)
        meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(arguments))
        mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
        if mesh is None:
            return program(*arguments, **options)
        tokens = cast(Array, jax.tree.leaves(batch)[0])
        rows = NamedSharding(mesh, PartitionSpec(*jax.typeof(tokens).sharding.spec[:1]))
        return cast("Callable[..., T]", jax.sharding.auto_axes(program, axes=mesh.explicit_axes, out_sharding=rows))(
            *arguments, **options
        )

    return run


def _check_manual_axes() -> None:
    """Raise ValueError if `jax.shard_map` leaves an axis to XLA.

    Under `jax.shard_map`, each device's loop stops when its own rows are done. A collective operation in the loop could
    then wait forever.
    """
    mesh = jax.sharding.get_abstract_mesh()
    left = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes and mesh.shape[axis] > 1]
    if mesh.manual_axes and left:
        raise ValueError(
            f"jax.shard_map over {mesh.manual_axes} leaves the axes {tuple(left)} to XLA, so devices could wait "
            "forever for others that have finished; map over all axes, or shard rows and weights without "
            "jax.shard_map."
        )


def vary_like(tree: T, like: PyTree) -> T:
    """Return `tree`, typed as varying over all axes along which any leaf of `like` varies.

    Use this for a loop's initial values. Values do not change. Outside `jax.shard_map`, types do not change either.
    """
    axes = frozenset[Hashable]().union(*map(_varying, jax.tree.leaves(like)))
    return jax.tree.map(lambda leaf: lax.pcast(leaf, tuple(axes - _varying(leaf)), to="varying"), tree)


def _varying(leaf: Array) -> frozenset[Hashable]:
    """Return the axes of a `jax.shard_map` along which the leaf may vary."""
    return jax.typeof(leaf).manual_axis_type.varying


# The matrices whose outputs are sharded. Others are sharded along their inputs.
SHARDED_OUTPUTS = "qkv_proj", "gate_up_proj"


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The placement that `tensor_parallel` returns: a function from a weight's name and shape to its sharding.

    Attributes:
        mesh: the device mesh.
        axis: the name of the mesh axis that divides the weights.
    """

    mesh: Mesh | AbstractMesh
    axis: str

    @property
    def num_shards(self) -> int:
        """The number of parts into which each matrix is divided."""
        return int(self.mesh.shape[self.axis])

    def __call__(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        path, _, leaf = name.rpartition(".")
        owner = path.partition(".parts.")[0].rpartition(".")[2]
        inputs, outputs = _input_and_output_axes(leaf, shape)
        spec: list[str | None] = [None] * len(shape)
        divided = outputs if owner in SHARDED_OUTPUTS else inputs
        if divided is not None:
            spec[divided] = self.axis
        return NamedSharding(self.mesh, PartitionSpec(*spec))


def tensor_parallel(mesh: Mesh, axis: str = "model") -> TensorParallel:
    """Return a placement for `jspec.load` that divides each of the model's matrices over one mesh axis.

    As in Megatron-LM (Shoeybi et al. 2019), the first projections of attention and MLP are split along their outputs,
    and the last projections along their inputs. The embedding and the output head are split along the hidden size, so
    every device has a token's whole distribution. All norms, including those of queries and keys, are replicated on
    every device. XLA divides caches, and activations inside a layer, accordingly. The residual stream is replicated.

    If the size of the axis divides the number of key-value heads and the intermediate size, `jspec.load` interleaves
    the columns of fused projections (`jspec.models.fused_projection`), and each layer needs only two all-reduces.

    Args:
        mesh: the device mesh. Weights are replicated over its other axes, if it has any.
        axis: the name of the mesh axis that divides the weights.

    Raises:
        ValueError: the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise ValueError(
            f"The mesh has the axes {mesh.axis_names}, but none named {axis!r}; pass the axis that divides the weights."
        )
    return TensorParallel(mesh, axis)


def replicate_features(x: Array, placement: TensorParallel | None) -> Array:
    """Return ``x[B, S, E]`` with its last two axes replicated over the mesh, or `x` itself if `placement` is None.

    XLA chooses the sharding of the rows. Without this constraint, XLA would shard the residual stream like the
    embedding. Each projection would then need an all-gather, and each norm an all-reduce of sums of squares. Under
    `jax.shard_map`, return `x` itself.
    """
    context = jax.sharding.get_abstract_mesh()
    if placement is None or context.manual_axes:
        return x
    whole = PartitionSpec(PartitionSpec.UNCONSTRAINED, None, None)
    return lax.with_sharding_constraint(x, NamedSharding(placement.mesh if context.empty else context, whole))


def _input_and_output_axes(leaf: str, shape: tuple[int, ...]) -> tuple[int | None, int]:
    """Return the index of an array's input dimension, or None, and that of its output dimension.

    `jspec.models.quantized_matrix` describes `codes` and `scales`. Several groups are divided among devices. The inputs
    of a single group are divided, too, but every device holds all its scales.
    """
    if leaf == "codes":
        return (0 if shape[0] > 1 else 2), 1
    if leaf == "scales":
        return (0 if shape[0] > 1 else None), 1
    return (0 if len(shape) > 1 else None), len(shape) - 1


def check_placement(sharding: object) -> None:
    """Raise TypeError unless `sharding` is a `Placement`."""
    if isinstance(sharding, type) or not (isinstance(sharding, Sharding) or callable(sharding)):
        raise TypeError(
            "sharding must be a jax.sharding.Sharding, or a function that returns one for a weight's name and "
            f"shape, such as jspec.tensor_parallel(mesh); got {sharding!r}."
        )


def place(name: str, array: np.ndarray, sharding: Placement) -> Array:
    """Return the array named `name`, placed by `sharding`. No device receives more than its own part.

    Raises:
        TypeError, ValueError: as in `sharding_of`.
    """
    return place_parts(name, array.shape, array.__getitem__, sharding)


def place_parts(
    name: str, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], np.ndarray], sharding: Placement
) -> Array:
    """Return an array, placed by `sharding`. Read only the parts that this process's devices hold.

    Args:
        name: the array's name.
        shape: the shape of the whole array.
        read: a function that returns the values at an index, which has one slice for each axis.

    Raises:
        TypeError, ValueError: as in `sharding_of`.
    """
    where = sharding_of(name, shape, sharding)
    parts_by_index: dict[str, np.ndarray] = {}  # devices may hold the same part

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        if str(index) not in parts_by_index:
            parts_by_index[str(index)] = np.ascontiguousarray(read(index))
        return parts_by_index[str(index)]

    return jax.make_array_from_callback(shape, where, part)


def sharding_of(name: str, shape: tuple[int, ...], sharding: Placement) -> Sharding:
    """Return the sharding of the array named `name`.

    Raises:
        TypeError: the function returned a value that is not a sharding.
        ValueError: the sharding cannot divide the array evenly.
    """
    where = sharding if isinstance(sharding, Sharding) else cast("object", sharding(name, shape))
    if not isinstance(where, Sharding):
        raise TypeError(f"sharding must return a jax.sharding.Sharding for every weight; got {where!r} for {name}.")
    try:
        where.shard_shape(shape)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"{name} has shape {shape}, which {where} cannot divide evenly; "
            "use another sharding, or a mesh of another size."
        ) from error
    return where


def transposed(where: Sharding, ndim: int) -> Sharding:
    """Return the sharding of a transposed array.

    If `where` is not a `NamedSharding`, the array is replicated on the same devices.
    """
    if isinstance(where, NamedSharding):
        spec = (*where.spec, *[None] * (ndim - len(where.spec)))
        return NamedSharding(where.mesh, PartitionSpec(*reversed(spec)), memory_kind=where.memory_kind)
    devices = sorted(cast("set[Any]", where.device_set), key=lambda device: device.id)
    return NamedSharding(Mesh(devices, ("all",)), PartitionSpec())
