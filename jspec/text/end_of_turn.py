"""The token that a chat template puts after an assistant's message.

A chat model ends its answers with this token, whether or not its files declare the token as EOS.
"""

import functools

from jspec.core.tokenizer import Tokenizer
from jspec.text.render_template import render_template

_ANSWER = "jspec-answer"
_CHAT = [{"role": "user", "content": "jspec-question"}, {"role": "assistant", "content": _ANSWER}]


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token that the chat template ends an answer with, or None."""
    template = getattr(tokenizer, "chat_template", None)
    return _end_of_turn(tokenizer, template) if isinstance(template, str) else None


@functools.lru_cache(maxsize=16)
def _end_of_turn(tokenizer: Tokenizer, template: str) -> int | None:
    try:
        text = render_template(tokenizer, template, _CHAT)
    except Exception:  # templates may raise anything, and may reject this conversation
        return None
    _, found, after = text.rpartition(_ANSWER)
    ids: list[int] = tokenizer(after.lstrip(), add_special_tokens=False, verbose=False)["input_ids"] if found else []
    return ids[0] if ids and _is_special(tokenizer, ids[0]) and after.strip() else None


def _is_special(tokenizer: Tokenizer, token: int) -> bool:
    shown, whole = (
        tokenizer.decode([token], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        for skip in (True, False)
    )
    return not shown and bool(whole)
