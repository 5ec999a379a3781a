"""Schema limits: values just within and just beyond each, and schemas that only look as if they exceeded one."""

import contextlib
import time

import pytest

from jspec.engine import schema_limits as limits
from jspec.engine.schema_limits import check_regex, check_schema


def chain(count):
    definitions = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count - 1)}
    return {"$defs": definitions | {f"d{count - 1}": {}}, "$ref": "#/$defs/d0"}


def nested(levels):
    schema = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


MAKERS = [
    (chain, limits.MAX_REFERENCES),
    (nested, limits.MAX_DEPTH),
    (lambda count: {"enum": [0] * (count - 2)}, limits.MAX_VALUES),
    (lambda count: {"patternProperties": {f"a{i}": True for i in range(count)}}, limits.MAX_PATTERNS),
    (lambda count: {"properties": {f"p{i}": {"pattern": "a"} for i in range(count)}}, limits.MAX_PATTERNS),
    (lambda count: {"pattern": "a" * count}, limits.MAX_PATTERN_LENGTH),
    (lambda count: {"allOf": [{"pattern": "a"}] * count}, limits.MAX_COMBINED_PATTERNS),
    (lambda count: {"items": {"multipleOf": count}}, limits.MAX_MULTIPLE),
    (lambda count: {"multipleOf": count * 1e-5}, limits.MAX_MULTIPLE),
    (lambda count: {"patternProperties": {f"a{{{count}}}": True}}, 10_000),
    (lambda count: {"properties": {f"p{i}": {"$ref": f"#/$defs/{i}"} for i in range(count)}}, limits.MAX_DEFINITIONS),
]


@pytest.mark.parametrize(("make", "most"), MAKERS)
def test_limits_are_enforced_exactly(make, most):
    check_schema(make(most))
    with pytest.raises(ValueError, match=r"^The (schema|regular expression) .*\.$"):
        check_schema(make(most + 1))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$ref": "#/$defs/none/0/x"},
        {"$ref": "https://example.org/schema"},
        {"$ref": 7},
        {"enum": [{"$ref": None}]},
        {"properties": {"pattern": {"type": "string"}, "multipleOf": {"const": 1}}},
        {"multipleOf": True},
        {"multipleOf": "x"},
        {"multipleOf": 0},
        {"multipleOf": -3.5},
        {"multipleOf": 0.01},
        {"multipleOf": 9999.5},
        {"multipleOf": 100.0},
        {"allOf": [{"multipleOf": 0.01}, {"multipleOf": 100}]},
        {"allOf": 3},
        {"allOf": [True, {}]},
        {"patternProperties": []},
        {"pattern": 3},
        {},
    ],
)
def test_schemas_within_limits_are_accepted(schema):
    check_schema(schema)


@pytest.mark.parametrize("multiple", [1e300, 10**400, 123456.5], ids=("large", "larger", "odd"))
def test_large_multiples_give_short_messages(multiple):
    with pytest.raises(ValueError, match="multiples of") as error:
        check_schema({"multipleOf": multiple})
    assert len(str(error.value)) < 200


def test_repeat_counts_are_limited_by_value_not_digits():
    with pytest.raises(ValueError, match="has a repeat count above 10000"):
        check_regex("a{" + "9" * 9000 + "}")
    check_regex("a{0000000000003}")
    check_regex("x" * limits.MAX_PATTERN_LENGTH)


def cost(monkeypatch, schema):
    """Return the number of values that `check_schema` reads."""
    read, values = [], limits._values
    monkeypatch.setattr(limits, "_values", lambda part: (read.append(0) or value for value in values(part)))
    with contextlib.suppress(ValueError):
        check_schema(schema)
    return len(read)


def test_many_references_to_large_parts_are_cheap(monkeypatch):
    """The check must be cheap because it holds Python's lock, which blocks other requests."""
    enum = list(range(40_000))
    names = {"anyOf": [{"$ref": f"x{i}#"} for i in range(900)], "enum": enum}  # all resolve to the schema itself
    assert cost(monkeypatch, names) < 3 * limits.MAX_VALUES
    levels = {"enum": enum}
    for _ in range(50):
        levels = {"not": levels}
    nested = {"anyOf": [{"$ref": "#" + "/not" * i} for i in range(1, 50)], "not": levels["not"]}
    assert cost(monkeypatch, nested) <= limits.MAX_REFERENCED_VALUES + 2 * limits.MAX_VALUES
    with pytest.raises(ValueError, match="references lead to more than 200000 values in total"):
        check_schema(nested)


def test_run_of_digits_takes_linear_time():
    """A search that tries every split of the digits would take minutes while holding Python's lock."""
    begun = time.process_time()
    for _ in range(100):
        check_regex("{" + "1" * 9_999)
    assert time.process_time() - begun < 30
