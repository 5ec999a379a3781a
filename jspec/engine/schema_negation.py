"""Negations of JSON schemas, written without the keyword ``not``."""

from collections.abc import Mapping
from itertools import pairwise

from jspec.core.types import Json
from jspec.engine.schema_overlap import ANNOTATIONS, TYPES, type_names, value_type

_MAX_CHARACTERS = 500


class NotExpressible(Exception):
    """An error raised if no schema that llguidance supports is the negation of a schema."""


def negated(schema: Json) -> list[Json]:
    """Return schemas such that a value satisfies one of them if and only if it does not satisfy `schema`.

    Raises:
        NotExpressible: a keyword has no supported negation.
    """
    if isinstance(schema, bool):
        return [] if schema else [True]
    if not isinstance(schema, Mapping):
        raise NotExpressible
    keywords = {*schema} - ({"type"} if _is_type_redundant(schema) else set[str]())
    return [
        part for keyword, value in schema.items() if keyword in keywords for part in _negated_keyword(keyword, value)
    ]


def _is_type_redundant(schema: Mapping[str, Json]) -> bool:
    """Return whether ``const`` or ``enum`` alone implies ``type``."""
    given = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return isinstance(given, list) and {value_type(value) for value in given} <= type_names(schema.get("type"))


def _negated_keyword(keyword: str, value: Json) -> list[Json]:
    if keyword in ANNOTATIONS:
        return []
    if keyword == "type":
        return _not_of_types(value)
    if keyword == "required" and isinstance(value, list):
        return [{"type": "object", "properties": {str(name): False}} for name in value]
    if keyword == "properties" and isinstance(value, Mapping):
        return [
            {"type": "object", "required": [name], "properties": {name: part}}
            for name, schema in value.items()
            for part in negated(schema)
        ]
    if keyword in ("const", "enum"):
        return _not_among(value if keyword == "enum" and isinstance(value, list) else [value])
    if keyword == "allOf" and isinstance(value, list):
        return [part for schema in value for part in negated(schema)]
    if keyword == "anyOf" and isinstance(value, list):
        return [{"allOf": [{"anyOf": negated(schema) or [False]} for schema in value]}]
    if keyword == "not":
        return [value]
    raise NotExpressible


def _not_of_types(value: Json) -> list[Json]:
    others = TYPES - type_names(value)
    if "fraction" in others and "integer" not in others:  # no keyword excludes all integers
        raise NotExpressible
    names = {"number" if name == "fraction" else name for name in others}
    return [{"type": name} for name in sorted(names - ({"integer"} if "number" in names else set()))]


def _not_among(values: list[Json]) -> list[Json]:
    kinds = {value_type(value) for value in values}
    if kinds & {"object", "array"}:
        raise NotExpressible
    rest = TYPES - kinds - {"integer", "fraction"}
    options: list[Json] = [{"type": name} for name in sorted(rest)]
    if "boolean" in kinds:
        options += [{"const": flag} for flag in (False, True) if not any(value is flag for value in values)]
    if "string" in kinds:
        options.append({"type": "string", "pattern": _other_strings([v for v in values if isinstance(v, str)])})
    return options + _other_numbers(sorted({v for v in values if value_type(v) in ("integer", "fraction")}))  # type: ignore


def _other_numbers(numbers: list[float]) -> list[Json]:
    """Return schemas of the numbers between, below and above `numbers`."""
    if not numbers:
        return [{"type": "number"}]
    gaps: list[Json] = [{"type": "number", "exclusiveMaximum": numbers[0]}]
    for low, high in pairwise(numbers):
        gaps.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    return [*gaps, {"type": "number", "exclusiveMinimum": numbers[-1]}]


def _other_strings(strings: list[str]) -> str:
    """Return a pattern that matches all other strings. It has no lookaround, because llguidance does not support it."""
    if sum(map(len, strings)) > _MAX_CHARACTERS:
        raise NotExpressible
    return f"^{_other_endings(sorted({*strings}))}$"


def _other_endings(endings: list[str]) -> str:
    followers: dict[str, list[str]] = {}
    for ending in endings:
        if ending:
            followers.setdefault(ending[0], []).append(ending[1:])
    other = "[^" + "".join(map(_escaped, followers)) + "]" if followers else r"[\s\S]"
    options = [other + r"[\s\S]*"] + [_escaped(first) + _other_endings(rest) for first, rest in followers.items()]
    return "(?:" + "|".join([*options, *([] if "" in endings else [""])]) + ")"


def _escaped(character: str) -> str:
    return "\\" + character if character in r"\.+*?()|[]{}^$-&~" else character
