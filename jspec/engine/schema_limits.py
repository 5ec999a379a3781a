"""Limits on schemas and regular expressions, checked before compilation."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias, cast
from urllib.parse import unquote

from jspec.core.types import Json
from jspec.engine.schema_overlap import ANNOTATIONS

MAX_DEPTH = 64
MAX_VALUES = 50_000
MAX_DEFINITIONS = 1_000
MAX_REFERENCES = 100  # in a chain
MAX_PATTERNS = 100
MAX_PATTERN_LENGTH = 10_000
MAX_MULTIPLE = 100_000
MAX_COMBINED_PATTERNS = 8
MAX_REFERENCED_VALUES = 200_000
_REPEAT = re.compile(r"\{(\d*+),?(\d*+)\}")  # possessive, because a run of digits would otherwise take quadratic time
_MAX_REPEAT = 10_000
_MAX_PRODUCT = 2**32  # llguidance multiplies two multiples in 32 bits when it combines schemas
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "$ref"})
_NOT_COMBINED = ANNOTATIONS | {"$schema", "$id", "$defs", "definitions", "discriminator"}
_Node: TypeAlias = Mapping[str, Json]


def check_schema(schema: Mapping[str, object]) -> None:
    """Check that a schema is within the limits. Do not check its meaning.

    Raises:
        ValueError: the schema exceeds a limit; the message names the first such limit.
    """
    nodes = [value for value in _values(cast(_Node, schema)) if isinstance(value, Mapping)]
    patterns = [pattern for node in nodes for pattern in _patterns(node)]
    if len(patterns) > MAX_PATTERNS:
        raise _excess("patterns", len(patterns), MAX_PATTERNS)
    for pattern in patterns:
        check_regex(pattern)
    for node in nodes:
        _check_combination(node)
    _check_multiples(nodes)
    length = _longest_chain(cast(_Node, schema))
    if length > MAX_REFERENCES:
        raise _excess("references in one chain of $ref", length, MAX_REFERENCES)


def check_regex(pattern: str) -> None:
    """Check that a regular expression is within the limits.

    Raises:
        ValueError: the expression exceeds a limit; the message names this limit.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise ValueError(
            f"The regular expression has {len(pattern)} characters; expected at most {MAX_PATTERN_LENGTH}."
        )
    counts = [count for match in _REPEAT.finditer(pattern) for count in match.groups() if count]
    if any(len(count.lstrip("0")) > 9 or int(count) > _MAX_REPEAT for count in counts):
        raise ValueError(f"The regular expression has a repeat count above {_MAX_REPEAT}; use * or a smaller count.")


def _excess(what: str, count: int, most: int) -> ValueError:
    return ValueError(f"The schema has {count} {what}; expected at most {most}; simplify it.")


def _values(schema: Json) -> Iterator[Json]:
    """Yield a schema and all values in it, without recursion, because deep schemas would exhaust the stack."""
    waiting: list[tuple[Json, int]]
    waiting, count = [(schema, 1)], 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"The schema has more than {MAX_VALUES} values; simplify it.")
        if depth > MAX_DEPTH:
            raise ValueError(f"The schema is nested more than {MAX_DEPTH} levels deep; use $ref, or simplify it.")
        yield value
        if isinstance(value, Mapping):
            waiting.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list | tuple):
            waiting.extend((item, depth + 1) for item in value)


def _patterns(node: _Node) -> list[str]:
    named = node.get("patternProperties")
    own = [cast(str, node["pattern"])] if isinstance(node.get("pattern"), str) else []
    return own + ([*named] if isinstance(named, Mapping) else [])


def _check_combination(node: _Node) -> None:
    """Check the combined demands of a schema and its allOf parts, because the sizes of their automata multiply."""
    parts = node.get("allOf")
    together = [node, *(part for part in parts if isinstance(part, Mapping))] if isinstance(parts, list) else [node]
    if (count := sum("pattern" in part for part in together)) > MAX_COMBINED_PATTERNS:
        raise _excess("patterns in one allOf", count, MAX_COMBINED_PATTERNS)
    multiple = 1
    for part in together:
        multiple = math.lcm(multiple, _steps(part.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            raise ValueError(
                f"The schema requires multiples of {_short(multiple)} (multipleOf); expected at most "
                f"{MAX_MULTIPLE}; use a smaller multiple."
            )


def _check_multiples(nodes: Sequence[_Node]) -> None:
    """Check the multiples of a schema that combines schemas, as if all of them applied to one number."""
    numbers = (node.get("multipleOf") for node in nodes)
    fractions = [
        Fraction(repr(v)) for v in numbers if isinstance(v, int | float) and 0 < v < math.inf and v is not True
    ]
    if not fractions or not any(map(_combines, nodes)):
        return
    unit = math.lcm(*(10 ** _num_decimals(fraction) for fraction in fractions))
    multiples = [int(fraction * unit) for fraction in fractions]
    if math.lcm(*multiples) * max(multiples) >= _MAX_PRODUCT:
        raise ValueError(
            "The schema combines schemas (with allOf, $ref or similar keywords), and the least common multiple of its "
            "multiples (multipleOf) is too large; use smaller multiples."
        )


def _combines(node: _Node) -> bool:
    return "allOf" in node or bool({*node} & _COMBINING and len({*node} - _NOT_COMBINED) > 1)


def _num_decimals(fraction: Fraction) -> int:
    return next(count for count in range(400) if 10**count % fraction.denominator == 0)


def _steps(multiple: Json) -> int:
    """Return the number of remainders to track for a multipleOf, from its decimal digits; 1 if it is not a number."""
    if isinstance(multiple, int) and not isinstance(multiple, bool):
        return max(1, abs(multiple))
    if not isinstance(multiple, float) or not math.isfinite(multiple):
        return 1
    mantissa, _, exponent = f"{abs(multiple):e}".partition("e")
    digits = mantissa.replace(".", "").rstrip("0") or "1"
    return int(digits) * 10 ** max(0, int(exponent) - len(digits) + 1)


def _short(number: int) -> str:
    return f"{number}" if number < 10**12 else "more than 10^12"


def _longest_chain(schema: _Node) -> int:
    """Return the length of the longest chain of references, or an approximate lower bound if there are cycles."""
    references = references_of_parts()
    following = {"": references(schema)}
    longest: dict[str, int] = {}
    waiting = [(name, False) for name in following[""]]
    while waiting:
        name, is_done = waiting.pop()
        if is_done:
            longest[name] = 1 + max((longest.get(other, 0) for other in following[name]), default=0)
        elif name not in longest:
            longest[name] = 1
            following[name] = references(resolved(schema, name))
            waiting.append((name, True))
            waiting.extend((other, False) for other in following[name] if other not in longest)
    return max(longest.values(), default=0)


def references_of_parts() -> Callable[[Json], list[str]]:
    """Return a function that lists the distinct $ref values in a part of a schema, and reads each part only once.

    Many names can stand for one part, and parts can contain one another, so the limit applies to all values read.
    """
    names: dict[int, list[str]] = {}
    count = 0

    def references(part: Json) -> list[str]:
        nonlocal count
        if id(part) in names:
            return names[id(part)]
        values = list(_values(part))
        count += len(values)
        if count > MAX_REFERENCED_VALUES:
            raise ValueError(
                f"The schema's references lead to more than {MAX_REFERENCED_VALUES} values in total; simplify it."
            )
        targets = (value.get("$ref") for value in values if isinstance(value, Mapping))
        names[id(part)] = list(dict.fromkeys(name for name in targets if isinstance(name, str)))
        if len(names[id(part)]) > MAX_DEFINITIONS:
            raise _excess("different $ref values", len(names[id(part)]), MAX_DEFINITIONS)
        return names[id(part)]

    return references


def resolved(schema: Json, name: str) -> Json:
    """Return the part of a schema that a local reference points to, or None."""
    for key in name.partition("#")[2].split("/")[1:]:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping):
            schema = schema.get(key)
        elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return None
    return schema


def anchors(root: Json) -> dict[str, Json]:
    """Return the parts of a schema that have an ``$anchor``, or an ``$id`` that is only a fragment."""
    found: dict[str, Json] = {}
    for part in _values(root):
        if isinstance(part, Mapping):
            for name in (part.get("$anchor"), part.get("$id")):
                if isinstance(name, str) and (name.startswith("#") or name == part.get("$anchor")):
                    found[name.lstrip("#")] = part
    return found


def floors_of_fractions(root: Json) -> frozenset[int]:
    """Return the floors of all numbers in a schema that are not integers."""
    numbers = (value for value in _values(root) if isinstance(value, float) and math.isfinite(value))
    return frozenset(math.floor(value) for value in numbers if not value.is_integer())
