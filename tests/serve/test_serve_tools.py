"""Function calls: required calls are valid, streamed and whole responses agree, and results match their calls."""

import itertools
import json
import re
from types import SimpleNamespace

import jsonschema
import numpy as np
import openai
import pytest

from jspec.engine.grammar_matcher import compile_grammar, make_tokenizer
from jspec.serve.chat_schemas import ChatBody
from jspec.serve.output_grammar import OutputConstraint, output_constraint
from jspec.serve.parse_request import parse_request
from support import oracle, servers, text_pair
from support.calling import BY_NAME, CALL, STRICT, TEMPLATE, TOOLS, WEATHER, Forced
from support.servers import HELLO

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Write a pair with sequences long enough for calls and descriptions of functions."""
    folder = tmp_path_factory.mktemp("sources")
    room = {"max_position_embeddings": 1536}
    return text_pair.write(folder / "target", **room), text_pair.write(folder / "draft", distance=0.3, **room)


@pytest.fixture(scope="module")
def calling(sources):
    """Yield a server with sequences long enough for calls. Its chat template supports tools."""
    with servers.running(sources, max_length=512, template=TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def describing(sources):
    """Yield a server whose chat template does not support tools, so that the server describes them in a message."""
    template = servers.TEMPLATE.replace("{{ raise_exception('no tools here') }}", "")
    with servers.running(sources, max_length=1536, template=template) as running:
        yield running


def check(choice):
    """Check that all complete calls of a choice are valid, and return them as names and arguments."""
    is_complete = choice.finish_reason == "tool_calls"
    assert not choice.message.content if is_complete else choice.finish_reason == "length"
    found = []
    for call in (choice.message.tool_calls or [])[: None if is_complete else -1]:
        assert call.type == "function" and call.id.startswith("call_")
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            jsonschema.validate(arguments, WEATHER)
        else:
            assert (call.function.name, arguments) == ("stop", {})
        found.append((call.function.name, arguments))
    return found


def joined(chunks):
    """Return the content, the calls and the finish reason of a stream with one choice."""
    content, calls, reason = "", {}, None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            if part.id is not None:
                assert part.index not in calls and part.type == "function" and part.function.name
                calls[part.index] = [part.function.name, ""]
            calls[part.index][1] += part.function.arguments
        reason = choice.finish_reason or reason
    return content, [calls[i] for i in range(len(calls))], reason


@pytest.mark.parametrize("server", ["calling", "describing"])
@pytest.mark.parametrize("choice", ["required", BY_NAME])
def test_required_calls_are_valid(request, server, choice):
    ask = request.getfixturevalue(server).chat
    for options in ({"n": 2, "max_completion_tokens": 120}, {"parallel_tool_calls": False, "seed": 1}):
        answer = ask(**{"tools": TOOLS, "tool_choice": choice, "max_completion_tokens": 200} | options)
        for one in answer.choices:
            calls = check(one)
            if choice == BY_NAME or "seed" in options:
                assert len(calls) == 1 and one.finish_reason == "tool_calls"
                assert choice == "required" or calls[0][0] == "weather"
        ids = [call.id for one in answer.choices for call in one.message.tool_calls or []]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("choice", ["required", BY_NAME, "auto"])
def test_streamed_calls_equal_whole_ones(calling, choice):
    for seed, strict in itertools.product(range(2), (False, True)):
        options = {
            "tools": STRICT if strict else TOOLS,
            "tool_choice": choice,
            "max_completion_tokens": 120,
            "seed": seed,
        }
        whole = calling.chat(**options).choices[0]
        content, calls, reason = joined(calling.chat(**options, stream=True))
        assert content == (whole.message.content or "") and reason == whole.finish_reason
        assert calls == [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or []]


def test_calls_do_not_depend_on_drafts(calling, monkeypatch):
    """A seeded call has the same arguments with drafts and without."""
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_completion_tokens": 200}
    found = [check(calling.chat(**options, seed=seed).choices[0]) for seed in range(4)]
    monkeypatch.setattr("jspec.engine.length_policy.LengthPolicy.next", lambda *_: 0)
    assert found == [check(calling.chat(**options, seed=seed).choices[0]) for seed in range(4)]


def test_calls_in_free_text_are_read(calling, monkeypatch):
    """With "auto", a call that the model writes on its own becomes a call, and the text before it is content."""
    written = 'so\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
    ids = calling.tokenizer(written, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(
        "jspec.serve.app.output_constraint", lambda *_: OutputConstraint("tools", "x", lambda _: lambda: Forced(ids))
    )
    (one,) = calling.chat(tools=STRICT, max_completion_tokens=200).choices
    calls = [[call.function.name, call.function.arguments] for call in one.message.tool_calls]
    expected = "so", [["weather", '{"city": "Rome", "days": 3}']], "tool_calls"
    assert (one.message.content, calls, one.finish_reason) == expected
    assert joined(calling.chat(tools=STRICT, max_completion_tokens=200, stream=True)) == expected
    cut = calling.chat(tools=STRICT, max_completion_tokens=70).choices[0]
    assert cut.finish_reason == "length" and cut.message.tool_calls[0].function.arguments.startswith('{"city"')


def test_history_with_calls_is_rendered(calling):
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    text = '[user]the thing\n[assistant]<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    text += "[tool]sunny\n[assistant]"
    assert calling.chat(messages=history).choices[0].message.content == calling.complete(prompt=text).choices[0].text
    with_tools = "(weather city days)(stop)" + text
    expected = calling.complete(prompt=with_tools).choices[0].text
    assert calling.chat(messages=history, tools=TOOLS).choices[0].message.content == expected
    none = calling.chat(messages=history, tools=TOOLS, tool_choice="none").choices[0].message.content
    assert none == calling.complete(prompt=text).choices[0].text


def test_template_without_tools_gets_a_description(describing):
    """The answer equals that to a system message that describes the tools. Calls and results are text."""
    ids = post_ids(describing, tools=TOOLS)
    text = describing.tokenizer.decode(ids)
    assert text.startswith("[system]") and '"name": "weather"' in text and "<tool_call>" in text
    history = [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    text = describing.tokenizer.decode(post_ids(describing, messages=[*HELLO, *history]))
    assert text.endswith("[user]<tool_response>\nsun\n</tool_response>\n[assistant]") and "Rome" in text


def deep(count):
    """Return a function whose parameters are nested `count` times."""
    schema = {}
    for _ in range(count):
        schema = {"a": schema}
    return {"type": "function", "function": {"name": "f", "parameters": {"x": schema}}}


def post_ids(running, **fields):
    answer = running.usual._client.post(f"{running.url}/tokenize", json={"messages": HELLO} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://x/y"}}}]},
            r"tools cannot be enforced: tools\[0\].function.parameters \('f'\): .* has \$ref .*",
        ),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools has two functions named 'stop'; give each function its own name."),
        ({"tools": TOOLS, "ignore_eos": True}, "constrained calls determine the output's end; .*"),
        ({"tools": TOOLS, "stop_token_ids": [5]}, "constrained calls determine the output's end; .*"),
        ({"tools": [deep(700)]}, "tools.*(nested|levels deep).*"),
        (
            {"tools": TOOLS, "functions": [{"name": "f"}]},
            "functions is not supported by this server; send tools instead.",
        ),
        (
            {"messages": [*HELLO, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
            r"messages\[1\] is the result of the call 'x', but no earlier message has this call; .*",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "["}}]},
                ]
            },
            r"messages\[1\].tool_calls\[0\].function.arguments is '\['; expected the text of a JSON object, .*",
        ),
        ({"tool_choice": "required"}, "tool_choice is 'required', but there are no tools; add tools."),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice names 'x', which is not a function in tools; name one of the tools.",
        ),
    ],
)
def test_errors_are_one_clear_sentence(calling, fields, sentence):
    fields = {"tool_choice": "required"} | fields if "tools" in fields else fields
    with pytest.raises(openai.BadRequestError) as error:
        calling.chat(
            **{name: fields[name] for name in fields if name not in ("ignore_eos", "stop_token_ids")}, extra_body=fields
        )
    assert re.fullmatch(sentence, error.value.body["message"]), error.value.body


def test_format_and_tools_may_be_combined(calling):
    """The output is either JSON that satisfies the schema, or calls."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    kinds = set()
    for seed in range(8):
        one = calling.chat(tools=TOOLS, response_format=form, seed=seed, max_completion_tokens=120).choices[0]
        kinds.add(one.finish_reason)
        if one.message.tool_calls:
            check(one)
        elif one.finish_reason == "length":
            assert "<tool_call>".startswith(one.message.content[:11])
        else:
            jsonschema.validate(json.loads(one.message.content), schema)
    assert "stop" in kinds and kinds & {"tool_calls", "length"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_responses_with_required_calls_are_valid(calling, choice):
    """A response is one function_call item, streamed or whole, and goes back into the input with its result."""
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    fields = {"model": servers.NAME, "input": "the thing", "tools": tools, "tool_choice": choice}
    fields |= {"parallel_tool_calls": False, "extra_body": {"seed": 4}}
    found = calling.usual.responses.create(**fields)
    (item,) = found.output
    assert (found.status, item.type, item.status) == ("completed", "function_call", "completed")
    if item.name == "weather":
        jsonschema.validate(json.loads(item.arguments), WEATHER)
    *_, last = calling.usual.responses.create(**fields, stream=True)
    assert [(one.name, one.arguments) for one in last.response.output] == [(item.name, item.arguments)]
    later = [{"role": "user", "content": "the thing"}, item.model_dump()]
    later.append({"type": "function_call_output", "call_id": item.call_id, "output": "sun"})
    answer = calling.usual.responses.create(**fields | {"input": later, "tool_choice": "none"}, max_output_tokens=20)
    assert answer.output[0].type == "message"


def test_stop_strings_do_not_cut_required_calls(calling):
    options = {"tools": TOOLS, "tool_choice": BY_NAME, "max_completion_tokens": 200}
    for stop in ("}", '"ci', ', "d'):
        assert check(calling.chat(**options, stop=stop).choices[0]) == check(calling.chat(**options).choices[0])


def test_call_cut_off_by_a_stop_string_is_incomplete(calling, monkeypatch):
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
    ids = calling.tokenizer(written, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(
        "jspec.serve.app.output_constraint", lambda *_: OutputConstraint("tools", "x", lambda _: lambda: Forced(ids))
    )
    one = calling.chat(tools=STRICT, max_completion_tokens=200, stop=', "d').choices[0]
    assert one.finish_reason == "stop" and one.message.tool_calls[0].function.arguments == '{"city": "Rome"'


def test_logprobs_and_ids_cover_calls(calling):
    options = {"tools": TOOLS, "tool_choice": BY_NAME, "max_completion_tokens": 200, "logprobs": True}
    one = calling.chat(**options, extra_body={"return_token_ids": True}).choices[0]
    assert (
        len(one.logprobs.content) == len(one.token_ids) and np.isfinite([t.logprob for t in one.logprobs.content]).all()
    )
    text = "".join(token.token for token in one.logprobs.content[:-1])
    assert check(one) and text.startswith("<tool_call>") and text.endswith("</tool_call>")


LETTERS = {"enum": ["a", "th"]}
BOTH = [
    {"type": "function", "function": {"name": "the", "parameters": {"type": "object", "properties": {"in": LETTERS}}}},
    {"type": "function", "function": {"name": "in"}},
]
BOTH[0]["function"]["parameters"] |= {"required": ["in"], "additionalProperties": False}
TEXTS = [
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    for name, arguments in (("the", '{"in": "a"}'), ("the", '{"in": "th"}'), ("in", "{}"))
]


def exact_calls(running, body):
    """Return the probability of every token sequence that is a valid call, from the model's own logits.

    The output is restricted at each token, as the grammar's masks say. They allow several tokenizations of a text.
    """
    served = running.server._served
    prompt, held = parse_request(served, body).prompts[0], []
    library = make_tokenizer(running.tokenizer.backend_tokenizer.to_str(), 261, [0])
    compiling = SimpleNamespace(lark=lambda text: held.append(compile_grammar(library, "grammar", text, 36)))
    output_constraint(served, body).compile(compiling)
    waiting, law, target = [((), 1.0)], {}, running.engine.device.target
    while waiting:
        tokens, p = waiting.pop()
        matcher = held[0].copy()
        assert all(map(matcher.consume, tokens))
        bits = np.frombuffer(matcher.allowed(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:261])
        logits = np.zeros(261)
        if len(allowed) > 1:  # most tokens are the only possible ones
            logits = np.asarray(target(np.array([[*prompt, *tokens]]))[0, -1], np.float64)
        each = np.exp(logits[allowed]) / np.exp(logits[allowed]).sum()
        for token, share in zip(allowed.tolist(), each, strict=True):
            if token:
                waiting.append(((*tokens, token), p * share))
            else:
                law[*tokens, 0] = p * share
    assert np.isclose(sum(law.values()), 1)
    assert {running.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in law} == {*TEXTS}
    return law


def test_required_calls_have_enumerated_distribution(calling, report):
    """The calls have the model's distribution, restricted to valid calls at each token, with and without seeds."""
    options = {"tools": BOTH, "tool_choice": "required", "parallel_tool_calls": False, "max_completion_tokens": 90}
    body = ChatBody(model=servers.NAME, messages=HELLO, **options)
    law = exact_calls(calling, body)
    leaves = [*law]
    p_values = []
    for seeded in (False, True):
        counts = np.zeros(len(leaves), np.int64)
        for i in range(100):
            answer = calling.chat(**options, n=8, seed=i if seeded else None, extra_body={"return_token_ids": True})
            for one in answer.choices:
                counts[leaves.index(tuple(one.token_ids))] += 1
        p_values.append(oracle.p_value(counts, np.array([*law.values()])))
    sees = oracle.detectable(800, len(leaves) - 1, oracle.ALPHA / 2)
    report(sequences=len(leaves), calls_each=800, min_p=f"{min(p_values):.2g}", sees_tv=f"{sees:.3f}")
    assert min(p_values) > oracle.ALPHA / 2
