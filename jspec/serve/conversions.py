"""Conversion between text and tokens: /tokenize and /detokenize."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import FailFast, Field, model_validator

from jspec.core.tokenizer import Tokenizer
from jspec.core.types import Json
from jspec.serve.chat_schemas import Conversation, Message
from jspec.serve.errors import wrong
from jspec.serve.fields import MOST, MOST_MESSAGES, ModelBody, WholeNumber, invalid_fields
from jspec.serve.parse_request import Served, chat_ids, check_characters
from jspec.text.chat_template import ids_of_text


class TokenizeBody(Conversation):
    """The body of /tokenize: a prompt, or a chat's messages.

    The tokenizer adds special tokens to a prompt. A chat template writes its own.
    """

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] = Field(default_factory=list[Message], max_length=MOST_MESSAGES)
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.prompt is None) != bool(self.messages):
            raise invalid_fields("prompt", "expected either prompt or messages; send exactly one of these fields")
        others = {"add_special_tokens"} if self.prompt is None else Conversation.model_fields.keys() - {"model"}
        if misplaced := sorted(others & self.model_fields_set):
            kind = "messages" if self.prompt is None else "a prompt"
            raise invalid_fields(misplaced[0], f"{misplaced[0]} has no effect on {kind}; omit this field")
        return self


class DetokenizeBody(ModelBody):
    """The body of /detokenize."""

    model: str = ""
    tokens: Annotated[list[Annotated[WholeNumber, Field(ge=0, le=MOST)]], FailFast(), Field(max_length=200_000)]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion between text and tokens.

    Attributes:
        kind: the schema of request bodies.
        convert: a function that returns the response. It raises Refusal if the body is invalid for this model.
    """

    kind: type[ModelBody]
    convert: Callable[[Served, Any], dict[str, Json]]


def tokenize(served: Served, body: TokenizeBody) -> dict[str, Json]:
    """Return the tokens of a text or of a chat.

    Raises:
        Refusal: the text is too long, or the chat template rejects the messages.
    """
    if body.prompt is None:
        ids = chat_ids(served, body)
    else:
        check_characters(served, [body.prompt], "prompt")
        ids = _ids(served.tokenizer, body.prompt, body.add_special_tokens)
    response: dict[str, Json] = {"count": len(ids), "max_model_len": served.max_length, "tokens": ids}
    return response | ({"token_strs": [served.names.text(i) for i in ids]} if body.return_token_strs else {})


def _ids(tokenizer: Tokenizer, text: str, adds_special_tokens: bool) -> list[int]:
    if adds_special_tokens:
        return ids_of_text(tokenizer, text)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def detokenize(served: Served, body: DetokenizeBody) -> dict[str, Json]:
    """Return the text of tokens, including special tokens.

    Raises:
        Refusal: a token is outside the vocabulary.
    """
    size = served.target.config.vocab_size
    if out_of_vocab := [i for i in body.tokens if i >= size]:
        raise wrong(f"tokens holds {out_of_vocab[0]}, outside the vocabulary of {size} tokens.", "tokens")
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return {"prompt": served.tokenizer.decode(body.tokens, **options)}


CONVERSIONS = {"/tokenize": Conversion(TokenizeBody, tokenize), "/detokenize": Conversion(DetokenizeBody, detokenize)}
