"""AutoGen: the OpenAI client of autogen-ext, and agents of autogen-agentchat with a tool and a stream."""

import json
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import StructuredMessage
from autogen_core import CancellationToken
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import MOST_TOKENS, QUESTION, TOOL_QUESTION, Program, weather
from pydantic import BaseModel

program = Program("autogen-ext")
INFO: Any = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
INFO |= {"family": "unknown", "multiple_system_messages": False}
tool = FunctionTool(weather, "Get the weather forecast of a city.", name="weather", strict=True)


class City(BaseModel):
    """A city."""

    name: str
    is_large: bool


def client(**options: Any) -> OpenAIChatCompletionClient:
    """Return a client; AutoGen requires a description of each model that it does not know."""
    return OpenAIChatCompletionClient(
        model=program.model,
        max_tokens=MOST_TOKENS,
        base_url=f"{program.url}/v1",
        api_key="none",
        model_info=INFO,
        **options,
    )


@program.check("create")
async def _() -> None:
    found = await client().create([UserMessage(content=QUESTION, source="user")])
    assert found.content and found.usage.completion_tokens > 0


@program.check("create_stream")
async def _() -> None:
    *pieces, last = [part async for part in client().create_stream([UserMessage(content=QUESTION, source="user")])]
    assert pieces and "".join(f"{piece}" for piece in pieces) == getattr(last, "content", None)


@program.check("tools")
async def _() -> None:
    asked = [UserMessage(content=TOOL_QUESTION, source="user")]
    found = await client().create(asked, tools=[tool], tool_choice="required")
    assert found.finish_reason == "function_calls" and not isinstance(found.content, str)
    for call in found.content:
        assert await tool.run_json(json.loads(call.arguments), CancellationToken())


@program.check("structured output")
async def _() -> None:
    found = await client().create([UserMessage(content=QUESTION, source="user")], json_output=City)
    assert City.model_validate_json(f"{found.content}")


@program.check("an agent")
async def _() -> None:
    found = await AssistantAgent("assistant", client()).run(task=QUESTION)
    assert getattr(found.messages[-1], "content", None)


@program.check("an agent with a tool, streamed")
async def _() -> None:
    agent = AssistantAgent("assistant", client(), tools=[tool], reflect_on_tool_use=True, model_client_stream=True)
    *_, last = [event async for event in agent.run_stream(task=TOOL_QUESTION)]
    assert last.messages[-1].content


@program.check("an agent with structured output")
async def _() -> None:
    found = await AssistantAgent("assistant", client(), output_content_type=City).run(task=QUESTION)
    last = found.messages[-1]
    assert isinstance(last, StructuredMessage) and isinstance(last.content, City)


program.end()
