"""Token names in responses."""

import re

from jspec.core.tokenizer import Tokenizer


class Names:
    """Token names for lists of log-probabilities.

    Attributes:
        longest: the number of characters in the longest token.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._raw = {i: token for token, i in tokenizer.get_vocab().items()}
        self.longest = max(map(len, self._raw.values()))
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token: int) -> str:
        r"""Return a token's text, or ``bytes:\xe2`` for a partial character, in OpenAI's notation."""
        return self._look(token)[0]

    def utf8(self, token: int) -> list[int]:
        """Return a token's bytes."""
        return self._look(token)[1]

    def is_special(self, token: int) -> bool:
        """Return whether decoded text does not show the token."""
        return not self._tokenizer.decode([token], skip_special_tokens=True, clean_up_tokenization_spaces=False)

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
        text = twice[len(alone) :]  # decoders treat a first token differently: some drop its space
        return text, list(text.encode("utf-8", "replace"))


def _bytes(raw: str) -> bytes | None:
    """Return the bytes that a vocabulary entry like ``<0xE2>`` or one in GPT-2's byte letters represents, or None."""
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
        return bytes([int(found[1], 16)])
    if raw and all(letter in _LETTERS for letter in raw):
        return bytes(_LETTERS[letter] for letter in raw)
    return None


def _letters() -> dict[str, int]:
    """Map GPT-2's letters to bytes. Visible Latin-1 characters map to themselves; letters from 256 map to the rest."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_LETTERS = _letters()
