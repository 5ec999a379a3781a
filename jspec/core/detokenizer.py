"""Incremental detokenization: the text that each new token adds after a prompt."""

import itertools
from collections.abc import Sequence

from jspec.core.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"  # stands for bytes that do not form a character, or do not form one yet
_LONGEST = 4  # the most bytes in a UTF-8 character, and therefore the most tokens that one character can be split into
_LONGEST_CONTEXT = 16  # tokens to try as a context before falling back to all tokens
_PROMPT_WINDOW = 16  # prompt tokens to decode first when looking for a context


class Pieces:
    """An incremental detokenizer, which returns the text that each token adds.

    If the tokens' bytes are valid UTF-8, the joined pieces equal ``decode(prompt + tokens)[len(decode(prompt)):]``. A
    token that ends inside a character adds only the text before that character. The token that completes the character
    adds the rest. Special tokens add nothing.

    Invalid bytes become U+FFFD as in ``decode``, with one exception. If a run of bytes contains an invalid byte, a
    byte-fallback decoder replaces the whole run. Here, characters that were complete before the invalid byte remain.

    Only a window of tokens is decoded, so the time per token does not depend on the length of the text. A window
    consists of a context and the pending tokens after it. Decoders treat the start of a text specially: some drop a
    leading space. The context therefore ends with a complete character and decodes to non-empty text, if any earlier
    tokens have text.

    Args:
        tokenizer: the tokenizer that the tokens belong to.
        prompt: the tokens before the generated ones.
        shows_prompt: whether the reader has seen the prompt's text. If not, the first piece includes the whole
            character that the prompt leaves incomplete.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), shows_prompt: bool = True):
        self._tokenizer = tokenizer
        context, self._pending = self._split(list(prompt))
        self._begin(context)
        # If the prompt ends inside a character, its decoded text ends with U+FFFD, which the whole character replaces.
        text = self._text()
        self._given = text if shows_prompt else self._complete(text)

    def add(self, token: int, is_last: bool = False) -> str:
        """Return the text that the next token adds. If `is_last`, include the text that has been held back."""
        before = self._text()
        self._pending.append(int(token))
        text = self._text()
        if text == before and self._is_special(token):  # decoders skip it, so it must not fill the window
            self._pending.pop()
        if is_last or not text.endswith(_UNKNOWN):
            return self._give(text)
        added = _after(self._given, self._complete(text))
        self._given += added
        self._drop_invalid(text)
        return added

    def rest(self) -> str:
        """Return the text that has been held back. Call this after the last token."""
        return self._give(self._text())

    def _give(self, text: str) -> str:
        """Return the new part of the pending tokens' text, and use these tokens as the context for the next tokens."""
        added, self._given = _after(self._given, text), ""
        self._begin(self._next_context())
        self._pending = []
        return added

    def _next_context(self) -> list[int]:
        """Return the pending tokens. If they have no text, include earlier tokens."""
        if self._decode(self._pending):
            return self._pending
        known = self._context + self._pending
        # A decoder may drop the first space. In a long run of spaces, a window of one token would then have no text.
        short = self._decode(known[-_LONGEST_CONTEXT:])
        return known[-_LONGEST_CONTEXT:] if short and _UNKNOWN not in short else known

    def _complete(self, text: str) -> str:
        """Return the pending tokens' text without an incomplete character at its end."""
        if not text.endswith(_UNKNOWN):
            return text
        # A few tokens may all belong to an incomplete character. With more tokens, only the last U+FFFD can be one.
        return text.rstrip(_UNKNOWN) if len(self._pending) < _LONGEST else text[:-1]

    def _begin(self, context: list[int]) -> None:
        self._context, self._context_text = context, self._decode(context)

    def _text(self) -> str:
        return self._text_after(self._context, self._context_text, self._pending)

    def _text_after(self, context: list[int], context_text: str, tokens: list[int]) -> str:
        """Return the text that `tokens` add to a context."""
        whole = self._decode(context + tokens)
        if whole.startswith(context_text):
            return whole[len(context_text) :]
        # The tokens continue a run of bytes that began in the context, and made the whole run invalid.
        return self._decode(tokens)

    def _drop_invalid(self, text: str) -> None:
        """Shorten a long run of pending tokens that form no character, unless this changes the last tokens' text."""
        first, last = self._pending[: 1 - _LONGEST], self._pending[1 - _LONGEST :]
        dropped = self._text_after(self._context, self._context_text, first) if first else text
        if len(dropped) >= len(text) or not text.startswith(dropped):
            return
        # Keep a context of invalid bytes, so that later bytes in the same run remain invalid.
        for context in (self._context, first) if self._context_text.endswith(_UNKNOWN) else (first,):
            context_text = self._decode(context)
            if context_text and self._text_after(context, context_text, last) == text[len(dropped) :]:
                self._context, self._context_text, self._pending = context, context_text, last
                self._given = self._given[len(dropped) :]
                return

    def _split(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Split the end of the prompt into a context and the tokens of a final incomplete character."""
        prompt = self._without_last_special(prompt)
        size = _PROMPT_WINDOW
        while size < len(prompt):
            window = prompt[-size:]
            for start in range(_LONGEST):
                for end in range(size, size - _LONGEST, -1):
                    text = self._decode(window[start:end])
                    if text and not text.startswith(_UNKNOWN) and not text.endswith(_UNKNOWN):
                        return window[start:end], window[end:]
            size *= 4
        ends = range(len(prompt), max(0, len(prompt) - _LONGEST), -1)
        last = max(0, len(prompt) - _LONGEST)
        end = next((end for end in ends if not self._decode(prompt[:end]).endswith(_UNKNOWN)), last)
        return prompt[:end], prompt[end:]

    def _without_last_special(self, prompt: list[int]) -> list[int]:
        """Return the prompt without special tokens near its end, because they may split the bytes of a character."""
        last: list[int] = []
        start = len(prompt)
        while start and len(last) < _LONGEST:
            start -= 1
            last += [] if self._is_special(prompt[start]) else [prompt[start]]
        return prompt[:start] + last[::-1]

    def _is_special(self, token: int) -> bool:
        return not self._decode([token]) and bool(_decode(self._tokenizer, [token], skip_special_tokens=False))

    def _decode(self, tokens: list[int]) -> str:
        return _decode(self._tokenizer, tokens)


def pieces(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Return the text that each of `tokens` adds after `prompt`. See `Pieces`."""
    detokenizer = Pieces(tokenizer, prompt)
    return [detokenizer.add(token, is_last=i == len(tokens)) for i, token in enumerate(tokens, 1)]


def _after(given: str, text: str) -> str:
    """Return the part of `text` that starts where it first differs from `given`."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(given, text, strict=False))
    return text[sum(1 for _ in same) :]


def _decode(tokenizer: Tokenizer, tokens: list[int], skip_special_tokens: bool = True) -> str:
    if not tokens:
        return ""
    return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
