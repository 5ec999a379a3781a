"""Conversion of tokens to text that is safe to show, without partial characters or possible starts of stop strings."""

import bisect
from collections.abc import Sequence

from jspec.core.detokenizer import Pieces
from jspec.core.tokenizer import Tokenizer


class StopAwareDetokenizer:
    """The text of a token stream, up to a stop string.

    Args:
        tokenizer: the tokenizer that the tokens belong to.
        prompt: the tokens before the text.
        stop: the strings that end the text.
        keeps_stop: whether the text includes the stop string that ended it.
        min_tokens: the number of initial tokens that are not searched for stop strings.
        shows_prompt: whether the reader has seen the prompt's text. See `jspec.core.detokenizer.Pieces`.

    Attributes:
        pieces: the text that each token adds.
        starts: the position in the text where each piece starts.
        text: all pieces joined, cut off at the end of the text once that is known.
        stopped: the stop string that ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        keeps_stop: bool = False,
        min_tokens: int = 0,
        shows_prompt: bool = True,
    ):
        self._coming, self._stop, self._keeps_stop = Pieces(tokenizer, prompt, shows_prompt), stop, keeps_stop
        self._held = max(map(len, stop), default=1) - 1
        self._min_tokens, self._from, self._ended = min_tokens, 0, False
        self.pieces: list[str] = []
        self.starts: list[int] = []
        self.text, self.stopped = "", None

    @property
    def shown(self) -> int:
        """The number of characters of the text that can no longer change."""
        return len(self.text) if self._ended else max(0, len(self.text) - self._held)

    @property
    def settled(self) -> int:
        """The number of tokens whose text can no longer change."""
        if self.shown == len(self.text):
            return len(self.pieces)
        return bisect.bisect_right(self.starts, self.shown) - 1

    def add(self, token: int) -> None:
        """Add the next token. Do not add a token after one that completed a stop string."""
        self._append(self._coming.add(token), is_new=True)

    def add_text(self, text: str) -> None:
        """Add a special token as `text`, although decoding would hide it."""
        self._append(self._coming.rest() + text, is_new=True)

    def add_silent(self) -> None:
        """Add a token that ends the text without being part of it."""
        self.starts.append(len(self.text))
        self.pieces.append("")

    def end(self) -> None:
        """End the text after the last token."""
        if not self._ended:
            self._append(self._coming.rest(), is_new=False)
            self._ended = True

    def _append(self, piece: str, is_new: bool) -> None:
        known = len(self.text)
        self.text += piece
        if is_new:
            self.starts.append(known)
            self.pieces.append(piece)
        elif piece and self.pieces:
            self.pieces[-1] += piece
        if len(self.pieces) <= self._min_tokens:
            self._from = len(self.text)
        self._find(known)

    def _find(self, known: int) -> None:
        """End the text at the first stop string that extends past the first `known` characters."""
        starts = ((self.text.find(one, max(self._from, known - len(one) + 1)), one) for one in self._stop)
        found = min(((start, one) for start, one in starts if start >= 0), default=None)
        if found is not None:
            start, self.stopped = found
            self.text = self.text[: start + len(self.stopped) * self._keeps_stop]
            self._ended = True
