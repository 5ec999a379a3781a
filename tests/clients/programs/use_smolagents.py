"""smolagents: the OpenAI model, an agent that calls tools and an agent that writes code."""

from typing import Any

from checks import MOST_TOKENS, QUESTION, TOOL_QUESTION, Program, weather
from smolagents import ActionStep, CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

program = Program("smolagents")
model = OpenAIServerModel(program.model, api_base=f"{program.url}/v1", api_key="none", max_tokens=MOST_TOKENS)
messages: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]


@program.check("generate, whole and streamed alike")
def _() -> None:
    cold = OpenAIServerModel(program.model, api_base=f"{program.url}/v1", api_key="none", temperature=0, max_tokens=24)
    text = cold.generate(messages).content
    assert text and text == "".join(piece.content or "" for piece in cold.generate_stream(messages))


@program.check("ToolCallingAgent")
def _() -> None:
    agent = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=2, verbosity_level=0)
    answer = agent.run(TOOL_QUESTION)
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    assert answer is not None and steps[0].tool_calls and not steps[0].error


@program.check("ToolCallingAgent, streamed")
def _() -> None:
    agent = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=2, verbosity_level=0, stream_outputs=True)
    *_, last = agent.run(TOOL_QUESTION, stream=True)
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    assert last.output is not None and steps[0].tool_calls and not steps[0].error


for is_structured in (False, True):

    @program.check(f"CodeAgent{', structured outputs' * is_structured}", is_structured)
    def _(is_structured: bool) -> None:
        agent = CodeAgent(
            tools=[], model=model, max_steps=2, verbosity_level=0, use_structured_outputs_internally=is_structured
        )
        answer = agent.run(QUESTION)
        steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
        assert answer is not None and steps[0].model_output


program.end()
