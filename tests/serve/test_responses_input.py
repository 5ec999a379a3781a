"""Bodies of the Responses API: they become chats, those of clients are accepted, and errors name this API's fields."""

import pytest

from jspec.serve.errors import Refusal
from jspec.serve.response_items import output_items
from jspec.serve.responses_schemas import ResponsesBody, as_chat
from jspec.serve.tools.hermes import Hermes
from jspec.serve.validation import validated
from support.response_bodies import ASSISTANT, CALL, RESULT, SCHEMA, TOOLS, body
from support.servers import HELLO

pytestmark = pytest.mark.usefixtures("quick_compile")


def messages(**fields):
    """Return the messages of the chat that a body becomes, as a template receives them."""
    chat = as_chat(validated(ResponsesBody, body(**fields)))
    assert (chat.max_tokens, chat.seed) == (12, 5)
    return [message.plain() for message in chat.messages]


def test_items_become_the_messages_of_a_chat():
    """A call joins the assistant message before it, so that the template renders what the model wrote."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"role": "tool", "content": "sunny", "tool_call_id": "a"}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    found = messages(input=[*HELLO, reasoning, ASSISTANT, reasoning, CALL, CALL | {"call_id": "b"}, RESULT])
    both = {"role": "assistant", "content": "so", "tool_calls": [call, call | {"id": "b"}]}
    assert found == [*HELLO, both, tool]
    parts = [{"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "ny"}]
    found = messages(input=[*HELLO, CALL, RESULT | {"output": parts}, ASSISTANT], instructions="in a")
    assert found == [
        {"role": "system", "content": "in a"},
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        tool,
        {"role": "assistant", "content": "so"},
    ]
    refusal = ASSISTANT | {"content": [{"type": "refusal", "refusal": "no"}]}
    assert messages(input=[*HELLO, refusal])[-1] == {"role": "assistant", "content": "no"}


def test_text_after_a_call_joins_the_message_with_the_call():
    """An answer gives the same messages whether it is sent back as the items of a response or as a chat's message."""
    text = 'so\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nand\n'
    reply = Hermes().parse(2 * text, {"f"}, is_complete=True)
    sent = [
        CALL | {"arguments": item.text} if item.function else ASSISTANT | {"content": item.text}
        for item in output_items(reply)
    ]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    whole = {"role": "assistant", "content": reply.content, "tool_calls": [call, call]}
    assert messages(input=[*HELLO, *sent, RESULT])[1:-1] == [whole]
    assert messages(input=[*HELLO, sent[0], sent[1], RESULT, sent[2]])[-1] == {
        "role": "assistant",
        "content": "and\nso",
    }


def test_names_reach_the_template():
    assert messages(input=[HELLO[0] | {"name": "me"}]) == [HELLO[0] | {"name": "me"}]


def test_parallel_calls_are_those_of_the_chat():
    """A missing field stays missing, because its meaning then depends on the chat template."""
    for fields in ({}, {"parallel_tool_calls": None}, {"parallel_tool_calls": True}, {"parallel_tool_calls": False}):
        chat = as_chat(validated(ResponsesBody, body(tools=TOOLS, tool_choice="required", **fields)))
        is_given = fields.get("parallel_tool_calls") is not None
        assert ("parallel_tool_calls" in chat.model_fields_set) == is_given


@pytest.mark.parametrize("arguments", ["", '{"a": "x', '{"a": }'])
def test_calls_that_were_cut_off_are_accepted(arguments):
    call = messages(input=[*HELLO, CALL | {"arguments": arguments}, RESULT])[1]["tool_calls"][0]
    assert call["function"]["arguments"] == arguments


CLIENTS = {  # request bodies of clients with their defaults, without the model
    "instructor": {
        "input": HELLO,
        "text": {"format": {"type": "json_schema", "name": "City", "strict": True, "schema": SCHEMA}},
        "tool_choice": {"type": "function", "name": "City"},
        "tools": [{"type": "function", "name": "City", "parameters": SCHEMA, "description": "A city."}],
    },
    "langchain": {"stream": False, "input": [{"content": "x", "role": "user", "type": "message"}]},
    "litellm": {"input": "x", "max_output_tokens": 24},
    "openai-agents": {
        "include": [],
        "input": [*HELLO, CALL, RESULT],
        "instructions": "Be brief.",
        "parallel_tool_calls": False,
        "tool_choice": "required",
        "tools": [TOOLS[0] | {"strict": True, "description": ""}],
    },
    "openai": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {}}]},
            ASSISTANT | {"content": [ASSISTANT["content"][0] | {"parsed": {"a": 1}}]},
            CALL | {"async_": None, "caller": None, "namespace": None, "parsed_arguments": {}},
            RESULT,
        ],
        "tool_choice": "none",
        "tools": [TOOLS[0] | {"defer_loading": False, "allowed_callers": ["direct"]}],
        "temperature": 0,
    },
    "codex": {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "tools": [TOOLS[0]],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
        "text": {"verbosity": "low"},
    },
    "nulls": dict.fromkeys(
        ("background", "conversation", "previous_response_id", "prompt", "text", "tools", "truncation", "metadata")
    )
    | {"input": "x"},
}


@pytest.mark.parametrize("client", CLIENTS)
def test_bodies_of_clients_are_accepted(client):
    chat = as_chat(validated(ResponsesBody, {"model": "m"} | CLIENTS[client]))
    assert chat.messages and chat.stream == CLIENTS[client].get("stream", False)


def test_functions_are_strict_by_default():
    def strict(**fields):
        tool = {"type": "function", "name": "f", "parameters": SCHEMA}
        (found,) = as_chat(validated(ResponsesBody, body(tools=[tool | fields]))).tools
        return found.function.strict

    assert strict() and strict(strict=None) and strict(strict=True) and not strict(strict=False)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id is not supported by this server; responses are not stored, so send the whole "
            "conversation as input.",
        ),
        ({"input": [*HELLO, *[{"role": "owl", "content": "x"}]]}, "input[1].role is 'owl'; expected 'system', "),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type is 'input_im"),
        ({"input": [*HELLO, CALL, RESULT | {"call_id": "b"}]}, "input[2] is the output of the call 'b', but no "),
        ({"input": [*HELLO, CALL | {"arguments": "[]"}]}, "input[1].arguments must be the text of a JSON object, "),
        ({"tools": [{"type": "web_search"}]}, "tools[0] has the type 'web_search', but this server cannot run "),
        ({"tools": [*TOOLS, *TOOLS]}, "tools has two functions named 'f'; give each function its own name."),
        (
            {"tools": TOOLS, "ignore_eos": True, "tool_choice": "required"},
            "constrained calls determine the output's end; ",
        ),
        ({"input": [CALL] * 129}, "a series of calls in input should have at most 128 items, not 129."),
        ({"min_tokens": 13}, "min_tokens is greater than max_output_tokens; reduce min_tokens."),
        ({"max_tokens": 4}, "max_tokens is not a field that this server supports; omit this field."),
        ({"top_logprobs": 2}, "top_logprobs requires 'message.output_text.logprobs' in include; add this value."),
        ({"ignore_eos": True, "text": {"format": {"type": "json_object"}}}, "text.format determines where the output"),
    ],
)
def test_errors_name_the_fields_of_this_api(fields, sentence):
    with pytest.raises(Refusal) as caught:
        as_chat(validated(ResponsesBody, body(**fields)))
    assert caught.value.message.startswith(sentence)
    assert (caught.value.param or "").startswith(tuple(fields))
