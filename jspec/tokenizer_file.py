"""Tokenizers of which tokenizer.json says everything, read without transformers, whose import takes seconds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# What tokenizer_config.json may hold for that: a class that takes tokenizer.json as it is, tokens that are in there,
# and what changes neither ids nor text. Of anything else transformers knows what it means.
_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}
_TOKENS = {"bos_token", "eos_token", "pad_token", "unk_token"}
_HARMLESS = {"backend", "chat_template", "model_input_names", "model_max_length", "tokenizer_class"}
_LEGACY_FILES = ("added_tokens.json", "special_tokens_map.json")


class TokenizerFile:
    """Speaks as the tokenizers of transformers do, as far as jspec asks them.

    Attributes:
        eos_token_id: None where there is no such token.
    """

    def __init__(self, inner: Tokenizer, eos_token: str | None) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.eos_token_id = None if eos_token is None else inner.token_to_id(eos_token)

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        """The ids of one text or of several; nothing is said of long ones, whatever `verbose` is."""
        if isinstance(text, str):
            return {"input_ids": self._inner.encode(text, add_special_tokens=add_special_tokens).ids}
        encoded = self._inner.encode_batch(text, add_special_tokens=add_special_tokens)
        return {"input_ids": [one.ids for one in encoded]}

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of `ids`; spaces stay as they are, for `read` leaves other tokenizers to transformers."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Every token, added ones included, with its id."""
        return self._inner.get_vocab()

    def __len__(self) -> int:
        return self._inner.get_vocab_size()


def read(directory: Path) -> TokenizerFile | None:
    """The tokenizer in `directory`, or None where transformers may make something else of its files.

    Raises:
        Exception: tokenizer.json is damaged; the library has no class for that.
    """
    config = _config(directory)
    if config is None or any((directory / name).exists() for name in _LEGACY_FILES):
        return None
    inner = Tokenizer.from_file(str(directory / "tokenizer.json"))
    special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    if not {config[name] for name in _TOKENS & config.keys()} <= special | {None}:
        return None  # transformers would add the token, find it in texts, and leave it out of them
    return TokenizerFile(inner, config.get("eos_token"))


def _config(directory: Path) -> dict[str, Any] | None:
    """tokenizer_config.json, if it leaves everything to a tokenizer.json beside it."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or not (directory / "tokenizer.json").is_file():
        return None
    if config.pop("clean_up_tokenization_spaces", False) or config.get("tokenizer_class") not in _CLASSES:
        return None
    strings = all(isinstance(config[name], str | None) for name in _TOKENS & config.keys())
    return config if strings and config.keys() <= _TOKENS | _HARMLESS else None
