"""Incomplete calls in outputs are parsed, and no other text of an output is lost."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.serve.tools.hermes import Hermes
from jspec.serve.tools.llama3 import Llama3
from jspec.serve.tools.mistral import Mistral, MistralArgs
from jspec.serve.tools.tool_format import FunctionTool, ToolCall

NAMES = {"f", "get-time", "look_up_2"}
FORMATS = [Hermes(), Llama3(), Mistral(), Mistral(has_space=False), MistralArgs()]
IDS = [f"{form.name}-{i}" for i, form in enumerate(FORMATS)]
HARD = '{"a": "}\\"{ ]\\\\", "b": [1, {"c": "\\u00e9\u4f60 <tool_call>"}], "d": {}}'
F = ("f", "{}")


def hermes(inner):
    return f"<tool_call>\n{inner}\n</tool_call>"


CALL = hermes('{"name": "f", "arguments": {}}')

TABLE = {
    Hermes: [
        ("", "", []),
        (" Hello < world \n", " Hello < world \n", []),
        (CALL, "", [F]),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [F]),
        (hermes(f'{{"name": "f", "arguments": {HARD}}}'), "", [("f", HARD)]),
        (f"Let me see.\n\n{CALL}", "Let me see.", [F]),
        (CALL + "\n" + hermes('{"name": "get-time", "arguments": {"a": 1}}'), "", [F, ("get-time", '{"a": 1}')]),
        (f" One {CALL}\n two \n{CALL} three ", " One\ntwo\nthree ", [F, F]),
        # other members and orders
        (hermes('{"arguments": {"a": 1}, "name": "f"}'), "", [("f", '{"a": 1}')]),
        (
            hermes('{"type": "function", "id": "x", "name": "f", "parameters": {"a": 1}, "more": [{"b": "]"}]}'),
            "",
            [("f", '{"a": 1}')],
        ),
        (hermes('{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}'), "", [("f", '{"a": "b"}')]),
        (hermes('{"name": "f", "arguments": null}'), "", [F]),
        (hermes('{"name": "f"}'), "", [F]),
        (hermes('{"name": "look\\u005fup_2", "arguments": {}}'), "", [("look_up_2", "{}")]),
        (hermes('{"name": "f", "name": "get-time", "arguments": {}, "parameters": {"a": 1}}'), "", [F]),
        # not quite JSON
        (hermes('{"name": "f", "arguments": {}}}'), "", [F]),
        (hermes('{"name": "f", "arguments": {}'), "", [F]),
        ('<tool_call>{"name": "f", "arguments": {}}\nand text', "and text", [F]),
        ('<tool_call>{"name": "f", "arguments": {}} <tool_call>{"name": "f", "arguments": {}}', "", [F, F]),
        (f"<tool_call>{CALL}", "<tool_call>", [F]),
        # no calls
        *(
            (text, text, [])
            for text in (
                hermes('{"name": "g", "arguments": {}}'),
                hermes('{"name": "f", "arguments": []}'),
                hermes('{"a": 1}'),
                hermes('{"name": 3, "arguments": {}}'),
                hermes("f(1)"),
                hermes("[]"),
                hermes("<function=f>"),
                hermes('{"name": "f", "arguments": "[]"}'),
                hermes('{"name": "f", "arguments": "{}}"}'),
                hermes('{"name": "f", "arguments": "{\\ud800}"}'),
                hermes('{"arguments": {}}'),
                '{"name": "f", "arguments": {}}',
                "</tool_call>",
                "<tool_call>",
                "<tool_call>\n{",
                "<tool_cal",
                '<tool_call>{"name": "f", "arguments": ',
                '<tool_call>{"arguments": {"a": 1}',
                '<tool_call>{"name": "f\\',
            )
        ),
        # cut off
        ('<tool_call>{"name": "f", "arguments": {"a": "b\\', "", [("f", '{"a": "b\\')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool_c', "", [F]),
    ],
    Llama3: [
        ("Hello", "Hello", []),
        ("\n ", "\n ", []),
        ('{"name": "f", "parameters": {}}', "", [F]),
        (f' \n{{"name": "f", "parameters": {HARD}}}\n', "", [("f", HARD)]),
        ('<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [F]),
        ('{"name": "f", "parameters": {}}; {"name": "get-time", "parameters": {}}', "", [F, ("get-time", "{}")]),
        ('{"name": "f", "arguments": {}}\n{"name": "f", "parameters": {}};', "", [F, F]),
        ('Well. <|python_tag|>{"name": "f", "parameters": {}}', "Well.", [F]),
        ('{"name": "f", "parameters": {}}; then', "; then", [F]),
        ('{"name": "f", "parameters": {}, "more": 1}', "", [F]),
        *(
            (text, text, [])
            for text in (
                'See {"name": "f", "parameters": {}}',
                '{"name": "g", "parameters": {}}',
                '{"a": {"name": "f"}}',
                "{",
                '<|python_tag|>brave_search.call(query="f")',
                "<|python_tag|>",
                '{"name": "f"}',  # may be an answer
                '{"name": "f", "parameters": 3}',
                "[{}]",
            )
        ),
        ('{"name": "f", "parameters": {"a', "", [("f", '{"a')]),
    ],
    Mistral: [
        ("Hello [", "Hello [", []),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "", [F]),
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"} , {"name": "get-time", "arguments": {}}]',
            "",
            [F, ("get-time", "{}")],
        ),
        ('[TOOL_CALLS] {"name": "f", "arguments": {}}', "", [F]),
        (f"So: [TOOL_CALLS]f[ARGS]{HARD}[TOOL_CALLS]get-time[ARGS]{{}}", "So:", [("f", HARD), ("get-time", "{}")]),
        ("[TOOL_CALLS]f{}", "", [F]),
        ("[TOOL_CALLS] look_up_2 [CALL_ID]abc123xyz[ARGS] {}", "", [("look_up_2", "{}")]),
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
            ', {"name": "g", "arguments": {}}]',
            [F],
        ),
        *(
            (text, text, [])
            for text in (
                "[TOOL_CALLS]",
                "[TOOL_CALLS] [",
                "[TOOL_CALLS]f",
                "[TOOL_CALLS]f[AR",
                "[TOOL_CALLS]g[ARGS]{}",
                "[TOOL_CALLS] no, thanks",
                '[TOOL_CALLS] [{"name": "g", "arguments": {}}]',
                "[TOOL_CALLS] []",
            )
        ),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"na', ', {"na', [("f", '{"a": 1}')]),
        ("[TOOL_CALLS]f[ARGS]{", "", [("f", "{")]),
    ],
}
CASES = [(kind, *case) for kind, cases in TABLE.items() for case in cases]


@pytest.mark.parametrize("kind, text, content, calls", CASES)
def test_output_is_split_into_content_and_calls(kind, text, content, calls):
    reply = kind().parse(text, NAMES, is_complete=True)
    assert (reply.content, [(call.name, call.arguments) for call in reply.calls]) == (content, calls)
    check_growth(kind(), text, range(len(text)))


def check_growth(form, text, ends):
    """Check that replies to prefixes of the text only grow, up to the reply to the whole text."""
    replies = [form.parse(text[:end], NAMES, is_complete=False) for end in ends]
    for before, after in itertools.pairwise([*replies, form.parse(text, NAMES, is_complete=True)]):
        assert after.content.startswith(before.content)
        assert len(after.calls) >= len(before.calls)
        for old, new in zip(before.calls, after.calls, strict=False):
            assert new.name == old.name and new.arguments.startswith(old.arguments)
        assert all(old == new for old, new in zip(before.calls[:-1], after.calls, strict=False))
        assert all(call.name in NAMES and call.arguments.startswith("{") for call in after.calls)


MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<tool_", "[TOO"]
SYMBOLS = [*'{}[],:;"\\\n 1é', "f", "get-time", '"name": "f"', '"arguments": ', '"id": "x", ', "null", "g[ARGS]{}"]
PARTS = [
    HARD,
    CALL,
    hermes('{"arguments": {}, "name": "get-time"}'),
    '{"name": "f", "arguments": ',
    '{"name": "f", "parameters": {}}',
    '"arguments": "{}"',
    '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}',
    ', {"name": "f", "arguments": {}}',
]
PIECES = st.sampled_from([*MARKERS, *SYMBOLS, *PARTS])
TEXTS = st.one_of(st.lists(PIECES, max_size=14).map("".join), st.text(max_size=30))


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_replies_to_growing_text_only_grow(form, data):
    text = data.draw(TEXTS)
    check_growth(form, text, sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12))))


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_calls_of_unknown_functions_are_content(form, text):
    reply = form.parse(text, set(), is_complete=True)
    assert reply.content == text and reply.calls == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["</tool_call>", "}", '"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.builds(
        ToolCall,
        st.sampled_from(sorted(NAMES)),
        st.dictionaries(st.text(max_size=5), JSON, max_size=3).flatmap(
            lambda value: st.booleans().map(lambda flag: json.dumps(value, ensure_ascii=flag))
        ),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_written_calls_are_read_back(form, calls):
    reply = form.parse(form.notation.write(calls), NAMES, is_complete=True)
    assert reply.content == "" and list(reply.calls) == calls


def test_json_answer_of_llama_is_shown_before_it_ends():
    assert Llama3().parse('{"answer": 1, "why": "Be', NAMES, is_complete=False).content == '{"answer": 1, "why": "Be'
    assert Llama3().parse('{"type": "function", "id": "x', NAMES, is_complete=False).content == ""


def test_long_arguments_are_scanned_at_once():
    """A text of many kilobytes takes only a few regular-expression matches for each string or bracket."""
    arguments = json.dumps({"code": 'print("{")\n' * 30_000})
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}'
    assert Hermes().parse(text, NAMES, is_complete=False).calls == (ToolCall("f", arguments),)


def test_ids_have_the_form_that_templates_require():
    assert re.fullmatch("call_[0-9a-f]{24}", Hermes().new_id()) and re.fullmatch("[a-zA-Z0-9]{9}", Mistral().new_id())
    assert Hermes().new_id() != Hermes().new_id() and Mistral().new_id() != Mistral().new_id()


def test_tool_as_json_has_only_given_fields():
    assert FunctionTool("f", "", None, True).as_json() == {"type": "function", "function": {"name": "f"}}
    full = FunctionTool("f", "Do.", {"type": "object"}, False).as_json()
    assert full["function"] == {"name": "f", "description": "Do.", "parameters": {"type": "object"}}


@pytest.mark.parametrize("parameters", [None, {}])
def test_missing_parameters_allow_no_arguments(parameters):
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert FunctionTool("f", "", parameters, False).schema == nothing


def test_arguments_have_only_listed_properties_unless_the_schema_allows_others():
    closed = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    assert FunctionTool("f", "", {"properties": {"a": {}}}, False).schema == closed
    for more in ({"additionalProperties": True}, {"patternProperties": {"^x": {}}}, {"anyOf": [{"required": ["b"]}]}):
        schema = {"type": "object", "properties": {"a": {}}, **more}
        assert FunctionTool("f", "", schema, False).schema == schema


def test_parameters_without_type_are_an_object():
    assert FunctionTool("f", "", {"required": ["a"]}, False).schema == {"type": "object", "required": ["a"]}
