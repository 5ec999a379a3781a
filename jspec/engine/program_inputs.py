"""The inputs of an engine's programs: a piece of text, the limits of a call, and the static settings of rounds."""

import dataclasses

import numpy as np
from jax import Array

from jspec.acceptance.base import Rule
from jspec.core.types import PyTree, pytree
from jspec.decoding.round import Constrain
from jspec.engine.slots import Bools, Ints


@pytree
class TextPiece:
    """A piece of a request's text to prefill.

    Attributes:
        tokens: ``int32[1, C + 1]``, the piece's tokens and the token after them, then arbitrary values.
        start: ``int32[]``, the first token's position: at most the number of prefilled tokens, and at most T - C.
        count: ``int32[]``, how many tokens to prefill, in 0 .. C. This excludes the text's last token, which the first
            round reads.
    """

    tokens: Array
    start: Array
    count: Array

    @classmethod
    def on_host(cls, tokens: Ints, start: int, count: int) -> "TextPiece":
        """Return a piece whose fields are NumPy values, for use as an argument of a compiled program."""
        values: PyTree = tokens, np.int32(start), np.int32(count)
        return cls(*values)


@pytree
class CallLimits:
    """The limits of one call, which runs rounds until all rows are done or a limit is reached.

    Attributes:
        stop: ``bool[S]``, rows to stop before the first round.
        rounds: ``int32[]``, the maximum number of rounds; at most `RoundSpec.max_rounds`.
        stop_when_done: ``bool[S]``, rows whose slots waiting requests need. No round runs after such a row ends.
    """

    stop: Array
    rounds: Array
    stop_when_done: Array

    @classmethod
    def on_host(cls, stop: Bools, rounds: int, stop_when_done: Bools) -> "CallLimits":
        """Return limits whose fields are NumPy values, for use as an argument of a compiled program."""
        values: PyTree = stop, np.int32(rounds), stop_when_done
        return cls(*values)


@dataclasses.dataclass(frozen=True)
class RoundSpec:
    """The static settings of a program that runs rounds.

    Attributes:
        rule, num_draft_tokens: the acceptance rule and the draft length of every round.
        max_rounds: the maximum number of rounds per call.
        temperature_only: whether to omit all sampling parameters except temperature. No active row may use any other.
        num_top: the number of most likely tokens to find, if a row requests any.
        constrain: same as in `jspec.decoding.round.decode_round`.
    """

    rule: Rule
    num_draft_tokens: int
    max_rounds: int
    temperature_only: bool
    num_top: int = 0
    constrain: Constrain | None = None
