"""`batches`: prompts of any lengths as padded batches of few shapes, so that few programs compile."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import jax
import numpy as np
from jax import Array

from jspec.core.tokenizer import Tokenizer
from jspec.core.transfers import explicit_transfers
from jspec.core.types import check_count
from jspec.text.chat_template import LEAST_WIDTH, Batch, Prompt, bucket, ids_of, listed, padded

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class IndexedBatch(Batch):
    """A batch of some of the prompts.

    Attributes:
        indices: ``int[B]``, the index of each row's prompt. If there are too few prompts to fill the batch, its last
            rows repeat a prompt and its index. With the same key they also repeat its output, so they add no rounds.
        num_prompts: the number of prompts in all batches.
    """

    indices: np.ndarray
    num_prompts: int

    @property
    def num_distinct(self) -> int:
        """The number of distinct prompts. The rows after them repeat a prompt."""
        return len(np.unique(self.indices))

    def take(self, values: Array | np.ndarray) -> Any:
        """Return the entries of `values` that belong to this batch, such as its keys.

        Args:
            values: an array with one entry for each prompt, or G consecutive entries for G samples of each prompt.

        Returns:
            An array with B or B G entries.

        Raises:
            ValueError: the number of entries is not a multiple of the number of prompts.
        """
        size = len(values)
        if not size or size % self.num_prompts:
            raise ValueError(
                f"values has {size} entries for {self.num_prompts} prompts; pass one entry, or the same number of "
                "entries, for each prompt."
            )
        return values[_rows(self.indices, size // self.num_prompts)]


class Batches(Sequence[IndexedBatch]):
    """The result of `batches`: a sequence of batches."""

    def __init__(self, parts: Sequence[IndexedBatch]):
        self._parts = tuple(parts)

    @overload
    def __getitem__(self, index: int) -> IndexedBatch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[IndexedBatch]: ...

    def __getitem__(self, index: int | slice) -> IndexedBatch | Sequence[IndexedBatch]:
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def restore(self, results: Iterable[Tree]) -> Tree:
        """Join the results of all batches, with one row for each prompt, in the order of the prompts.

        Args:
            results: for each batch, in order, an array with B or B G rows, or a pytree of such arrays, such as a
                `jspec.Output`.

        Returns:
            The same pytree with NumPy arrays. Arrays of fewer columns than others are padded on the right with zeros.

        Raises:
            ValueError: there are more or fewer results than batches, or a number of rows is not B G with the same G.
        """
        results = list(results)
        if len(results) != len(self):
            raise ValueError(f"There are {len(results)} results for {len(self)} batches; pass one result per batch.")
        with explicit_transfers():
            results = jax.device_get(results)
        return jax.tree.map(lambda *leaves: self._joined(leaves), *results)

    def _joined(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """Return the rows of all batches in the order of the prompts."""
        samples = max(1, len(leaves[0]) // len(self[0].indices))
        for leaf, batch in zip(leaves, self, strict=True):
            if len(leaf) != samples * len(batch.indices):
                raise ValueError(
                    f"A result has {len(leaf)} rows for a batch of {len(batch.indices)} prompts; expected "
                    f"{samples * len(batch.indices)} rows."
                )
        shape = np.max([leaf.shape[1:] for leaf in leaves], axis=0).astype(int)
        joined = np.zeros((self[0].num_prompts * samples, *shape), leaves[0].dtype)
        for leaf, batch in zip(leaves, self, strict=True):
            rows = _rows(batch.indices, samples)
            joined[(rows, *map(slice, leaf.shape[1:]))] = leaf
        return joined


def batches(
    prompts: Prompt | Sequence[Prompt] | Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    *,
    batch_size: int | None = None,
    widths: int | Sequence[int] | None = None,
    template: Mapping[str, object] | None = None,
) -> Batches:
    """Pad prompts on the right into batches of few shapes.

    The decoding program compiles once for each shape of its prompts. If all calls of a program use batches of one size,
    it compiles at most once for each width.

    Args:
        prompts: prompts, as in `jspec.complete`. Or the output of a transformers tokenizer: a mapping with "input_ids"
            and, if they are padded on either side, "attention_mask".
        tokenizer: the target's tokenizer. It may be None if all prompts are token ids.
        batch_size: the number of rows of each batch. The longest prompts come first, so that prompts of similar lengths
            share a batch. By default, one batch contains all prompts in their original order.
        widths: the width or widths that batches may have. By default, these are the powers of two from 32.
        template: chat-template variables for every conversation, as in `jspec.complete`.

    Returns:
        A sequence of batches. `Batches.restore` restores the order of the prompts.

    Raises:
        ValueError: a prompt is invalid, empty or longer than the largest width; the attention mask has a 0
            between ones, or another shape; or another argument is out of range.
    """
    rows = _without_padding(prompts) if isinstance(prompts, Mapping) else ids_of(tokenizer, listed(prompts), template)
    lengths = np.array([len(ids) for ids in rows], np.int32)
    order = np.arange(len(rows))
    if batch_size is not None:
        check_count("batch_size", batch_size)
        order = np.argsort(-lengths, kind="stable")
    size = len(rows) if batch_size is None else batch_size
    allowed = _checked_widths(widths, lengths)
    parts = list[IndexedBatch]()
    for start in range(0, len(rows), size):
        indices = order[start : start + size]
        indices = np.pad(indices, (0, size - len(indices)), mode="edge")
        width = _width(int(lengths[indices].max()), allowed)
        texts = [rows[index] for index in cast("list[int]", indices.tolist())]
        parts.append(IndexedBatch(padded(texts, width), lengths[indices], indices, len(rows)))
    return Batches(parts)


def _without_padding(encoding: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids that the attention mask marks as text."""
    if "input_ids" not in encoding:
        raise ValueError(
            f"prompts is a mapping with the keys {sorted(encoding)}, but without 'input_ids'; pass a tokenizer's "
            "output, or a list of prompts."
        )
    rows = cast("list[list[int]]", listed(encoding["input_ids"]))
    given = encoding.get("attention_mask")
    masks = [np.ones(len(ids), int) for ids in rows] if given is None else [np.asarray(mask) for mask in listed(given)]
    if [len(mask) for mask in masks] != [len(ids) for ids in rows]:
        raise ValueError("attention_mask and input_ids have different shapes; pass both from one tokenizer call.")
    for i, mask in enumerate(masks):
        changes = np.flatnonzero(np.diff(mask.astype(bool).astype(int), prepend=0, append=0))
        if len(changes) > 2:
            raise ValueError(
                f"attention_mask[{i}] has a 0 between ones, at column {changes[1]}; mark each prompt as one contiguous "
                "run, padded on the left or on the right."
            )
    texts = [np.asarray(ids)[mask.astype(bool)].tolist() for ids, mask in zip(rows, masks, strict=True)]
    return ids_of(None, cast("list[Prompt]", texts))


def _width(longest: int, allowed: Sequence[int] | None) -> int:
    """Return the smallest width of at least `longest`: one of `allowed`, or a power of two if that is None."""
    return bucket(longest, LEAST_WIDTH) if allowed is None else min(width for width in allowed if width >= longest)


def _rows(indices: np.ndarray, samples: int) -> np.ndarray:
    """Return the rows of the output that belong to prompts `indices`, with `samples` rows for each prompt."""
    return (indices[:, None] * samples + np.arange(samples)).ravel()


def _checked_widths(widths: int | Sequence[int] | None, lengths: np.ndarray) -> list[int] | None:
    if widths is None:
        return None
    allowed = list(widths) if isinstance(widths, Iterable) else [widths]
    for width in allowed:
        check_count("Each width", width)
    longest, largest = int(lengths.max()), max(allowed, default=0)
    if longest > largest:
        raise ValueError(
            f"Prompt {int(lengths.argmax()) + 1} has {longest} tokens, but the largest width is {largest}; add a "
            "larger width, or shorten the prompt."
        )
    return allowed
