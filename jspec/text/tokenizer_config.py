"""Tokenizer settings from files other than tokenizer.json: named special tokens, added tokens and the chat template."""

import dataclasses
import json
from pathlib import Path
from typing import cast

from tokenizers import AddedToken

from convert.json_fields import Fields
from convert.json_file import Json

_NO_DEFAULT = "{{{{ raise_exception('the tokenizer has the chat templates {names}, but none is the default') }}}}"


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer settings that tokenizer.json does not contain.

    Attributes:
        named: the text of each named token ("bos_token", "eos_token" and the like), by name.
        ids: the ids of named tokens whose text is in no file, by name.
        adds: whether every text gets a "bos" or "eos" token, by name. tokenizer.json has its own setting for that.
        added: tokens that tokenizer.json may lack, by id.
        chat_template: the Jinja template for conversations, if there is one.
    """

    named: dict[str, str]
    ids: dict[str, int]
    adds: dict[str, bool]
    added: dict[int, AddedToken]
    chat_template: str | None


def read(directory: Path) -> TokenizerConfig:
    """Read the files as transformers does for a class that uses tokenizer.json without changes.

    `clean_up_tokenization_spaces` is ignored, because it would remove spaces that the model generated.

    Raises:
        ValueError: a file is malformed.
    """
    config = _object(directory / "tokenizer_config.json")
    fields, added = dict(config), config.get("added_tokens_decoder")
    if not isinstance(added, dict):  # older folders have two more files instead
        fields |= _object(directory / "special_tokens_map.json")
        added = {i: {"content": text} for text, i in _object(directory / "added_tokens.json").items()}
    named = {name: text for name, value in fields.items() if name.endswith("_token") and (text := _text(value))}
    # A folder may leave both tokens to its tokenizer's class. config.json then has their ids.
    model = {} if {"bos_token", "eos_token"} <= fields.keys() else _object(directory / "config.json")
    ids = {name: model.get(f"{name}_id") for name in ("bos_token", "eos_token") if name not in fields}
    special = {*named.values(), *map(_text, cast("list[Json]", fields.get("additional_special_tokens") or []))}
    return TokenizerConfig(
        named=named,
        ids={name: i for name, i in ids.items() if type(i) is int},
        adds={name: flag for name in ("bos", "eos") if isinstance(flag := config.get(f"add_{name}_token"), bool)},
        added={int(i): _added(cast("Fields", value), special) for i, value in cast("Fields", added).items()},
        chat_template=_chat_template(directory, config),
    )


def _object(file: Path) -> Fields:
    """Return the contents of a JSON file, or an empty object if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        content = cast("Json", json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return content


def _text(token: Json) -> str | None:
    """Return a token's text. The token may be an object with flags."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _added(value: Fields, special: set[str | None]) -> AddedToken:
    flags = {
        name: value[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in value
    }
    content = value["content"]
    return AddedToken(
        cast("str", content), **{"special": content in special, "normalized": content not in special} | flags
    )


def _chat_template(directory: Path, config: Fields) -> str | None:
    """Return the default chat template. Templates in separate files replace those in the config."""
    templates = config.get("chat_template")
    if isinstance(templates, list):
        templates = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
    files = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (file := directory / "chat_template.jinja").is_file():
        files["default"] = file
    if files:
        templates = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if isinstance(templates, dict) and templates:
        single = next(iter(templates.values())) if len(templates) == 1 else None
        templates = templates.get("default", single) or _NO_DEFAULT.format(names=", ".join(map(str, templates)))
    return templates if isinstance(templates, str) else None
