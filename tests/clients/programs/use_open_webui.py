"""The requests of Open WebUI's backend: models, chats, tools, and the titles, tags and follow-ups of a chat.

Open WebUI is too large to install for a check. Its backend sends these bodies with aiohttp.
"""

import json
from typing import Any

import aiohttp
from checks import MOST_TOKENS, QUESTION, TOOL_QUESTION, Program

program = Program("aiohttp", "Open WebUI's requests, aiohttp")
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}
FORWARDED = {"X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-User-Id": "1", "X-OpenWebUI-User-Role": "admin"}
FORWARDED |= {"X-OpenWebUI-User-Email": "ada@example.com", "X-OpenWebUI-Chat-Id": "2"}
USER = {"role": "user", "content": QUESTION}
HISTORY = f"<chat_history>\nUSER: {QUESTION}\nASSISTANT: Paris.\n</chat_history>"
PARAMETERS = {
    "temperature": 0.8,
    "top_p": 0.9,
    "min_p": 0.05,
    "max_tokens": 24,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "reasoning_effort": "medium",
    "seed": 7,
    "stop": ["###"],
    "logit_bias": {"5": -100},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather forecast of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city's name."}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


async def answer(headers: dict[str, str], **fields: Any) -> dict[str, Any]:
    """Send a chat, and return the whole answer, or that of the joined chunks of a stream."""
    body = json.dumps({"model": program.model, **fields})
    address = f"{program.url}/v1/chat/completions"
    async with (
        aiohttp.ClientSession(trust_env=True) as session,
        session.post(address, data=body, headers=HEADERS | headers) as response,
    ):
        assert response.status == 200, await response.text()
        if "text/event-stream" not in response.headers["Content-Type"]:
            return (await response.json())["choices"][0]["message"]
        lines = [line.decode().strip() async for line in response.content]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    parts = [json.loads(one) for one in data[:-1]]
    assert any(part.get("usage") for part in parts)
    deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    return {"content": "".join(delta.get("content") or "" for delta in deltas), "tool_calls": calls}


@program.check("models")
async def _() -> None:
    async with (
        aiohttp.ClientSession(trust_env=True) as session,
        session.get(f"{program.url}/v1/models", headers=HEADERS | FORWARDED) as response,
    ):
        assert program.model in [one["id"] for one in (await response.json())["data"]]


@program.check("chat")
async def _() -> None:
    fields: Any = {"stream": True, "stream_options": {"include_usage": True}}
    assert (await answer({}, messages=[USER], **fields))["content"]


@program.check("chat with every parameter, a text part and the user's headers")
async def _() -> None:
    content = [{"type": "text", "text": QUESTION}]
    fields: Any = {"stream": True, "stream_options": {"include_usage": True}, **PARAMETERS}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    assert (await answer(FORWARDED, messages=messages, **fields))["content"]


@program.check("native tools and a result")
async def _() -> None:
    call = {"index": 0, "id": "call_1", "type": "function"}
    call |= {"function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'}}
    messages = [
        {"role": "user", "content": TOOL_QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    for some in (messages[:1], messages):
        found = await answer(
            {}, messages=some, tools=[TOOL], stream=True, stream_options={"include_usage": True}, max_tokens=64
        )
        assert found["content"] or found["tool_calls"]


for task, key in (("a title", "title"), ("1 to 3 tags", "tags"), ("3 follow-up questions", "follow_ups")):

    @program.check(f"generation of {task}", task, key)
    async def _(task: str, key: str) -> None:
        prompt = f'### Task:\nGenerate {task} for this chat.\n### Output:\nJSON format: {{ "{key}": ... }}\n{HISTORY}'
        messages = [{"role": "user", "content": prompt}]
        found = await answer({}, messages=messages, stream=False, max_completion_tokens=MOST_TOKENS)
        assert found["content"]


program.end()
