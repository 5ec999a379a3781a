"""The columns that the output adds to those of the input."""

from typing import TypedDict


class Completed(TypedDict):
    """The completion of a prompt.

    Attributes:
        prompt_index: the number of prompts before this one in the input. With the seed, it determines the key.
        generated_text: the text, without the stop string.
        generated_tokens: the token ids.
        finish_reason: "eos", "stop" or "length", as in `jspec.complete`.
    """

    prompt_index: int
    generated_text: str
    generated_tokens: list[int]
    finish_reason: str


COLUMNS = tuple(Completed.__annotations__)
