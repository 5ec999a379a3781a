"""The interface that jspec requires of a Hugging Face tokenizer."""

from collections.abc import Mapping
from typing import Any, Protocol


class Tokenizer(Protocol):
    """A tokenizer with the interface of transformers, such as one from `jspec.load_tokenizer`."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_tokens_map(self) -> Mapping[str, object]: ...
    def __call__(
        self, text: str | list[str], /, add_special_tokens: bool = True, verbose: bool = True
    ) -> Mapping[str, Any]:
        """Return ``{"input_ids": ids}``, with a list of ids for one text, or a list of such lists for several."""
        ...

    def decode(
        self, ids: list[int], /, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Return the text of `ids`."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token, including added tokens."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], /, **options: Any) -> Any:
        """Return a conversation as a prompt: its text, or its ids if ``tokenize=True``."""
        ...
