# pyright: reportUnknownVariableType=false
"""The arrays of a head's module, by the names that `convert` gives them. There, weights are transposed."""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from convert.errors import CheckpointError

_DRAFT_IDS = "draft_ids"


def no_output_head(source: object, draft_vocab_size: int | None) -> CheckpointError:
    """Return the error for files that have a reduced vocabulary but no output head, if no target is given."""
    return CheckpointError(
        f"{source} has no lm_head.weight for the {draft_vocab_size} tokens that it can draft; pass the target, whose "
        "lm_head has a row for each of these tokens: load(path, target)."
    )


def check_unquantized(name: str, kind: str | None) -> None:
    """Raise ValueError if the drafter is quantised (`kind` is not None), because quantised drafters cannot be saved."""
    if kind is not None:
        raise ValueError(f"The {name} is {kind} and cannot be saved; save it before it is quantised.")


def variables(module: nnx.Module) -> dict[str, nnx.Variable[Array]]:
    """Return a module's variables by name."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(module))}


def fill(module: nnx.Module, arrays: Iterable[tuple[str, np.ndarray]], draft_ids: np.ndarray | None) -> None:
    """Set the variables of a module to arrays by name, and its `draft_ids`, if any."""
    leaves = variables(module)
    for name, array in arrays:
        leaves[name].set_value(jnp.asarray(array).T)
    if draft_ids is not None:
        leaves[_DRAFT_IDS].set_value(jnp.asarray(draft_ids))


def arrays_of(module: nnx.Module) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return a module's arrays by name, and its `draft_ids`, if any."""
    values = {name: np.asarray(leaf[...]) for name, leaf in variables(module).items()}
    draft_ids = values.pop(_DRAFT_IDS, None)
    return {name: np.ascontiguousarray(value.T) for name, value in values.items()}, draft_ids
