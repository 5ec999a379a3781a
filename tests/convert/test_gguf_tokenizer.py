"""A GGUF file's tokenizer, and the one saved from it, gives the same ids and text as the model's own tokenizer."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import convert
import jspec
from convert import CheckpointError
from convert.gguf.pre_tokenizers import SPLITS
from jspec import text
from jspec.cli.common import UsageError
from jspec.cli.model_args import sources
from jspec.text import tokenizer_file
from support import gguf_files, tokenizer_kinds
from support.gguf_tokenizer import CHAT, END, START, TOOL, check_same, splitting_digits
from support.tokenizer_file import strings

SENTENCE_KEYS = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": None, "tokenizer.ggml.merges": None}
# The keys that describe a vocabulary of each kind.
KINDS = {
    "gpt2": {"tokenizer.ggml.pre": "gpt-2"},
    "gpt2 without flags": {"tokenizer.ggml.pre": "mpt", "tokenizer.ggml.add_bos_token": None},
    "smollm": {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.add_bos_token": False},
    "llama3": {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": True},
    "qwen2": {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.bos_token_id": None},
    "tekken": {"tokenizer.ggml.pre": "tekken", "tokenizer.ggml.add_eos_token": True},
    "sentencepiece": SENTENCE_KEYS | {"tokenizer.ggml.add_bos_token": None},
    "sentencepiece with merges": SENTENCE_KEYS | {"tokenizer.ggml.merges": ["▁ t", "h e", "▁t he"]},
}


@pytest.fixture(scope="module")
def byte_level():
    """Return the keys of a trained byte-level vocabulary."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[END, START], initial_alphabet=gguf_files.LETTERS, show_progress=False
    )
    inner.train([str(path) for path in sorted(Path(__file__).parent.glob("test_g*.py"))], trainer)
    tokens = [inner.id_to_token(i) for i in range(inner.get_vocab_size())] + [TOOL, "<|more|>"]
    merges = [" ".join(pair) for pair in json.loads(inner.to_str())["model"]["merges"]]
    kinds = [3, 3, *[1] * (len(tokens) - 4), 4, 4]
    return {"tokens": tokens, "token_type": kinds, "merges": merges, "bos_token_id": 1, "padding_token_id": 0}


@pytest.fixture(scope="module")
def sentencepiece():
    """Return the keys of a vocabulary with scores: single characters, parts of words, bytes."""
    rng = np.random.default_rng(0)
    words = Path(__file__).read_text(encoding="utf-8").split()
    parts = sorted({word[:i] for word in words for i in range(2, min(len(word), 9))} - {"<s>"})
    letters = sorted({letter for word in words for letter in word})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁t", "▁the", "he", *letters, *parts]
    tokens = list(dict.fromkeys([*tokens, *(f"▁{part}" for part in parts[::2]), "<|more|>"]))
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260), 4]
    scores = [0.0, 0.0, 0.0, *np.round(rng.uniform(-9, 0, len(tokens) - 3)).tolist()]  # most are equal
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"tokens": tokens, "token_type": kinds, "scores": list(map(np.float32, scores)), **ids}


def prefixed(words):
    return {f"tokenizer.ggml.{key}": value for key, value in words.items()}


@pytest.fixture(params=KINDS)
def file(request, tmp_path, byte_level, sentencepiece):
    words = sentencepiece if request.param.startswith("sentencepiece") else byte_level
    keys = prefixed(words) | KINDS[request.param]
    return gguf_files.model(tmp_path / "x.gguf", keys, vocab_size=len(words["tokens"]), num_hidden_layers=1)[0]


def composing(tokenizer):
    """Return transformers' GGUF tokenizer with the normalizer that tokenizer.json has and transformers leaves out."""
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def as_llama2(tokenizer):
    """Return transformers' GGUF tokenizer with the parts of a Llama 2 tokenizer.json."""
    content = json.loads(tokenizer.backend_tokenizer.to_str()) | {"pre_tokenizer": None}
    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    inner = Tokenizer.from_str(json.dumps(content))
    inner.normalizer = normalizers.Sequence(parts)
    tokenizer._tokenizer = inner
    return tokenizer


def test_ids_and_text_match_transformers(file, tmp_path, request, report):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    texts = [one.replace(gguf_files.TOKENS[0], END) for one in strings(1300)] + [
        f"a{TOOL} {START} b",
        "",
        " ",
        "\n\n1",
    ]
    ours = text.load_tokenizer(file)
    rows = np.random.default_rng(1).integers(0, len(ours), (200, 20)).tolist()
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    if "smollm" in request.node.name:
        theirs = splitting_digits(theirs)
    if SPLITS.get(KINDS[request.node.callspec.params["file"]]["tokenizer.ggml.pre"], SPLITS["gpt-2"]).composes:
        theirs = composing(theirs)
    if "sentencepiece" in request.node.name:
        theirs = as_llama2(theirs)
    check_same(ours, theirs, texts, rows)
    convert.save(convert.load(file), tmp_path / "store")
    written = text.load_tokenizer(tmp_path / "store")
    assert isinstance(written, tokenizer_file.TokenizerFile)
    if "sentencepiece" not in request.node.name:
        check_same(written, AutoTokenizer.from_pretrained(tmp_path / "store"), texts[:300], rows[:50])
    assert written(texts)["input_ids"] == ours(texts)["input_ids"]
    report(texts=len(texts), tokens=len(ours))


def test_llama3_tokenizer_adds_bos_and_matches_whole_words(tmp_path, byte_level):
    """Both follow llama.cpp, whose files do not record these settings; transformers does neither."""
    pair = next(merge for merge in byte_level["merges"] if merge.isascii() and merge.replace(" ", "").isalpha())
    word = pair.replace(" ", "")
    merges = [merge for merge in byte_level["merges"] if merge != pair]
    keys = prefixed(byte_level | {"merges": merges, "add_bos_token": None})
    found = {}
    for pre in ("gpt-2", "llama-bpe"):
        words = keys | {"tokenizer.ggml.pre": pre}
        file, _ = gguf_files.model(
            tmp_path / f"{pre}.gguf", words, vocab_size=len(byte_level["tokens"]), num_hidden_layers=1
        )
        found[pre] = text.load_tokenizer(file)(word)["input_ids"]
    assert found["llama-bpe"] == [1, byte_level["tokens"].index(word)]
    assert 1 not in found["gpt-2"] and len(found["gpt-2"]) > 1


def test_no_token_is_added_to_vocabulary(tmp_path, byte_level):
    """A vocabulary gains no token; transformers adds GPT-2's end of text if it is missing, an id that no model has."""
    tokens = ["<|mine|>", *byte_level["tokens"][1:]]
    file, _ = gguf_files.model(
        tmp_path / "x.gguf", prefixed(byte_level | {"tokens": tokens}), vocab_size=len(tokens), num_hidden_layers=1
    )
    tokenizer = text.load_tokenizer(file)
    assert len(tokenizer) == len(tokens) and max(tokenizer(END)["input_ids"]) < len(tokens)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "changes text before it is split"),
        ({"tokenizer.ggml.scores": None}, "has neither scores nor merges"),
        ({"tokenizer.ggml.scores": [np.float32(1)]}, "and 1 scores for"),
    ],
)
def test_unsupported_sentencepiece_settings_are_rejected(tmp_path, sentencepiece, keys, message):
    words = prefixed(sentencepiece) | SENTENCE_KEYS | keys
    size = len(sentencepiece["tokens"])
    file, _ = gguf_files.model(tmp_path / "x.gguf", words, vocab_size=size, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=message):
        text.load_tokenizer(file)


def test_corpus_uses_gguf_tokenizer(tmp_path):
    file, _ = gguf_files.model(tmp_path / "x.gguf", num_hidden_layers=1)
    (tmp_path / "a.txt").write_text("the end")
    tokens, vocab_size = text.corpus(str(file), [tmp_path / "a.txt"])
    assert vocab_size == len(gguf_files.TOKENS) and tokens[-1] == 0
    assert text.load_tokenizer(file).decode(tokens[:-1]) == "the end"


def test_missing_chat_template_is_an_error(tmp_path):
    file, _ = gguf_files.model(tmp_path / "x.gguf", {"tokenizer.chat_template": None}, num_hidden_layers=1)
    with pytest.raises(ValueError, match="has no chat template"):
        text.load_tokenizer(file).apply_chat_template(CHAT)


NAMES = ["<unk>", "<s>", "</s>", *tokenizer_kinds.BYTES, "▁", "h", "i", "▁h", "▁hi", "▁▁"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_equal_tokenizer_json(tmp_path, prefix):
    merges = [("▁", "h"), ("▁h", "i"), ("▁", "▁")]
    vocab = {token: i for i, token in enumerate(NAMES)}
    hub = Tokenizer(models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    parts = [normalizers.Prepend("▁")] if prefix else []
    hub.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    hub.decoder = decoders.Sequence(decoder)
    hub.add_special_tokens(["<unk>", "<s>", "</s>"])
    scores = [*[0.0] * 259, -9.0, -8.0, -7.0, -2.0, -1.0, -3.0]
    words = {"tokens": NAMES, "token_type": [2, 3, 3, *[6] * 256, *[1] * 6], "scores": [*map(np.float32, scores)]}
    keys = prefixed(words | {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False, "unknown_token_id": 0})
    keys |= SENTENCE_KEYS | {"tokenizer.ggml.add_space_prefix": prefix}
    file, _ = gguf_files.model(tmp_path / "x.gguf", keys, vocab_size=len(NAMES), num_hidden_layers=1)
    ours = text.load_tokenizer(file)
    for given in ["hi", " hi", "  hi", "hi</s> hi", "<s>hi</s></s>  hi ", *tokenizer_kinds.texts(300)]:
        ids = hub.encode(given, add_special_tokens=False).ids
        assert ours(given, add_special_tokens=False)["input_ids"] == ids, given
        assert ours.decode(ids, skip_special_tokens=True) == hub.decode(ids), given


def test_control_token_with_any_characters_is_one_token(tmp_path, byte_level):
    token = "<｜end▁of▁sentence｜>"  # noqa: RUF001
    tokens, kinds = [*byte_level["tokens"], token], [*byte_level["token_type"], 3]
    words = byte_level | {"tokens": tokens, "token_type": kinds, "eos_token_id": len(tokens) - 1}
    file, _ = gguf_files.model(tmp_path / "x.gguf", prefixed(words), vocab_size=len(tokens), num_hidden_layers=1)
    ours = text.load_tokenizer(file)
    ids = ours(f"a{token}b", add_special_tokens=False)["input_ids"]
    assert ids[1] == ours.eos_token_id == len(tokens) - 1 and len(ours) == len(tokens)
    assert ours.decode(ids, skip_special_tokens=True) == "ab" and ours.decode(ids) == f"a{token}b"


@pytest.mark.parametrize("pre", SPLITS)
def test_every_pre_tokenizer_is_lossless(tmp_path, byte_level, pre):
    """Every pattern splits any text without loss, and the tokenizer decodes the ids to the same text."""
    keys = prefixed(byte_level | {"pre": pre, "add_bos_token": False})
    file, _ = gguf_files.model(tmp_path / "x.gguf", keys, vocab_size=len(byte_level["tokens"]), num_hidden_layers=1)
    ours = text.load_tokenizer(file)
    for given in tokenizer_kinds.texts(60):
        ids = ours(given, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == (unicodedata.normalize("NFC", given) if SPLITS[pre].composes else given)


@pytest.mark.parametrize(
    "pre, composes", [("qwen2", True), ("qwen35", True), ("command-r", True), ("olmo", True), ("llama-bpe", False)]
)
def test_accents_are_composed_by_nfc_tokenizers(tmp_path, byte_level, pre, composes):
    file, _ = gguf_files.model(
        tmp_path / "x.gguf",
        prefixed(byte_level | {"pre": pre}),
        vocab_size=len(byte_level["tokens"]),
        num_hidden_layers=1,
    )
    ours = text.load_tokenizer(file)
    assert (ours("e\u0301 \u1100\u1161") == ours("é 가")) is composes


SPLIT = {
    "llama-bpe": ["Hello", " don", "'t", " ", "123", "456", "7", " x", "=[", "1", "];", " \n\n", "y"],
    "qwen2": ["Hello", " don", "'t", " ", *"1234567", " x", "=[", "1", "];", " \n\n", "y"],
    "gpt-2": ["Hello", " don", "'t", " 1234567", " x", "=[", "1", "];", " \n", "\n", "y"],
    "smollm": ["Hello", " don", "'t", " ", *"1234567", " x", "=[", "1", "];", " \n", "\n", "y"],
    "gpt-4o": ["Hello", " don't", " ", "123", "456", "7", " x", "=[", "1", "];", " \n\n", "y"],
    "superbpe": ["Hello don't ", "1", "234", "567", " x=[", "1", "]; \n\ny"],
    "afmoe": ["Hello", " don", "'t", " ", "1", "234", "567", " x", "=[", "1", "];", " \n\n", "y"],
    "deepseek-v3": ["Hello", " don", "'t", " ", "123", "456", "7", " x", "=[", "1", "];", " \n\n", "y"],
    "falcon": ["Hello", " don", "'", "t", " ", "123", "456", "7", " x", "=[", "1", "];", " \n", "\n", "y"],
}


@pytest.mark.parametrize("pre", SPLIT)
def test_pre_tokenizer_splits_words_as_expected(pre):
    parts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[pre].patterns]
    words = pre_tokenizers.Sequence(parts).pre_tokenize_str("Hello don't 1234567 x=[1]; \n\ny")
    assert [word for word, _ in words] == SPLIT[pre]


def test_unknown_pre_tokenizer_error_suggests_option(tmp_path, byte_level):
    keys = prefixed(byte_level | {"pre": "new"})
    file, _ = gguf_files.model(tmp_path / "x.gguf", keys, vocab_size=len(byte_level["tokens"]), num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"'new', an unknown way to split text; .*--tokenizer SRC"):
        text.load_tokenizer(file)


def test_tokenizer_option_replaces_unreadable_tokenizer(tmp_path, byte_level):
    """`--tokenizer` replaces a tokenizer that cannot be read; one with more tokens than the target is rejected."""
    size = len(byte_level["tokens"])
    file, _ = gguf_files.model(
        tmp_path / "x.gguf", prefixed(byte_level | {"pre": "new"}), vocab_size=size, num_hidden_layers=1
    )
    other, _ = gguf_files.model(tmp_path / "y.gguf", prefixed(byte_level), vocab_size=size, num_hidden_layers=1)
    ours = sources(str(file), "none", tokenizer_source=str(other)).tokenizer()
    assert ours("the")["input_ids"] == text.load_tokenizer(other)("the")["input_ids"]
    with pytest.raises(CheckpointError, match="an unknown way to split text"):
        sources(str(file), "none").tokenizer()
    small, _ = gguf_files.model(tmp_path / "z.gguf", num_hidden_layers=1)
    with pytest.raises(UsageError, match=rf"--tokenizer .*y.gguf has {size} tokens, but the target has only"):
        sources(str(small), "none", tokenizer_source=str(other)).tokenizer()


@pytest.mark.parametrize("token", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|end|>"])
def test_end_of_turn_tokens_are_recognised_by_text(tmp_path, token):
    tokens = ["<eos?>", *gguf_files.TOKENS[1:], token]
    keys = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 2), 3],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": None,
    }
    file, _ = gguf_files.model(tmp_path / "x.gguf", keys, vocab_size=len(tokens), num_hidden_layers=1)
    assert text.eos_ids(jspec.load(file), text.load_tokenizer(file)) == (0, len(tokens) - 1)
    convert.save(convert.load(file), tmp_path / "store")
    assert convert.read_config(tmp_path / "store").eos_token_ids == (0, len(tokens) - 1)


def test_additional_chat_templates_are_ignored(tmp_path):
    keys = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    file, _ = gguf_files.model(tmp_path / "x.gguf", keys, num_hidden_layers=1)
    assert text.load_tokenizer(file).chat_template == gguf_files.TEMPLATE
