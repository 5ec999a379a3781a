"""DSPy: Predict, ChainOfThought, typed outputs, an agent with a tool and a stream."""

from typing import Any

import dspy
from checks import QUESTION, TOOL_QUESTION, Program, weather

program = Program("dspy")
lm = dspy.LM(f"openai/{program.model}", api_base=f"{program.url}/v1", api_key="none", cache=False, max_tokens=200)
dspy.configure(lm=lm)


@program.check("LM")
def _() -> None:
    (found,) = lm(QUESTION)
    assert found


@program.check("Predict")
def _() -> None:
    assert dspy.Predict("question -> answer")(question=QUESTION).answer is not None


@program.check("ChainOfThought with typed outputs")
def _() -> None:
    found = dspy.ChainOfThought("question -> city: str, population: int")(question=QUESTION)
    assert isinstance(found.city, str) and isinstance(found.population, int)


@program.check("JSONAdapter")
def _() -> None:
    with dspy.context(adapter=dspy.JSONAdapter()):
        found = dspy.Predict("question -> city: str, population: int")(question=QUESTION)
    assert isinstance(found.city, str) and isinstance(found.population, int)


@program.check("native tools")
def _() -> None:
    class Asked(dspy.Signature):
        """Answer with calls of tools."""

        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    with dspy.context(adapter=dspy.JSONAdapter(use_native_function_calling=True)):
        found: Any = dspy.Predict(Asked)(question=TOOL_QUESTION, tools=[dspy.Tool(weather)])
    assert "calls" in found


@program.check("ReAct")
def _() -> None:
    found = dspy.ReAct("question -> answer", tools=[weather], max_iters=2)(question=TOOL_QUESTION)
    assert found.answer is not None and found.trajectory


@program.check("streamify")
async def _() -> None:
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    predict = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
    *_, last = [part async for part in predict(question=QUESTION)]
    assert isinstance(last, dspy.Prediction)


program.end()
