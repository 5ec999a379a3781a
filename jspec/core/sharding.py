"""Arrays on several devices: running one program on any mesh, and placing the weights of a model.

If the axes of a mesh are automatic, XLA divides the work and the program needs no annotations. Explicit axes are part
of every array's type. Under `jax.shard_map`, so are the axes along which values differ. A program must then declare
how each gather is divided, and that the initial values of a loop may differ. This module declares both, once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

# The placement of arrays: one sharding for all, or a function of name and shape, such as "norm.weight" and (64,).
Placement = Sharding | Callable[[str, tuple[int, ...]], Sharding]


def on_any_mesh(program: Callable) -> Callable:
    """Return ``program(target, drafter, tokens, ...)``, the function of a jitted program, for arrays of any mesh.

    Inside the program explicit axes are automatic, and under `jax.shard_map` all arguments vary alike. Its results are
    divided like the rows of `tokens`.

    Raises, while the program is traced:
        ValueError: `jax.shard_map` divides the batch, and XLA divides other axes.
    """

    @functools.wraps(program)
    def run(target: Any, drafter: Any, tokens: Any, *others: Any, **options: Any) -> Any:
        _check_manual_axes()
        arguments = target, drafter, tokens, *others
        arguments = vary_like(arguments, arguments)
        meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(arguments))
        mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
        if mesh is None:
            return program(*arguments, **options)
        rows = NamedSharding(mesh, PartitionSpec(*jax.typeof(tokens).sharding.spec[:1]))
        return jax.sharding.auto_axes(program, axes=mesh.explicit_axes, out_sharding=rows)(*arguments, **options)

    return run


def _check_manual_axes() -> None:
    """Raise ValueError if `jax.shard_map` leaves an axis to XLA.

    Under `jax.shard_map` a loop ends when the rows of its device end. An exchange in the loop would then wait forever.
    """
    mesh = jax.sharding.get_abstract_mesh()
    left = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes and mesh.shape[axis] > 1]
    if mesh.manual_axes and left:
        raise ValueError(f"jax.shard_map over {mesh.manual_axes} leaves the axes {tuple(left)} to XLA, whose exchanges "
                         "would wait for devices that are done; map over all axes, or call without jax.shard_map, "
                         "where rows and weights may both be divided.")  # fmt: skip


def vary_like(tree: Any, like: Any) -> Any:
    """Return `tree`, typed as varying over all axes along which a leaf of `like` varies; for a loop's initial values.

    Values do not change. Outside `jax.shard_map`, types do not change either.
    """
    axes = frozenset[Any]().union(*map(_varying, jax.tree.leaves(like)))
    return jax.tree.map(lambda leaf: lax.pcast(leaf, tuple(axes - _varying(leaf)), to="varying"), tree)


def _varying(leaf: Any) -> frozenset:
    """Return the axes of a `jax.shard_map` along which the leaf may differ."""
    return jax.typeof(leaf).manual_axis_type.varying


def tensor_parallel(mesh: Mesh, axis: str = "model") -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Divide every matrix of a model over one axis of a mesh, for `jspec.load`.

    As in Megatron-LM (Shoeybi et al. 2019), the first projections of attention and MLP are split along their outputs,
    the last ones along their inputs. Embedding and head are split along the hidden size, so that every device has the
    whole distribution of a token. All norms are copied to every device, including those of queries and keys. XLA
    divides caches and activations accordingly.

    Args:
        mesh: the mesh; weights are copied over its other axes, if it has any.
        axis: the name of one of its axes.

    Raises:
        ValueError: the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"The mesh has the axes {mesh.axis_names} and none named {axis!r}; pass the one that is to "
                         "divide the weights.")  # fmt: skip

    def divide(name: str, shape: tuple[int, ...]) -> NamedSharding:
        owner = name.split(".")[-2]
        if owner in ("qkv_proj", "gate_up_proj"):
            return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), axis))
        return NamedSharding(mesh, PartitionSpec(*[axis] * (len(shape) - 1)))

    return divide


def check_placement(sharding: Any) -> None:
    """Raise TypeError unless `sharding` is a `Placement`."""
    if isinstance(sharding, type) or not (isinstance(sharding, Sharding) or callable(sharding)):
        raise TypeError(f"sharding must be a jax.sharding.Sharding, or a function that gives one for a weight's name "
                        f"and shape, such as jspec.tensor_parallel(mesh); got {sharding!r}.")  # fmt: skip


def place(name: str, array: np.ndarray, sharding: Placement) -> Array:
    """Return the array `name`, placed by `sharding`. No device receives more than its own part.

    Raises:
        TypeError: the function returned a value that is not a sharding.
        ValueError: the sharding cannot divide the array evenly.
    """
    where = sharding if isinstance(sharding, Sharding) else sharding(name, array.shape)
    if not isinstance(where, Sharding):
        raise TypeError(f"sharding must give a jax.sharding.Sharding for every weight; got {where!r} for {name}.")
    try:
        where.shard_shape(array.shape)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{name} has shape {array.shape}, which {where} cannot divide evenly; "
                         "use another sharding, or a mesh of another size.") from error  # fmt: skip
    return jax.make_array_from_callback(array.shape, where, lambda part: np.ascontiguousarray(array[part]))
