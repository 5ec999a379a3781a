"""Assemble quantised matrices from a checkpoint's tensors."""

from collections.abc import Mapping
from pathlib import Path

from convert import dtypes
from convert.errors import CheckpointError, listing
from convert.quantized.base import Format, Part, QuantizedTensor
from convert.quantized.methods import SUFFIXES
from convert.safetensors_reader import Tensor

_ADVICE = "restore the model's own config.json and weights"


def assemble(
    stored: Mapping[str, Tensor], weight_format: Format, shapes: Mapping[str, tuple[int, ...]], directory: Path
) -> dict[str, Tensor]:
    """Return `stored` with one tensor for each quantised matrix, in place of the tensors that store its parts.

    The stored tensors decide which matrices are quantised. Those with a suffix in `weight_format.unread` are left out.

    Args:
        shapes: the shapes that the tensors would have without quantisation, by name.

    Raises:
        CheckpointError: parts are missing, misshapen or in another format, or no matrix is quantised.
    """
    remaining = {name: tensor for name, tensor in stored.items() if _suffix(name) not in weight_format.unread}
    matrices: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        parts = _parts(remaining, name, weight_format) if len(shape) == 2 else {}
        if parts:
            matrices[name] = _matrix(name, shape, parts, weight_format, directory)
            for part in parts.values():
                del remaining[part.name]
            _drop_zero_bias(remaining, name, shapes)
    if not matrices:
        raise CheckpointError(
            f"{directory} has no matrix in {weight_format.label}, the format that its config.json names; {_ADVICE}."
        )
    _check_rest(remaining, matrices, weight_format, directory)
    return remaining | matrices


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _parts(stored: Mapping[str, Tensor], name: str, weight_format: Format) -> dict[str, Tensor]:
    """Return the tensors that store the matrix `name`, keyed by suffix, or {} if it is missing or not quantised."""
    names = {suffix: f"{_module(name)}.{suffix}" for suffix in weight_format.SUFFIXES}
    parts = {suffix: stored[part] for suffix, part in names.items() if part in stored}
    is_plain = parts.keys() == {"weight"} and parts["weight"].dtype in dtypes.BY_NAME.values()
    return {} if is_plain else parts


def _matrix(
    name: str, shape: tuple[int, ...], parts: dict[str, Tensor], weight_format: Format, directory: Path
) -> QuantizedTensor:
    try:
        expected = weight_format.parts(*shape)
    except CheckpointError as error:
        raise CheckpointError(f"{name} of {directory} cannot be in {weight_format.label}: {error}") from error
    module = _module(name)
    if module in weight_format.ignored:
        raise CheckpointError(
            f"{module} of {directory} is quantised, but its config.json says that it is not; {_ADVICE}."
        )
    missing = {f"{module}.{suffix}" for suffix, part in expected.items() if part.required} - {
        f"{module}.{suffix}" for suffix in parts
    }
    if missing:
        raise CheckpointError(f"{directory} lacks {listing(missing)}, expected in {weight_format.label}; {_ADVICE}.")
    unknown = parts.keys() - expected.keys()
    if unknown:
        surplus = listing(parts[suffix].name for suffix in unknown)
        raise CheckpointError(
            f"{directory} has unexpected {surplus}, not part of {weight_format.label} with the parameters in "
            f"config.json; {_ADVICE}."
        )
    for suffix, part in expected.items():
        if suffix in parts:
            _check_part(parts[suffix], part, weight_format)
    return weight_format.tensor(name, shape, parts)


def _check_part(tensor: Tensor, part: Part, weight_format: Format) -> None:
    if tensor.dtype.name not in part.dtypes:
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} is {tensor.dtype}; expected {' or '.join(part.dtypes)} in "
            f"{weight_format.label}: {_ADVICE}."
        )
    if tensor.shape not in part.shapes:
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} has shape {list(tensor.shape)}, expected {list(part.shapes[-1])} in "
            f"{weight_format.label} with the bits and groups in config.json; {_ADVICE}."
        )


def _drop_zero_bias(remaining: dict[str, Tensor], name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Remove an extra bias if all its values are 0, because AutoGPTQ writes such biases."""
    bias = f"{_module(name)}.bias"
    if bias in remaining and bias not in shapes and not remaining[bias].read_part(...).any():
        del remaining[bias]


def _check_rest(
    remaining: Mapping[str, Tensor], matrices: Mapping[str, Tensor], weight_format: Format, directory: Path
) -> None:
    """Check the tensors that are not part of a quantised matrix."""
    unassigned = {name for name in remaining if name in matrices or _suffix(name) in SUFFIXES - {"weight"}}
    if unassigned:
        raise CheckpointError(
            f"{directory} has {listing(unassigned)}, which belong to no matrix in {weight_format.label}, the format "
            f"that its config.json names; {_ADVICE}."
        )
    for name, tensor in remaining.items():
        if tensor.dtype not in dtypes.BY_NAME.values():
            raise CheckpointError(
                f"{name} in {tensor.file} is {tensor.dtype}; expected one of {', '.join(dtypes.BY_NAME)}: {_ADVICE}."
            )
