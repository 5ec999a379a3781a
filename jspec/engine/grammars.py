"""Constraints from JSON schemas, regular expressions and grammars, compiled with llguidance."""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol, Self, cast

from jspec.core.tokenizer import Tokenizer
from jspec.core.types import Json
from jspec.engine import grammar_matcher
from jspec.engine.constraints import Constraint
from jspec.engine.grammar_pool import GrammarPool
from jspec.engine.schema_limits import check_regex, check_schema
from jspec.engine.schema_rewrite import ONE_SPELLING, rewritten


class _Backend(Protocol):
    """The part of a `tokenizers.Tokenizer` that grammars need."""

    def to_str(self) -> str: ...


class _FastTokenizer(Protocol):
    """The part of a fast tokenizer that a `Tokenizer` need not have."""

    @property
    def backend_tokenizer(self) -> _Backend: ...


def enforceable(schema: Mapping[str, object]) -> dict[str, Json]:
    """Return a schema that llguidance enforces completely. All its values satisfy `schema`.

    Raises:
        ValueError: `schema` is too large, or has a keyword that cannot be enforced.
    """
    check_schema(schema)
    return rewritten(json.loads(json.dumps(schema)))


class Grammars:
    """A factory of request constraints: ``Request(..., constraint=grammars.json_schema({...}))``.

    Grammars are compiled and evaluated in separate processes with time and memory limits. A grammar that exceeds the
    limits is rejected, or ends only its own request. (On Windows, everything runs in this process, without limits.) A
    grammar ends the output with an EOS token, which the request's `eos_ids` should include.

    Args:
        tokenizer: the target's tokenizer: a jspec tokenizer, or a fast tokenizer from transformers.
        vocab_size: the target's vocabulary size.
        eos_ids: the tokens that may end an output. The default is the tokenizer's EOS token.

    Raises:
        ModuleNotFoundError: llguidance is not installed.
        ValueError: there is no EOS token, or the tokenizer has more tokens than the target's vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int] = ()):
        if find_spec("llguidance") is None:
            raise ModuleNotFoundError("Grammars need llguidance: pip install llguidance.")
        ends = [i for i in (*eos_ids, *([] if eos_ids else [tokenizer.eos_token_id])) if i is not None]
        if not ends:
            raise ValueError("The tokenizer has no EOS token, which a grammar needs to end the output; pass eos_ids.")
        make = GrammarPool if hasattr(os, "fork") else _InProcess
        self._pool = make(cast(_FastTokenizer, tokenizer).backend_tokenizer.to_str(), vocab_size, ends)

    def json_schema(self, schema: Mapping[str, object]) -> Constraint:
        """Return a constraint that makes the output a JSON value satisfying `schema`, without unnecessary whitespace.

        Raises:
            ValueError: `schema` is not a JSON schema, demands something that cannot be guaranteed, or is too complex.
            RuntimeError: the system cannot start a process for the schema; try again later.
        """
        return self.compile("schema", json.dumps(enforceable(schema) | {"x-guidance": ONE_SPELLING}))

    def regex(self, pattern: str) -> Constraint:
        """Return a constraint that makes the whole output match `pattern`.

        Raises:
            ValueError: `pattern` is not a regular expression, or it is too complex.
        """
        check_regex(pattern)
        return self.compile("regular expression", pattern)

    def lark(self, grammar: str) -> Constraint:
        """Return a constraint that makes the output follow `grammar`, in Lark notation as llguidance interprets it.

        Raises:
            ValueError: `grammar` is not a valid grammar, or it is too complex.
        """
        return self.compile("grammar", grammar)

    def compile(self, kind: str, text: str) -> Constraint:
        """Return a constraint from `text`, which llguidance gets unchanged.

        Args:
            kind: "schema", "regular expression" or "grammar".
            text: the JSON schema, the pattern or the Lark grammar.

        Raises:
            ValueError: `text` is invalid or too complex.
            RuntimeError: the system cannot start a process for the grammar; try again later.
        """
        try:
            return self._pool.compile(kind, text)
        except ValueError as error:
            raise ValueError(f"The {kind} cannot be used: {str(error).rstrip('.')}.") from None

    def close(self) -> None:
        """End the processes immediately. Constraints that are still in use fail."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _InProcess:
    """A replacement for `GrammarPool` on platforms that cannot fork."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer = grammar_matcher.make_tokenizer(tokenizer, vocab_size, eos_ids)
        self._num_bytes = 4 * -(-vocab_size // 32)

    def compile(self, kind: str, text: str) -> Constraint:
        """Compile a grammar.

        Raises:
            ValueError: llguidance rejects the grammar.
        """
        return grammar_matcher.compile_grammar(self._tokenizer, kind, text, self._num_bytes).copy

    def close(self) -> None:
        """Do nothing: there are no processes to end."""
