"""The prompt of a chat request: messages and tools, rendered by the model's chat template."""

import json
from collections.abc import Mapping
from typing import cast

from jspec.core.tokenizer import Tokenizer
from jspec.serve.chat_schemas import Conversation
from jspec.serve.errors import wrong
from jspec.serve.tools.detect import ToolSupport
from jspec.text.chat_template import Message, rendered
from jspec.text.template_variables import check_variables

_KWARGS = "chat_template_kwargs"


def prompt_texts(body: Conversation) -> dict[str, str]:
    """Return the texts of a prompt, by the field that contains them.

    Raises:
        Refusal: a value is nested too deeply.
    """
    calls = [call.function for message in body.messages for call in message.tool_calls]
    own = [message.text + (message.reasoning_content or message.reasoning or "") for message in body.messages]
    tools = [[tool.function.name, tool.function.description, tool.function.parameters] for tool in body.tools]
    return {
        "messages": "".join([*own, *(function.name + function.arguments for function in calls)]),
        "tools": _json("tools", tools),
        _KWARGS: _json(_KWARGS, body.chat_template_kwargs),
    }


def chat_prompt(tokenizer: Tokenizer, support: ToolSupport | None, body: Conversation) -> list[int]:
    """Return the token ids of a chat's prompt.

    Args:
        support: how the model writes calls; None if it has no chat template.

    Raises:
        Refusal: the template rejects the messages, or it fails.
    """
    tools = [tool.plain() for tool in body.tools] if body.may_call else []
    messages = [message.plain() for message in body.messages]
    variables = _variables(body.chat_template_kwargs)
    try:
        if support is not None:
            messages = support.messages(messages, tools)
            if tools and support.is_native:
                variables["tools"] = [tool.as_json() for tool in tools]
        text = rendered(
            tokenizer,
            cast("list[Message]", messages),
            "The conversation",
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            variables=variables | ({"continue_final_message": True} if body.continue_final_message else {}),
        )
    except ValueError as error:
        raise wrong(str(error), "messages") from None
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise wrong("The messages are empty; add some text.", "messages")
    return ids


def _variables(given: Mapping[str, object]) -> dict[str, object]:
    try:
        return check_variables(_KWARGS, given, reserved=("tools",))
    except ValueError as error:
        raise wrong(str(error), _KWARGS) from None


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise wrong(f"{name} is nested too deeply; simplify it.", name) from None
