# pyright: reportMissingImports=false
"""Constraints from JSON schemas, regular expressions and grammars, by llguidance."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.engine.constraints import Matcher

_LOG = logging.getLogger("jspec")


class Grammars:
    """Makes constraints for requests: ``Request(..., constraint=grammars.json_schema({...}))``.

    The grammar ends a text with an end of text, which the request's `eos_ids` should have, too.

    Args:
        tokenizer: the target's, one of jspec's or a fast one of transformers.
        vocab_size: that of the target.
        eos_ids: with which a text may end; the tokenizer's, if there are none.

    Raises:
        ModuleNotFoundError: llguidance is not installed.
        ValueError: no token ends a text, or the tokenizer has more tokens than the target.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int] = ()):
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError:
            raise ModuleNotFoundError("Grammars need llguidance: pip install llguidance.") from None
        self._make, self._vocab_size = LLMatcher, vocab_size
        ends = [i for i in (*eos_ids, *([] if eos_ids else [tokenizer.eos_token_id])) if i is not None]
        if not ends:
            raise ValueError("The tokenizer has no end of text, with which a grammar ends; give eos_ids.")
        self._tokenizer = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=vocab_size, eos_token=ends)

    def json_schema(self, schema: Mapping[str, Any]) -> Callable[[], Matcher]:
        """A JSON value for which `schema` holds, without needless white space.

        Raises:
            ValueError: it is no schema, or asks for what cannot be promised.
        """
        compact: Any = {"whitespace_flexible": False}
        return self._constraint("schema", self._make.grammar_from_json_schema(json.dumps(schema), overrides=compact))

    def regex(self, pattern: str) -> Callable[[], Matcher]:
        """A text all of which matches. ValueError: it is no regular expression."""
        return self._constraint("regular expression", self._make.grammar_from_regex(pattern))

    def lark(self, grammar: str) -> Callable[[], Matcher]:
        """A text of a grammar in Lark's notation, as llguidance reads it. ValueError: it is no such grammar."""
        return self._constraint("grammar", self._make.grammar_from_lark(grammar))

    def _constraint(self, kind: str, grammar: str) -> Callable[[], Matcher]:
        first = self._make(self._tokenizer, grammar, log_level=0)
        tried = first if first.is_error() else first.deep_copy()
        if not tried.is_error():
            tried.compute_bitmask()  # some limits are met here
        if tried.is_error():
            raise ValueError(f"The {kind} cannot be used: {_sentence(tried.get_error())}")
        return lambda: _Matcher(first.deep_copy(), -(-self._vocab_size // 32))


def _sentence(error: str) -> str:
    """What llguidance says, without the state of its parser; of a failure of its own nothing but that."""
    said = " ".join(re.split("<(?:state|backtrace)>", error)[0].split())
    if "panic: " not in said:
        return said
    _LOG.warning("llguidance has failed: %s", said)
    return "llguidance does not understand it."


class _Matcher:
    """llguidance's as a `jspec.engine.constraints.Matcher`."""

    def __init__(self, matcher: Any, words: int):
        self._matcher, self._words = matcher, words

    def allowed(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]
        if self._matcher.is_error():
            raise RuntimeError(_sentence(self._matcher.get_error()))
        return bits

    def consume(self, token: int) -> bool:
        taken = self._matcher.try_consume_tokens([token]) == 1
        if self._matcher.is_error():
            raise RuntimeError(_sentence(self._matcher.get_error()))
        return taken

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
