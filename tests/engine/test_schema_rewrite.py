"""Schemas that clients send: every output satisfies the schema, and every valid value is allowed."""

import json

import jsonschema
import numpy as np
import pytest

from jspec.bundled import PAIR
from jspec.engine import schema_rewrite
from jspec.engine.grammars import Grammars
from jspec.engine.schema_rewrite import rewritten
from jspec.text.tokenizer_file import transformers
from support.client_schemas import INTEGER, OBJECT, REFUSED, STRICTER, SUPPORTED


@pytest.fixture(scope="module")
def tokenizer():
    return transformers().AutoTokenizer.from_pretrained(PAIR / "target")


@pytest.fixture(scope="module")
def grammars(tokenizer):
    with Grammars(tokenizer, 2048) as made:
        yield made


def masks_after(constraint):
    """Return two functions: one returns the tokens allowed after a list of tokens, the other ends the process."""
    source = constraint()

    def allowed(tokens):
        source.ask(tokens, (), ())
        return np.flatnonzero(np.unpackbits(source.masks().masks[0].view(np.uint8), bitorder="little"))

    return allowed, source.close


def is_accepted(constraint, tokenizer, value):
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == text
    allowed, close = masks_after(constraint)
    try:
        return all(t in allowed(tokens[:i]) for i, t in enumerate([*tokens, tokenizer.eos_token_id]))
    finally:
        close()


def sampled(constraint, tokenizer, rng, texts, most=120):
    """Return a random output, or None if it does not end within `most` tokens."""
    allowed, close = masks_after(constraint)
    tokens = []
    try:
        while len(tokens) < most:
            choices = allowed(tokens)
            if not len(choices):
                return None
            if tokenizer.eos_token_id in choices and (len(choices) == 1 or rng.random() < 0.5 or len(tokens) > 20):
                return tokenizer.decode(tokens)
            short = [t for t in choices if texts[t] and set(texts[t]) <= set('{}[]":,01ab')]
            choices = short if short and rng.random() < 0.9 else choices
            ends = [t for t in choices if texts[t] in ('"', "}", "]", '"}', '"]', "]}")]
            choices = ends if ends and rng.random() < len(tokens) / 40 else choices
            tokens.append(int(rng.choice([t for t in choices if t != tokenizer.eos_token_id])))
        return None
    finally:
        close()


def validator(schema):
    return jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)


@pytest.mark.parametrize("name", SUPPORTED)
def test_exactly_the_valid_instances_are_accepted(grammars, tokenizer, name):
    schema, instances = SUPPORTED[name]
    constraint, oracle = grammars.json_schema(schema), validator(schema)
    expected = [oracle.is_valid(value) for value in instances]
    assert any(expected)
    assert [is_accepted(constraint, tokenizer, value) for value in instances] == expected


@pytest.mark.parametrize("name", [*SUPPORTED, *STRICTER])
def test_random_outputs_are_valid(grammars, tokenizer, name):
    schema = (SUPPORTED | STRICTER)[name][0]
    constraint, oracle, rng = grammars.json_schema(schema), validator(schema), np.random.default_rng(0)
    texts = [tokenizer.decode([t]) for t in range(2048)]
    outputs = [sampled(constraint, tokenizer, rng, texts) for _ in range(6)]
    assert any(outputs)
    for output in filter(None, outputs):
        oracle.validate(json.loads(output))


@pytest.mark.parametrize("name", STRICTER)
def test_rewritten_schema_may_exclude_valid_instances(grammars, tokenizer, name):
    schema, instance = STRICTER[name]
    assert validator(schema).is_valid(instance)
    assert not is_accepted(grammars.json_schema(schema), tokenizer, instance)


@pytest.mark.parametrize("message", REFUSED)
def test_refusal_names_keyword_and_place(grammars, message):
    with pytest.raises(ValueError) as error:
        grammars.json_schema(REFUSED[message])
    assert str(error.value).startswith(message) and str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"items": {"type": "x"}}, "b c": True}}, "Invalid type: x (at $.properties.a.items)."),
        ({"properties": {"b c": {"anyOf": [{}, {"type": "x"}]}}}, '(at $.properties["b c"].anyOf[1]).'),
        (
            OBJECT | {"properties": {"a": {"allOf": [INTEGER, {"type": "null"}]}, "b": False}, "required": ["a"]},
            "required property 'a' is unsatisfiable (at $.properties.a.allOf[0]).",
        ),
        (OBJECT | {"properties": {name: {"type": "x"} for name in "ab"}}, "Invalid type: x."),
        (INTEGER | {"minimum": 3, "maximum": 1}, "minimum (3) is greater than maximum (1)."),
    ],
)
def test_rejection_by_the_library_names_the_smallest_place(grammars, schema, message):
    with pytest.raises(ValueError) as error:
        grammars.json_schema(schema)
    assert str(error.value).endswith(message)


def test_property_has_only_one_spelling(grammars, tokenizer):
    """An escaped name would be a second spelling, and its value would evade the property's schema."""
    constraint = grammars.json_schema(OBJECT | {"properties": {"a": INTEGER}})
    allowed, close = masks_after(constraint)
    tokens = tokenizer('{"\\u0061', add_special_tokens=False)["input_ids"]
    assert not all(token in allowed(tokens[:i]) for i, token in enumerate(tokens))
    close()


def test_expansion_is_bounded(monkeypatch):
    """The rewritten form of a small schema is small, or the schema is rejected."""
    unique = {"type": "array", "uniqueItems": True, "items": {"enum": [*range(5)]}}
    assert len(json.dumps(rewritten(unique))) < 100_000
    with pytest.raises(ValueError, match=r"\$\.properties\.b has uniqueItems"):
        rewritten({"properties": {"a": unique, "b": unique}})
    branches = [{"required": [f"a{i}"]} for i in range(60)]
    with pytest.raises(ValueError, match=r"\$\.properties\.p[0-9]+ has oneOf"):
        rewritten({"properties": {f"p{i}": {"oneOf": branches} for i in range(40)}})
    with pytest.raises(ValueError, match="has oneOf"):
        rewritten({"oneOf": [{"pattern": f"a{i}"} for i in range(400)]})
    monkeypatch.setattr(schema_rewrite, "MAX_VALUES", 60)
    with pytest.raises(ValueError, match="needs more than 60 parts to be enforced"):
        rewritten({"oneOf": branches[:8]})
