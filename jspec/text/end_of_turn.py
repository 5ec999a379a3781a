"""The token that a chat template puts after an assistant's message.

A chat model ends its answers with this token, whether or not its files declare the token as EOS.
"""

import functools
import re
from collections.abc import MutableMapping
from typing import cast

from jspec.core.tokenizer import Tokenizer

_ANSWER = "jspec-answer"
_CHAT = [{"role": "user", "content": "jspec-question"}, {"role": "assistant", "content": _ANSWER}]
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # marks answers for training; not supported by jinja2


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token that the chat template ends an answer with, or None."""
    template = getattr(tokenizer, "chat_template", None)
    return _end_of_turn(tokenizer, template) if isinstance(template, str) else None


@functools.lru_cache(maxsize=16)
def _end_of_turn(tokenizer: Tokenizer, template: str) -> int | None:
    try:
        text = _rendered(tokenizer, template)
    except Exception:  # templates may raise anything, and may reject this conversation
        return None
    _, found, after = text.rpartition(_ANSWER)
    ids: list[int] = tokenizer(after.lstrip(), add_special_tokens=False, verbose=False)["input_ids"] if found else []
    return ids[0] if ids and _is_special(tokenizer, ids[0]) and after.strip() else None


def _rendered(tokenizer: Tokenizer, template: str) -> str:
    """Return the conversation as rendered by the template.

    Transformers would render it identically, but importing transformers takes several seconds.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    functions = cast(MutableMapping[str, object], environment.globals)
    functions["raise_exception"] = _refuse
    functions["strftime_now"] = lambda form: ""
    options: dict[str, object] = {"messages": _CHAT, "tools": None, "documents": None, "add_generation_prompt": False}
    options |= tokenizer.special_tokens_map
    return environment.from_string(_GENERATION.sub("", template)).render(options)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _is_special(tokenizer: Tokenizer, token: int) -> bool:
    shown, whole = (
        tokenizer.decode([token], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        for skip in (True, False)
    )
    return not shown and bool(whole)
