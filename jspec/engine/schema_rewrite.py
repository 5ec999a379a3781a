"""Rewrites of JSON schemas into the keywords that llguidance enforces.

Each value that satisfies the rewritten schema satisfies the original. Keywords that cannot be enforced are rejected.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import ClassVar, cast

from jspec.core.types import Json
from jspec.engine.schema_limits import MAX_VALUES, anchors, floors_of_fractions, resolved
from jspec.engine.schema_negation import NotExpressible, negated
from jspec.engine.schema_overlap import Node, Overlap
from jspec.engine.schema_patterns import without_nul
from jspec.engine.schema_references import Variants, recursive_references
from jspec.engine.schema_unions import disjoint_branches
from jspec.engine.schema_values import (
    allowed_names,
    as_integer,
    at_least,
    at_most,
    check_literal,
    distinct_arrays,
    inner_bound,
    with_names,
)

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # llguidance's
)
# An option of llguidance. Without \\u escapes, each string has one spelling. Otherwise, a property's name could be
# spelled differently, and its value would evade the property's schema.
ONE_SPELLING: dict[str, Json] = {"json_allowed_escapes": 'nrbtf\\"'}
_MAX_ARRAYS = 400
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KEPT = ("type", "required", "pattern", "multipleOf")
_REJECTED = {
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "divisibleBy": "use multipleOf",
    "disallow": "list the allowed types with type",
    "extends": "use allOf",
}
_Dict = dict[str, Json]


def rewritten(schema: Mapping[str, Json]) -> _Dict:
    """Return a schema that llguidance enforces completely. All its values satisfy `schema`.

    Annotations, unknown keywords and unknown formats are left out, as the specification allows. The two schemas have
    the same values, except in these cases, where the rewritten schema has fewer:

    - Branches of a ``oneOf`` that may overlap require the property that ``discriminator`` names, or exclude a property
      that another branch requires.
    - Bounds above 2^53 move inwards, and so do exclusive bounds next to a fraction, such as 2 next to 2.5. They move to
      the next number, or from 0 by 1e-30.
    - Keywords are enforced even if ``$schema`` names a draft that lacks them.

    Args:
        schema: a JSON schema. References to other documents are rejected.

    Raises:
        ValueError: a keyword cannot be enforced. The message names the keyword and its place.
    """
    return _Rewriter(schema).document()


class _Rewriter:
    """A rewriter of one document. Each target of a reference is rewritten once, under a name in ``$defs``."""

    def __init__(self, root: Mapping[str, Json]):
        self._root = root
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []
        self._overlap = Overlap(self._target)
        self._arrays_left, self._nodes_left = _MAX_ARRAYS, MAX_VALUES
        self._anchors, self._floors = anchors(root), floors_of_fractions(root)
        self._recursive, self._variants = recursive_references(root, self._target), Variants()

    def document(self) -> _Dict:
        """Return the rewritten root, with the rewritten targets of all reachable references."""
        document = self._node(self._root, "$")
        definitions: _Dict = {}
        while self._waiting:
            reference = self._waiting.pop()
            definitions[self._names[reference]] = self.schema(self._target(reference), _reference_path(reference))
        bodies = {"#": document} | {f"#/$defs/{name}": body for name, body in definitions.items()}
        definitions |= self._variants.definitions(bodies)
        return document | ({"$defs": definitions} if definitions else {})

    def schema(self, schema: Json, path: str) -> Json:
        """Return the rewritten form of the schema at `path`."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"{path} is not a schema; expected an object, true or false.")
        return self._node(schema, path)

    def _node(self, node: Node, path: str) -> _Dict:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise ValueError(f"The schema needs more than {MAX_VALUES} parts to be enforced; simplify {path}.")
        out: _Dict = {}
        more: list[Json] = []  # further schemas that the value must satisfy
        for keyword in node:
            if keyword in _REJECTED:
                raise unenforceable(path, keyword, _REJECTED[keyword])
            if keyword in self._HANDLERS:
                more += self._HANDLERS[keyword](self, keyword, node, path, out)
        if more:
            out["allOf"] = [*cast("list[Json]", out.get("allOf", [])), *more]
        return self._variants.separated(out)

    def _target(self, reference: str) -> Json:
        if reference.startswith("#") and not reference.startswith("#/") and len(reference) > 1:
            return self._anchors.get(reference[1:])
        return resolved(self._root, reference) if reference.startswith("#") else None

    # Each handler adds a keyword's equivalent to `out`, or returns further schemas that the value must satisfy.

    def _ref(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        reference = node["$ref"]
        if not isinstance(reference, str) or self._target(reference) is None:
            raise unenforceable(
                path, f"$ref {json.dumps(reference)}", "refer to a part of this schema, such as #/$defs/name"
            )
        if reference != "#" and reference not in self._names:
            stem = re.sub(r"\W", "_", reference.rpartition("/")[2].lstrip("#"), flags=re.ASCII)[:40]
            self._names[reference] = f"{stem}_{len(self._names)}"
            self._waiting.append(reference)
        out["$ref"] = "#" if reference == "#" else f"#/$defs/{self._names[reference]}"
        if reference in self._recursive:
            self._variants.recursive.add(str(out["$ref"]))
        return []

    def _id(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        if path != "$" and '"$ref"' in json.dumps(node):
            raise unenforceable(path, "$id above a $ref", "leave $id out, and refer to parts from the root")
        return []

    def _keep(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        value = node[keyword]
        out[keyword] = without_nul(value) if keyword == "pattern" and isinstance(value, str) else value
        return []

    def _bound(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        exclusive, value = f"exclusive{keyword.capitalize()}", node[keyword]
        if not (keyword.startswith("exclusive") and isinstance(value, bool)):  # a flag for the other keyword in draft 4
            keyword = exclusive if node.get(exclusive) is True else keyword
            out[keyword] = inner_bound(keyword, value, self._floors, path)
        return []

    def _literal(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        check_literal(node[keyword], f"{path}.{keyword}")
        out[keyword] = node[keyword]
        return []

    def _count(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        out[keyword] = as_integer(node[keyword])
        return []

    def _format(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        if isinstance(name := node["format"], str) and name in FORMATS:
            out["format"] = name
        return []

    def _subschema_map(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        given = node[keyword]
        if not isinstance(given, Mapping):
            raise ValueError(f"{path}.{keyword} is not an object; expected an object of schemas.")
        parts = {name: self.schema(part, _child_path(f"{path}.{keyword}", name)) for name, part in given.items()}
        out[keyword] = parts if keyword == "properties" else {without_nul(name): parts[name] for name in parts}
        return []

    def _subschema(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        out[keyword] = self.schema(node[keyword], f"{path}.{keyword}")
        return []

    def _rewritten_list(self, keyword: str, node: Node, path: str) -> list[Json]:
        given = node[keyword]
        if not isinstance(given, list) or not given:
            raise ValueError(f"{path}.{keyword} is not a list of schemas; expected at least one schema.")
        return [self.schema(part, f"{path}.{keyword}[{i}]") for i, part in enumerate(given)]

    def _subschemas(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        out[keyword] = self._rewritten_list(keyword, node, path)
        return []

    def _items(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        if "prefixItems" in node and (isinstance(node["items"], list) or _is_old(self._root.get("$schema"))):
            raise unenforceable(
                path, "prefixItems beside items of a draft before 2020-12", "leave one out, or change $schema"
            )
        if isinstance(node["items"], list):  # drafts before 2020-12
            out["prefixItems"] = self._rewritten_list("items", node, path) if node["items"] else []
            if "additionalItems" in node:
                out["items"] = self.schema(node["additionalItems"], f"{path}.additionalItems")
            return []
        return self._subschema("items", node, path, out)

    def _one_of(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        given = self._rewritten_list("oneOf", node, path)
        branches = disjoint_branches(node, self._overlap)
        if branches is None:
            raise unenforceable(path, "oneOf", "use anyOf, or a property that each branch requires with another const")
        union = {"anyOf": [self._conjunction(*pair, path) for pair in zip(given, branches, strict=True)]}
        if "anyOf" in node:
            return [union]
        out |= union
        return []

    def _conjunction(self, schema: Json, more: Json, path: str) -> Json:
        return schema if more is True else self._variants.separated({"allOf": [schema, self.schema(more, path)]})

    def _not(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        return [self._negation(node["not"], path, "not")]

    def _negation(self, schema: Json, path: str, keyword: str) -> Json:
        try:
            options = negated(schema)
        except NotExpressible:
            raise unenforceable(path, keyword, "describe the allowed values instead") from None
        return {"anyOf": [self.schema(option, f"{path}.{keyword}") for option in options]} if options else False

    def _if(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        if "then" not in node and "else" not in node:
            return []
        when = self.schema(node["if"], f"{path}.if")
        then = self.schema(node.get("then", True), f"{path}.then")
        other = self.schema(node.get("else", True), f"{path}.else")
        return [{"anyOf": [{"allOf": [when, then]}, {"allOf": [self._negation(node["if"], path, "if"), other]}]}]

    def _dependent(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        given = node[keyword]
        if not isinstance(given, Mapping) or len(given) > 6:
            raise unenforceable(path, keyword, "use at most 6 names")
        more: list[Json] = []
        for name, need in given.items():
            then = (
                {"required": need}
                if isinstance(need, list)
                else self.schema(need, _child_path(f"{path}.{keyword}", name))
            )
            more.append({"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, then]}]})
        return more

    def _contains(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        least, most = as_integer(node.get("minContains", 1)), as_integer(node.get("maxContains"))
        if least == 0 and most is None:
            return []
        if node["contains"] not in (True, {}):
            raise unenforceable(path, "contains", "use prefixItems for the item that must occur")
        return [{"minItems": least} | ({} if most is None else {"maxItems": most})]

    def _unevaluated(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        same = "additionalProperties" if keyword == "unevaluatedProperties" else "items"
        if node[keyword] in (True, {}):
            return []
        if {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "contains"} & {*node}:
            raise unenforceable(path, keyword, f"use {same} in the schema that has the properties or items")
        decides = "additionalItems" if isinstance(node.get(same), list) else same  # a list: drafts before 2020-12
        if decides not in node:
            out[same] = self.schema(node[keyword], f"{path}.{keyword}")
        return []

    def _property_names(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        given = node["propertyNames"]
        names = allowed_names(given, self._target) if given is not False else []
        if names == "":
            return []
        if isinstance(names, list):
            check_literal(names, f"{path}.propertyNames")
            return [{"properties": dict.fromkeys(names, True), "additionalProperties": False}]
        if names is None or "patternProperties" in node:
            raise unenforceable(path, "propertyNames", "use enum, const, or one pattern, and no patternProperties")
        return [{"patternProperties": {without_nul(names): True}, "additionalProperties": False}]

    def _unique_items(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        if not node["uniqueItems"]:
            return []
        arrays = distinct_arrays(node, self._overlap, self._arrays_left)
        if arrays is None:
            fix = "list the items with enum, set maxItems to 1, or leave it out"
            raise ValueError(
                f"{path} has uniqueItems, which cannot be enforced for these items, or not for this many; {fix}."
            )
        assert isinstance(arrays, list)
        self._arrays_left -= len(arrays)
        return [{"anyOf": arrays}] if arrays else []

    def _min_properties(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        return _counted(at_least(with_names(node, self._target)), "minProperties", path, out)

    def _max_properties(self, keyword: str, node: Node, path: str, out: _Dict) -> list[Json]:
        return _counted(at_most(with_names(node, self._target)), "maxProperties", path, out)

    _HANDLERS: ClassVar[dict[str, Callable[["_Rewriter", str, Node, str, _Dict], list[Json]]]] = {
        **dict.fromkeys(_KEPT, _keep),
        **dict.fromkeys(_BOUNDS, _bound),
        **dict.fromkeys(("const", "enum"), _literal),
        **dict.fromkeys(_COUNTS, _count),
        **dict.fromkeys(("properties", "patternProperties"), _subschema_map),
        **dict.fromkeys(("allOf", "anyOf", "prefixItems"), _subschemas),
        **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _dependent),
        **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _unevaluated),
        "additionalProperties": _subschema,
        "$ref": _ref,
        "$id": _id,
        "format": _format,
        "items": _items,
        "oneOf": _one_of,
        "not": _not,
        "if": _if,
        "contains": _contains,
        "propertyNames": _property_names,
        "uniqueItems": _unique_items,
        "minProperties": _min_properties,
        "maxProperties": _max_properties,
    }


def _counted(options: Json, keyword: str, path: str, out: _Dict) -> list[Json]:
    """Add a limit on the number of properties to `out`, or return schemas that enforce it."""
    if options is None:
        raise unenforceable(path, keyword, "name enough properties with required, or set additionalProperties to false")
    if isinstance(options, list):
        return [{"anyOf": options}] if options else []
    out[keyword] = options
    return []


def unenforceable(path: str, what: str, fix: str) -> ValueError:
    """Return the error for a keyword that cannot be enforced."""
    return ValueError(f"{path} has {what}, which cannot be enforced here; {fix}.")


def _child_path(path: str, name: str) -> str:
    return f"{path}.{name}" if re.fullmatch(r"\w{1,40}", name) else f"{path}[{json.dumps(name[:40])}]"


def _reference_path(reference: str) -> str:
    return "$" + reference[1:].replace("/", ".")[:200] if reference.startswith("#/") else reference[:200]


def _is_old(draft: Json) -> bool:
    return isinstance(draft, str) and re.search("draft(-0|/2019)", draft) is not None
