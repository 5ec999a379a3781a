"""The patterns that split text into words for byte-level BPE vocabularies in GGUF files, by `tokenizer.ggml.pre`.

The names are llama.cpp's (llama-vocab.cpp), and the patterns are those in the models' tokenizer.json files. The table
omits names that are not for language models or that need more than patterns, such as "default", for which llama.cpp
prints a warning.
"""

# ruff: noqa: RUF001 (the patterns contain punctuation of many scripts)

import dataclasses

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_ASCII_SYMBOLS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_HAN_AND_KANA = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_END}"
QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SYMBOLS}|{_END}"
_QWEN35 = rf"{_CONTRACTIONS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
_CASED = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
_GPT4O = rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
_NOT_HAN = r"(?!\p{Han})"
_KIMI_UPPER, _KIMI_LOWER = f"(?:{_NOT_HAN}{_UPPER})", f"(?:{_NOT_HAN}{_LOWER})"
_KIMI = (
    rf"\p{{Han}}+|{_BEFORE}{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?|"
    rf"{_BEFORE}{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_END}"
)
_DEEPSEEK3 = (
    rf"{_ASCII_SYMBOLS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}"
)
_SPARK = (
    rf"{_ASCII_SYMBOLS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|"
    r"[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # groups of three, counted from the last digit
_ASIAN = (
    "[一-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e00-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_WIDE_SYMBOLS = r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
)
_SPACES = "|".join([*(rf"\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s{1}"])
_YOUTU_SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _HAN_AND_KANA
_YOUTU = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"


@dataclasses.dataclass(frozen=True)
class Splits:
    """The rules by which a vocabulary splits text.

    Attributes:
        patterns: the patterns, in the order of use. Each pattern splits the pieces that the earlier ones left.
        ignore_merges: whether a word that is a token becomes that token, regardless of the merges.
        add_bos: whether every text starts with BOS, unless the file says otherwise.
        composes: whether characters and accents are composed first (NFC), as in the models' tokenizer.json. llama.cpp
            does not compose them.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    composes: bool = False


def _table() -> dict[str, Splits]:
    rows: list[tuple[str, Splits]] = [
        ("mpt olmo", Splits((GPT2,), composes=True)),
        ("gpt-2 phi-2 jais exaone4 trillion granite-docling", Splits((GPT2,))),
        ("gigachat a.x-4.0 mellum modern-bert", Splits((GPT2,))),
        ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", Splits((LLAMA3,), True, True)),
        ("smaug-bpe dbrx chatglm-bpe glm4", Splits((LLAMA3,))),
        ("qwen2 deepseek-r1-qwen", Splits((QWEN2,), composes=True)),
        ("kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", Splits((QWEN2,))),
        ("qwen35", Splits((_QWEN35,), composes=True)),
        ("tekken", Splits((_TEKKEN,), True, True)),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", Splits((_GPT4O,))),
        ("tiny_aya cohere2moe", Splits((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
        ("kimi-k2", Splits((_KIMI,))),
        ("command-r", Splits((r"\p{N}", GPT2), composes=True)),
        ("smollm starcoder refact codeshell exaone minerva-7b mellum2", Splits((r"\p{N}", GPT2))),
        ("falcon", Splits((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"))),
        ("deepseek-llm", Splits(("[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", _WIDE_SYMBOLS, r"\s+$", _CJK, r"\p{N}+"))),
        ("deepseek-coder", Splits(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Splits((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3))),
        ("spark2_5", Splits((r"\p{N}{1,3}", _HAN_AND_KANA, _SPARK, r"\p{N}"))),
        ("poro-chat bloom gpt3-finnish", Splits((_BLOOM,))),
        ("viking", Splits((_BLOOM, r"\p{N}"))),
        ("chameleon", Splits((*_CHAMELEON, GPT2), add_bos=True)),
        ("superbpe", Splits((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
        ("bailingmoe bailingmoe2 llada-moe", Splits((_BAILING,))),
        ("seed-coder", Splits((_SEED,))),
        ("ufakzeka", Splits((rf"{_LETTERS}|\p{{N}}|{_SYMBOLS}|{_END}",))),
        ("laguna", Splits((r"[^\n]+|[\n]+", QWEN2))),
        ("exaone-moe", Splits((_EXAONE_MOE,))),
        ("afmoe", Splits((_THREES, _ASIAN, _DEEPSEEK3))),
        ("minicpm5", Splits((r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), ignore_merges=True)),
        ("jais-2", Splits((LLAMA3.replace(r"\s+(?!\S)|\s+", _SPACES),))),
        ("youtu", Splits((_YOUTU_SCRIPTS, _YOUTU), ignore_merges=True)),
    ]
    return {name: splits for names, splits in rows for name in names.split()}


SPLITS = _table()
