"""A GGUF file's tokenizer, as transformers makes it of the file, without torch.

That is what a test holds it to. Three things come from llama.cpp instead, where transformers leaves the way of the
models: vocabularies of Llama 3 start every text with BOS unless the file says otherwise, and take a word that is a
token as it is; and "smollm" splits off every digit before anything else, so that white space before one stays whole.
As in transformers, chat templates besides the first are left out.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from convert.errors import CheckpointError, brief
from convert.gguf_header import Header
from convert.gguf_vocabulary import Vocabulary, vocabulary

_CONTROL, _USER_DEFINED = 3, 4
_NAMED = ("bos", "eos", "unk", "pad")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_DIGIT = r"\p{N}"  # what is left is split as by GPT-2
_TEKKEN = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
# tokenizer.ggml.pre -> the pattern of a word; None is GPT-2's own.
_SPLITS: dict[str | None, str | None] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2")),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    "smollm": _DIGIT,
}
_AS_LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken"}


def build(header: Header) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and the content of tokenizer_config.json.

    Raises:
        CheckpointError: `header` has none, or one of a kind not known here.
    """
    words = vocabulary(header)
    if words.kind == "gpt2" and words.pre not in _SPLITS:
        raise CheckpointError(
            f"{header.file} has tokenizer.ggml.pre {words.pre!r}, a way to split texts that is not known here; use the "
            "tokenizer of the model that the file was made of."
        )
    try:
        tokenizer = (_byte_level if words.kind == "gpt2" else _sentencepiece)(words)
        tokenizer.post_processor = _ends(words)
    except Exception as error:  # the tokenizers library has no class for it
        raise CheckpointError(f"The tokenizer in {header.file} cannot be read: {brief(error)}.") from error
    named = {f"{name}_token": words.tokens[i] for name, i in words.ids.items() if name in _NAMED}
    config = {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend", **named}
    return tokenizer, config | ({} if words.chat_template is None else {"chat_template": words.chat_template})


def write(header: Header, directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: as `build`.
    """
    tokenizer, config = build(header)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _byte_level(words: Vocabulary) -> Tokenizer:
    """BPE over bytes, each spelled as a character of its own."""
    spelling = _spelling()
    alphabet = set(spelling.values())
    vocab = {
        token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode()): i
        for i, token in enumerate(words.tokens)
    }
    as_it_is = words.pre in _AS_LLAMA3
    model = models.BPE(vocab=vocab, merges=_merges(words), fuse_unk=False, ignore_merges=as_it_is)
    tokenizer = Tokenizer(model)
    pattern = _SPLITS[words.pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, _DIGIT))
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level]) if split else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    # A control token in other characters is not one of the vocabulary, which has it in bytes.
    return _with_added(tokenizer, words, ("<|endoftext|>",), alphabet.issuperset)


def _spelling() -> dict[int, str]:
    """GPT-2's character for each byte: the printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _sentencepiece(words: Vocabulary) -> Tokenizer:
    """BPE over characters, with tokens for the bytes of those it does not know."""
    vocab = {token: i for i, token in enumerate(words.tokens)}
    merges = _merges(words) if words.merges is not None else _implied_merges(vocab, words.scores)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    tokenizer.decoder = decoders.Sequence(parts)
    return _with_added(tokenizer, words, ("<unk>", "<s>", "</s>"), lambda token: True)


def _merges(words: Vocabulary) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ")) for merge in words.merges or []]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise ValueError(f"the merge {' '.join(wrong)!r} is not of two tokens")
    return merges  # pyright: ignore[reportReturnType]


def _implied_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two: the best score first, among equals the longer parts."""
    merges = []
    for token, i in vocab.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        merges += [(scores[i], *pair) for pair in sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _with_added(
    tokenizer: Tokenizer, words: Vocabulary, usual: tuple[str, ...], spelled: Callable[[str], bool]
) -> Tokenizer:
    """With the tokens that are found whole in a text: control tokens, the usual ones, those that users have defined."""
    vocab, typed = tokenizer.get_vocab(), list(zip(words.tokens, words.types, strict=False))
    control = [token for token, kind in typed if kind == _CONTROL and spelled(token)]
    named = [words.tokens[i] for name, i in words.ids.items() if name in _NAMED]
    special = dict.fromkeys([*(token for token in usual if token in vocab), *control, *named])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    defined = [token for token, kind in typed if kind == _USER_DEFINED and token in vocab and token not in special]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
    return tokenizer


def _ends(words: Vocabulary) -> processors.TemplateProcessing:
    """Adds BOS and EOS where the file says so, or its kind does."""
    add = {"bos": words.kind == "llama" or words.pre in _AS_LLAMA3, "eos": False} | words.add
    before, after = ([words.tokens[words.ids[name]]] if add[name] and name in words.ids else [] for name in add)
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{part}:1" for part in (*before, "$B", *after))],
        special_tokens=[(token, words.tokens.index(token)) for token in dict.fromkeys([*before, *after])],
    )
