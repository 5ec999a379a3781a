"""A grammar for calls accepts exactly the outputs whose calls are read back with valid arguments."""

import dataclasses
import json
import random

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jspec.serve.tools.hermes import Hermes
from jspec.serve.tools.llama3 import Llama3
from jspec.serve.tools.mistral import Mistral, MistralArgs
from jspec.serve.tools.tool_format import FunctionTool, ToolCall, ToolFormat
from jspec.serve.tools.tool_grammar import grammar, marker_ids, text_ids
from support import text_pair

pytest.importorskip("llguidance")
from jspec.engine.grammar_matcher import LLGuidance, compile_grammar, make_tokenizer
from jspec.engine.grammars import Grammars

UNIT = {"enum": ["C", "F"]}
TOOLS = [
    FunctionTool(
        "get_weather",
        "",
        {
            "type": "object",
            "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["unit"],
            "additionalProperties": False,
            "$defs": {"unit": UNIT},
        },
        is_strict=True,
    ),
    FunctionTool("get_weather_2", "", None, is_strict=False),
    FunctionTool(
        "list-all",
        "",
        {
            "properties": {"flags": {"type": "array", "items": {"$ref": "#/$defs/unit"}, "maxItems": 2}},
            "required": ["flags"],
            "additionalProperties": False,
            "$defs": {"unit": {"type": "boolean"}},
        },
        is_strict=False,
    ),
]
NAMES = {tool.name: tool for tool in TOOLS}
VALID = [
    ToolCall("get_weather", '{"unit": "C", "days": 3}'),
    ToolCall("get_weather_2", "{}"),
    ToolCall("list-all", '{"flags": [true, false]}'),
]
INVALID = [
    ToolCall("get_weather", '{"unit": "K"}'),
    ToolCall("get_weather", '{"days": 3}'),
    ToolCall("get_weather", '{"unit": "C", "days": "3"}'),
    ToolCall("get_weather", '{"unit":"C"}'),  # models write spaces
    ToolCall("get_weather_2", '{"unit": "C"}'),
    ToolCall("list-all", '{"flags": ["C"]}'),
    ToolCall("list-all", "{}"),
    ToolCall("get_weathe", "{}"),
    ToolCall("get_weather_3", "{}"),
]
ANSWER = {
    "type": "object",
    "properties": {"name": {"enum": ["get_weather", "zero"]}, "days": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
FORMATS = [Hermes(), Llama3(), Mistral(), Mistral(has_space=False), MistralArgs()]
# How a tokenizer encodes the markers: as text, as special tokens, or as other added tokens, as Qwen 2.5's does.
each_kind = pytest.mark.parametrize("special", [None, False, True], ids=["text", "added", "special"])
each = pytest.mark.parametrize("form", FORMATS, ids=["hermes", "llama3", "mistral", "nemo", "mistral-args"])
END = 256


@dataclasses.dataclass
class Case:
    """A format, a tokenizer with a token for every byte, and the tokenizer's special tokens."""

    form: ToolFormat
    special: bool | None

    def __post_init__(self):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.inner = Tokenizer(models.BPE({one: i for i, one in enumerate(alphabet)} | {"<end>": END}, []))
        self.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.inner.decoder = decoders.ByteLevel()
        self.inner.add_special_tokens(["<end>"])
        if self.special is not None:
            markers = [AddedToken(text, special=self.special, normalized=False) for text in self.form.special_tokens]
            self.inner.add_tokens(markers)
        self.tokens = marker_ids(self.form, self.inner)
        self.size = self.inner.get_vocab_size()

    def start(self, is_required=True, is_parallel=True, answer=None, tools=TOOLS) -> LLGuidance:
        options = {"is_required": is_required, "is_parallel": is_parallel, "answer": answer}
        text = grammar(self.form, tools, tokens=self.tokens, **options)
        tokenizer = make_tokenizer(self.inner.to_str(), self.size, [END])
        return compile_grammar(tokenizer, "grammar", text, 4 * -(-self.size // 32))

    def accepts(self, start, text):
        matcher = start.copy()
        ids = self.inner.encode(text).ids
        return all(map(matcher.consume, ids)) and END in allowed(matcher)

    def write(self, *calls):
        return self.form.notation.write(calls)

    def parse(self, text):
        return self.form.parse(text, NAMES, is_complete=True)


def allowed(matcher):
    bits = matcher.allowed()
    return [8 * i + bit for i, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1]


def check_calls(calls):
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), NAMES[call.name].schema)


@each
@each_kind
def test_required_calls_are_valid_calls_and_nothing_else(form, special):
    case = Case(form, special)
    start = case.start()
    for calls in ([VALID[0]], [VALID[1]], [VALID[2]], VALID, VALID[::-1]):
        assert case.accepts(start, case.write(*calls))
        assert case.parse(case.write(*calls)).calls == tuple(calls)
    for call in INVALID:
        assert not case.accepts(start, case.write(call))
        assert not case.accepts(start, case.write(VALID[0], call))
    whole = case.write(VALID[0])
    for text in ("", "Hello", f"Hello {whole}", f"{whole}!", whole[:-1], f" {whole}", '{"name":"zero"}'):
        assert not case.accepts(start, text)


@each
@each_kind
def test_without_parallel_calls_there_is_one_call(form, special):
    case = Case(form, special)
    for is_required in (True, False):
        start = case.start(is_required, is_parallel=False)
        assert case.accepts(start, case.write(VALID[0]))
        assert not case.accepts(start, case.write(*VALID[:2]))


@each
@each_kind
def test_optional_calls_may_follow_text(form, special):
    case = Case(form, special)
    start = case.start(is_required=False)
    has_marker = not isinstance(form, Llama3)
    for text in ("", "Hello <tool_ [TOOL <|python {é", "\nNo."):
        assert case.accepts(start, text) and case.parse(text).calls == ()
        whole = text + case.write(*VALID)
        assert case.accepts(start, whole)
        assert case.parse(whole).calls == (tuple(VALID) if has_marker or not text else ())
    for call in INVALID if has_marker else []:
        assert not case.accepts(start, f"Hello {case.write(call)}")
    for text in (form.special_tokens[0], f"Hello {form.special_tokens[0]} and more", f"{case.write(VALID[0])} more"):
        assert not case.accepts(start, text)


@each_kind
def test_text_of_llama_does_not_look_like_calls(special):
    case = Case(Llama3(), special)
    start = case.start(is_required=False)
    for text in ("{", " \n{", '{"name": "other", "parameters": {}}', case.write(INVALID[0])):
        assert not case.accepts(start, text)
    assert case.accepts(start, f"<|python_tag|>{case.write(VALID[0])}") == (special is not None)


@each
@each_kind
def test_answer_of_a_schema_may_replace_calls(form, special):
    case = Case(form, special)
    start = case.start(is_required=False, answer=ANSWER)
    for text in ('{"name":"get_weather","days":3}', '{"name":"zero"}', case.write(VALID[0]), case.write(*VALID)):
        assert case.accepts(start, text), text
    for text in ("", "Hello", '{"days":3}', '{"name":"one"}', "{}", f"Hello {case.write(VALID[0])}"):
        assert not case.accepts(start, text)
    assert not any(case.accepts(start, case.write(call)) for call in INVALID)


@pytest.mark.parametrize("answer", [{"type": "array", "items": {"type": "string"}}, {"enum": ["a", 1]}])
@each
def test_answer_may_be_any_json(form, answer):
    case = Case(form, None)
    start = case.start(is_required=False, answer=answer)
    for value in (["a", "[TOOL_CALLS]", "<tool_call>"], [], "a", 1, ["a", 1], {}, "b"):
        text = json.dumps(value, separators=(",", ":"))
        assert case.accepts(start, text) == jsonschema.Draft202012Validator(answer).is_valid(value)
    assert case.accepts(start, case.write(VALID[0]))


@each
@each_kind
def test_random_outputs_are_read_back_as_valid_calls(form, special):
    case = Case(form, special)
    rng = random.Random(0)
    starts = [case.start(), case.start(is_required=False, answer=ANSWER)]
    for _ in range(30):
        start = rng.choice(starts)
        text = decoded(case, walk(start.copy(), rng))
        reply = case.parse(text)
        check_calls(reply.calls)
        if not reply.calls:
            assert start is starts[1]
            jsonschema.validate(json.loads(reply.content), ANSWER)
        else:
            assert reply.content == ""


def walk(matcher, rng):
    """Return the tokens of a random output."""
    ids = []
    while True:
        choices = allowed(matcher)
        token = END if END in choices and rng.random() < 0.5 else rng.choice(choices)
        if token == END:
            return ids
        assert matcher.consume(token)
        ids.append(token)


def decoded(case, ids):
    return case.inner.decode(ids, skip_special_tokens=False)


@each
def test_only_given_functions_may_be_called(form):
    case = Case(form, True)
    start = case.start(tools=[TOOLS[1]])
    assert case.accepts(start, case.write(VALID[1])) and not case.accepts(start, case.write(VALID[0]))


def test_unusable_schema_is_rejected_by_the_compiler():
    tool = FunctionTool("f", "", {"properties": {"a": {"type": "nonsense"}}}, False)
    with pytest.raises(ValueError, match="nonsense"):
        Case(Hermes(), None).start(tools=[tool])


def test_grammar_compiles_in_grammar_processes():
    case = Case(Hermes(), True)
    text = grammar(case.form, TOOLS, tokens=case.tokens, is_required=True, is_parallel=True, answer=None)
    tokenizer = type("Fast", (), {"backend_tokenizer": case.inner, "eos_token_id": END})()
    with Grammars(tokenizer, case.size, [END]) as grammars:
        source = grammars.lark(text)()
        source.ask([], [], [])
        bits = np.unpackbits(source.masks().masks.view(np.uint8), bitorder="little")
    assert [*np.flatnonzero(bits)] == [case.tokens["<tool_call>"]]


def test_free_text_may_contain_visible_added_tokens():
    """Thinking models write tokens such as <think>, which llguidance treats as special."""
    words = text_pair.tokenizer()
    words.add_tokens(["<think>", "<tool_call>", "</tool_call>"])
    size = len(words)
    library = make_tokenizer(words.backend_tokenizer.to_str(), size, [0])
    options = {"tokens": marker_ids(Hermes(), words), "is_required": False, "is_parallel": True, "answer": None}
    think = words.convert_tokens_to_ids("<think>")
    ids = text_ids(Hermes(), words)
    assert ids == (think,)
    text = "<think>so<think>\n" + '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tokens = words(text, add_special_tokens=False)["input_ids"]
    for shown in ((), ids):
        made = grammar(Hermes(), [FunctionTool("f", "", None, False)], text_ids=shown, **options)
        matcher = compile_grammar(library, "grammar", made, 4 * -(-size // 32))
        assert all(map(matcher.consume, tokens)) == bool(shown)
