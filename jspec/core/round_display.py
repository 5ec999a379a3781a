"""A round-by-round picture of a generation, as in Figure 1 of Leviathan et al. 2023, for any drafter and tree.

Each line shows one round: the accepted draft tokens, followed by the correction of the first rejected token or by the
token after a fully accepted draft. If draft tokens were recorded, the rejected ones are struck out. A rejected chain
appears in the line itself. Rejected branches appear below the line.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jax import Array
from rich.text import Text

from jspec.core.detokenizer import pieces
from jspec.core.origins import ACCEPTED, COLOURS, KEPT, NAMES, NO_GUESS, REFUSED
from jspec.core.tokenizer import Tokenizer

_REFUSED = "strike bright_black"
# A control character in the text could recolour or overwrite the screen, and a line break would look like a round.
_VISIBLE = {i: "\ufffd" for i in [*range(32), *range(127, 160)]} | {ord("\n"): "⏎", ord("\t"): "→", ord("\r"): ""}


class Record(Protocol):
    """One request's row of a `jspec.core.types.Record`."""

    @property
    def tokens(self) -> Array: ...

    @property
    def parents(self) -> Array: ...

    @property
    def fates(self) -> Array: ...

    @property
    def counts(self) -> Array: ...


def picture(tokenizer: Tokenizer, tokens: Sequence[int], origins: Sequence[int], record: Record | None = None) -> Text:
    """Return a picture of one request's rounds.

    Args:
        tokenizer: a transformers tokenizer.
        tokens, origins: the request's `jspec.Output.tokens` and ``origins``, without padding.
        record: the request's row of a `jspec.core.types.Record`; None if nothing was recorded.
    """
    shown, written = pieces(tokenizer, [], tokens), Text()
    rounds = list(_rounds(origins, record))
    width = len(str(len(rounds)))
    for number, (start, end) in enumerate(rounds):
        written.append(f"{number + 1:{width}} │ ", "dim")
        kept = start + int(np.argmin([*(origin == ACCEPTED for origin in origins[start:end]), False]))
        _append(written, shown[start:kept], COLOURS[ACCEPTED])
        branches = [] if record is None else _Guesses(tokenizer, tokens[:start], record, number).refused()
        instead = next((branch for branch in branches if branch.instead), None)
        if instead is not None:
            _append(written, instead.texts, _REFUSED)
        for place in range(kept, end):
            _append(written, shown[place : place + 1], COLOURS[int(origins[place])])
        for branch in branches:
            if branch is not instead:
                written.append(f"\n{'':{width}} │ {'·' * branch.depth}", "dim")
                _append(written, branch.texts, _REFUSED)
        written.append("\n")
    return written


def legend(record: bool) -> Text:
    """Return a legend of the colours."""
    names = [Text(NAMES[origin], colour) for origin, colour in COLOURS.items()]
    return Text(" ").join([*names, *([Text("rejected", _REFUSED)] if record else [])])


def _append(text: Text, parts: Sequence[str], style: str) -> None:
    text.append("".join(parts).translate(_VISIBLE), style)


def _rounds(origins: Sequence[int], record: Record | None) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each round's tokens. A round ends after its first token that is not accepted."""
    if record is not None:
        ends = np.cumsum(record.counts[record.counts > 0])
    else:
        ends = np.flatnonzero([*(origin != ACCEPTED for origin in origins[:-1]), True]) + 1
    yield from zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True) if len(origins) else ()


class _Branch(NamedTuple):
    """A run of rejected draft tokens, each of which follows the previous one.

    Attributes:
        depth: the number of draft tokens before the run.
        instead: whether the run follows the last accepted draft token of the round.
        texts: the text of each rejected token.
    """

    depth: int
    instead: bool
    texts: list[str]


class _Guesses:
    """The draft tree of one round."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], record: Record, number: int):
        self.tokenizer, self.before = tokenizer, [*before]
        self.tokens, self.parents, self.fates = (
            np.asarray(part[number]) for part in (record.tokens, record.parents, record.fates)
        )
        self.end = max(
            (np.flatnonzero(self.fates == KEPT) + 1).tolist(), default=0
        )  # parents come before their children

    def refused(self, node: int = 0, path: tuple[int, ...] = (), line: list[str] | None = None) -> list[_Branch]:
        """Return the rejected branches after a node, split where they diverge. The first child extends `line`."""
        found: list[_Branch] = []
        for child in (np.flatnonzero((self.parents == node) & (self.fates != NO_GUESS)) + 1).tolist():
            token, own = int(self.tokens[child - 1]), None
            if self.fates[child - 1] == REFUSED:
                own, line = line, None
                if own is None:
                    own = []
                    found.append(_Branch(len(path), node == self.end, own))
                own += pieces(self.tokenizer, [*self.before, *path], [token])
            found += self.refused(child, (*path, token), own)
        return found
