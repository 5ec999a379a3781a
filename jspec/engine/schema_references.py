"""Recursive references of JSON schemas, in a form that llguidance supports."""

import json
from collections.abc import Callable, Mapping

from jspec.core.types import Json
from jspec.engine.schema_limits import references_of_parts

_MAX_CHARACTERS = 1_000_000


def recursive_references(root: Json, resolve: Callable[[str], Json]) -> frozenset[str]:
    """Return the values of ``$ref`` in a schema that lead back to themselves, or to such values.

    Args:
        root: a JSON schema.
        resolve: a function that returns the part of the schema that a ``$ref`` names.
    """
    references = references_of_parts()
    following: dict[str, list[str]] = {}
    waiting = references(root)[:]
    while waiting:
        name = waiting.pop()
        if name not in following:
            following[name] = references(resolve(name))
            waiting.extend(following[name])
    users: dict[str, list[str]] = {name: [] for name in following}
    for name, others in following.items():
        for other in others:
            users[other].append(name)
    counts = {name: len(others) for name, others in following.items()}
    ends = [name for name, count in counts.items() if not count]
    while ends:
        for user in users[ends.pop()]:
            counts[user] -= 1
            if not counts[user]:
                ends.append(user)
    return frozenset(name for name, count in counts.items() if count)


class Variants:
    """Definitions for recursive references that other keywords restrict, which llguidance rejects.

    Such a reference refers to a variant instead: a copy of its target, with these keywords.

    Attributes:
        recursive: the rewritten recursive references.
    """

    def __init__(self) -> None:
        self.recursive: set[str] = set()
        self._rest: dict[tuple[str, str], dict[str, Json]] = {}
        self._names: dict[tuple[str, str], str] = {}

    def separated(self, node: dict[str, Json]) -> dict[str, Json]:
        """Return a rewritten node whose recursive reference, if any, has no keyword beside it."""
        parts = node.get("allOf")
        parts = parts if isinstance(parts, list) else []
        inner = [part["$ref"] for part in parts if isinstance(part, Mapping) and {*part} == {"$ref"}]
        name = next((name for name in (node.get("$ref"), *inner) if name in self.recursive), None)
        if not isinstance(name, str):
            return node
        rest = {
            keyword: value
            for keyword, value in node.items()
            if keyword != "allOf" and (keyword, value) != ("$ref", name)
        }
        if others := [part for part in parts if part != {"$ref": name}]:
            rest["allOf"] = others
        if not rest:
            return {"$ref": name}
        key = name, json.dumps(rest)
        self._rest[key] = rest
        return {"$ref": f"#/$defs/{self._names.setdefault(key, f'variant_{len(self._names)}')}"}

    def definitions(self, bodies: Mapping[str, Json]) -> dict[str, Json]:
        """Return the variants by name.

        Args:
            bodies: the rewritten target of each rewritten reference.

        Raises:
            ValueError: the variants are too large.
        """
        size, found = 0, dict[str, Json]()
        for (name, text), variant in self._names.items():
            body = bodies[name]
            for _ in bodies:
                if isinstance(body, Mapping) and {*body} == {"$ref"} and body["$ref"] in bodies:
                    body = bodies[str(body["$ref"])]
            size += len(json.dumps(body)) + len(text)
            if size > _MAX_CHARACTERS:
                raise ValueError("The schema has too many keywords beside recursive references ($ref); simplify it.")
            found[variant] = {"allOf": [body, self._rest[name, text]]}
        return found
