"""Arrays on several devices: what lets the one program run on any mesh, and where the weights of a model may lie.

Where the axes of a mesh are automatic, XLA divides the work and nothing needs to be said. Explicit axes are part of
every array's type, and so are, under `jax.shard_map`, the axes along which values differ; a program must then say how
each gather is divided, and that what a loop begins with may differ. It is said here, once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

# Where arrays are to lie: one sharding for all, or a function of name and shape, as of "norm.weight" and (64,).
Placement = Sharding | Callable[[str, tuple[int, ...]], Sharding]


def on_any_mesh(program: Callable) -> Callable:
    """The function of a jitted program, for arrays of any mesh: ``program(target, drafter, tokens, ...)``.

    Within it explicit axes are automatic, and under `jax.shard_map` all arguments vary alike. Its results are divided
    as the rows of `tokens` are.

    Raises, while the program is traced:
        ValueError: `jax.shard_map` divides the batch, and XLA something else.
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
    """Under `jax.shard_map` a loop ends when the rows of its device do; an exchange in it would then wait forever."""
    mesh = jax.sharding.get_abstract_mesh()
    left = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes and mesh.shape[axis] > 1]
    if mesh.manual_axes and left:
        raise ValueError(f"jax.shard_map over {mesh.manual_axes} leaves the axes {tuple(left)} to XLA, whose exchanges "
                         "would wait for devices that are done; map over all axes, or call without jax.shard_map, "
                         "where rows and weights may both be divided.")  # fmt: skip


def vary_like(tree: Any, like: Any) -> Any:
    """`tree`, typed as what may differ between devices wherever something in `like` may; for what a loop begins with.

    No leaf changes; outside `jax.shard_map` no type does, either.
    """
    axes = frozenset[Any]().union(*map(_varying, jax.tree.leaves(like)))
    return jax.tree.map(lambda leaf: lax.pcast(leaf, tuple(axes - _varying(leaf)), to="varying"), tree)


def _varying(leaf: Any) -> frozenset:
    """The axes of a `jax.shard_map` along which the leaf may differ."""
    return jax.typeof(leaf).manual_axis_type.varying


def tensor_parallel(mesh: Mesh, axis: str = "model") -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Divides every matrix of a model over one axis of a mesh, for `jspec.load`.

    As in Megatron-LM (Shoeybi et al. 2019) the projections that open attention and MLP are cut by what they put out,
    those that close them by what they take in; embedding and head are cut by the hidden size, so that the law of a
    token is whole on every device. Norms are on all of them, those of queries and keys too. XLA divides caches and
    activations accordingly.

    Args:
        mesh: may have other axes, over which weights are copied.
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
    """Raises TypeError unless `sharding` is a `Placement`."""
    if isinstance(sharding, type) or not (isinstance(sharding, Sharding) or callable(sharding)):
        raise TypeError(f"sharding must be a jax.sharding.Sharding, or a function that gives one for a weight's name "
                        f"and shape, such as jspec.tensor_parallel(mesh); got {sharding!r}.")  # fmt: skip


def place(name: str, array: np.ndarray, sharding: Placement) -> Array:
    """The array `name` where it is to lie; no device receives more than its own part.

    Raises:
        TypeError: the function gave no sharding.
        ValueError: the array cannot be divided like that.
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
