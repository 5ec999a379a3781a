"""Texts of schemas and regular expressions: valid, whatever is drafted, and the same as without a draft."""

import json
import re
from types import SimpleNamespace

import jax
import jsonschema
import numpy as np
import pytest

import jspec
from jspec.engine import Engine, Request
from jspec.engine.device import Device
from jspec.engine.grammars import Grammars

WORDS = ("name", "size", "import", "value", "x")


def schema(rng, depth=0):
    """Any JSON schema whose values are short."""
    kinds = ["integer", "boolean", "null", "enum", "string", "pattern"] + ["object", "array"] * 2 * (depth < 2)
    kind = kinds[rng.integers(len(kinds))] if depth else "object"
    if kind == "object":
        names = [str(name) for name in rng.choice(WORDS, rng.integers(1, 4), replace=False)]
        return {"type": "object", "properties": {name: schema(rng, depth + 1) for name in names},
                "required": names[: rng.integers(len(names) + 1)], "additionalProperties": False}  # fmt: skip
    return {
        "array": lambda: {"type": "array", "items": schema(rng, depth + 1), "maxItems": int(rng.integers(1, 4))},
        "integer": lambda: {"type": "integer", "minimum": int(rng.integers(-20, 0)), "maximum": 10**4},
        "boolean": lambda: {"type": "boolean"},
        "null": lambda: {"type": "null"},
        "enum": lambda: {"enum": [str(word) for word in rng.choice(WORDS, 2)] + [int(rng.integers(9))]},
        "string": lambda: {"type": "string", "maxLength": int(rng.integers(1, 9))},
        "pattern": lambda: {"type": "string", "pattern": "^[a-f]{1,5}-[0-9]{2}$"},
    }[kind]()


pytestmark = pytest.mark.usefixtures("quick_compile")


def test_tokenizers_for_which_there_are_no_grammars():
    tokenizer = jspec.demo_pair()[2]
    with pytest.raises(ValueError, match="The tokenizer has no end of text"):
        Grammars(SimpleNamespace(eos_token_id=None, backend_tokenizer=tokenizer.backend_tokenizer), 2048)
    with pytest.raises(ValueError, match="vocab size too small"):
        Grammars(tokenizer, 100)


@pytest.fixture(autouse=True)
def compiled_when_met(monkeypatch):
    monkeypatch.setattr(Device, "compile", lambda _: None)
    monkeypatch.setattr(Device, "later", lambda _: [])
    monkeypatch.setattr("jspec.engine.engine.rehearse", lambda *_: None)


@pytest.fixture(scope="module")
def pair():
    return jspec.demo_pair()


@pytest.fixture(scope="module")
def grammars(pair):
    return Grammars(pair[2], pair[0].config.vocab_size)


def check_schemas(pair, grammars, report, count):
    """With a key and without, one in three beside free requests; with keys the texts are those of plain decoding."""
    target, draft, tokenizer = pair
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), count)
    schemas = [schema(rng) for _ in range(count)]
    prompt, ends = tuple(tokenizer("import json\nconfig = ")["input_ids"]), (tokenizer.eos_token_id,)
    sampling = [jspec.SamplingParams(temperature=1.0 - i / 4) for i in range(4)]
    requests = [Request(prompt, 200, sampling[i % 4], keys[i] if i % 2 else None, ends,
                        constraint=None if i % 5 == 4 else grammars.json_schema(one))
                for i, one in enumerate(schemas)]  # fmt: skip
    with Engine(target, draft, slots=4, max_length=256, num_draft_tokens=3) as engine:
        results = engine.generate(requests)
    constrained = [i for i in range(count) if requests[i].constraint is not None]
    for i in constrained:
        assert results[i].finish_reason == "eos", (schemas[i], results[i])
        jsonschema.validate(json.loads(tokenizer.decode(results[i].tokens[:-1])), schemas[i])
    accepted = sum(sum(results[i].accepted) for i in constrained)
    keyed = [i for i in constrained if i % 2][:6]
    with Engine(target, slots=2, max_length=256) as engine:
        plain = engine.generate([requests[i] for i in keyed])
    differ = sum(one.tokens != results[i].tokens for one, i in zip(plain, keyed, strict=True))
    report(schemas=len(constrained), valid=len(constrained), accepted_drafts=accepted, differ_from_plain=differ)
    assert accepted > 0 and not differ


def test_texts_of_schemas_are_valid(pair, grammars, report):
    check_schemas(pair, grammars, report, 15)


@pytest.mark.slow
def test_texts_of_schemas_are_valid_at_length(pair, grammars, report):
    check_schemas(pair, grammars, report, 625)


def test_texts_match_a_regular_expression_or_a_grammar(pair, grammars):
    target, draft, tokenizer = pair
    ends, pattern = (tokenizer.eos_token_id,), r"def [a-z]{3,8}\(self\): return [0-9]{1,3}"
    lark = 'start: "x = " NUMBER ("+" NUMBER)~1..4\nNUMBER: /[0-9]{1,2}/'
    requests = [Request(tuple(tokenizer("class A:\n")["input_ids"]), 60, eos_ids=ends, constraint=one)
                for one in (grammars.regex(pattern), grammars.lark(lark))]  # fmt: skip
    with Engine(target, draft, slots=2, max_length=128, num_draft_tokens=3) as engine:
        first, second = (tokenizer.decode(result.tokens[:-1]) for result in engine.generate(requests))
    assert re.fullmatch(pattern, first) and re.fullmatch(r"x = \d{1,2}(\+\d{1,2}){1,4}", second)


def test_what_is_no_grammar_is_refused_in_a_sentence(grammars):
    for make, message in (
        (lambda: grammars.json_schema({"type": "nope"}), "The schema cannot be used: Invalid type: nope"),
        (lambda: grammars.regex("[a"), "The regular expression cannot be used: .*unclosed character class"),
        (lambda: grammars.lark("start: ("), "The grammar cannot be used: "),
    ):
        with pytest.raises(ValueError, match=message):
            make()
