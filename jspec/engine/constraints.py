"""Constraints on texts, such as a grammar: which tokens may follow, asked on the host between draft and verification.

The target's law is masked at every place of a draft by what may follow there, so the text has exactly the law of the
constrained model, however far and by whom it was drafted.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.state import DecodeState, RequestParams
from jspec.types import Draft

_LOG = logging.getLogger("jspec")
# Those of all engines by numbers of this process: compiled programs, which engines share, find them here.
_asked: "weakref.WeakValueDictionary[int, _Followed]" = weakref.WeakValueDictionary()
_process_numbers = itertools.count(1)


class Matcher(Protocol):
    """Where a text is in its constraint; at first before the first new token."""

    def allowed(self) -> np.ndarray:
        """Which tokens may follow: ``uint32[ceil(V / 32)]``, token t at bit ``t % 32`` of word ``t // 32``."""
        ...

    def consume(self, token: int) -> bool:
        """Go on by a token; False, and nothing, if it may not follow."""
        ...

    def rollback(self, count: int) -> None:
        """Go back by so many tokens."""
        ...


class _Followed:
    """A matcher, its number in the process, how many new tokens it has consumed, and what has gone wrong with it."""

    def __init__(self, make: Callable[[], Matcher], vocab_size: int):
        self.make, self.matcher, self.vocab_size, self.consumed, self.error = make, make(), vocab_size, 0, ""
        self.number = next(_process_numbers)
        _asked[self.number] = self

    def bits(self, new: list[int], drafted: list[int], parents: list[int], size: int) -> np.ndarray:
        """What may follow the text, of these `new` tokens, and behind it every node of a draft."""
        self._follow(new)
        found = np.full((len(drafted) + 1, size), 0xFFFFFFFF, np.uint32)
        children: list[list[int]] = [[] for _ in found]
        for node, parent in enumerate(parents, 1):
            children[parent].append(node)

        def visit(node: int, guessed: list[int]) -> None:
            found[node] = self.matcher.allowed()
            for child in children[node]:
                token = drafted[child - 1]
                if token >= self.vocab_size:
                    continue  # a vector to be read, which is no guess
                try:
                    if self.matcher.consume(token):  # else it is forbidden, and what is behind
                        visit(child, [*guessed, token])
                        self.matcher.rollback(1)
                except Exception:  # behind a guess, to which the text may never come; if it does, it ends there
                    found[child] = 0
                    self.matcher, self.consumed = self.make(), 0
                    self._follow([*new, *guessed])
                    self.consumed = len(new)

        visit(0, [])
        return found

    def _follow(self, tokens: list[int]) -> None:
        while self.consumed < len(tokens):
            if not self.matcher.consume(tokens[self.consumed]):
                raise ValueError(f"The constraint refuses token {tokens[self.consumed]}, which it has allowed.")
            self.consumed += 1


class Constraints:
    """Those of an engine's running requests, by numbers of its own."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._followed: dict[int, _Followed] = {}
        self._numbers = itertools.count(1)

    def add(self, make: Callable[[], Matcher]) -> int:
        """Follow another text; its number."""
        followed = _Followed(make, self._vocab_size)
        number = next(self._numbers)  # of those that could be made, as a journal has them
        self._followed[number] = followed
        return number

    def drop(self, number: int) -> None:
        """No longer."""
        self._followed.pop(number, None)

    def clear(self) -> None:
        """None any longer."""
        self._followed.clear()

    def error(self, number: int) -> str:
        """What has gone wrong with one; of 0, which is none, nothing."""
        return self._followed[number].error if number else ""

    def in_process(self, number: int) -> int:
        """The number by which programs ask for one, which a row carries, for slots change hands; 0 is none."""
        return self._followed[number].number if number else 0


def allowed(params: RequestParams, state: DecodeState, draft: Draft, *, vocab_size: int) -> Array:
    """``bool[B, N + 1, V]``: which tokens may follow the text of each row, and each guess."""
    batch, nodes, size = state.lengths.shape[0], draft.tokens.shape[1] + 1, -(-vocab_size // 32)
    shape = jax.ShapeDtypeStruct((batch, nodes, size), jnp.uint32)
    numbers = jnp.where(state.done, 0, params.constraints)
    parents = jnp.broadcast_to(jnp.asarray(draft.topology.parents, jnp.int32), (batch, nodes - 1))

    def asked() -> Array:
        return jax.pure_callback(functools.partial(_bits, size), shape, numbers, params.prompt_lengths, state.lengths,
                                 state.tokens, draft.tokens, parents)  # fmt: skip

    def anything() -> Array:
        return jnp.full(shape.shape, 0xFFFFFFFF, jnp.uint32)

    bits = lax.cond(numbers.any(), asked, anything)
    each = bits[..., None] >> lax.broadcast_to_rank(jnp.arange(32, dtype=jnp.uint32), bits.ndim + 1) & 1
    return each.reshape(batch, nodes, -1)[..., :vocab_size] != 0


def _bits(size: int, *arrays: Any) -> np.ndarray:
    numbers, starts, ends, tokens, drafted, parents = map(np.asarray, arrays)
    found = np.full((len(numbers), drafted.shape[1] + 1, size), 0xFFFFFFFF, np.uint32)
    for row in np.flatnonzero(numbers):
        followed = _asked.get(int(numbers[row]))
        if followed is None or followed.error:
            continue  # it has been cancelled, or ends with its error
        try:
            new = tokens[row, starts[row] : ends[row]].tolist()
            found[row] = followed.bits(new, drafted[row].tolist(), parents[row].tolist(), size)
        except BaseException as error:  # in a thread of XLA's, which would end the call of all
            _LOG.exception("A constraint has failed; its request ends.")
            followed.error = f"The constraint has failed: {type(error).__name__}: {error}"
    return found
