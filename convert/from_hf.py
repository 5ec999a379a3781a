"""Convert a Hugging Face directory to our arrays, one at a time and strictly by the table in keymap.py."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from convert import blocks, dtypes, keymap
from convert.config import LlamaConfig
from convert.errors import CheckpointError, listing
from convert.json_file import read_object
from convert.quantized import methods
from convert.quantized.assemble import assemble
from convert.quantized.base import QuantizedTensor
from convert.safetensors_reader import QUANTIZED, Tensor, row_chunks, scan
from convert.stored_array import stored_arrays

_LOG = logging.getLogger("jspec.convert")


def check_names(found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Check the tensor names and shapes of `source`, a directory or a GGUF file, against its config.

    Raises:
        CheckpointError: a tensor is missing, unknown or misshapen.
    """
    missing, unknown = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing:
        raise CheckpointError(
            f"{source} lacks {listing(missing)}, expected by its configuration; download the "
            "checkpoint again or restore its own config.json."
        )
    if unknown:
        raise CheckpointError(
            f"{source} has unexpected {listing(unknown)}; a model of this configuration has "
            "no such tensor, so merge adapters or restore the checkpoint's own config.json."
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"{name} in {found[name].file} has shape {list(found[name].shape)}, expected "
                f"{list(shape)} by its configuration; restore whichever of the two files is not the original."
            )


def _tied(found: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Return a tied checkpoint's tensors. The head may be missing, a copy of the embedding, or stored alone.

    A head whose dtype differs from the embedding's is left out if one equals the other after rounding. A head that is
    stored alone becomes the embedding.

    Raises:
        CheckpointError: the head differs from the embedding. transformers versions disagree about which tensor to use.
    """
    head, embedding = found.get(keymap.HEAD), found.get(keymap.EMBEDDING)
    if head is None:
        return found
    rest = {name: tensor for name, tensor in found.items() if name != keymap.HEAD}
    if embedding is None:
        return rest | {keymap.EMBEDDING: head}
    equal = _equal_in(head, embedding)
    if not equal:
        raise CheckpointError(
            f"{directory} has tie_word_embeddings true but its {keymap.HEAD} differs from "
            f"{keymap.EMBEDDING}; set tie_word_embeddings to false if the head was trained separately."
        )
    if equal != {head.dtype, embedding.dtype}:
        _LOG.warning(
            "%s: %s (%s) is ignored, because it is tied to %s (%s) and equal except for rounding; set "
            "tie_word_embeddings to false to read both.",
            *(directory, keymap.HEAD, head.dtype, keymap.EMBEDDING, embedding.dtype),
        )
    return found if head.dtype == embedding.dtype else rest


def _equal_in(head: Tensor, embedding: Tensor) -> set[np.dtype]:
    """Return those of the two dtypes to which both tensors can be cast with bitwise equal results."""
    if head.shape != embedding.shape:
        return set()
    casts = {head.dtype, embedding.dtype}
    for rows in row_chunks(head.shape, max(dtype.itemsize for dtype in casts)):
        first, second = head.read(rows), embedding.read(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            casts = {dtype for dtype in casts if first.astype(dtype).tobytes() == second.astype(dtype).tobytes()}
    return casts


def check_depth(config: LlamaConfig, num_tensors: int, source: Path) -> None:
    """Reject a config with more layers than `source` has tensors, because its tensor table could exhaust memory.

    Raises:
        CheckpointError: the config has more layers than `source` has tensors.
    """
    if config.num_hidden_layers > num_tensors:
        raise CheckpointError(
            f"{source} has {num_tensors} tensors, but its configuration says num_hidden_layers "
            f"{config.num_hidden_layers}; restore the checkpoint's own config.json."
        )


def tensors(directory: Path, config: LlamaConfig) -> dict[str, Tensor]:
    """Return the tensors that are not ignored, keyed by Hugging Face name, after checking them against the config.

    Quantised matrices are dequantised while they are read. A tied head that repeats the embedding is kept, so that
    converting back can write it again.

    Raises:
        CheckpointError: a tensor is missing, unknown, misshapen, or ambiguous (a tied head that differs).
    """
    tied = config.tie_word_embeddings
    pair = {keymap.HEAD, keymap.EMBEDDING} if tied else set[str]()
    weight_format = methods.parse(read_object(directory / "config.json"))
    scanned = scan(
        directory,
        is_optional=lambda name: name in pair or keymap.is_ignored(name, config),
        extra_dtypes=None if weight_format is None else QUANTIZED,
    )
    check_depth(config, len(scanned), directory)
    found = {
        name: tensor
        for name, tensor in scanned.items()
        if not keymap.is_ignored(name, config) and not name.startswith(keymap.MEDUSA)
    }
    expected = keymap.hf_shapes(config)
    if weight_format is not None:
        head = {keymap.HEAD: expected[keymap.EMBEDDING]}  # a tied checkpoint may store the head, too
        found = assemble(found, weight_format, head | expected, directory)
    found = _tied(found, directory) if tied else found
    repeated = {keymap.HEAD: expected[keymap.EMBEDDING]} if tied and keymap.HEAD in found else {}
    check_names(found, expected | repeated, directory)
    return found


def stored_dtype(found: dict[str, Tensor], directory: Path) -> np.dtype:
    """Return the dtype that all tensors share. If some are quantised, return float32, which represents every value.

    Raises:
        CheckpointError: the dtypes differ, so the caller has to choose one.
    """
    by_dtype = {tensor.dtype: tensor for tensor in found.values()}
    if any(isinstance(tensor, QuantizedTensor) for tensor in found.values()):
        return dtypes.BY_NAME["float32"]
    if len(by_dtype) > 1:
        mixed = listing(f"{tensor.name} is {dtype}" for dtype, tensor in by_dtype.items())
        raise CheckpointError(f"{directory} mixes dtypes ({mixed}); choose one with dtype=... or --dtype.")
    return next(iter(by_dtype))


def stream(found: dict[str, Tensor], config: LlamaConfig, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Yield an (our name, array) pair for every entry of the table. See `filled`.

    Raises:
        CheckpointError: under the same conditions as `filled`.
    """
    return filled(found, keymap.entries(config), dtype)


def stream_packed(
    found: dict[str, Tensor], config: LlamaConfig, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray | blocks.StoredParts]]:
    """Yield the same arrays as `stream`, but leave each matrix as it is stored if its format can be packed.

    Raises:
        CheckpointError: under the same conditions as `filled`, or if a stored scale is not finite.
    """
    widened: list[str] = []
    for entry in keymap.entries(config):
        tensors = [found[part.hf_name] for part in entry.parts]
        if len(entry.shape) == 2 and all(blocks.row_bytes(tensor.format, entry.shape[1]) for tensor in tensors):
            yield entry.name, _stored_parts(tensors)
            continue
        if len(entry.shape) == 2:
            widened += [f"{tensor.name} ({tensor.format})" for tensor in tensors if tensor.format != "F32"]
        yield from filled(found, [entry], dtype)
    if widened:
        _LOG.info("Widened %s to %s, because jspec cannot pack these formats.", listing(widened), dtype)


def _stored_parts(tensors: list[Tensor]) -> blocks.StoredParts:
    """Return the tensors as tiled matrices. Consecutive ones of one format are merged if they fill whole tiles."""
    parts: list[tuple[Tensor, ...]] = []
    for tensor in tensors:
        last = parts[-1] if parts else ()
        if last and last[-1].format == tensor.format and last[-1].shape[0] % blocks.LANES == 0:
            parts[-1] = (*last, tensor)
        else:
            parts.append((tensor,))
    return tuple(map(_tiled, parts))


def _tiled(tensors: tuple[Tensor, ...]) -> blocks.StoredMatrix:
    name, width = tensors[0].format, tensors[0].shape[1]
    count = sum(tensor.shape[0] for tensor in tensors)
    nbytes = blocks.row_bytes(name, width)
    tiles = blocks.empty_tiles(-(-count // blocks.LANES), blocks.LANES * nbytes)
    at = 0
    for tensor in tensors:
        for rows in row_chunks((tensor.shape[0], nbytes), 1, blocks.LANES):
            stored = tensor.read_stored(rows)
            blocks.check_finite(name, stored, tensor.name)
            end = at + -(-len(stored) // blocks.LANES)
            blocks.interleave(name, stored, tiles[at:end])
            at = end
    return blocks.StoredMatrix(name, (count, width), tiles)


def filled(
    found: Mapping[str, Tensor], entries: Iterable[keymap.Entry], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (our name, array) pairs. Each array is allocated once in `dtype` and filled in 16 MiB chunks.

    Raises:
        CheckpointError: a file has become unreadable since it was scanned, or a value does not fit `dtype`.
    """
    for name, array in stored_arrays(found, entries, dtype):
        yield name, array.read((slice(None),) * len(array.shape))
