"""The names of single tokens in answers."""

import re
from typing import Any


class Names:
    """The names of single tokens in lists of log-probabilities.

    Attributes:
        longest: how many characters the longest token has.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._raw = {i: token for token, i in tokenizer.get_vocab().items()}
        self.longest = max(map(len, self._raw.values()))
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token: int) -> str:
        """Return a token's text, or ``bytes:\\xe2`` for a part of a character, as OpenAI writes it."""
        return self._look(token)[0]

    def utf8(self, token: int) -> list[int]:
        """Return a token's bytes."""
        return self._look(token)[1]

    def _look(self, token: int) -> tuple[str, list[int]]:
        if token not in self._known:
            self._known[token] = self._found(token)
        return self._known[token]

    def _found(self, token: int) -> tuple[str, list[int]]:
        alone, twice = (
            self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for tokens in ([token], [token, token])
        )
        if "\ufffd" in alone and (part := _bytes(self._raw.get(token, ""))) is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in part), list(part)
        text = twice[len(alone) :]  # decoders treat the first token of a text in their own way: some drop its space
        return text, list(text.encode("utf-8", "replace"))


def _bytes(raw: str) -> bytes | None:
    """Return the bytes that a vocabulary's entry stands for: ``<0xE2>``, or GPT-2's letters for bytes."""
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
        return bytes([int(found[1], 16)])
    if raw and all(letter in _LETTERS for letter in raw):
        return bytes(_LETTERS[letter] for letter in raw)
    return None


def _letters() -> dict[str, int]:
    """Return GPT-2's letters: bytes visible in Latin-1 stand for themselves, the others for the letters from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_LETTERS = _letters()
