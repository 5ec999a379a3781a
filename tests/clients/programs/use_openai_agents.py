"""OpenAI's Agents SDK: runs, streams, tools and structured output, on both of OpenAI's APIs."""

from typing import Any

from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
)
from checks import MOST_TOKENS, QUESTION, TOOL_QUESTION, Program, weather
from openai import AsyncOpenAI
from pydantic import BaseModel

program = Program("openai-agents")


class City(BaseModel):
    """A city."""

    name: str
    is_large: bool


def agent(**options: Any) -> Agent:
    """Return an agent whose answers are limited in length."""
    options = {"model_settings": ModelSettings(max_tokens=MOST_TOKENS, temperature=0.0)} | options
    return Agent(name="assistant", instructions="Be brief.", model=program.model, **options)


set_default_openai_client(AsyncOpenAI(base_url=f"{program.url}/v1", api_key="none"), use_for_tracing=False)


for api in ("responses", "chat_completions"):

    @program.check(f"{api}: run", api)
    async def _(api: Any) -> None:
        set_default_openai_api(api)
        assert (await Runner.run(agent(), QUESTION)).final_output

    @program.check(f"{api}: run_streamed", api)
    async def _(api: Any) -> None:
        set_default_openai_api(api)
        found, text = Runner.run_streamed(agent(), QUESTION), ""
        async for event in found.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        assert text and text == found.final_output

    @program.check(f"{api}: a tool, its result and a final answer", api)
    async def _(api: Any) -> None:
        set_default_openai_api(api)
        called: list[str] = []

        @function_tool(is_enabled=lambda context, agent: not called)
        def forecast(city: str, days: int) -> str:
            called.append(weather(city, days))
            return called[-1]

        settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=MOST_TOKENS)
        found = await Runner.run(agent(tools=[forecast], model_settings=settings), TOOL_QUESTION)
        assert len(called) == 1 and found.final_output

    @program.check(f"{api}: structured output", api)
    async def _(api: Any) -> None:
        set_default_openai_api(api)
        found = await Runner.run(agent(output_type=AgentOutputSchema(City)), QUESTION)
        assert isinstance(found.final_output, City)


program.end()
