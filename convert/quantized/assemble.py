"""Assembly of quantised matrices from the tensors of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from convert import dtypes
from convert.errors import CheckpointError, listing
from convert.quantized.base import Format, Part, QuantizedTensor
from convert.quantized.methods import SUFFIXES
from convert.safetensors_reader import Tensor

_FIX = "restore the model's own config.json and weights"


def assemble(
    stored: Mapping[str, Tensor], form: Format, shapes: Mapping[str, tuple[int, ...]], directory: Path
) -> dict[str, Tensor]:
    """Return `stored` with one tensor for each quantised matrix, in place of the tensors that store its parts.

    The stored tensors decide which matrices are quantised. Tensors with a suffix in `form.unread` are left out.

    Args:
        shapes: the shapes that the tensors would have without quantisation, by name.

    Raises:
        CheckpointError: parts are missing, misshapen or in another format, or no matrix is quantised.
    """
    left = {name: tensor for name, tensor in stored.items() if _suffix(name) not in form.unread}
    made: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        parts = _parts(left, name, form) if len(shape) == 2 else {}
        if parts:
            made[name] = _matrix(name, shape, parts, form, directory)
            for part in parts.values():
                del left[part.name]
            _drop_zero_bias(left, name, shapes)
    if not made:
        raise CheckpointError(
            f"{directory} has no matrix in {form.label}, the format that its config.json names; {_FIX}."
        )
    _check_rest(left, made, form, directory)
    return left | made


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _parts(stored: Mapping[str, Tensor], name: str, form: Format) -> dict[str, Tensor]:
    """Return the tensors that store the matrix `name`, by suffix; none if it is missing or not quantised."""
    names = {suffix: f"{_module(name)}.{suffix}" for suffix in form.SUFFIXES}
    parts = {suffix: stored[part] for suffix, part in names.items() if part in stored}
    is_plain = parts.keys() == {"weight"} and parts["weight"].dtype in dtypes.BY_NAME.values()
    return {} if is_plain else parts


def _matrix(
    name: str, shape: tuple[int, ...], parts: dict[str, Tensor], form: Format, directory: Path
) -> QuantizedTensor:
    try:
        expected = form.parts(*shape)
    except CheckpointError as error:
        raise CheckpointError(f"{name} of {directory} cannot be in {form.label}: {error}") from error
    module = _module(name)
    if module in form.ignored:
        raise CheckpointError(f"{module} of {directory} is quantised, but its config.json says that it is not; {_FIX}.")
    missing = {f"{module}.{suffix}" for suffix, part in expected.items() if part.required} - {
        f"{module}.{suffix}" for suffix in parts
    }
    if missing:
        raise CheckpointError(f"{directory} lacks {listing(missing)}, expected in {form.label}; {_FIX}.")
    unknown = parts.keys() - expected.keys()
    if unknown:
        surplus = listing(parts[suffix].name for suffix in unknown)
        raise CheckpointError(
            f"{directory} has unexpected {surplus}, not part of {form.label} with the parameters in "
            f"config.json; {_FIX}."
        )
    for suffix, part in expected.items():
        if suffix in parts:
            _check_part(parts[suffix], part, form)
    return form.tensor(name, shape, parts)


def _check_part(tensor: Tensor, part: Part, form: Format) -> None:
    if tensor.dtype.name not in part.dtypes:
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} is {tensor.dtype}; expected {' or '.join(part.dtypes)} in {form.label}: "
            f"{_FIX}."
        )
    if tensor.shape not in part.shapes:
        raise CheckpointError(
            f"{tensor.name} in {tensor.file} has shape {list(tensor.shape)}, expected {list(part.shapes[-1])} in "
            f"{form.label} with the bits and groups in config.json; {_FIX}."
        )


def _drop_zero_bias(left: dict[str, Tensor], name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Remove an extra bias if all its values are 0, because AutoGPTQ writes such biases."""
    bias = f"{_module(name)}.bias"
    if bias in left and bias not in shapes and not left[bias].read_part(...).any():
        del left[bias]


def _check_rest(left: Mapping[str, Tensor], made: Mapping[str, Tensor], form: Format, directory: Path) -> None:
    """Check the tensors that are not part of a quantised matrix."""
    strange = {name for name in left if name in made or _suffix(name) in SUFFIXES - {"weight"}}
    if strange:
        raise CheckpointError(
            f"{directory} has {listing(strange)}, which belong to no matrix in {form.label}, the format that its "
            f"config.json names; {_FIX}."
        )
    for name, tensor in left.items():
        if tensor.dtype not in dtypes.BY_NAME.values():
            raise CheckpointError(
                f"{name} in {tensor.file} is {tensor.dtype}; expected one of {', '.join(dtypes.BY_NAME)}: {_FIX}."
            )
