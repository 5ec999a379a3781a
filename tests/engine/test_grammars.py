"""Outputs of schemas and regular expressions are valid for any draft, and the same as without drafting."""

import gc
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jsonschema
import numpy as np
import pytest

import jspec
from jspec.engine import Engine, Request, grammar_pool
from jspec.engine.grammars import Grammars
from jspec.engine.runner import Runner
from support import shallow

WORDS = ("name", "size", "import", "value", "x")


def schema(rng, depth=0):
    """Return a random JSON schema whose values are short."""
    kinds = ["integer", "boolean", "null", "enum", "string", "pattern"] + ["object", "array"] * 2 * (depth < 2)
    kind = kinds[rng.integers(len(kinds))] if depth else "object"
    if kind == "object":
        names = [str(name) for name in rng.choice(WORDS, rng.integers(1, 4), replace=False)]
        return {
            "type": "object",
            "properties": {name: schema(rng, depth + 1) for name in names},
            "required": names[: rng.integers(len(names) + 1)],
            "additionalProperties": False,
        }
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
SIZES = {"slots": 3, "max_length": 256}  # of all engines, which then share their programs


def test_unsupported_tokenizers_are_rejected():
    tokenizer = jspec.demo_pair()[2]
    with pytest.raises(ValueError, match="The tokenizer has no EOS token"):
        Grammars(SimpleNamespace(eos_token_id=None, backend_tokenizer=tokenizer.backend_tokenizer), 2048)
    with pytest.raises(ValueError, match="vocab size too small"):
        Grammars(tokenizer, 100)


@pytest.fixture(autouse=True)
def compiled_when_met(monkeypatch):
    """Disable background compilation."""
    monkeypatch.setattr(Runner, "deferred_compiles", lambda _: [])


@pytest.fixture(scope="module")
def pair():
    return shallow.pair()


@pytest.fixture(scope="module")
def grammars(pair):
    return Grammars(pair[2], pair[0].config.vocab_size)


def check_schemas(pair, grammars, report, count):
    """Check requests with and without keys, one in five unconstrained; keyed outputs equal those of plain decoding."""
    target, draft, tokenizer = pair
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), count)
    schemas = [schema(rng) for _ in range(count)]
    prompt, ends = tuple(tokenizer("import json\nconfig = ")["input_ids"]), (tokenizer.eos_token_id,)
    sampling = [jspec.SamplingParams(temperature=1.0 - i / 4) for i in range(4)]
    requests = [
        Request(
            prompt,
            200,
            sampling[i % 4],
            keys[i] if i % 2 else None,
            ends,
            constraint=None if i % 5 == 4 else grammars.json_schema(one),
        )
        for i, one in enumerate(schemas)
    ]
    with Engine(target, draft, **SIZES, num_draft_tokens=3) as engine:
        results = engine.generate(requests)
    constrained = [i for i in range(count) if requests[i].constraint is not None]
    for i in constrained:
        assert results[i].finish_reason == "eos", (schemas[i], results[i])
        jsonschema.validate(json.loads(tokenizer.decode(results[i].tokens[:-1])), schemas[i])
    accepted = sum(sum(results[i].accepted) for i in constrained)
    keyed = [i for i in constrained if i % 2][:6]
    with Engine(target, **SIZES) as engine:
        plain = engine.generate([requests[i] for i in keyed])
    differ = sum(one.tokens != results[i].tokens for one, i in zip(plain, keyed, strict=True))
    report(schemas=len(constrained), valid=len(constrained), accepted_drafts=accepted, differ_from_plain=differ)
    assert accepted > 0 and not differ


def test_schema_outputs_are_valid(pair, grammars, report):
    check_schemas(pair, grammars, report, 15)


@pytest.mark.slow
def test_schema_outputs_are_valid_at_length(pair, grammars, report):
    check_schemas(pair, grammars, report, 625)


def test_outputs_match_regular_expression_or_grammar(pair, grammars):
    target, draft, tokenizer = pair
    ends, pattern = (tokenizer.eos_token_id,), r"def [a-z]{3,8}\(self\): return [0-9]{1,3}"
    lark = 'start: "x = " NUMBER ("+" NUMBER)~1..4\nNUMBER: /[0-9]{1,2}/'
    requests = [
        Request(tuple(tokenizer("class A:\n")["input_ids"]), 60, eos_ids=ends, constraint=one)
        for one in (grammars.regex(pattern), grammars.lark(lark))
    ]
    with Engine(target, draft, **SIZES, num_draft_tokens=3) as engine:
        first, second = (tokenizer.decode(result.tokens[:-1]) for result in engine.generate(requests))
    assert re.fullmatch(pattern, first) and re.fullmatch(r"x = \d{1,2}(\+\d{1,2}){1,4}", second)


def test_invalid_grammar_is_rejected_in_one_sentence(grammars):
    for make, message in (
        (lambda: grammars.json_schema({"type": "nope"}), "The schema cannot be used: Invalid type: nope"),
        (lambda: grammars.regex("[a"), "The regular expression cannot be used: .*unclosed character class"),
        (lambda: grammars.lark("start: ("), "The grammar cannot be used: "),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_constrained_outputs_do_not_depend_on_drafts_or_failures(pair, grammars, monkeypatch):
    """Outputs equal plain decoding's despite a failed call and a cancelled request; all requests share one grammar."""
    target, draft, tokenizer = pair
    make = grammars.json_schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 6}},
            "required": ["name"],
            "additionalProperties": False,
        }
    )
    prompt, ends = tuple(tokenizer("import json\nconfig = ")["input_ids"]), (tokenizer.eos_token_id,)
    sampling = jspec.SamplingParams(frequency_penalty=0.5, repetition_penalty=1.1)
    requests = [
        Request(prompt, 60, sampling, key, ends, constraint=make) for key in jax.random.split(jax.random.key(1), 4)
    ]
    tree = jspec.TreeDrafter(draft, jspec.Tree.branching((2, 1)))
    texts = []
    for drafter in (None, draft, tree):
        with Engine(target, drafter, **SIZES) as engine:
            runner, decode_rounds, calls = engine.device, engine.device.decode_rounds, iter(range(10**6))
            failing = lambda *how: 1 / 0 if next(calls) == 3 else decode_rounds(*how)  # noqa: B023, E731
            monkeypatch.setattr(runner, "decode_rounds", failing)
            engine.cancel(engine.submit(requests[0], lambda _: None))
            texts.append([result.tokens for result in engine.generate(requests)])
        assert not engine.device.constraints._active
    assert texts[1:] == texts[:1] * 2
    for tokens in texts[0]:
        assert set(json.loads(tokenizer.decode(tokens[:-1]))) == {"name"}


def test_min_tokens_that_forbid_required_eos_is_an_error(pair, grammars):
    target, _, tokenizer = pair
    prompt, ends = tuple(tokenizer("x = ")["input_ids"]), (tokenizer.eos_token_id,)
    request = Request(
        prompt, 20, jspec.SamplingParams(min_tokens=9), eos_ids=ends, constraint=grammars.regex("[0-9]{2}")
    )
    with Engine(target, **SIZES) as engine:
        result = engine.generate([request])[0]
    assert result.error_code == "constraint_conflict" and result.is_refused
    assert result.error == (
        "No token may follow: logit_bias or min_tokens forbids every token that the constraint allows; "
        "relax one of the two."
    )


def test_dead_end_keeps_text_so_far(pair, grammars):
    target, draft, tokenizer = pair
    number = {"type": "integer"}
    make = grammars.json_schema(
        {
            "type": "object",
            "properties": {"a": number},
            "patternProperties": {"^a$": number},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    prompt, ends = tuple(tokenizer("x = ")["input_ids"]), (tokenizer.eos_token_id,)
    bias = np.zeros(target.config.vocab_size, np.float32)
    bias[[i for i in range(len(bias)) if tokenizer.decode([i]).startswith(",")]] = 60
    requests = [
        Request(prompt, 30, jspec.SamplingParams(logit_bias=bias), key, ends, constraint=make)
        for key in jax.random.split(jax.random.key(2), 2)
    ]
    for drafts in ({}, {"draft": draft, "num_draft_tokens": 3}):
        with Engine(target, **drafts, **SIZES) as engine:
            for result in engine.generate(requests):
                assert result.error_code == "constraint_dead_end" and not result.is_refused
                assert tokenizer.decode(result.tokens).endswith(",")


def test_constraint_outlives_its_grammars_object(pair):
    make = Grammars(pair[2], pair[0].config.vocab_size).regex("[a-z]{2}")
    gc.collect()
    with Engine(pair[0], **SIZES) as engine:
        result = engine.generate([Request((1, 2), 5, eos_ids=(pair[2].eos_token_id,), constraint=make)])[0]
    assert re.fullmatch("[a-z]{2}", pair[2].decode(result.tokens[:-1]))


SLOW = f"""{grammar_pool._SCRIPT.partition("from jspec")[0]}
import os, time
from jspec.engine import grammar_worker as worker

class Slow:
    def copy(self):
        return self
    def allowed(self):
        end = time.thread_time() + float(sys.argv[3])
        while time.thread_time() < end:
            pass
        return bytes(4)
    def consume(self, token):
        return True
    def rollback(self, count):
        pass

ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.close()
    worker._serve_matcher(theirs, Slow(), 32)
    os._exit(0)
theirs.close()
worker.receive(ours)
for i in range(int(sys.argv[4])):
    worker.send(ours, b"[[], [1, 2, 3, 4], [0, 1, 2, 3]]")
    if worker.receive(ours) is None:
        break
    print(i)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="without processes there are no limits")
@pytest.mark.parametrize(("seconds", "is_kept"), [(0.0012, True), (0.004, False)])
def test_mask_time_limit_grows_with_number_of_masks(seconds, is_kept):
    """The limit allows five masks a round if each takes less CPU time than a mask adds to it, and stops slower ones."""
    command = [sys.executable, "-c", SLOW, *grammar_pool._PACKAGES, str(seconds), "400"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr and (len(done.stdout.split()) == 400) == is_kept


def test_closed_grammars_create_no_constraints(pair):
    with Grammars(pair[2], pair[0].config.vocab_size) as grammars:
        make = grammars.regex("[a-z]")
    with pytest.raises(RuntimeError, match="The Grammars object is closed"):
        grammars.regex("[a-z]")
    with Engine(pair[0], **SIZES) as engine:
        result = engine.generate([Request((1, 2), 5, constraint=make)])[0]
    assert result.finish_reason == "error" and result.error
