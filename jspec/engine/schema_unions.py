"""Rewrites of ``oneOf``: branches that no value satisfies together."""

import math
from collections.abc import Mapping, Sequence

from jspec.core.types import Json
from jspec.engine.schema_negation import NotExpressible, negated
from jspec.engine.schema_overlap import Node, Overlap, required

_MAX_BRANCHES = 100
_MAX_OPTIONS = 64
_MAX_NEGATION = 16


def disjoint_branches(node: Node, overlap: Overlap) -> list[Json] | None:
    """Return a schema to add to each branch of ``oneOf`` so that all are disjoint, or None if that is not possible.

    Branches that are already disjoint get the schema True, which adds nothing.
    """
    branches = node["oneOf"]
    assert isinstance(branches, list)
    rest: Json = {keyword: value for keyword, value in node.items() if keyword != "oneOf"}
    count = len(branches)
    if count > _MAX_BRANCHES or overlap.is_exhausted:
        return None
    pairs = [(i, j) for j in range(count) for i in range(j) if not overlap.is_empty(rest, branches[i], branches[j])]
    tag = _tag(node)
    if tag and all(overlap.is_empty(rest, branches[i], branches[j], tag) for i, j in pairs):
        overlapping = {i for pair in pairs for i in pair}
        return [tag if i in overlapping else True for i in range(count)]
    exclusions: list[list[Sequence[Json]]] = [[] for _ in branches]
    for i, j in pairs:
        for branch, other in ((i, j), (j, i)):
            exclusions[branch].append(_exclusion(branches[branch], branches[other], overlap))
            if not 0 < math.prod(map(len, exclusions[branch])) <= _MAX_OPTIONS:
                return None
    return [{"allOf": [{"anyOf": options} for options in groups]} if groups else True for groups in exclusions]


def _tag(node: Node) -> Json:
    """Return a schema that requires the property that ``discriminator`` names, or None if there is none."""
    given = node.get("discriminator")
    name = given.get("propertyName") if isinstance(given, Mapping) else None
    return {"type": "object", "required": [name]} if isinstance(name, str) else None


def _exclusion(branch: Json, other: Json, overlap: Overlap) -> Sequence[Json]:
    """Return schemas whose values do not satisfy `other`, or an empty list if there are none.

    If `other` has no supported negation, the schemas exclude a property that `other` requires and `branch` does not.
    """
    while isinstance(other, Mapping) and {*other} == {"$ref"} and isinstance(name := other["$ref"], str):
        other = overlap.resolve(name)
    try:
        if len(exact := negated(other)) <= _MAX_NEGATION:
            return exact or [False]
    except NotExpressible:
        pass
    needs = [required(nodes) for nodes in overlap.alternatives(other)]
    present = [required(nodes) for nodes in overlap.alternatives(branch)]
    names = [name for name in needs[0] if all(name in properties for properties in needs)] if needs else []
    names = [name for name in names if not any(name in properties for properties in present)]
    options: Sequence[Json] = [{"type": "object", "properties": {name: False}} for name in names[:8]]
    if not options:
        return []
    types = overlap.types(branch) - overlap.types(other) - {"object"}
    plain = sorted(types - {"integer", "fraction"})
    plain += ["number"] if {"integer", "fraction"} <= types else []
    return [*options, *({"type": name} for name in plain)]
