"""Hugging Face directory -> our arrays, one at a time, strictly by the table in keymap.py."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from convert import dtypes, keymap
from convert.config import LlamaConfig
from convert.errors import CheckpointError, listing
from convert.safetensors_reader import Tensor, row_chunks, scan


def check_names(found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Holds names and shapes of `source`, a directory or a GGUF file, against those of its config.

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
                f"{list(shape)} by its configuration; restore the file that belongs to the other."
            )


def _check_tied_head(found: dict[str, Tensor], directory: Path) -> None:
    """A tied checkpoint may repeat the embedding as its head; any other head would be dropped in silence."""
    head, embedding = found[keymap.HEAD], found[keymap.EMBEDDING]
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
        head.read(rows).tobytes() == embedding.read(rows).tobytes()
        for rows in row_chunks(head.shape, head.dtype.itemsize)
    )
    if not same:
        raise CheckpointError(
            f"{directory} has tie_word_embeddings true but its {keymap.HEAD} differs from "
            f"{keymap.EMBEDDING}; set tie_word_embeddings to false if the head was trained apart."
        )


def check_depth(config: LlamaConfig, num_tensors: int, source: Path) -> None:
    """Refuses more layers than `source` can have, or the table of a damaged config could fill the memory.

    Raises:
        CheckpointError: there are more.
    """
    if config.num_hidden_layers > num_tensors:
        raise CheckpointError(
            f"{source} has {num_tensors} tensors, but its configuration says num_hidden_layers "
            f"{config.num_hidden_layers}; restore the checkpoint's own config.json."
        )


def tensors(directory: Path, config: LlamaConfig) -> dict[str, Tensor]:
    """Hugging Face name -> tensor, checked against the config; what may be ignored is left out.

    A tied head that repeats the embedding stays in, so that the way back can write it again.

    Raises:
        CheckpointError: a tensor is missing, unknown, misshapen, or doubtful (a tied head that differs).
    """
    scanned = scan(directory)
    check_depth(config, len(scanned), directory)
    found = {name: tensor for name, tensor in scanned.items()
             if name not in keymap.ignored(config) and not name.startswith(keymap.MEDUSA)}  # fmt: skip
    expected = keymap.hf_shapes(config)
    repeats_head = config.tie_word_embeddings and keymap.HEAD in found
    check_names(found, expected | ({keymap.HEAD: expected[keymap.EMBEDDING]} if repeats_head else {}), directory)
    if repeats_head:
        _check_tied_head(found, directory)
    return found


def stored_dtype(found: dict[str, Tensor], directory: Path) -> np.dtype:
    """The dtype that all tensors share.

    Raises:
        CheckpointError: they differ, so the caller has to choose one.
    """
    by_dtype = {tensor.dtype: tensor for tensor in found.values()}
    if len(by_dtype) > 1:
        mixed = listing(f"{tensor.name} is {dtype}" for dtype, tensor in by_dtype.items())
        raise CheckpointError(f"{directory} mixes dtypes ({mixed}); choose one with dtype=... or --dtype.")
    return next(iter(by_dtype))


def stream(found: dict[str, Tensor], config: LlamaConfig, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """(our name, array) of every entry of the table, see `filled`.

    Raises:
        CheckpointError: as `filled`.
    """
    return filled(found, keymap.entries(config), dtype)


def filled(
    found: Mapping[str, Tensor], entries: Iterable[keymap.Entry], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """(our name, array) one after another, each allocated once in `dtype` and filled by 16 MiB pieces.

    Raises:
        CheckpointError: a file went bad since it was scanned, or a value does not fit `dtype`.
    """
    for entry in entries:
        array, offset = np.empty(entry.shape, dtype), 0
        for part in entry.parts:
            _fill(array[offset : offset + part.rows], found[part.hf_name])
            offset += part.rows
        yield entry.name, array


def _fill(out: np.ndarray, tensor: Tensor) -> None:
    for rows in row_chunks(tensor.shape, tensor.dtype.itemsize):
        with np.errstate(over="ignore"):  # check_cast tells it better than a warning
            out[rows] = tensor.read(rows)
        dtypes.check_cast(out[rows], tensor.dtype, tensor.name)
