"""DSPy: Predict, ChainOfThought, typed outputs, tools and a stream."""

import contextlib
from typing import Any

import dspy
from checks import MOST_TOKENS, QUESTION, TOOL_QUESTION, Program, weather
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider
from dspy.utils.exceptions import AdapterParseError

program = Program("dspy")
lm = dspy.LM(
    f"openai/{program.model}", api_base=f"{program.url}/v1", api_key="none", cache=False, max_tokens=MOST_TOKENS
)
dspy.configure(lm=lm)


class Asked(dspy.Signature):
    """Answer with calls of tools."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


@program.check("LM")
def _() -> None:
    (found,) = lm(QUESTION)
    assert found


@program.check("Predict")
def _() -> None:
    with contextlib.suppress(AdapterParseError):  # the prompt describes a format, which a small model may ignore
        assert dspy.Predict("question -> answer")(question=QUESTION).answer is not None


access = AccessPolicy(provider="served", env_keys=("SERVED_KEY",), base_url=f"{program.url}/v1")
register_provider(
    ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("openai")),
    supports=ModelSupport(function_calling=True, response_schema=True),
)
# DSPy sends formats and tools only to models that it knows, or to those of a declared provider.
declared = dspy.LM(
    f"served/{program.model}", api_base=f"{program.url}/v1", api_key="none", cache=False, max_tokens=MOST_TOKENS
)


@program.check("ChainOfThought with typed outputs")
def _() -> None:
    with dspy.context(lm=declared, adapter=dspy.JSONAdapter()):
        found = dspy.ChainOfThought("question -> city: str, is_large: bool")(question=QUESTION)
    assert isinstance(found.city, str) and isinstance(found.is_large, bool)


@program.check("native tools")
def _() -> None:
    with dspy.context(lm=declared, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        found: Any = dspy.Predict(Asked)(question=TOOL_QUESTION, tools=[dspy.Tool(weather)])
    assert "calls" in found


@program.check("streamify")
async def _() -> None:
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    predict = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
    with dspy.context(lm=declared, adapter=dspy.JSONAdapter()):
        *_, last = [part async for part in predict(question=QUESTION)]
    assert isinstance(last, dspy.Prediction)


program.end()
