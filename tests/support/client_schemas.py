"""Schemas that pydantic, zod, OpenAI's strict mode and tools write, and others for every keyword."""

import enum
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Literal
from uuid import UUID

import pydantic
from pydantic import BaseModel, Field


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str | None = None


class Pet(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Left(BaseModel):
    kind: Literal["left"] = "left"
    left: int = 0


class Right(BaseModel):
    kind: Literal["right"] = "right"
    left: str = ""


class Named(BaseModel):
    one: Annotated[Left | Right, Field(discriminator="kind")]


class Node(BaseModel):
    value: int
    children: list["Node"] = []


class Leaf(BaseModel):
    kind: Literal["leaf"] = "leaf"
    value: int


class Branch(BaseModel):
    kind: Literal["branch"] = "branch"
    left: Annotated["Leaf | Branch", Field(discriminator="kind")]


class Scalars(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    at: datetime
    day: date
    uid: UUID
    price: Decimal = Decimal(1)
    code: str = Field("AA", pattern="^[A-Z]{2}$")
    size: int = Field(1, ge=0, lt=10)


class Containers(BaseModel):
    counts: dict[Color, int]
    pair: tuple[int, str] | None = None
    colors: set[Color] = Field(default_factory=set)


NOW = {"at": "2024-02-03T04:05:06Z", "day": "2024-02-03", "uid": "12345678-1234-1234-1234-123456789abc"}
OBJECT = {"type": "object"}
INTEGER = {"type": "integer"}
CLOSED = {"type": "object", "additionalProperties": False}
ABC = {name: INTEGER for name in "abc"}
KIND = {"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "v": INTEGER}, "required": ["k"]}
ANY = [None, True, 0, -7, 1.5, "", "a", [], [1], {}, {"a": 1}]
NAMES = [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, {"d": 1}, {"c": 3, "d": 1}]
# For each schema, instances of which some satisfy it and some do not. The oracle decides which.
SUPPORTED = {
    "pydantic union": (Pet.model_json_schema(), [{"pet": {"kind": "cat"}}, {"pet": {"kind": "dog", "name": None}}, {}]),
    "pydantic defaults": (Named.model_json_schema(), [{"one": {"kind": "left", "left": 1}}, {"one": {}}, {}]),
    "pydantic recursion": (Node.model_json_schema(), [{"value": 1, "children": [{"value": 2}]}, {"value": "x"}]),
    "pydantic scalars": (Scalars.model_json_schema(), [NOW, NOW | {"code": "AB"}, NOW | {"code": "x"}, {"at": 3}]),
    "pydantic containers": (
        Containers.model_json_schema(),
        [
            {"counts": {"red": 1}, "pair": [1, "x"], "colors": ["red", "blue"]},
            {"counts": {"green": 1}},
            {"counts": {}, "colors": ["red", "red"]},
            {"counts": {}, "pair": ["x", 1]},
        ],
    ),
    "strict mode": (
        {
            "type": "object",
            "properties": {"a": {"type": ["string", "null"], "description": "x"}, "b": {"enum": ["u", "v"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "strict": True,
        },
        [{"a": None, "b": "u"}, {"a": "x", "b": "w"}, {"a": "x"}],
    ),
    "zod record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
        [{"q": 1}, {"q": "x"}],
    ),
    "zod tuple in draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [INTEGER, {"type": "string"}],
            "additionalItems": False,
            "minItems": 2,
        },
        [[1, "a"], [1], [1, "a", 2], ["a", 1]],
    ),
    "tool": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.org/tool",
            "title": "tool",
            "type": "object",
            "properties": {"path": {"type": "string", "format": "path", "examples": ["a"], "x-order": 1}},
            "required": ["path"],
        },
        [{"path": "a/b"}, {"path": 1}, {}],
    ),
    "never": ({"anyOf": [INTEGER, {"not": {}}]}, ANY),
    "type": ({"type": ["string", "null"]}, ANY),
    "nullable is an annotation": ({"type": "string", "nullable": True}, ANY),
    "unknown format": ({"type": "string", "format": "binary"}, ["x", 1]),
    "format that is not a string": ({"type": "string", "format": {}}, ["x", 1]),
    "library options": ({"x-guidance": {"lenient": True}, "type": "object", "properties": {"a": INTEGER}}, NAMES),
    "const": ({"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}, {"a": [1]}]),
    "large bounds": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -5, 2**63, 2**70, 1.5]),
    "bounds": ({"type": "number", "exclusiveMinimum": 0, "maximum": 3.5}, [0, 0.5, 3.5, 3.6]),
    "bound next to a fraction": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.25}, [0, 0.1, 0.25, 0.3, -1]),
    "bound next to a fraction elsewhere": (
        {"type": "number", "exclusiveMinimum": 2, "allOf": [{"exclusiveMaximum": 2.5}]},
        [2, 2.1, 2.5, 3],
    ),
    "upper bound next to a fraction": (
        {"type": "number", "minimum": -2.5, "exclusiveMaximum": -2},
        [-2, -2.1, -2.5, -3],
    ),
    "upper bound of 0 next to a fraction": ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, [0, -0.1, -1]),
    "bounds of draft 4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "number",
            "minimum": 2,
            "exclusiveMinimum": True,
            "maximum": 2.5,
            "exclusiveMaximum": False,
        },
        [2, 2.1, 2.5, 3],
    ),
    "exclusive bound of 2^53": ({"type": "integer", "exclusiveMinimum": 2**53}, [0, 2**53, 2**53 + 9]),
    "exclusive bound of 2^60": ({"type": "integer", "exclusiveMaximum": 2**60}, [0, 2**60, 2**60 - 999]),
    "large bound of numbers": ({"type": "number", "minimum": -(2**60)}, [0, -1152921504606847000, -(2**59)]),
    "unlimited bound": ({"type": "number", "maximum": 1.7976931348623157e308}, [0, 1.5, "x"]),
    "multiples": ({"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, [4, 6, 12, 18, 24]),
    "multiple": ({"type": "integer", "multipleOf": 3}, [-6, 0, 4, 9]),
    "pattern without quotes": ({"type": "string", "pattern": '^[^"]*$'}, ["", "a", "\n", '"', 'a"', "\\", "é", "]"]),
    "pattern without backslashes": (
        {"type": "string", "pattern": "^[^\\\\\\]]+$"},
        ["a", "\n", '"', "\\", "a\\b", "]"],
    ),
    "pattern of a range": ({"type": "string", "pattern": "^[\\x00-!#-~]$"}, ["a", "\n", "!", '"', "#", "\\", "é"]),
    "pattern of escaped text": (
        {"type": "string", "pattern": '^(?:[^"\\\\]|\\\\.){1,2}$'},
        ["a", '"', '\\"', "\\", "\n", "a\\", '\\"a', 'a"'],
    ),
    "patterns of names without quotes": (
        CLOSED | {"patternProperties": {'^[^"]$': INTEGER}},
        [{"a": 1}, {'"': 1}, {"\\": 1}, {"\n": 1}, {"]": "x"}],
    ),
    "names without quotes": (OBJECT | {"propertyNames": {"pattern": '^[^"]$'}}, [{"a": 1}, {'"': 1}, {"\\": 1}]),
    "lengths": ({"type": "string", "minLength": 1.0, "maxLength": 2}, ["", "a", "é😀", "abc"]),
    "items": ({"type": "array", "prefixItems": [INTEGER], "items": False}, [[], [1], [1, 2], ["a"]]),
    "additional": (OBJECT | {"properties": {"a": INTEGER}, "additionalProperties": {"type": "string"}}, NAMES),
    "patterns of names": (CLOSED | {"patternProperties": {"^[ab]$": INTEGER}}, [*NAMES, {"a": "x"}]),
    "names enum": (OBJECT | {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER}, NAMES),
    "names const": (OBJECT | {"propertyNames": {"const": "a"}}, NAMES),
    "names reference": (OBJECT | {"$defs": {"n": {"enum": ["b"]}}, "propertyNames": {"$ref": "#/$defs/n"}}, NAMES),
    "names pattern": (OBJECT | {"propertyNames": {"pattern": "^[a-b]+$"}}, [*NAMES, {"ab": 1}]),
    "names pattern beside properties": (OBJECT | {"propertyNames": {"pattern": "[a-b]"}, "properties": ABC}, NAMES),
    "names length": (OBJECT | {"propertyNames": {"minLength": 2}}, [*NAMES, {"ab": 1}]),
    "names none": (OBJECT | {"propertyNames": False}, NAMES),
    "unique enum": (
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}, "minItems": 1},
        [[], ["a"], ["a", "b"], ["c", "b", "a"], ["a", "a"], ["a", "b", "a"]],
    ),
    "unique boolean": ({"uniqueItems": True, "items": {"type": "boolean"}}, [[], [True, False], [True, True], 3, "x"]),
    "unique numbers": ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 1.0, True]}}, [[1, True], [1, 1]]),
    "unique range": (
        {"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 1, "maximum": 3}},
        [[3, 1, 2], [1, 1], [4]],
    ),
    "unique single": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], ["a"], [1, 2]]),
    "unique false": ({"type": "array", "uniqueItems": False, "items": INTEGER}, [[1, 1], ["a"]]),
    "one of types": ({"oneOf": [{"type": "string"}, INTEGER, {"type": "null"}]}, ANY),
    "one of ranges": ({"type": "integer", "oneOf": [{"maximum": 3}, {"minimum": 4}]}, [-1, 3, 4, 99]),
    "one of overlapping ranges": (
        {"oneOf": [{"type": "integer", "enum": [1, 2, 3]}, {"type": "integer", "enum": [3, 4]}]},
        [1, 2, 3, 4, 5],
    ),
    "one of required": (OBJECT | {"properties": ABC, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, NAMES),
    "one of three required": (
        OBJECT | {"properties": ABC, "oneOf": [{"required": [name]} for name in "abc"]},
        [*NAMES, {"b": 1, "c": 2}],
    ),
    "one of the same twice": ({"anyOf": [INTEGER, {"oneOf": [{"type": "string"}, {"type": "string"}]}]}, ANY),
    "one of closed": (
        {"oneOf": [CLOSED | {"properties": {n: INTEGER}, "required": [n]} for n in "ab"]},
        NAMES,
    ),
    "one of and any of": (
        {"anyOf": [{"type": "integer"}, {"type": "string"}], "oneOf": [{"type": "string"}, {"type": "null"}]},
        ANY,
    ),
    "not type": ({"not": {"type": ["null", "object"]}}, ANY),
    "not string": (
        {"type": "string", "not": {"enum": ["ab", "a.", ""]}},
        ["", "a", "ab", "abc", "b", "a.", "aX", "\n"],
    ),
    "not string with a quote": (
        {"type": "string", "not": {"enum": ['"', 'a"', "\\", "\\b", ""]}},
        ["", "a", '"', 'a"', '""', "\\", "\\b", "\\a", "\n"],
    ),
    "not number": ({"not": {"const": 0}}, ANY),
    "not numbers": ({"type": "number", "not": {"enum": [2, 2.5]}}, [1, 2, 2.1, 2.5, 3]),
    "not boolean": ({"not": {"const": True}}, [True, False, 1, None]),
    "not required": (OBJECT | {"properties": ABC, "not": {"required": ["a", "b"]}}, NAMES),
    "not any of": (OBJECT | {"properties": ABC, "not": {"anyOf": [{"required": ["a"]}, {"required": ["d"]}]}}, NAMES),
    "if const": (
        KIND | {"if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["v"]}},
        [{"k": "x"}, {"k": "y"}, {"k": "x", "v": 1}, {"k": "y", "v": 1}, {"v": 1}],
    ),
    "if else": (
        OBJECT
        | {"properties": ABC, "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
        [*NAMES, {"c": 1}],
    ),
    "if alone": ({"if": {"type": "string"}}, ANY),
    "dependent required": (OBJECT | {"properties": ABC, "dependentRequired": {"a": ["b"], "b": ["c"]}}, NAMES),
    "dependent schemas": (OBJECT | {"properties": ABC, "dependentSchemas": {"c": {"required": ["a"]}}}, NAMES),
    "contains any": ({"type": "array", "contains": {}, "maxContains": 2}, [[], [1], [1, 2], [1, 2, 3]]),
    "contains none": ({"type": "array", "contains": {"const": 1}, "minContains": 0}, [[], [1], [2]]),
    "at least one": (OBJECT | {"properties": ABC, "minProperties": 1}, NAMES),
    "at least two": (CLOSED | {"properties": ABC, "minProperties": 2}, NAMES),
    "at most two": (CLOSED | {"properties": ABC, "maxProperties": 2}, NAMES),
    "at most none": (OBJECT | {"properties": ABC, "maxProperties": 0}, NAMES),
    "at most one more": (OBJECT | {"properties": {"a": INTEGER}, "required": ["a"], "maxProperties": 2}, NAMES),
    "at least two of the names": (
        OBJECT | {"propertyNames": {"enum": ["a", "b", "c"]}, "additionalProperties": INTEGER, "minProperties": 2},
        NAMES,
    ),
    "at most two of the names": (OBJECT | {"propertyNames": {"enum": ["a", "b", "c"]}, "maxProperties": 2}, NAMES),
    "at most two of a few names": (OBJECT | {"propertyNames": {"enum": ["a", "b"]}, "maxProperties": 2}, NAMES),
    "unevaluated": (OBJECT | {"properties": {"a": INTEGER}, "unevaluatedProperties": False}, NAMES),
    "unevaluated items": ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, [[1], [1, 2]]),
    "unevaluated items beside a list": (
        {"$schema": "https://json-schema.org/draft/2019-09/schema", "items": [INTEGER], "unevaluatedItems": False},
        [[1], [1, 2], ["a"]],
    ),
    "reference to the root beside a keyword": (
        OBJECT | {"properties": {"x": {"$ref": "#", "required": ["y"]}}},
        [{}, {"x": {}}, {"x": {"y": 1}}, {"x": {"x": {"y": 1}, "y": 1}}, {"x": {"x": {}, "y": 1}}],
    ),
    "recursive reference beside a literal": (
        {"type": ["object", "string"], "properties": {"x": {"$ref": "#", "const": "#"}}},
        [{"x": "#"}, {"x": "a"}, {}, "a"],
    ),
    "recursive reference in allOf": (
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": OBJECT | {"properties": {"x": {"allOf": [{"required": ["y"]}, {"$ref": "#/$defs/n"}]}}}},
        },
        [{}, {"x": {}}, {"x": {"y": 1}}, {"x": {"x": {"y": 1}, "y": 1}}, {"x": {"x": {}, "y": 1}}],
    ),
    "anchor": ({"$defs": {"x": {"$anchor": "here"} | INTEGER}, "items": {"$ref": "#here"}}, [[1], ["a"]]),
    "escaped reference": ({"$defs": {"a/b%": INTEGER}, "items": {"$ref": "#/$defs/a~1b%25"}}, [[1], ["a"]]),
    "reference into oneOf": ({"items": {"$ref": "#/oneOf/0"}, "oneOf": [{"type": "array"}, INTEGER]}, [3, [[]], [3]]),
    "unused definition": ({"$defs": {"x": {"contains": {"const": 1}}}, "type": "integer"}, [1, "a"]),
    "names with quotes": (CLOSED | {"properties": {'é"\n\\': INTEGER}}, [{'é"\n\\': 1}, {'é"\n\\': "x"}]),
}
# Valid instances that the rewritten schema excludes.
STRICTER = {
    "recursive tag": (Branch.model_json_schema(), {"left": {"value": 1}}),
    "tag": (Named.model_json_schema(), {"one": {"left": 1}}),
    "required differences": (
        {
            "oneOf": [
                {"type": "object", "properties": {n: {"type": "string", "minLength": 1}}, "required": [n]} for n in "ab"
            ]
        },
        {"a": "x", "b": ""},
    ),
    "small numbers": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, 1e-31),
    "large integers": ({"type": "integer", "maximum": 2**63 - 1}, 2**63 - 1),
}
REFUSED = {
    "$.properties.tags has uniqueItems": {"properties": {"tags": {"uniqueItems": True, "items": {"type": "string"}}}},
    "$.items has uniqueItems": {"items": {"type": "array", "uniqueItems": True, "items": {"enum": [*range(9)]}}},
    "$ has oneOf": {"oneOf": [INTEGER, {"type": "number"}]},
    "$.$defs.x has oneOf": {"$ref": "#/$defs/x", "$defs": {"x": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}}},
    "$ has not": {"not": {"pattern": "a"}},
    "$ has if": {"if": {"pattern": "a"}, "then": {"pattern": "b"}},
    "$.anyOf[1] has contains": {"anyOf": [INTEGER, {"contains": {"const": 1}}]},
    "$ has minProperties": OBJECT | {"minProperties": 2},
    "$ has maxProperties": OBJECT | {"properties": ABC, "maxProperties": 2},
    "$ has propertyNames, which": {"propertyNames": {"enum": ["a"], "pattern": "b"}},
    "$.not has propertyNames": {"not": {"not": {"propertyNames": {"$ref": "#/x"}}}},
    "$ has unevaluatedProperties": {"allOf": [OBJECT], "unevaluatedProperties": False},
    "$ has propertyNames": {"propertyNames": {"pattern": "a", "minLength": 3}},
    '$.properties["a b"] has $ref "#/$defs/x"': {"properties": {"a b": {"$ref": "#/$defs/x"}}},
    '$ has $ref "https://example.org/x"': {"$ref": "https://example.org/x"},
    "$ has $dynamicRef": {"$dynamicRef": "#x"},
    "$ has $recursiveRef": {"$recursiveRef": "#"},
    "$.items has $id above a $ref": {"items": {"$id": "x", "items": {"$ref": "#"}}},
    "$ has prefixItems beside items": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "prefixItems": [{}],
        "items": {},
    },
    "$.const has the integer 9007199254740993": {"const": 2**53 + 1},
    "$.enum has a string with a control character": {"enum": [["\u0001"]]},
    "$.items has minimum 1e+30": {"items": {"type": "integer", "minimum": 1e30}},
    "$ has exclusiveMaximum -1000000000000": {"type": "integer", "exclusiveMaximum": -(10**30)},
    "The schema combines schemas": {"type": "integer", "allOf": [{"multipleOf": 70000}, {"multipleOf": 70000}]},
    "The schema combines schemas (with": {
        "multipleOf": 0.001,
        "$ref": "#/$defs/x",
        "$defs": {"x": {"multipleOf": 9999}},
    },
    "$.items is not a schema": {"items": 3},
    "$.anyOf is not a list of schemas": {"anyOf": []},
    "$ has propertyNames, which cannot": {"propertyNames": {"minLength": {}}},
    "$.items has uniqueItems, which": {"items": {"uniqueItems": True, "prefixItems": None}},
    "$.properties is not an object": {"properties": []},
}
