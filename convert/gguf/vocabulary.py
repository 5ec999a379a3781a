"""A GGUF file's validated tokenizer metadata, from which `convert.gguf.tokenizer` builds a tokenizer."""

import dataclasses
import math
from typing import TypeVar, cast

from convert.errors import CheckpointError, listing
from convert.gguf.header import Header

T = TypeVar("T")
_PREFIX = "tokenizer.ggml."
_LONGEST_TOKEN = 4096
# Tokens that end generation in llama.cpp (llama-vocab.cpp, `special_eog_ids`), except those for infilling.
_END_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<turn|>", "[e~["),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
}
_OF_ANSWERS = {"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}  # if these exist, "<|end|>" only ends a message
# Special tokens: our name -> the name in the key.
IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's metadata.

    Attributes:
        kind: "gpt2" for byte-level BPE, "llama" for SentencePiece.
        pre: the name of the rules by which "gpt2" first splits text.
        types: the type of each token: 3 for control, 4 for user-defined.
        ids: the ids of special tokens, keyed by the names in `IDS`.
        add: whether to add BOS and EOS, under the keys "bos" and "eos". A key is absent if the file does not say.
        add_space_prefix: whether "llama" puts a space before every text.
        removes_spaces: whether "llama" collapses runs of spaces and strips leading and trailing ones.
    """

    kind: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str] | None
    ids: dict[str, int]
    add: dict[str, bool]
    chat_template: str | None
    add_space_prefix: bool = True
    removes_spaces: bool = False

    @property
    def ends(self) -> list[int]:
        """The ids that end generation: EOS, EOT, EOM, and tokens whose text is known to end a turn.

        A file names one EOS token. In many chat-model files it is not the token that ends an answer.
        """
        named = [self.ids[name] for name in ("eos", "eot", "eom") if name in self.ids]
        has_messages = any(texts <= set(self.tokens) for texts in _OF_ANSWERS)
        texts = _END_TEXTS - ({"<|end|>"} if has_messages else set())
        return list(dict.fromkeys([*named, *(i for i, token in enumerate(self.tokens) if token in texts)]))


def vocabulary(header: Header) -> Vocabulary:
    """Return the tokenizer's metadata in `header`.

    Raises:
        CheckpointError: the metadata is missing or inconsistent, or requires an unsupported tokenizer.
    """
    known = _Fields(header)
    known.check_names()
    tokens = cast("list[str] | None", known.get("tokens", list))
    words = Vocabulary(
        kind=known.get("model", str) or "none",
        pre=known.get("pre", str),
        tokens=tokens or [],
        types=cast("list[int] | None", known.get("token_type", list)) or [],
        scores=cast("list[float] | None", known.get("scores", list)) or [],
        merges=cast("list[str] | None", known.get("merges", list)),
        ids={name: i for name, key in IDS.items() if (i := known.get(f"{key}_token_id", int)) is not None},
        add={name: flag for name in ("bos", "eos") if (flag := known.get(f"add_{name}_token", bool)) is not None},
        chat_template=known.get("chat_template", str, "tokenizer."),
        add_space_prefix=known.get("add_space_prefix", bool) is not False,
    )
    if fault := _fault(words, known):
        raise CheckpointError(f"{header.file} {fault}; download it again or choose another file.")
    return words


class _Fields:
    """The tokenizer's metadata keys."""

    def __init__(self, header: Header) -> None:
        self._header = header

    def get(self, name: str, kind: type[T], prefix: str = _PREFIX) -> T | None:
        value = self._header.metadata.get(prefix + name)
        if value is not None and type(value) is not kind:
            raise CheckpointError(
                f"{prefix + name} in {self._header.file} is {str(value)[:40]!r}; expected {kind.__name__}."
            )
        return cast("T | None", value)

    def check_names(self) -> None:
        """Reject keys that the gguf library does not know, because they may change the tokenizer."""
        import gguf

        known = {name for name in vars(gguf.Keys.Tokenizer).values() if isinstance(name, str)}
        prefix, more = "tokenizer.", "tokenizer.chat_template."
        tails = {name[len(prefix) :] for name in known}
        found = {key for key in self._header.metadata if key.startswith(prefix) or key[len(prefix) :] in tails}
        if unknown := {key for key in found - known if not key.startswith(more)}:
            raise CheckpointError(
                f"{self._header.file} has {listing(unknown)}, which no supported tokenizer has; choose another file."
            )


def _is_finite(score: object) -> bool:
    return isinstance(score, float) and math.isfinite(score)


def _fault(words: Vocabulary, known: _Fields) -> str | None:
    """Return a description of what is wrong with the tokenizer, or None."""
    count = len(words.tokens)
    if words.kind not in ("gpt2", "llama") or not count:
        return f"has {count} tokens for a tokenizer {words.kind[:40]!r}, expected tokens for 'gpt2' or 'llama'"
    if not all(type(token) is str for token in words.tokens) or len(set(words.tokens)) != count:
        return "has duplicate tokens, or tokens that are not text"
    if max(map(len, words.tokens)) > _LONGEST_TOKEN:  # merges are searched for in every token
        return f"has a token of more than {_LONGEST_TOKEN} characters"
    if wrong := [name for name, i in words.ids.items() if not 0 <= i < count]:
        return f"has {wrong[0]}_token_id {words.ids[wrong[0]]}, with {count} tokens"
    if len(words.types) not in (0, count) or len(words.scores) not in (0, count):
        return f"has {len(words.types)} token types and {len(words.scores)} scores for {count} tokens"
    if not all(isinstance(kind, int) for kind in cast("list[object]", words.types)) or not all(
        map(_is_finite, words.scores)
    ):
        return "has token types or scores that are not numbers"
    if words.kind == "gpt2" and words.merges is None:
        return "has no tokenizer.ggml.merges"
    if words.kind == "llama" and words.merges is None and not words.scores:
        return "has neither scores nor merges for its tokens"
    if known.get("remove_extra_whitespaces", bool) or known.get("precompiled_charsmap", list):
        return "changes text before it is split, which is not supported"
    return None
