"""Pydantic AI: runs, streams, tools and structured output, on both of OpenAI's APIs."""

from checks import MOST_TOKENS, QUESTION, TOOL_QUESTION, Program, weather
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, PromptedOutput, Tool
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

program = Program("pydantic-ai-slim")
provider = OpenAIProvider(base_url=f"{program.url}/v1", api_key="none")
settings = ModelSettings(max_tokens=MOST_TOKENS)
model = OpenAIChatModel(program.model, provider=provider, settings=settings)


class City(BaseModel):
    """A city."""

    name: str
    is_large: bool


class Anything(BaseModel, extra="allow"):
    """Any object, because without its schema a small model writes any."""


@program.check("run")
def _() -> None:
    found = Agent(model, instructions="Be brief.").run_sync(QUESTION)
    assert found.output and found.usage.output_tokens > 0


@program.check("run_stream")
async def _() -> None:
    async with Agent(model).run_stream(QUESTION) as found:
        pieces = [piece async for piece in found.stream_text(delta=True, debounce_by=None)]
        assert pieces and "".join(pieces) == await found.get_output()


@program.check("structured output by a tool")
def _() -> None:
    assert isinstance(Agent(model, output_type=City).run_sync(QUESTION).output, City)


@program.check("structured output by a tool, streamed")
async def _() -> None:
    async with Agent(model, output_type=City).run_stream(QUESTION) as found:
        assert isinstance(await found.get_output(), City)


@program.check("structured output by a format")
def _() -> None:
    assert isinstance(Agent(model, output_type=NativeOutput(City)).run_sync(QUESTION).output, City)


@program.check("structured output by a prompt")
def _() -> None:
    agent = Agent(model, output_type=PromptedOutput(Anything))
    assert isinstance(agent.run_sync(QUESTION).output, Anything)


@program.check("a tool, its result and a final answer")
def _() -> None:
    called: list[str] = []

    def forecast(city: str, days: int) -> str:
        called.append(weather(city, days))
        return called[-1]

    agent = Agent(
        model,
        output_type=City,
        tools=[Tool(forecast, prepare=lambda context, tool: None if called else tool)],
        capabilities=[PrepareOutputTools(lambda context, tools: tools if called else [])],
    )
    assert isinstance(agent.run_sync(TOOL_QUESTION).output, City) and called


@program.check("responses API")
def _() -> None:
    other = OpenAIResponsesModel(program.model, provider=provider, settings=settings)
    assert Agent(other).run_sync(QUESTION).output
    assert isinstance(Agent(other, output_type=City).run_sync(QUESTION).output, City)


program.end()
