"""Request bodies that a server must reject, field by field."""

import json

from support import servers

TEXT = {"model": servers.NAME, "prompt": "the"}
CHAT = {"model": servers.NAME, "messages": [{"role": "user", "content": "x"}]}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
HUGE = 10**30
NUMBERS = {  # invalid values by field
    "max_tokens": ["4", 1.5, True, -1, HUGE, [1], {}],
    "temperature": ["1", -0.1, 101, True, [], 1e300],
    "top_p": ["1", -1, 1.1, {}],
    "top_k": ["1", -2, 1.5, HUGE],
    "min_p": ["0", -0.1, 1.1],
    "presence_penalty": ["0", -2.1, 2.1],
    "frequency_penalty": ["0", -2.1, 2.1],
    "repetition_penalty": ["1", 0, -1, 101],
    "seed": ["1", -(2**63) - 1, 2**64, 1.5, True],
    "n": ["1", 0, -1, 1.5, 129, HUGE],
    "min_tokens": ["1", -1, 17, 128],
    "stop": [[""], 1, [1], ["a", None], {"a": 1}, ["a"] * 17, ["a" * 1001]],
    "stop_token_ids": [1, ["a"], [-1], [1.5], [True], [261], [HUGE], [*range(1, 9)], [1] * 65],
    "logit_bias": [
        *([], {"a": 1}, {"1": "x"}, {"1": 101}, {"261": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {"²": 1}),
        {"1" * 40: 1},
    ],
    "stream": ["true", 1],
    "stream_options": [1, {"include_usage": True}, {"other": True}],
    "ignore_eos": ["yes", 1],
    "cache_salt": [1, "x" * 257],
    "model": [1, [], {}],
    "return_token_ids": [1],
    "response_format": [
        *("json", {}, {"type": "owl"}, {"type": "json_schema"}, {"type": "regex"}, {"type": "text", "regex": "a"}),
        {"type": "regex", "regex": "[a"},
        {"type": "regex", "regex": 1},
        {"type": "json_object", "a": 1},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "owl"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x/y"}}},
        {"type": "json_schema", "json_schema": {"schema": [1]}},
    ],
}
OF_TEXTS = {
    "prompt": [
        *("", [], [[]], 1, {}, [1, "a"], ["a", 1], [[1], "a"], [1.5], [True], [-1], [261], [HUGE], [[1], [261]]),
        *("x" * 500, [1] * 200, [["a"]], [None], ["a", ""], "\ud800", ["a"] * 50),
    ],
    "logprobs": [-1, 21, True, "1", 1.5],
    "best_of": [2, 0, "1"],
    "suffix": ["end"],
    "tools": [[TOOL]],
    "echo": [1, "yes"],
    "messages": [[{"role": "user", "content": "x"}]],
    "\ud800": [1],
}
OF_CHATS = {
    "messages": [
        *([], "x", {}, [1], ["x"], [{}], [{"role": "user"}], [{"content": "x"}]),
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [1]}],
        [{"role": "owl", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        [{"role": "user", "content": "x", "tool_calls": [1]}],
        [{"role": "user", "content": "x", "tool_calls": [CALL]}],
        [{"role": "user", "content": "x", "tool_call_id": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}],
        [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]}],
        [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}]}, RESULT],
        [{"role": "assistant", "tool_calls": [CALL]}, RESULT | {"tool_call_id": "other"}],
        [RESULT],
        [{"role": "function", "name": "f", "content": "x"}],
        [{"role": "user", "content": "x" * 500}],
        [{"role": "user", "content": "\ud800"}],
        [[]],
        [{"role": "tool", "content": "x"}, {"role": "user", "content": "x"}],
    ],
    "logprobs": [1, "true"],
    "top_logprobs": [1, -1, 21, True],
    "max_completion_tokens": [0, -1, "1", HUGE],
    "tools": [
        *([{"type": "function"}], {}, [1], [{"type": "web_search"}], [TOOL, TOOL], [TOOL] * 129),
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
        [{"type": "function", "function": {"name": "f", "other": 1}}],
        [{"type": "function", "function": {"name": "f", "description": "x" * 10_000}}],
    ],
    "tool_choice": ["required", "any", 1, {}, {"type": "function"}, {"type": "function", "function": {"name": "g"}}],
    "parallel_tool_calls": ["yes"],
    "functions": [[{"name": "f"}]],
    "function_call": ["auto"],
    "continue_final_message": [True, 1],
    "modalities": [["audio"]],
    "prompt": ["x"],
    "chat_template": ["x"],
}
TOGETHER = [
    {"max_tokens": 0},
    {"max_tokens": 5, "min_tokens": 6},
    {"stream_options": {"include_usage": True}},
    {"prompt": ["a", "b", "c"], "n": 3},
    {"stream": True, "prompt": "x" * 500},
    {"stream": True, "stream_options": {"x": 1}},
    {str(i): 1 for i in range(70_000)},
    {"logit_bias": {str(i): "x" for i in range(70_000)}},
    {"response_format": {str(i): 1 for i in range(70_000)}},
]
RAW = [
    *(b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe"),
    b'{"model": "tiny", "prompt": "\xff"}',
    b'{"a": NaN}',
    b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
    b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b"1" * 5000,
    b'{"model": "tiny", "prompt": "x", "seed": ' + b"1" * 5000 + b"}",
    b'{"model": "tiny"} {}',
    b"model=tiny",
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b"\x00" * 10,
    b'\xef\xbb\xbf{"model": "tiny"}',
]


def bodies():
    """Yield the path, the text and the invalid field, or None, of each body."""
    for path, usual, own in (("completions", TEXT, OF_TEXTS), ("chat/completions", CHAT, OF_CHATS)):
        tables = NUMBERS, own
        for name, value in ((name, value) for table in tables for name, values in table.items() for value in values):
            if (path, name, value) != ("chat/completions", "min_tokens", 17):  # chats have no limit of 16
                yield path, json.dumps(usual | {name: value}).encode(), name
        yield path, json.dumps(usual | {"unheard_of": 1}).encode(), "unheard_of"
        long = [1] * 200_000
        for messages in (long, [{"role": "user", "content": long}], [{str(i): 1 for i in range(70_000)}]):
            yield path, json.dumps(CHAT | {"messages": messages}).encode(), None
        yield path, json.dumps({}).encode(), "model"
        yield path, json.dumps({"model": servers.NAME}).encode(), "messages" if "chat" in path else "prompt"
    yield from (("completions", json.dumps(TEXT | fields).encode(), None) for fields in TOGETHER)
    yield from (("completions", raw, None) for raw in RAW)
