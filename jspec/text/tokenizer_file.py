"""Tokenizers read from tokenizer.json or a GGUF file.

The tokenizers library uses these files without changes. Some tokenizer classes in transformers instead rebuild the
tokenizer from its class name, which changes ids. Importing transformers also takes several seconds.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import AddedToken, Tokenizer

from convert import sentencepiece
from convert.gguf import header as gguf_header
from convert.gguf import tokenizer as gguf_tokenizer
from jspec.text import tokenizer_config
from jspec.text.tokenizer_config import TokenizerConfig

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_NO_TOKENS = frozenset({"unk_token"})  # stands for text that has no token, so decoded text must show it


def transformers() -> ModuleType:
    """Import transformers, which takes several seconds.

    Suppress its notice that PyTorch is missing, because jspec does not need PyTorch.
    """
    if "transformers" in sys.modules or _ADVICE in os.environ:
        return importlib.import_module("transformers")
    os.environ[_ADVICE] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        os.environ.pop(_ADVICE, None)


class TokenizerFile:
    """A tokenizer with the part of the transformers tokenizer interface that jspec uses.

    Attributes:
        bos_token_id, eos_token_id: the ids of these tokens, or None if there is no such token.
        chat_template: the template that renders a conversation as text, if there is one.
        special_tokens_map: the text of each named token ("bos_token", "eos_token" and the like), by name.
    """

    def __init__(self, inner: Tokenizer, named: Mapping[str, object], chat_template: str | None) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner, self.chat_template = inner, chat_template
        self.special_tokens_map = {
            name: text for name, text in named.items() if name.endswith("_token") and isinstance(text, str)
        }
        self.bos_token_id, self.eos_token_id = (
            inner.token_to_id(self.special_tokens_map[name]) if name in self.special_tokens_map else None
            for name in ("bos_token", "eos_token")
        )

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        """Return the ids of one or several texts. Long texts never cause a warning, whatever `verbose` is."""
        # Encode a batch even for one text, because other threads can then run in the meantime.
        several = [text] if isinstance(text, str) else text
        ids = [one.ids for one in self._inner.encode_batch(several, add_special_tokens=add_special_tokens)]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return self(text, add_special_tokens)["input_ids"]

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Return the text of `ids`. Spaces stay as the model generated them."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **template: object,
    ) -> dict[str, Any] | str:
        """Render the messages as text, and return the text or its ids.

        Args:
            conversation: the messages, each with a "role" and "content".
            add_generation_prompt: whether to append the start of an answer.
            tokenize: whether to return ids.
            **template: template variables. They replace special tokens of the same name.

        Raises:
            ValueError: there is no template.
        """
        if self.chat_template is None:
            raise ValueError("The tokenizer has no chat template; use the checkpoint of a chat model.")
        render = transformers().utils.chat_template_utils.render_jinja_template
        options = {"chat_template": self.chat_template, "add_generation_prompt": add_generation_prompt}
        (text,), _ = render([conversation], **options, **{**self.special_tokens_map, **template})
        return self(text, add_special_tokens=False) if tokenize else text

    def get_vocab(self) -> dict[str, int]:
        """Return a dict that maps every token to its id, including added tokens."""
        return self._inner.get_vocab()

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The underlying tokenizer from the tokenizers library."""
        return self._inner

    def __len__(self) -> int:
        return self._inner.get_vocab_size()


def read(directory: Path) -> TokenizerFile | None:
    """Return the tokenizer that the tokenizer.json in `directory` describes, or None if there is no such file.

    Raises:
        Exception: a file is damaged. The tokenizers library has no specific class for that.
    """
    if not (directory / "tokenizer.json").is_file():
        return None
    inner, config = Tokenizer.from_file(str(directory / "tokenizer.json")), tokenizer_config.read(directory)
    _add_tokens(inner, config)
    named = config.named | {name: token for name, i in config.ids.items() if (token := inner.id_to_token(i))}
    _make_special(inner, named)
    return TokenizerFile(inner, named, config.chat_template)


def _add_tokens(inner: Tokenizer, config: TokenizerConfig) -> None:
    """Add the tokens that are only in files other than tokenizer.json."""
    for i, token in sorted(config.added.items()):
        if inner.token_to_id(token.content) is None:
            inner.add_tokens([token])
            if inner.token_to_id(token.content) != i:
                raise ValueError(
                    f"the token {token.content!r} has the id {i}, but the next free id in tokenizer.json is "
                    f"{inner.token_to_id(token.content)}; use files from one version of the model"
                )


def _make_special(inner: Tokenizer, named: Mapping[str, str]) -> None:
    """Make named tokens special, because chat templates write them as text and decoded text must not show them."""
    special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    others = {text for name, text in named.items() if name not in _NO_TOKENS} - special
    known = sorted(text for text in others if inner.token_to_id(text) is not None)
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in known])


def from_sentencepiece(directory: Path) -> TokenizerFile:
    """Return the tokenizer of the SentencePiece model in `directory`, which has no tokenizer.json.

    Every text starts with BOS and does not end with EOS, as with transformers' LlamaTokenizer, unless
    tokenizer_config.json says otherwise.

    Raises:
        convert.CheckpointError: the model is not a BPE model, or it changes text before splitting it.
    """
    config = tokenizer_config.read(directory)
    add = {name: config.adds.get(name, name == "bos") for name in ("bos", "eos")}
    words = sentencepiece.read(directory / "tokenizer.model", add)
    named = {f"{name}_token": words.tokens[i] for name, i in words.ids.items()} | config.named
    ids = {
        name: words.tokens.index(named[f"{name}_token"]) for name in words.ids if named[f"{name}_token"] in words.tokens
    }
    inner = gguf_tokenizer.assemble(dataclasses.replace(words, ids=words.ids | ids))
    _add_tokens(inner, config)
    _make_special(inner, named)
    return TokenizerFile(inner, named, config.chat_template)


def from_gguf(file: Path) -> TokenizerFile:
    """Return the tokenizer in a GGUF file.

    Raises:
        convert.CheckpointError: the tokenizer is missing, damaged or of an unknown kind.
    """
    inner, config = gguf_tokenizer.build(gguf_header.read(file))
    return TokenizerFile(inner, config, config.get("chat_template"))
