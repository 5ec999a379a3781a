"""Build the tokenizer described by a GGUF file.

The model's tokenizer.json is the reference: a vocabulary gives the same ids whichever file it is read from. Control
tokens, BOS and pre-tokenizer names mean the same as in llama.cpp. Only the default chat template is used.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from convert.errors import CheckpointError, brief
from convert.gguf.header import Header
from convert.gguf.pre_tokenizers import SPLITS
from convert.gguf.vocabulary import Vocabulary, vocabulary

_CONTROL, _USER_DEFINED = 3, 4
_NAMED = ("bos", "eos", "unk", "pad")
_SPECIAL = {
    "gpt2": {"<|endoftext|>"},
    "llama": {"<unk>", "<s>", "</s>"},
}  # special, even if the file does not mark them


def build(header: Header) -> tuple[Tokenizer, dict[str, str]]:
    """Build the tokenizer and the content of tokenizer_config.json.

    Raises:
        CheckpointError: `header` has no tokenizer, or one of an unknown kind.
    """
    words = vocabulary(header)
    if words.kind == "gpt2" and words.pre not in SPLITS:
        raise CheckpointError(
            f"{header.file} has tokenizer.ggml.pre {words.pre!r}, an unknown way to split text; pass the folder or "
            "Hugging Face repo id of the model that the file was made from: --tokenizer SRC."
        )
    try:
        tokenizer = assemble(words)
    except Exception as error:  # the tokenizers library has no class for its errors
        raise CheckpointError(f"The tokenizer in {header.file} cannot be read: {brief(error)}.") from error
    named = {f"{name}_token": words.tokens[i] for name, i in words.ids.items() if name in _NAMED}
    config = {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend", **named}
    return tokenizer, config | ({} if words.chat_template is None else {"chat_template": words.chat_template})


def assemble(words: Vocabulary) -> Tokenizer:
    """Build a vocabulary's tokenizer. Any exception means that the vocabulary is inconsistent."""
    tokenizer = (_byte_level if words.kind == "gpt2" else _sentencepiece)(words)
    tokenizer.post_processor = _ends(words)
    return tokenizer


def write(header: Header, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: under the same conditions as `build`.
    """
    tokenizer, config = build(header)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _byte_level(words: Vocabulary) -> Tokenizer:
    """Build a byte-level BPE tokenizer, in which each byte has its own character."""
    spelling = _spelling()
    alphabet = set(spelling.values())
    # Special tokens keep their text. Other tokens with characters outside the alphabet are spelled in bytes.
    special = {words.tokens[i] for i in _special_ids(words)}
    vocab = {
        token
        if token in special or alphabet.issuperset(token)
        else "".join(spelling[byte] for byte in token.encode()): i
        for i, token in enumerate(words.tokens)
    }
    splits = SPLITS[words.pre or ""]
    model = models.BPE(vocab=vocab, merges=_merges(words), fuse_unk=False, ignore_merges=splits.ignore_merges)
    tokenizer = Tokenizer(model)
    if splits.composes:
        tokenizer.normalizer = normalizers.NFC()
    parts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer, words)


def _spelling() -> dict[int, str]:
    """Return GPT-2's character for each byte: printable bytes map to themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _sentencepiece(words: Vocabulary) -> Tokenizer:
    """Build a character-level BPE tokenizer that falls back to byte tokens for unknown characters."""
    vocab = {token: i for i, token in enumerate(words.tokens)}
    merges = _merges(words) if words.merges is not None else _implied_merges(vocab, words.scores)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    # As in Llama 2's tokenizer.json, add a space before every piece of text between special tokens.
    ends, runs = normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")
    spaces = [ends, runs] if words.removes_spaces else []
    prefix = [normalizers.Prepend("▁")] if words.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, *prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if words.add_space_prefix else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return _with_added(tokenizer, words)


def _merges(words: Vocabulary) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ")) for merge in words.merges or []]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise ValueError(f"the merge {' '.join(wrong)!r} does not have two tokens")
    return merges  # pyright: ignore[reportReturnType]


def _implied_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every token pair that forms a token, by descending score and then by descending length of the parts."""
    merges: list[tuple[float, str, str]] = []
    for token, i in vocab.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        merges += [(scores[i], *pair) for pair in sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _with_added(tokenizer: Tokenizer, words: Vocabulary) -> Tokenizer:
    """Add the tokens that are matched whole (special and user-defined tokens) and return the tokenizer."""
    special = [words.tokens[i] for i in _special_ids(words)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    typed = zip(words.tokens, words.types, strict=False)
    defined = [token for token, kind in typed if kind == _USER_DEFINED and token not in special]
    known = [token for token in defined if tokenizer.token_to_id(token) is not None]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in known])
    return tokenizer


def _special_ids(words: Vocabulary) -> list[int]:
    """Return the ids of control tokens, tokens that the file names, and tokens that end generation."""
    control = [i for i, kind in enumerate(words.types) if kind == _CONTROL]
    implied = [i for i, token in enumerate(words.tokens) if token in _SPECIAL[words.kind]]
    named = [i for name, i in words.ids.items() if name in _NAMED]
    return list(dict.fromkeys([*implied, *control, *named, *words.ends]))


def _ends(words: Vocabulary) -> processors.TemplateProcessing:
    """Return the post-processor that adds BOS and EOS if the file or its tokenizer kind requires them."""
    add = {"bos": words.kind == "llama" or SPLITS[words.pre or ""].add_bos, "eos": False} | words.add
    before, after = ([words.tokens[words.ids[name]]] if add[name] and name in words.ids else [] for name in add)
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{part}:1" for part in (*before, "$B", *after))],
        special_tokens=[(token, words.tokens.index(token)) for token in dict.fromkeys([*before, *after])],
    )
