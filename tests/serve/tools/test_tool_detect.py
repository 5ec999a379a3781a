"""A model's tool-call format is detected from its chat template, and conversations with calls fit the template."""

import json
import types

import pytest

from jspec.serve.tools.detect import detect_tool_support
from jspec.serve.tools.hermes import Hermes
from jspec.serve.tools.tool_format import FunctionTool, ToolCall
from jspec.text.render_template import render_template
from support import tool_templates

TOOLS = [FunctionTool("get_weather", "Return the weather.", {"type": "object", "properties": {"city": {}}}, False)]
CITY = {"city": "Zürich <b>"}
CALL_ID = "call_0123456789abcdef01234567"


def tokenizer(template):
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return types.SimpleNamespace(chat_template=template, special_tokens_map=tokens)


def call(arguments, call_id=CALL_ID):
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def conversation(*results, arguments='{"city":"Zürich <b>"}', content=""):
    calls = [call(arguments, f"{CALL_ID}{i}") for i, _ in enumerate(results)]
    return [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": f"{CALL_ID}{i}", "content": text} for i, text in enumerate(results)),
    ]


def rendered(template, messages, tools=TOOLS):
    """Return a conversation's prompt, as rendered by the template."""
    support = detect_tool_support(tokenizer(template))
    listed = [tool.as_json() for tool in tools] if support.is_native else None
    return render_template(tokenizer(template), template, support.messages(messages, tools), listed)


NATIVE = {
    "HERMES": "hermes",
    "HERMES_2": "hermes",
    "LLAMA3": "llama3",
    "MISTRAL": "mistral",
    "NEMO": "mistral",
    "MISTRAL_ARGS": "mistral-args",
}


@pytest.mark.parametrize("template, name", NATIVE.items())
def test_format_of_native_template_is_found(template, name):
    support = detect_tool_support(tokenizer(getattr(tool_templates, template)))
    assert support.is_native and support.format is not None and support.format.name == name


@pytest.mark.parametrize("template", NATIVE)
def test_calls_that_native_template_renders_are_read_back(template):
    template = getattr(tool_templates, template)
    text = rendered(template, conversation("Sunny."))
    answer = text.partition("How is it?")[2].partition("Sunny.")[0]
    answer = answer.rpartition("<|end_header_id|>\n\n{")[2] if "<|end_header_id|>" in answer else answer
    answer = "{" + answer if answer.startswith('"name"') else answer
    (found,) = detect_tool_support(tokenizer(template)).format.parse(answer, {"get_weather"}, is_complete=True).calls
    assert found.name == "get_weather" and json.loads(found.arguments) == CITY


@pytest.mark.parametrize("template, opening", [("MISTRAL", "[TOOL_CALLS] ["), ("NEMO", "[TOOL_CALLS][")])
def test_space_after_marker_is_that_of_template(template, opening):
    assert detect_tool_support(tokenizer(getattr(tool_templates, template))).format.notation.opening == opening


def test_unknown_notation_has_no_format():
    support = detect_tool_support(tokenizer(tool_templates.XML))
    assert support.is_native and support.format is None


@pytest.mark.parametrize("template", [None, "{{ nothing(", tool_templates.PLAIN, tool_templates.NO_SYSTEM])
def test_template_without_tools_falls_back_to_hermes(template):
    support = detect_tool_support(tokenizer(template))
    assert not support.is_native and isinstance(support.format, Hermes)


def test_native_messages_have_arguments_as_objects():
    messages = conversation("Sunny.")
    found = detect_tool_support(tokenizer(tool_templates.HERMES)).messages(messages, TOOLS)
    assert found[1]["tool_calls"] == [call(CITY, f"{CALL_ID}0")]
    assert found[2] == messages[2] | {"name": "get_weather"} and found[0] == messages[0]
    assert messages == conversation("Sunny.")  # the caller's messages are unchanged


def test_empty_calls_are_left_out():
    """Templates test for calls by testing whether the field exists."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "tool_calls": []}]
    for template in (tool_templates.LLAMA3, tool_templates.PLAIN):
        assert "tool_calls" not in detect_tool_support(tokenizer(template)).messages(messages, [])[1]


def test_mistral_ids_get_nine_characters():
    found = detect_tool_support(tokenizer(tool_templates.MISTRAL)).messages(conversation("1", "2"), TOOLS)
    ids = [one["id"] for one in found[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in found[2:]] == ids
    assert len({*ids}) == 2 and all(len(one) == 9 and one.isalnum() for one in ids)
    kept = detect_tool_support(tokenizer(tool_templates.MISTRAL)).messages(
        [{"role": "assistant", "content": "", "tool_calls": [call("{}", "abcDEF123")]}], TOOLS
    )
    assert kept[0]["tool_calls"][0]["id"] == "abcDEF123"


def test_fallback_writes_calls_and_results_as_text():
    text = rendered(tool_templates.PLAIN, conversation("Sunny.", "Wet.", content="Let me see."))
    system, _, rest = text.partition("[user]")
    assert system.startswith("[system]# Tools") and json.dumps(TOOLS[0].as_json()) in system.splitlines()
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich <b>"}}\n</tool_call>'
    assert rest == (
        f"How is it?\n[assistant]Let me see.\n{written}\n{written}\n"
        "[user]<tool_response>\nSunny.\n</tool_response>\n<tool_response>\nWet.\n</tool_response>\n"
    )
    found = Hermes().parse(rest.partition("[assistant]")[2].partition("\n[user]")[0], {"get_weather"}, is_complete=True)
    assert found.content == "Let me see." and [json.loads(one.arguments) for one in found.calls] == [CITY, CITY]


def test_example_in_description_has_the_notation_that_is_read():
    system = rendered(tool_templates.PLAIN, [{"role": "user", "content": "Hi"}])
    assert Hermes.notation.write([ToolCall("FUNCTION", '{"ARGUMENT": VALUE}')]) in system


def test_fallback_extends_system_message():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = rendered(tool_templates.PLAIN, messages)
    assert text.startswith("[system]Be brief.\n\n# Tools") and text.endswith("[user]Hi\n")


@pytest.mark.parametrize("template", [tool_templates.NO_SYSTEM, tool_templates.SILENT_ABOUT_SYSTEM])
def test_fallback_without_system_messages_uses_first_user_message(template):
    text = rendered(template, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    assert text.startswith("[user]# Tools") and text.endswith("\n\nHi\n[assistant]Hello\n")


def test_fallback_without_tools_describes_none():
    messages = [{"role": "user", "content": "Hi"}]
    assert detect_tool_support(tokenizer(tool_templates.PLAIN)).messages(messages, []) == messages


@pytest.mark.parametrize("template", [tool_templates.HERMES, tool_templates.PLAIN])
@pytest.mark.parametrize("arguments", ["[]", "3", "null", "[" * 100_000])
def test_arguments_that_are_not_an_object_are_rejected(template, arguments):
    messages = conversation("Sunny.", arguments=arguments)
    expected = r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is .*; expected the text of a JSON object"
    with pytest.raises(ValueError, match=expected):
        detect_tool_support(tokenizer(template)).messages(messages, TOOLS)


@pytest.mark.parametrize("template", [tool_templates.HERMES, tool_templates.PLAIN])
@pytest.mark.parametrize("arguments", ['{"place": "Ro', '{"place": }', '{"a":' * 100_000])
def test_calls_that_the_model_did_not_finish_are_rendered_as_written(template, arguments):
    """The server may have returned such a call itself, so a client may send it back with an error as its result."""
    text = rendered(template, conversation("No JSON.", arguments=arguments))
    assert arguments in text or json.dumps(arguments) in text


def test_calls_are_separated_for_templates_that_take_one_call_in_a_message():
    """Each call is followed by its result. Results without a call in the message follow."""
    support = detect_tool_support(tokenizer(tool_templates.LLAMA3))
    assert not support.takes_several and detect_tool_support(tokenizer(tool_templates.HERMES)).takes_several
    messages = support.messages(conversation("sun", "rain", content="so"), TOOLS)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [len(message.get("tool_calls", ())) for message in messages] == [0, 1, 0, 1, 0]
    assert [message["content"] for message in messages[1:]] == ["so", "sun", "", "rain"]
    text = rendered(tool_templates.LLAMA3, conversation("sun", "rain"))
    assert text.index("sun") < text.rindex("get_weather") < text.index("rain")


def test_empty_arguments_in_the_history_are_an_empty_object():
    (_, message, _) = detect_tool_support(tokenizer(tool_templates.HERMES)).messages(
        conversation("sun", arguments=""), TOOLS
    )
    assert message["tool_calls"][0]["function"]["arguments"] == {}
