"""Left-padded prompts are rejected with a one-sentence error. Prompts without left padding are not."""

import types

import numpy as np
import pytest
import transformers

import jspec
from jspec.decoding.left_padding import check_right_padded
from jspec.text import request_keys

pytestmark = pytest.mark.usefixtures("quick_compile")
PAD, BOS, EOS, OTHER = 9, 1, 2, 40
# The special token ids that models name: (pad, bos, eos). Rows are padded with pad.
IDS = {
    "a pad of its own": (PAD, BOS, EOS),
    "no bos": (PAD, None, EOS),
    "pad is eos": (EOS, BOS, EOS),
    "pad is bos": (BOS, BOS, EOS),
    "pad is bos and eos": (EOS, EOS, EOS),
}


def config(pad, bos, eos):
    return types.SimpleNamespace(pad_token_id=pad, bos_token_id=bos, eos_token_ids=() if eos is None else (eos,))


def padded(texts, pad, side):
    """Return `texts` padded as a tokenizer does it, and the sums of the attention mask."""
    width = max(map(len, texts))
    rows = [
        [pad] * (width - len(text)) + text if side == "left" else text + [pad] * (width - len(text)) for text in texts
    ]
    return np.array(rows), np.array([len(text) for text in texts])


def refused(tokens, lengths, ids):
    try:
        check_right_padded(tokens, lengths, config(*ids))
    except ValueError as error:
        return str(error)
    return None


TEXTS = [[10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23], [30, 31, 32, 33, 34]]


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("measured", ["by mask", "by width"])
def test_left_padding_is_detected_and_right_padding_is_not(ids, starts, measured):
    pad, bos, _ = ids
    texts = [[bos, *text] if starts and bos is not None else text for text in TEXTS]
    tokens, lengths = padded(texts, pad, "left")
    lengths = lengths if measured == "by mask" else np.full_like(lengths, tokens.shape[1])
    assert "tokens[1] begins with the id " in refused(tokens, lengths, ids)
    assert refused(*padded(texts, pad, "right"), ids) is None


@pytest.mark.parametrize("pad", [0, OTHER])
def test_padding_with_id_not_in_config_is_detected(pad):
    """Such padding is found from the attention mask's lengths, or because BOS comes after it."""
    ids = (None, BOS, EOS)
    tokens, lengths = padded(TEXTS, pad, "left")
    assert "(4 in a row)" in refused(tokens, lengths, ids)
    tokens, lengths = padded([[BOS, *text] for text in TEXTS], pad, "left")
    assert "(4 in a row)" in refused(tokens, np.full_like(lengths, tokens.shape[1]), ids)
    assert "(1 in a row)" in refused(*padded([[BOS, 5, 6], [BOS, 5]], pad, "left"), ids)
    assert refused(*padded(TEXTS, pad, "right"), ids) is None


TEXT = {
    "starts with eos": ([[EOS, 5, 6]], [3], (EOS, BOS, EOS)),
    "starts with bos": ([[BOS, 5, 6]], [3], (BOS, BOS, EOS)),
    "starts with bos twice": ([[BOS, BOS, 5, 6]], [4], (EOS, BOS, EOS)),
    "starts twice with what is everything": ([[EOS, EOS, 5, 6]], [4], (EOS, EOS, EOS)),
    "is eos alone": ([[EOS, EOS, EOS, EOS]], [1], (EOS, BOS, EOS)),
    "is a filler": ([[5, 6, 7], [PAD, PAD, PAD]], [3, 1], (PAD, BOS, EOS)),
    "is one token": ([[BOS]], [1], (PAD, BOS, EOS)),
    "repeats a word": ([[7, 7, 7, 7, 7, 5, 0, 0]], [6], (PAD, BOS, EOS)),
    "repeats a word before its padding": ([[7, 7, 7, 7, 5, 0, 0, 0, 0]], [5], (PAD, BOS, EOS)),
    "goes on after its length": ([[7, 7, 4, 5, 6, 8]], [4], (PAD, BOS, EOS)),
    "is padded with garbage": ([[5, 6, -4, 10**6], [5, 6, 7, 8]], [2, 4], (PAD, BOS, EOS)),
    "has no start beside one that has": ([[BOS, 5, 6], [5, BOS, BOS]], [3, 1], (BOS, BOS, EOS)),
    "has pads inside": ([[5, PAD, PAD, 6]], [4], (PAD, BOS, EOS)),
    "of a model that names nothing": ([[0, 0, 0, 0, 5]], [5], (None, None, None)),
    "starts with a word whose id pads": ([[PAD, 5, 6, 0, 0, 0]], [3], (PAD, None, EOS)),
    "starts with such a word in a batch": ([[PAD, 5, 6, 0], [5, 6, 0, 0], [7, 7, 5, 6]], [3, 2, 4], (PAD, None, EOS)),
    "starts with the word 0": ([[0, 5, 6, 0, 0], [5, 6, 7, 8, 9]], [3, 5], (0, None, EOS)),
    "starts with the word 0 and fills all but one place": ([[0, 5, 6, 0], [5, 6, 7, 8]], [3, 4], (0, None, EOS)),
    "starts with such a word in every row": ([[PAD, 5, 6], [PAD, 7, 8]], [3, 3], (PAD, None, EOS)),
    "is eos alone, padded by two programs": ([[EOS, EOS, EOS, 0, 0]], [1], (EOS, BOS, EOS)),
    "is the start alone, padded by two programs": ([[0, 0, 0, 7, 7]], [1], (0, 0, 0)),
    "has bos after a line break": ([[BOS, 5, 6, 7], [30, BOS, 6, 7]], [4, 4], (EOS, BOS, EOS)),
    "is two documents": ([[EOS, 5, 6, 7], [5, EOS, 6, 7]], [4, 4], (EOS, EOS, EOS)),
}


@pytest.mark.parametrize("case", TEXT)
def test_text_is_not_taken_for_padding(case):
    tokens, lengths, ids = TEXT[case]
    assert refused(np.array(tokens), np.array(lengths), ids) is None
    check_right_padded(np.array(tokens), np.array(lengths), types.SimpleNamespace())  # a third-party config


@pytest.mark.parametrize("ids", [IDS["a pad of its own"], IDS["no bos"]])
def test_single_pad_token_is_detected(ids):
    tokens, lengths = padded([[10, 11, 12], [20, 21]], PAD, "left")
    assert "tokens[1] begins with the id 9 (1 in a row)" in refused(tokens, lengths, ids)
    assert "tokens[1] begins with the id 9 (1 in a row)" in refused(tokens, np.full_like(lengths, 3), ids)


@pytest.mark.parametrize("measured", ["by mask", "by width"])
def test_single_eos_before_bos_is_detected(measured):
    tokens, lengths = padded([[BOS, 11, 12], [BOS, 21]], EOS, "left")
    lengths = lengths if measured == "by mask" else np.full_like(lengths, 3)
    assert "tokens[1] begins with the id 2 (1 in a row)" in refused(tokens, lengths, IDS["pad is eos"])


def test_text_may_begin_with_pad_id(toy):
    target, words = toy(0, pad_token_id=PAD, bos_token_id=None, eos_token_ids=(EOS,)), _words()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    text = f"w{PAD} w10 w11"
    (done,) = jspec.complete(target, None, tokenizer, [text], max_new_tokens=4)
    streamed = [
        token for part in jspec.stream(target, None, tokenizer, text, max_new_tokens=4) for token in part.tokens
    ]
    assert len(done.tokens) == len(streamed) > 0


def test_every_entry_point_rejects_left_padding(toy):
    target = toy(0, pad_token_id=PAD, bos_token_id=BOS, eos_token_ids=(EOS,))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=_words(), pad_token="w9", padding_side="left")
    batch = words(["w1 w10 w11 w12", "w1 w20"], padding=True, return_tensors="np")
    tokens, lengths = batch["input_ids"], batch["attention_mask"].sum(1)
    assert tokens[1].tolist() == [PAD, PAD, 1, 20]
    keys, options = request_keys(0, 2), {"max_new_tokens": 4}
    said = r"tokens\[1\] begins with the id 9 \(2 in a row\), which looks like padding on the left; pad prompts"
    with pytest.raises(ValueError, match=said):
        jspec.generate(target, tokens, lengths, keys, **options)
    with pytest.raises(ValueError, match=said):
        jspec.speculative_generate(target, jspec.NGramDrafter(), tokens, lengths, keys, **options)
    with pytest.raises(ValueError, match=said):
        jspec.complete(target, None, words, tokens.tolist(), **options)
    with pytest.raises(ValueError, match=r"tokens\[0\] begins with the id 9"):
        list(jspec.stream(target, None, words, tokens[1].tolist(), **options))


def _words():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return words
