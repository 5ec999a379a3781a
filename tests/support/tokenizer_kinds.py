"""Tokenizers of many kinds, as found in tokenizer.json files, and text in many scripts."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
QWEN2 = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)
HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u30ff]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}"
)
ALPHABETS = [
    "abc theinSTR 'sll ",
    "0123456789 12,3.",
    " \t\n\r\u00a0\u3000\u2028",
    "\x00\x01\x07\x0b\x1b\x7f\x85\u200b\u200d\ufeff\u202e",
    "ñçßéΩμεЖлюڪعبש",
    "漢字かなカナ한글ไทย",
    "అఆఇతెలుగు ಕನ್ನಡ తె",
    "🙂🙃👩‍👩‍👧🏽🇩🇪✨",
    "e\u0301o\u0308\u1100\u1161ﬁ①\uff21½",
    '{}#"._=+-*/()<>[]|▁Ġ',
]


def texts(count: int, seed: int = 0) -> list[str]:
    """Return texts over the alphabets above, alone and mixed."""
    rng = np.random.default_rng(seed)
    mixed = [*"".join(ALPHABETS)]
    words = ["hi", "  hi", "The the", "don't", "1234", "</s>", "<s>", "<|end|>", "<more>", " <more> ", "<mask>", "\n\n"]
    result = [*words[: count // 4], ""]
    while len(result) < count:
        letters = [*ALPHABETS[len(result) % len(ALPHABETS)]] if rng.random() < 0.6 else mixed
        text = "".join(rng.choice(letters, rng.integers(1, 30)))
        result.append(text + " ".join(rng.choice(words, rng.integers(0, 3))))
    return result


@functools.cache
def _corpus() -> list[str]:
    return [Path(__file__).read_text(encoding="utf-8"), *texts(400, seed=7)]


def _trained(model: models.Model, trainer: trainers.Trainer, **parts: object) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _byte_level(
    splits: list[object], *, normalizer: object = None, regex: bool = False, bos: bool = False
) -> Tokenizer:
    last = pre.ByteLevel(add_prefix_space=False, use_regex=regex)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|end|>"],
        show_progress=False,
    )
    parts = {"pre_tokenizer": pre.Sequence([*splits, last]), "decoder": decoders.ByteLevel()}
    if normalizer is not None:
        parts["normalizer"] = normalizer
    tokenizer = _trained(models.BPE(), trainer, **parts)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def _split(pattern: str) -> pre.Split:
    return pre.Split(Regex(pattern), behavior="isolated")


def _sentencepiece_bpe(
    *, normalizer: object = None, pre_tokenizer: object = None, strip: bool = True, split: bool = False
) -> Tokenizer:
    """Return a BPE model with a token for every byte, used for characters that it does not know."""
    parts = {"pre_tokenizer": pre.Metaspace(prepend_scheme="first" if strip else "never", split=split)}
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *BYTES], limit_alphabet=40, show_progress=False
    )
    learned = _trained(models.BPE(unk_token="<unk>"), trainer, **parts)
    vocab = {learned.id_to_token(i): i for i in range(learned.get_vocab_size())}
    merges = [
        (token[:at], token[at:])
        for token in list(vocab)[259:]
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    last = [decoders.Strip(content=" ", left=1)] if strip else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def _legacy() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _llama2_with_ends() -> Tokenizer:
    tokenizer = _sentencepiece_bpe(normalizer=_legacy())
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))],
    )
    return tokenizer


def _unigram(*, normalizer: object, byte_fallback: bool, scheme: str) -> Tokenizer:
    parts = {
        "pre_tokenizer": pre.Metaspace(prepend_scheme=scheme),
        "decoder": decoders.Metaspace(prepend_scheme=scheme),
    }
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    learned = _trained(models.Unigram(), trainer, normalizer=normalizer, **parts)
    if not byte_fallback:
        learned.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
        return learned
    rows = [tuple(row) for row in json.loads(learned.to_str())["model"]["vocab"]]
    tokenizer = Tokenizer(models.Unigram([*rows, *((byte, -20.0) for byte in BYTES)], unk_id=0, byte_fallback=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, parts["pre_tokenizer"]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def _wordpiece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer = _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(lowercase=True),
        pre_tokenizer=pre.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def _wordlevel(**parts: object) -> Tokenizer:
    trainer = trainers.WordLevelTrainer(vocab_size=400, special_tokens=["<unk>", "</s>"], show_progress=False)
    return _trained(models.WordLevel(unk_token="<unk>"), trainer, **parts)


def _suffixed() -> Tokenizer:
    """Return a BPE model that marks the ends of words, like those of GPT and CLIP."""
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "</s>"], end_of_word_suffix="</w>", show_progress=False
    )
    return _trained(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
        trainer,
        normalizer=normalizers.Lowercase(),
        pre_tokenizer=pre.Whitespace(),
        decoder=decoders.BPEDecoder(suffix="</w>"),
    )


def _with_added_tokens() -> Tokenizer:
    tokenizer = _byte_level([], regex=True, normalizer=normalizers.NFC())
    tokenizer.add_tokens(
        [AddedToken("<more>", lstrip=True), AddedToken("the", single_word=True), AddedToken("Å", normalized=True)]
    )
    tokenizer.add_special_tokens([AddedToken("<mask>", rstrip=True, lstrip=True)])
    return tokenizer


def _with_prefix_space() -> Tokenizer:
    tokenizer = _byte_level([], regex=True)
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


def _ignoring_merges() -> Tokenizer:
    content = json.loads(_byte_level([_split(LLAMA3)], bos=True).to_str())
    content["model"]["ignore_merges"] = True
    content["model"]["merges"] = content["model"]["merges"][::3]
    content["model"]["merges"] = [
        m for m in content["model"]["merges"] if all(part in content["model"]["vocab"] for part in m)
    ]
    return Tokenizer.from_str(json.dumps(content))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: _byte_level([], regex=True),
    "llama3": lambda: _byte_level([_split(LLAMA3)], bos=True),
    "llama3, merges ignored": _ignoring_merges,
    "qwen2": lambda: _byte_level([_split(QWEN2)], normalizer=normalizers.NFC()),
    "gpt-4o": lambda: _byte_level([_split(GPT4O)]),
    "smollm": lambda: _byte_level([pre.Digits(individual_digits=True)], regex=True),
    "deepseek-v3": lambda: _byte_level(
        [_split(r"\p{N}{1,3}"), _split("[\u4e00-\u9fa5\u3040-\u30ff]+"), _split(DEEPSEEK3)]
    ),
    "falcon": lambda: _byte_level([pre.Punctuation("contiguous"), pre.Digits(), _split("[0-9][0-9][0-9]")], regex=True),
    "byte level, NFKC, lower case": lambda: _byte_level(
        [], regex=True, normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "added tokens": _with_added_tokens,
    "roberta": _with_prefix_space,
    "llama2": lambda: _sentencepiece_bpe(normalizer=_legacy()),
    "llama2 with ends": _llama2_with_ends,
    "mistral": lambda: _sentencepiece_bpe(pre_tokenizer=pre.Metaspace(prepend_scheme="first", split=False)),
    "metaspace, always": lambda: _sentencepiece_bpe(pre_tokenizer=pre.Metaspace(prepend_scheme="always", split=True)),
    "gemma": lambda: _sentencepiece_bpe(
        normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=pre.Split(" ", "merged_with_previous"), strip=False
    ),
    "unigram": lambda: _unigram(normalizer=normalizers.NFKC(), byte_fallback=False, scheme="always"),
    "unigram with bytes": lambda: _unigram(normalizer=normalizers.NFC(), byte_fallback=True, scheme="first"),
    "wordpiece": _wordpiece,
    "wordlevel": lambda: _wordlevel(pre_tokenizer=pre.Whitespace()),
    "wordlevel, no accents": lambda: _wordlevel(
        normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
        pre_tokenizer=pre.WhitespaceSplit(),
        decoder=decoders.Metaspace(),
    ),
    "clip": _suffixed,
}


@functools.cache
def kind(name: str) -> Tokenizer:
    """Return the tokenizer called `name` in `KINDS`."""
    return KINDS[name]()
