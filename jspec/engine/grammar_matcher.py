"""Grammars compiled with llguidance, and masks for drafts. This module imports neither JAX nor the rest of jspec."""

import contextlib
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_PROBE_STEPS, _PROBE_SECONDS = 32, 0.1
_SEARCH_SECONDS = 0.5
Mask = TypeVar("Mask", covariant=True)
_Reset: TypeAlias = "Callable[[list[int]], _Matcher[Mask]]"


class _Matcher(Protocol[Mask]):  # a `jspec.engine.constraints.Matcher`
    def allowed(self) -> Mask: ...
    def consume(self, token: int) -> bool: ...
    def rollback(self, count: int) -> None: ...


class _Forcing(Protocol):  # a `jspec.engine.constraints.ForcingMatcher`
    def forced(self) -> Sequence[int]: ...


def tree_masks(
    matcher: _Matcher[Mask], drafted: Sequence[int], parents: Sequence[int], vocab_size: int, reset: "_Reset[Mask]"
) -> tuple[list[Mask | bytes | None], list[int]]:
    """Return the masks after the text and after each draft node, and the forced tokens.

    The mask of a node that cannot be reached is None. In a chain, the first tokens that the optional method `forced`
    of the matcher returns replace the draft's tokens, and the draft ends after them. The second list holds each node's
    forced token; -1 for a node without one. The forced tokens must depend only on the tokens before them.

    Args:
        matcher: a `jspec.engine.constraints.Matcher` at the end of the text.
        drafted: the token of each node.
        parents: the parent of each node: 0 for the text and i for node i - 1.
        vocab_size: the vocabulary size. Ids at or above it are not text.
        reset: a function that returns a matcher that has consumed the text and the given draft tokens. It replaces a
            matcher that failed after a draft token, never after the text. A failed node's mask, b"", allows nothing.
    """
    masks: list[Mask | bytes | None] = [None] * (len(drafted) + 1)
    tokens, forced = [*drafted], [-1] * len(drafted)
    may_force = hasattr(matcher, "forced") and [*parents] == [*range(len(drafted))]
    children: list[list[int]] = [[] for _ in masks]
    for node, parent in enumerate(parents, 1):
        children[parent].append(node)

    def force(node: int, path: list[int]) -> None:
        nonlocal matcher, may_force
        try:
            run = [*cast(_Forcing, matcher).forced()][: len(drafted) - node]
        except Exception:  # ignored: masks must not depend on the draft length
            matcher, run = reset(path), []
        if run:
            forced[node : node + len(run)], may_force = run, False
            tokens[node:] = [*run, *[vocab_size] * (len(drafted) - node - len(run))]

    def visit(node: int, path: list[int]) -> None:
        nonlocal matcher
        masks[node] = matcher.allowed()
        if may_force and children[node]:
            force(node, path)
        for child in children[node]:
            token = tokens[child - 1]
            if token >= vocab_size:
                continue
            try:
                if matcher.consume(token):
                    visit(child, [*path, token])
                    matcher.rollback(1)
            except Exception:
                masks[child] = b""
                matcher = reset(path)

    visit(0, [])
    return masks, forced


class DeadEnd(Exception):
    """An error raised if no token may follow, not even EOS."""


class LLGuidance:
    """A `jspec.engine.constraints.Matcher` backed by llguidance."""

    def __init__(self, matcher: "LLMatcher", num_bytes: int):
        self._matcher, self._num_bytes = matcher, num_bytes

    def copy(self) -> "LLGuidance":
        """Return a copy in the same state. The copy and the original share the lexer's results."""
        return LLGuidance(self._matcher.deep_copy(), self._num_bytes)

    def allowed(self) -> bytes:
        """Return the mask of allowed tokens, with one bit for each token.

        Raises:
            DeadEnd: no token may follow.
            RuntimeError: the grammar is too complex.
        """
        bits = self._matcher.compute_bitmask()[: self._num_bytes]
        if self._matcher.is_error():
            error = self._matcher.get_error()
            raise DeadEnd if "NoExtension" in error else RuntimeError(sentence(error))
        if bits == bytes(len(bits)):
            raise DeadEnd
        return bits

    def consume(self, token: int) -> bool:
        """Advance by `token`. Return False if the grammar does not allow it here.

        Raises:
            RuntimeError: the grammar is too complex.
        """
        taken = self._matcher.try_consume_tokens([token]) == 1
        if self._matcher.is_error():
            raise RuntimeError(sentence(self._matcher.get_error()))
        return taken

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        self._matcher.rollback(count)

    def forced(self) -> list[int]:
        """Return the usual tokens of the text that must follow, such as the next key of a JSON object.

        Raises:
            RuntimeError: the grammar is too complex.
        """
        tokens = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            raise RuntimeError(sentence(self._matcher.get_error()))
        return tokens


def compile_grammar(tokenizer: "LLTokenizer", kind: str, text: str, num_bytes: int) -> LLGuidance:
    """Compile a grammar, and return a matcher at the start of an output.

    Raises:
        ValueError: llguidance rejects the grammar.
    """
    matcher = _matcher(tokenizer, kind, text)
    if matcher.is_error():
        place = _place(tokenizer, text) if kind == "schema" else "$"  # llguidance's message names no place
        raise ValueError(sentence(matcher.get_error()) + ("" if place == "$" else f" (at {place})"))
    first = LLGuidance(matcher, num_bytes)
    _probe(first)
    return first


def _matcher(tokenizer: "LLTokenizer", kind: str, text: str) -> "LLMatcher":
    from llguidance import LLMatcher

    if kind == "schema":
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    else:
        grammar = (LLMatcher.grammar_from_regex if kind == "regular expression" else LLMatcher.grammar_from_lark)(text)
    return LLMatcher(tokenizer, grammar, log_level=0)


def _place(tokenizer: "LLTokenizer", text: str) -> str:
    """Return the path of the smallest part of a rejected schema without which llguidance accepts the schema."""
    schema, begun = json.loads(text), time.monotonic()
    path, node, is_found = "$", schema, True
    while is_found:
        is_found = False
        for parent, key, step in _parts(node):
            if time.monotonic() > begun + _SEARCH_SECONDS:
                return path
            part, parent[key] = parent[key], True
            is_found = not _matcher(tokenizer, "schema", json.dumps(schema)).is_error()
            parent[key] = part
            if is_found:
                path, node = path + step, part
                break
    return path


def _parts(schema: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield a container, a key and a path for each direct part of a schema that is a schema."""
    if not isinstance(schema, dict):
        return
    for keyword, value in cast("dict[str, Any]", schema).items():
        if keyword in ("properties", "patternProperties", "$defs"):
            for name in cast("dict[str, Any]", value):
                step = f".{name}" if re.fullmatch(r"\w{1,40}", name) else f"[{json.dumps(name[:40])}]"
                yield value, name, f".{keyword}{step}"
        elif keyword in ("prefixItems", "anyOf", "allOf"):
            yield from ((value, i, f".{keyword}[{i}]") for i in range(len(value)))
        elif keyword in ("items", "additionalProperties"):
            yield schema, keyword, f".{keyword}"


def _probe(first: LLGuidance) -> None:
    """Follow a random output for a while, because some grammars hang or fail only after some tokens.

    Raises:
        ValueError: the first mask cannot be computed.
    """
    rng, matcher, begun = random.Random(0), first.copy(), time.monotonic()
    try:
        bits = matcher.allowed()
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    except DeadEnd:
        raise ValueError("no text satisfies it") from None
    with contextlib.suppress(RuntimeError, DeadEnd):  # later failures affect only the outputs that reach them
        for _ in range(_PROBE_STEPS):
            tokens = [8 * i + bit for i, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]
            if time.monotonic() > begun + _PROBE_SECONDS or not matcher.consume(rng.choice(tokens)):
                return
            bits = matcher.allowed()


def sentence(error: str) -> str:
    """Return llguidance's message without its parser state. For a panic, say only that it occurred."""
    message = " ".join(re.split("<(?:state|backtrace)>", error)[0].split())
    return "llguidance fails on it" if "panic: " in message else message


def make_tokenizer(text: str, vocab_size: int, eos_ids: Sequence[int]) -> "LLTokenizer":
    """Return an llguidance tokenizer made from the contents of a tokenizer.json file.

    Raises:
        ValueError: the tokenizer has more tokens than `vocab_size`.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))
