"""Chat-template variables that callers set, such as ``enable_thinking``."""

import reprlib
from collections.abc import Mapping
from typing import cast

# Names that jspec sets itself, and options of transformers' `apply_chat_template` that are not template variables.
_RESERVED = {
    *("messages", "conversation", "conversations", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "sanitize_control_tokens", "tokenizer_kwargs"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "self"),
}


def check_variables(name: str, variables: object, reserved: tuple[str, ...] = ()) -> dict[str, object]:
    """Validate `variables` and return them as a dict. Return an empty dict for None.

    Names that the template does not use are accepted, because a template may look up variables in any way.

    Args:
        name: the name of the argument, for error messages.
        reserved: names that are not allowed, in addition to those that jspec itself reserves.

    Raises:
        ValueError: `variables` is not a mapping, or it has a name that is reserved or that a template cannot use.
    """
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise ValueError(
            f"{name} is {reprlib.repr(variables)}; expected chat-template variables by name, such as "
            f"{{'enable_thinking': False}}."
        )
    for key in cast("Mapping[object, object]", variables):
        if not isinstance(key, str) or not key.isidentifier():
            raise ValueError(
                f"{name} holds {reprlib.repr(key)}; expected a name that a template can use, made of letters, "
                "digits and _."
            )
        if key in _RESERVED or key in reserved:
            raise ValueError(f"{name} holds {key!r}, which is not a variable that callers may set; leave it out.")
    return dict(cast("Mapping[str, object]", variables))
