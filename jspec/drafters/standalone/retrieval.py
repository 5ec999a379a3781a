"""Retrieval: draft the continuations of the row's last tokens in a corpus (He et al. 2023, "REST")."""

import dataclasses
import functools
import os
import secrets
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from convert.unfinished import deleted_in_the_end
from jspec.core.row_ops import tally
from jspec.core.sharding import vary_like
from jspec.core.tree import Level, Tree
from jspec.core.types import check_counts
from jspec.drafters.base import Context
from jspec.drafters.draft_vocabulary import checked_tokens
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter

_FORMAT = "jspec datastore 1"
_SIZES = ("vocab_size", "max_ngram", "min_ngram", "num_matches")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tokens", "order"], meta_fields=_SIZES)
@dataclasses.dataclass(frozen=True)
class RetrievalDrafter(AutoregressiveDrafter[tuple[()], Array]):
    """A drafter that finds the longest matches of the row's last tokens in a corpus, and drafts their continuations.

    `from_tokens` builds such a drafter. A token's probability is its frequency as the next token, among the matches
    that agree with the draft so far. If no such match remains, the row proposes nothing. If there are more than
    `num_matches` matches, a sample of them is used.

    Attributes:
        tokens: ``int32[N]``, the corpus.
        order: ``int32[N]``, the corpus positions, sorted by the tokens before them, nearest token first. Ties are in
            random order.
        max_ngram: the largest number of tokens to compare.
        min_ngram: the smallest number of tokens that must match.
        num_matches: M, the number of entries of `order` to examine, around the index where the row's last tokens would
            be inserted.
    """

    tokens: Array
    order: Array
    vocab_size: int
    max_ngram: int = 8
    min_ngram: int = 2
    num_matches: int = 16

    def __post_init__(self) -> None:
        check_counts(**self._sizes)
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram={self.min_ngram} is more than max_ngram={self.max_ngram}; swap them.")
        if self.num_matches < 2:
            raise ValueError("num_matches=1 covers only one side of the position in the sorted order; use at least 2.")

    @property
    def _sizes(self) -> dict[str, int]:
        """The fields that are not arrays."""
        sizes = self.vocab_size, self.max_ngram, self.min_ngram, self.num_matches
        return dict(zip(_SIZES, sizes, strict=True))

    @classmethod
    def from_tokens(
        cls, tokens: ArrayLike, vocab_size: int, max_ngram: int = 8, min_ngram: int = 2, num_matches: int = 16
    ) -> "RetrievalDrafter":
        """Return a drafter for the corpus ``tokens int[N]``, whose documents should be separated by the EOS token.

        Raises:
            ValueError: there are no tokens, tokens are outside the vocabulary, or sizes are invalid.
        """
        check_counts(vocab_size=vocab_size, max_ngram=max_ngram)
        tokens = checked_tokens(tokens, vocab_size, 1)
        tokens, order = (jnp.asarray(array, jnp.int32) for array in (tokens, _sorted(tokens, max_ngram)))
        return cls(tokens, order, vocab_size, max_ngram, min_ngram, num_matches)

    def begin(self, state: tuple[()], context: Context, tree: Tree) -> tuple[Array, Array]:
        """Return logits and the carry.

        The carry is ``int32[B, S, M, K]``: the tokens after each match, or -1 if the match is ruled out or the corpus
        ends. Each of the S tokens in a level has its own entry, because their prefixes differ.
        """
        at = context.lengths[:, None] - 1 - jnp.arange(self.max_ngram)[None]
        last = jnp.where(at >= 0, jnp.take_along_axis(context.tokens, jnp.maximum(at, 0), axis=1), -1)
        matches = jax.vmap(self._matches)(last)
        followed = _read(self.tokens, matches[:, :, None] + jnp.arange(tree.max_depth)[None, None])
        return self._law(followed[:, :, 0]), followed[:, None]

    def extend(self, carry: Array, tokens: Array, level: Level, context: Context) -> tuple[Array, Array]:
        """Rule out the matches that continue differently from the draft."""
        carry = level.of_parents(carry)
        agree = cast(Array, lax.dynamic_index_in_dim(carry, level.depth - 1, axis=3)) == tokens[:, :, None, None]
        carry = jnp.where(agree, carry, -1)
        following = cast(Array, lax.dynamic_index_in_dim(carry, level.depth, axis=3, keepdims=False))
        return jax.vmap(self._law, in_axes=1, out_axes=1)(following), carry

    def _law(self, tokens: Array) -> Array:
        """Return the log-frequencies ``float32[B, V]`` of ``tokens[B, M]``, ignoring tokens that are -1."""
        counted = (tokens >= 0).astype(jnp.float32)
        counts = tally(jnp.zeros((len(tokens), self.vocab_size), jnp.float32), tokens, counted)
        return jnp.log(counts / jnp.maximum(counted.sum(-1, keepdims=True), 1))

    def _matches(self, last: Array) -> Array:
        """Return the positions ``int32[M]`` after one row's longest matches, padded with N.

        Args:
            last: ``int32[max_ngram]``, the row's last tokens, nearest first; -1 before the start of the row.
        """
        size = self.order.size
        start = jnp.clip(self._rank(last) - self.num_matches // 2, 0, max(size - self.num_matches, 0))
        positions = _read(self.order, start + jnp.arange(self.num_matches))
        matched = _common(self._before(positions), last)
        longest = jnp.max(matched)
        return jnp.where((matched == longest) & (longest >= self.min_ngram), positions, size)

    def _rank(self, last: Array) -> Array:
        """Return the number of positions sorted before `last`, by bisection. The best matches are around that index."""
        steps, index = self.order.size.bit_length(), jnp.arange(self.max_ngram)

        def try_bit(i: Array, rank: Array) -> Array:
            more = rank + (jnp.int32(1 << (steps - 1)) >> jnp.asarray(i, jnp.int32))
            before = self._before(_read(self.order, more - 1))
            smaller = jnp.any((index == _common(before, last)) & (before < last))
            return jnp.where((more <= self.order.size) & smaller, more, rank)

        return cast(Array, lax.fori_loop(0, steps, try_bit, vary_like(jnp.int32(0), last)))

    def _before(self, positions: Array) -> Array:
        """Return the tokens before ``positions[...]``, nearest first, as ``int32[..., max_ngram]``."""
        back = lax.broadcast_to_rank(jnp.arange(self.max_ngram), positions.ndim + 1)
        return _read(self.tokens, positions[..., None] - 1 - back)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Atomically write the drafter to a safetensors file.

        Raises:
            FileNotFoundError: the directory does not exist.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent} is not a directory; create it, or choose another path.")
        notes = {"format": _FORMAT} | {name: str(size) for name, size in self._sizes.items()}
        content = save({"tokens": np.asarray(self.tokens), "order": np.asarray(self.order)}, notes)
        folder = path.with_name(f".datastore-{secrets.token_hex(4)}")
        with deleted_in_the_end(folder):
            folder.mkdir()
            (folder / "new").write_bytes(content)
            os.replace(folder / "new", path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "RetrievalDrafter":
        """Load a file that was written by `save`.

        Raises:
            ValueError: the file has another format, or is damaged.
            FileNotFoundError: the file does not exist.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is not a file; build a datastore with `jspec index`.")
        try:
            with _opened(path) as file:
                notes = file.metadata() or {}
                if notes.get("format") != _FORMAT:
                    raise ValueError(f"its format is {notes.get('format')!r}, not {_FORMAT!r}")
                tokens, order = file.get_tensor("tokens"), file.get_tensor("order")
            sizes = [int(notes.get(name, 0)) for name in _SIZES]
            tokens = checked_tokens(tokens, sizes[0], 1)
            if {tokens.dtype, order.dtype} != {np.dtype(np.int32)}:
                raise ValueError(f"its arrays are {tokens.dtype} and {order.dtype}, not int32")
            if not np.array_equal(np.sort(order, axis=None), np.arange(tokens.size)) or order.ndim != 1:
                raise ValueError("its order is not a permutation")
            return cls(jnp.asarray(tokens), jnp.asarray(order), *sizes)
        except (SafetensorError, ValueError) as error:
            reason = str(error).rstrip(".")
            raise ValueError(f"{path} is not a datastore ({reason}); build it again with `jspec index`.") from error


class _SafeOpen(Protocol):
    """The methods that are called on an open safetensors file, which has no type annotations."""

    def metadata(self) -> dict[str, str] | None: ...

    def get_tensor(self, name: str) -> np.ndarray: ...


def _opened(path: str | os.PathLike[str]) -> AbstractContextManager[_SafeOpen]:
    return cast(AbstractContextManager[_SafeOpen], safe_open(path, "numpy"))


def _read(tokens: Array, positions: Array) -> Array:
    """Return ``tokens[positions]``, with -1 for positions that are out of range."""
    inside = (positions >= 0) & (positions < tokens.size)
    return jnp.where(inside, tokens[jnp.clip(positions, 0, tokens.size - 1)], -1)


def _common(before: Array, last: Array) -> Array:
    """Return the length of the common prefix of ``before[..., n]`` and ``last[n]``; -1 never matches."""
    index, last = (lax.broadcast_to_rank(part, before.ndim) for part in (jnp.arange(last.size), last))
    return jnp.min(jnp.where((before != last) | (last < 0), index, last.size), axis=-1)


def _sorted(tokens: np.ndarray, max_ngram: int) -> np.ndarray:
    """Return `RetrievalDrafter.order`, computed by prefix doubling (Manber, Myers 1990).

    The order by the last w tokens determines the order by the last 2 w. Equal contexts are in random order, so the few
    contexts that are examined are a fair sample.
    """
    rank = np.pad(tokens[:-1].astype(np.int64) + 1, (1, 0))
    width = 1
    while width < max_ngram:
        step = min(width, max_ngram - width)
        farther = np.pad(rank, (step, 0))[: rank.size]
        rank = np.unique(rank * (rank.max() + 1) + farther, return_inverse=True)[1]
        width += step
    shuffled = np.random.default_rng(0).permutation(rank.size)
    return shuffled[np.argsort(rank[shuffled], kind="stable")]
