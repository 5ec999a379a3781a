"""Rendering of chat templates. It has transformers' result without its import, which takes several seconds."""

import json
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import cast

from jspec.core.tokenizer import Tokenizer

_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # marks answers for training; not supported by jinja2


def render_template(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """Return the conversation as rendered by the template, without a generation prompt.

    Args:
        tokenizer: the tokenizer whose special tokens the template may name.
        template: the template.
        messages: the conversation.
        tools: the functions that the model may call.

    Raises:
        Exception: the template rejects the conversation, or fails. Templates may raise anything.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    functions = cast(MutableMapping[str, object], environment.globals)
    functions["raise_exception"] = _refuse
    functions["strftime_now"] = lambda form: ""
    cast(MutableMapping[str, object], environment.filters)["tojson"] = _to_json
    options: dict[str, object] = {"messages": messages, "tools": tools, "documents": None}
    options |= {"add_generation_prompt": False, **tokenizer.special_tokens_map}
    return environment.from_string(_GENERATION.sub("", template)).render(options)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as JSON. Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
