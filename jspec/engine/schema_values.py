"""Rewrites of single keywords: numbers, counts of properties, names of properties and distinct items."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from typing import cast

from jspec.core.types import Json
from jspec.engine.schema_overlap import ANNOTATIONS, Node, Overlap, required, type_names, value_key, values_of

MAX_COMBINATIONS = 100
_NAME_KEYWORDS = ANNOTATIONS | {"type", "enum", "const", "pattern", "minLength", "maxLength", "$ref", "allOf"}
_EXACT = 2**53  # llguidance reads numbers as float64
_LARGEST = 2**63 - 1024  # llguidance writes integers below 2^63
_SMALLEST = 1e-30  # used as the number next to 0: llguidance rejects the true one, which has too many digits
NOT_OBJECTS: Json = {"type": ["null", "boolean", "number", "string", "array"]}
_NOT_ARRAYS: Json = {"type": ["null", "boolean", "number", "string", "object"]}


def as_integer(value: Json) -> Json:
    """Return a number such as 3.0 as an integer, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def inner_bound(keyword: str, value: Json, floors: Collection[int], path: str) -> Json:
    """Return a bound of a number, and any other value unchanged. The bound moves inwards if llguidance needs it.

    A bound moves if llguidance would round it outwards, or if it is exclusive, an integer, and next to one of the
    fractions with the given `floors`. In the range from 2 (exclusive) to 2.5, for example, llguidance allows 2.

    Raises:
        ValueError: all numbers within the bound are beyond 2^63.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        return value
    is_above, is_exclusive = keyword in ("maximum", "exclusiveMaximum"), keyword.startswith("exclusive")
    inwards = -math.inf if is_above else math.inf
    if abs(value) < _EXACT:
        if not is_exclusive or value != math.floor(value) or value - is_above not in floors:
            return value
        return math.nextafter(value, inwards) if value else math.copysign(_SMALLEST, inwards)
    if (value < -_LARGEST) if is_above else (value > _LARGEST):
        raise ValueError(f"{path} has {keyword} {str(value)[:40]}; expected a bound that numbers below 2^63 satisfy.")

    def is_inside(number: Decimal) -> bool:
        return (number < value if is_above else number > value) or (number == value and not is_exclusive)

    bound = float(min(value, _LARGEST) if is_above else max(value, -_LARGEST))
    while not (is_inside(Decimal(bound)) and is_inside(Decimal(repr(bound)))):  # llguidance uses either, by type
        bound = math.nextafter(bound, inwards)
    return int(bound)


def check_literal(value: Json, path: str) -> None:
    """Check that a value of const or enum can be written exactly.

    Raises:
        ValueError: an integer needs more than 53 bits, or a string has a control character without a short escape.
    """
    if isinstance(value, int) and abs(value) > _EXACT:
        raise ValueError(f"{path} has the integer {str(value)[:40]}; expected at most 2^53; use a string instead.")
    if isinstance(value, str) and any((c < " " and c not in "\b\f\n\r\t") or c == "\x7f" for c in value):
        raise ValueError(
            f"{path} has a string with a control character, which the grammar library cannot write; leave it out."
        )
    if isinstance(value, Mapping):
        for item in value.values():
            check_literal(item, path)
    elif isinstance(value, list):
        for item in value:
            check_literal(item, path)


def with_names(node: Node, resolve: Callable[[str], Json]) -> Node:
    """Return a node that lists all properties, if its ``propertyNames`` allows only certain names."""
    names = allowed_names(node["propertyNames"], resolve) if "propertyNames" in node else None
    if not isinstance(names, list) or "patternProperties" in node:
        return node
    given = node.get("properties")
    known = given if isinstance(given, Mapping) else cast(Node, {})
    return {**node, "properties": {name: known.get(name, True) for name in names}, "additionalProperties": False}


def at_least(node: Node) -> Json:
    """Return alternative schemas that enforce minProperties, the number itself if that suffices, or None.

    None means that it cannot be enforced: names beyond ``properties`` may repeat in the output, and then count only
    once. An empty list means that the number has no effect.
    """
    least, needed = as_integer(node["minProperties"]), required([node])
    if not isinstance(least, int):
        return least
    optional, missing = _optional(node, needed), least - len(needed)
    if missing <= 0:
        return []
    if missing > 1 and not _is_closed(node):
        return None
    if not optional or missing > len(optional):
        return least
    sets = _combinations(optional, missing)
    if sets is None:
        return None
    none: Json = {"properties": dict.fromkeys(optional, False), "minProperties": least}
    return [NOT_OBJECTS, *({"required": [*names]} for names in sets), *([] if _is_closed(node) else [none])]


def at_most(node: Node) -> Json:
    """Return alternative schemas that enforce maxProperties, the number itself if that suffices, or None.

    None means that it cannot be enforced. An empty list means that the number has no effect.
    """
    most, needed = as_integer(node["maxProperties"]), required([node])
    optional = _optional(node, needed)
    if not isinstance(most, int) or not optional or most < len(needed):
        return most
    remaining, is_closed = most - len(needed), _is_closed(node)
    if is_closed and remaining >= len(optional):
        return []
    sets = _combinations(optional, remaining) if is_closed or remaining == 0 else None
    if sets is None:
        return None
    absent = [dict.fromkeys((name for name in optional if name not in names), False) for names in sets]
    return [{"properties": names} | ({} if is_closed else {"maxProperties": most}) for names in absent]


def _optional(node: Node, needed: Mapping[str, None]) -> list[str]:
    given = node.get("properties")
    return [n for n, s in given.items() if n not in needed and s is not False] if isinstance(given, Mapping) else []


def _is_closed(node: Node) -> bool:
    return node.get("additionalProperties") is False and not node.get("patternProperties")


def _combinations(names: Sequence[str], count: int) -> list[tuple[str, ...]] | None:
    return [*combinations(names, count)] if math.comb(len(names), count) <= MAX_COMBINATIONS else None


def allowed_names(schema: Json, resolve: Callable[[str], Json]) -> list[str] | str | None:
    """Return the strings that satisfy a schema, as a list or as a pattern; None if neither is possible.

    An empty pattern matches all strings.
    """
    nodes = _conjuncts(schema, resolve)
    if nodes is None or not all("string" in type_names(node.get("type")) for node in nodes):
        return None
    patterns = {str(node["pattern"]) for node in nodes if "pattern" in node}
    limits: set[tuple[int, int | None]] = set()
    for node in nodes:
        least, most = as_integer(node.get("minLength", 0)), as_integer(node.get("maxLength"))
        if not isinstance(least, int) or not (isinstance(most, int) or "maxLength" not in node):
            return None
        limits.add((least, cast("int | None", most)))
    limits.discard((0, None))
    if any("enum" in node or "const" in node for node in nodes):
        return None if patterns else [value for value in values_of(tuple(nodes)) or [] if isinstance(value, str)]
    if limits:
        least, most = limits.pop()
        patterns.add(f"^[\\s\\S]{{{least},{'' if most is None else most}}}$")
    return None if limits or len(patterns) > 1 else "".join(patterns)


def _conjuncts(schema: Json, resolve: Callable[[str], Json]) -> list[Node] | None:
    """Return nodes that all apply to the same values, or None if they have keywords that do not apply to names."""
    nodes: list[Node] = []
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if node is True:
            continue
        if not isinstance(node, Mapping) or {*node} - _NAME_KEYWORDS or len(nodes) > 20:
            return None
        nodes.append(node)
        if isinstance(parts := node.get("allOf"), list):
            waiting.extend(parts)
        if isinstance(name := node.get("$ref"), str):
            waiting.append(resolve(name))
    return nodes


def distinct_arrays(node: Node, overlap: Overlap, most_arrays: int) -> Json:
    """Return schemas of all arrays with distinct items, or None if there are too many.

    More than `most_arrays` arrays are too many. An empty list means that the keyword has no effect.
    """
    most = as_integer(node.get("maxItems"))
    items = node.get("items", True)
    first = items if isinstance(items, list) else node.get("prefixItems", [])
    rest = node.get("additionalItems", True) if isinstance(items, list) else items
    if not isinstance(first, list):
        return None
    limit = min(most if isinstance(most, int) else math.inf, len(first) if rest is False else math.inf)
    if limit <= 1 or "array" not in overlap.types(node):
        return []
    least = as_integer(node.get("minItems", 0))
    values = [overlap.finite_values(schema) for schema in [*first, rest][: int(min(limit, len(first) + 1))]]
    if any(options is None for options in values) or not isinstance(least, int):
        return None
    arrays: list[Json] = []
    waiting: list[list[Json]] = [[]]
    seen = 0
    while waiting:
        array = waiting.pop()
        seen += 1
        if len(arrays) >= most_arrays or seen > 4 * most_arrays:
            return None
        if len(array) >= least:
            arrays.append(_exactly(array))
        if len(array) < limit:
            keys = {value_key(value) for value in array}
            options = values[min(len(array), len(values) - 1)] or []
            waiting.extend([*array, value] for value in options if value_key(value) not in keys)
    return [_NOT_ARRAYS, *arrays]


def _exactly(array: Sequence[Json]) -> Json:
    count, items = len(array), [{"const": value} for value in array]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": count, "maxItems": count}
