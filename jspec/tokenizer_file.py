"""Tokenizers of which tokenizer.json or a GGUF file says all, read without transformers, whose import takes seconds."""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import Tokenizer

from convert import gguf_header, gguf_tokenizer

# What tokenizer_config.json may hold for that: a class that takes tokenizer.json as it is, tokens that are in there,
# and what changes neither ids nor text. Of anything else transformers knows what it means.
_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}
_TOKENS = {"bos_token", "eos_token", "pad_token", "unk_token"}
_HARMLESS = {"backend", "chat_template", "model_input_names", "model_max_length", "tokenizer_class"}
_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_LEGACY_FILES = ("added_tokens.json", "special_tokens_map.json")


def transformers() -> ModuleType:
    """The library, whose import takes seconds, without its notice that PyTorch, which jspec needs not, is missing."""
    if "transformers" in sys.modules or _ADVICE in os.environ:
        return importlib.import_module("transformers")
    os.environ[_ADVICE] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        os.environ.pop(_ADVICE, None)


class TokenizerFile:
    """Speaks as the tokenizers of transformers do, as far as jspec asks them.

    Attributes:
        bos_token_id, eos_token_id: None where there is no such token.
        chat_template: what makes one text of a conversation, if there is one.
    """

    def __init__(self, inner: Tokenizer, config: dict[str, Any], chat_template: str | None) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner, self.chat_template = inner, chat_template
        self._named = {name: config[name] for name in _TOKENS & config.keys() if config[name] is not None}
        self.bos_token_id, self.eos_token_id = (
            inner.token_to_id(self._named[name]) if name in self._named else None for name in ("bos_token", "eos_token")
        )

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        """The ids of one text or of several; nothing is said of long ones, whatever `verbose` is."""
        # A batch, also of one: other threads run meanwhile.
        several = [text] if isinstance(text, str) else text
        ids = [one.ids for one in self._inner.encode_batch(several, add_special_tokens=add_special_tokens)]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of `ids`; spaces stay as they are, for `read` leaves other tokenizers to transformers."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> dict[str, Any] | str:
        """The messages ("role", "content") as one text, or its ids; with the start of the answer, if wanted.

        Args:
            variables: of the template; they take precedence over the tokenizer's own tokens.

        Raises:
            ValueError: there is no template.
        """
        if self.chat_template is None:
            raise ValueError("The tokenizer has no chat template; use a checkpoint that was made for chats.")
        render = transformers().utils.chat_template_utils.render_jinja_template
        options = {"chat_template": self.chat_template, "add_generation_prompt": add_generation_prompt}
        (text,), _ = render([conversation], **options, **self._named | variables)
        return self(text, add_special_tokens=False) if tokenize else text

    def get_vocab(self) -> dict[str, int]:
        """Every token, added ones included, with its id."""
        return self._inner.get_vocab()

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """What does the work."""
        return self._inner

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
    return TokenizerFile(inner, config, config.get("chat_template"))


def from_gguf(file: Path) -> TokenizerFile:
    """The tokenizer in a GGUF file.

    Raises:
        convert.CheckpointError: it is missing, damaged, or of a kind that is not known.
    """
    inner, config = gguf_tokenizer.build(gguf_header.read(file))
    return TokenizerFile(inner, config, config.get("chat_template"))


def _config(directory: Path) -> dict[str, Any] | None:
    """tokenizer_config.json, if it leaves everything to a tokenizer.json beside it; the chat template is in it."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or not (directory / "tokenizer.json").is_file():
        return None
    if config.pop("clean_up_tokenization_spaces", False) or config.get("tokenizer_class") not in _CLASSES:
        return None
    if (template := directory / "chat_template.jinja").is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    strings = all(isinstance(config[name], str | None) for name in (_TOKENS | {"chat_template"}) & config.keys())
    return config if strings and config.keys() <= _TOKENS | _HARMLESS else None
