"""Constraints from JSON schemas, regular expressions and grammars, by llguidance."""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Self

from jspec.engine import grammar_worker as worker
from jspec.engine.constraints import Constraint
from jspec.engine.grammar_pool import GrammarPool
from jspec.engine.schema_limits import check_regex, check_schema


class Grammars:
    """Makes constraints for requests: ``Request(..., constraint=grammars.json_schema({...}))``.

    Grammars are compiled and followed in processes of their own, which are limited in time and memory. A grammar that
    exceeds the limits is refused, or ends its own request. (On Windows everything runs in this process, unlimited.)
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
        if find_spec("llguidance") is None:
            raise ModuleNotFoundError("Grammars need llguidance: pip install llguidance.")
        ends = [i for i in (*eos_ids, *([] if eos_ids else [tokenizer.eos_token_id])) if i is not None]
        if not ends:
            raise ValueError("The tokenizer has no end of text, with which a grammar ends; give eos_ids.")
        make = GrammarPool if hasattr(os, "fork") else _InProcess
        self._pool = make(tokenizer.backend_tokenizer.to_str(), vocab_size, ends)

    def json_schema(self, schema: Mapping[str, Any]) -> Constraint:
        """A JSON value for which `schema` holds, without needless white space.

        Raises:
            ValueError: it is not a schema, asks for what cannot be promised, or is too complex.
            RuntimeError: the system refuses a process for it; try again later.
        """
        check_schema(schema)
        return self._compiled("schema", json.dumps(schema))

    def regex(self, pattern: str) -> Constraint:
        """A text all of which matches. ValueError: it is not a regular expression, or it is too complex."""
        check_regex(pattern)
        return self._compiled("regular expression", pattern)

    def lark(self, grammar: str) -> Constraint:
        """A text of a grammar in Lark's notation, as llguidance reads it.

        Raises:
            ValueError: it is not such a grammar, or it is too complex.
        """
        return self._compiled("grammar", grammar)

    def _compiled(self, kind: str, text: str) -> Constraint:
        try:
            return self._pool.compile(kind, text)
        except ValueError as error:
            raise ValueError(f"The {kind} cannot be used: {str(error).rstrip('.')}.") from None

    def close(self) -> None:
        """End the processes at once. Constraints that still run fail."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _InProcess:
    """A `GrammarPool` for platforms that cannot fork."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer = worker.make_tokenizer(tokenizer, vocab_size, eos_ids)
        self._num_bytes = 4 * -(-vocab_size // 32)

    def compile(self, kind: str, text: str) -> Constraint:
        """Compile a grammar. ValueError: llguidance refuses it."""
        return worker.compile_grammar(self._tokenizer, kind, text, self._num_bytes).copy

    def close(self) -> None:
        """There is nothing to end."""
