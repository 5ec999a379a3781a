"""LangChain's OpenAI models: invoke, stream, bind_tools and with_structured_output."""

from checks import BEGINNING, MOST_TOKENS, QUESTION, TOOL_QUESTION, Program, weather
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

program = Program("langchain-openai")
where = {"base_url": f"{program.url}/v1", "api_key": "none", "model": program.model}
chat = ChatOpenAI(**where, max_tokens=MOST_TOKENS)


class City(BaseModel):
    """A city."""

    name: str
    is_large: bool


@program.check("invoke")
def _() -> None:
    found = chat.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert found.content and found.usage_metadata and found.usage_metadata["output_tokens"] > 0


@program.check("stream, as invoke")
def _() -> None:
    cold = ChatOpenAI(**where, temperature=0, max_tokens=24)
    text = "".join(f"{chunk.content}" for chunk in cold.stream(QUESTION))
    assert text and text == cold.invoke(QUESTION).content


@program.check("bind_tools")
def _() -> None:
    found = chat.bind_tools([weather], tool_choice="any").invoke(TOOL_QUESTION)
    assert found.tool_calls and not found.invalid_tool_calls
    assert all(isinstance(call["args"]["days"], int) for call in found.tool_calls)


@program.check("bind_tools, streamed")
def _() -> None:
    first, *others = chat.bind_tools([weather], tool_choice="weather").stream(TOOL_QUESTION)
    whole = first
    for chunk in others:
        whole = whole + chunk
    assert whole.tool_calls and isinstance(whole.tool_calls[0]["args"]["days"], int)


@program.check("bind_tools, a result in the conversation")
def _() -> None:
    call = {"name": "weather", "args": {"city": "Paris", "days": 3}, "id": "call_1"}
    messages = [
        HumanMessage(TOOL_QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage("Sunny.", tool_call_id="call_1"),
    ]
    found = chat.bind_tools([weather]).invoke(messages)
    assert isinstance(found.content, str)  # a small model may answer nothing


@program.check("with_structured_output")
def _() -> None:
    assert isinstance(chat.with_structured_output(City).invoke(QUESTION), City)


@program.check("with_structured_output, function_calling")
def _() -> None:
    assert isinstance(chat.with_structured_output(City, method="function_calling").invoke(QUESTION), City)


@program.check("with_structured_output, json_mode")
def _() -> None:
    assert isinstance(chat.with_structured_output(None, method="json_mode").invoke(f"{QUESTION} Use JSON."), dict)


@program.check("responses API")
def _() -> None:
    found = ChatOpenAI(**where, max_tokens=MOST_TOKENS, use_responses_api=True).invoke(QUESTION)
    assert found.text


@program.check("completions")
def _() -> None:
    plain = OpenAI(**where, temperature=0, max_tokens=24)
    text = plain.invoke(BEGINNING)
    assert text and text == "".join(plain.stream(BEGINNING))


program.end()
