"""Proofs about JSON schemas: that no value satisfies two of them, or that only a few values satisfy one.

The proofs are sound but incomplete: a true claim may remain unproved.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TypeAlias

from jspec.core.types import Json

Node: TypeAlias = Mapping[str, Json]
Nodes: TypeAlias = tuple[Node, ...]
# A number is either of the type "integer" (1 and 1.0) or of the type "fraction".
TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "$comment"})
_MAX_ALTERNATIVES = 64
_MAX_INTEGERS = 100
_MAX_STEPS = 50_000
_MAX_DEPTH = 12


def type_names(given: Json) -> frozenset[str]:
    """Return the members of `TYPES` that the value of the keyword ``type`` allows."""
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else [*TYPES]
    types = frozenset(name for name in names if isinstance(name, str))
    return TYPES & (types | {"integer", "fraction"} if "number" in types else types)


def value_type(value: Json) -> str:
    """Return the member of `TYPES` that a value belongs to."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if math.isfinite(value) and value == math.floor(value) else "fraction"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def value_key(value: Json) -> object:
    """Return a hashable key. Two values have the same key if and only if they are equal in JSON Schema."""
    if isinstance(value, Mapping):
        return ("object", frozenset((name, value_key(item)) for name, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(value_key, value)))
    return ("number" if value_type(value) in ("integer", "fraction") else value_type(value), value)


def required(nodes: Sequence[Node]) -> dict[str, None]:
    """Return the properties that `nodes` require, in order."""
    lists = (names for node in nodes if isinstance(names := node.get("required"), list))
    return dict.fromkeys(name for names in lists for name in names if isinstance(name, str))


class Overlap:
    """A prover for the parts of one schema. The number of steps is limited.

    Args:
        resolve: a function that returns the part of the schema that a ``$ref`` names.
    """

    def __init__(self, resolve: Callable[[str], Json]):
        self.resolve = resolve
        self._steps = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether no steps are left. All further proofs then fail."""
        return self._steps > _MAX_STEPS

    def is_empty(self, *schemas: Json) -> bool:
        """Return True if it can be proved that no value satisfies all of `schemas`."""
        return self._all_empty(self.alternatives({"allOf": [*schemas]}), _MAX_DEPTH)

    def alternatives(self, schema: Json, depth: int = _MAX_DEPTH) -> list[Nodes]:
        """Return lists of nodes. Each value that satisfies `schema` satisfies all nodes of at least one list.

        The nodes' own ``$ref``, ``allOf``, ``anyOf`` and ``oneOf`` are already expanded.
        """
        self._steps += 1
        if schema is False:
            return []
        if not isinstance(schema, Mapping) or depth == 0 or self.is_exhausted:
            return [()]
        options: list[Nodes] = [(schema,)]
        groups = [[part] for part in _list(schema, "allOf")]
        if isinstance(name := schema.get("$ref"), str):
            groups.append([self.resolve(name)])
        groups += [parts for keyword in ("anyOf", "oneOf") if (parts := _list(schema, keyword))]
        for group in groups:
            further = [nodes for part in group for nodes in self.alternatives(part, depth - 1)]
            if len(options) * len(further) <= _MAX_ALTERNATIVES:  # otherwise, skip the group, which allows more values
                options = [left + right for left, right in product(options, further)]
        return options

    def finite_values(self, schema: Json) -> list[Json] | None:
        """Return a list that contains all values that satisfy `schema`, or None if no such list is known."""
        values: dict[object, Json] = {}
        for nodes in self.alternatives(schema):
            node_values = values_of(nodes)
            if node_values is None:
                return None
            values |= {value_key(value): value for value in node_values}
        return [*values.values()]

    def types(self, schema: Json) -> frozenset[str]:
        """Return a superset of the types of the values that satisfy `schema`."""
        return frozenset(name for nodes in self.alternatives(schema) for name in _types(nodes))

    def _all_empty(self, options: Sequence[Nodes], depth: int) -> bool:
        return all(self._is_empty(nodes, depth) for nodes in options)

    def _is_empty(self, nodes: Nodes, depth: int) -> bool:
        self._steps += 1
        if depth == 0 or self.is_exhausted:
            return False
        values = values_of(nodes)
        if values is not None:
            return not values
        return all(self._is_type_empty(kind, nodes, depth) for kind in _types(nodes))

    def _is_type_empty(self, kind: str, nodes: Nodes, depth: int) -> bool:
        if kind == "string":
            return _largest(nodes, "minLength") > _smallest(nodes, "maxLength")
        if kind in ("integer", "fraction"):
            return not _range_holds(nodes)
        if kind == "array":
            return _largest(nodes, "minItems") > _smallest(nodes, "maxItems") or any(
                self._all_empty(self.alternatives({"allOf": _item_schemas(nodes, i)}, depth - 1), depth - 1)
                for i in range(int(min(_largest(nodes, "minItems"), 8)))
            )
        return kind == "object" and any(
            self._all_empty(self.alternatives({"allOf": _property_schemas(nodes, name)}, depth - 1), depth - 1)
            for name in required(nodes)
        )


def _list(node: Node, keyword: str) -> list[Json]:
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def _types(nodes: Nodes) -> frozenset[str]:
    return TYPES.intersection(*(type_names(node.get("type")) for node in nodes))


def values_of(nodes: Nodes) -> list[Json] | None:
    """Return a list that contains all values that satisfy `nodes`, or None if no such list is known."""
    lists: list[list[Json]] = [[node["const"]] for node in nodes if "const" in node]
    lists += [values for node in nodes if isinstance(values := node.get("enum"), list)]
    types = _types(nodes)
    if types <= {"null", "boolean"}:
        lists.append([None, False, True])
    low, high = _lowest(nodes)[0], _highest(nodes)[0]
    if types <= {"integer"} and high - low < _MAX_INTEGERS:
        lists.append([*range(math.ceil(low), math.floor(high) + 1)])
    if not lists:
        return None
    keys = [{value_key(value) for value in values} for values in lists]
    common = {key: value for value in lists[0] if all((key := value_key(value)) in allowed for allowed in keys)}
    return [value for value in common.values() if value_type(value) in types and _is_within(nodes, value)]


def _is_within(nodes: Nodes, value: Json) -> bool:
    """Return whether a value is within the nodes' limits on length and size."""
    if isinstance(value, str):
        return _largest(nodes, "minLength") <= len(value) <= _smallest(nodes, "maxLength")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _range_holds((*nodes, {"minimum": value, "maximum": value}))
    return True


def _numbers(nodes: Nodes, keyword: str) -> list[float]:
    return [v for node in nodes if isinstance(v := node.get(keyword), int | float) and not isinstance(v, bool)]


def _largest(nodes: Nodes, keyword: str) -> float:
    return max(_numbers(nodes, keyword), default=0)


def _smallest(nodes: Nodes, keyword: str) -> float:
    return min(_numbers(nodes, keyword), default=math.inf)


def _lowest(nodes: Nodes) -> tuple[float, bool]:
    """Return the lower bound of a number, and whether it is exclusive."""
    bounds = [(v, False) for v in _numbers(nodes, "minimum")] + [(v, True) for v in _numbers(nodes, "exclusiveMinimum")]
    return max(bounds, default=(-math.inf, False))


def _highest(nodes: Nodes) -> tuple[float, bool]:
    """Return the upper bound of a number, and whether it is exclusive."""
    bounds = [(v, False) for v in _numbers(nodes, "maximum")] + [(v, True) for v in _numbers(nodes, "exclusiveMaximum")]
    return min(bounds, key=lambda bound: (bound[0], not bound[1]), default=(math.inf, False))


def _range_holds(nodes: Nodes) -> bool:
    (low, is_above), (high, is_below) = _lowest(nodes), _highest(nodes)
    return low < high or (low == high and not is_above and not is_below)


def _item_schemas(nodes: Nodes, i: int) -> list[Json]:
    """Return the schemas that item `i` of an array must satisfy."""
    schemas: list[Json] = []
    for node in nodes:
        items = node.get("items")
        first = items if isinstance(items, list) else _list(node, "prefixItems")
        rest = node.get("additionalItems", True) if isinstance(items, list) else node.get("items", True)
        schemas.append(first[i] if i < len(first) else rest)
    return schemas


def _property_schemas(nodes: Nodes, name: str) -> list[Json]:
    """Return schemas that property `name` of an object must satisfy."""
    schemas: list[Json] = []
    for node in nodes:
        properties = node.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            schemas.append(properties[name])
        elif "additionalProperties" in node and not node.get("patternProperties"):
            schemas.append(node["additionalProperties"])
    return schemas
