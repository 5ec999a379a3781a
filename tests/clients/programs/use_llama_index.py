"""LlamaIndex: OpenAILike as a chat model with tools, and as a completion model, which is its default."""

from typing import Any

from checks import BEGINNING, MOST_TOKENS, QUESTION, TOOL_QUESTION, Program, weather
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

program = Program("llama-index-llms-openai-like")
where: Any = {"model": program.model, "api_base": f"{program.url}/v1", "api_key": "none", "max_tokens": MOST_TOKENS}
plain = OpenAILike(**where)
chat = OpenAILike(**where, is_chat_model=True, is_function_calling_model=True)


class City(BaseModel):
    """A city."""

    name: str
    is_large: bool


@program.check("complete and stream_complete")
def _() -> None:
    assert plain.complete(BEGINNING).text
    *_, last = plain.stream_complete(BEGINNING)
    assert last.text


@program.check("chat and stream_chat")
def _() -> None:
    assert chat.chat([ChatMessage(QUESTION)]).message.content
    pieces = [*chat.stream_chat([ChatMessage(QUESTION)])]
    assert "".join(piece.delta or "" for piece in pieces) == pieces[-1].message.content


@program.check("chat_with_tools")
def _() -> None:
    tool = FunctionTool.from_defaults(weather)
    found = chat.chat_with_tools([tool], user_msg=TOOL_QUESTION, tool_required=True)
    calls = chat.get_tool_calls_from_response(found)
    assert calls and all(isinstance(call.tool_kwargs["days"], int) for call in calls)


@program.check("predict_and_call")
def _() -> None:
    tool = FunctionTool.from_defaults(weather)
    found = chat.predict_and_call([tool], user_msg=TOOL_QUESTION, tool_required=True)
    assert found.sources and "sunny" in found.response


@program.check("structured_predict")
def _() -> None:
    assert isinstance(chat.structured_predict(City, PromptTemplate(QUESTION)), City)


@program.check("as_structured_llm, streamed")
def _() -> None:
    *_, last = chat.as_structured_llm(City).stream_chat([ChatMessage(QUESTION)])
    assert last.raw is not None  # tool_choice is "auto" here, so a small model may answer with text


program.end()
