"""A SentencePiece model without tokenizer.json loads, or the error names the package that reads it."""

import json

import pytest

import convert
from convert import sentencepiece
from jspec import text
from support import tokenizer_kinds

pb = pytest.importorskip("transformers.utils.sentencepiece_model_pb2_new")
WORDS = ["▁", "h", "i", "▁h", "▁hi", "▁▁"]


def model(folder, *, scores=(-9.0, -8.0, -7.0, -2.0, -1.0, -3.0), config=None, kind=1, **normalizer):
    """Write tokenizer.model with a token for every byte and a few words."""
    proto = pb.ModelProto()
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback, proto.trainer_spec.pad_id = 2, True, -1
    for name, value in normalizer.items():
        setattr(proto.normalizer_spec, name, value)
    special = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((byte, 6) for byte in tokenizer_kinds.BYTES)]
    rows = [*((token, 0.0, kind) for token, kind in special), *zip(WORDS, scores, [1] * 5 + [kind], strict=True)]
    for token, score, token_kind in rows:
        piece = proto.pieces.add()
        piece.piece, piece.score, piece.type = token, score, token_kind
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"} | (config or {})))
    return proto


def tokens(folder, given, **options):
    tokenizer = text.load_tokenizer(folder)
    names = {i: token for token, i in tokenizer.get_vocab().items()}
    return [names[i] for i in tokenizer(given, **options)["input_ids"]]


# The expected ids are those of version 0.2 of the sentencepiece package.
@pytest.mark.parametrize(
    "normalizer, given, expected",
    [
        ({"remove_extra_whitespaces": False}, " hi  hi ", ["▁", "▁hi", "▁", "▁hi", "▁"]),
        ({"remove_extra_whitespaces": True}, " hi  hi ", ["▁hi", "▁hi"]),
        ({"remove_extra_whitespaces": False, "add_dummy_prefix": False}, "hi  hi", ["h", "i", "▁", "▁hi"]),
        ({}, "hi\n", ["▁hi", "<0x0A>"]),
    ],
)
def test_sentencepiece_gives_expected_tokens(tmp_path, normalizer, given, expected):
    model(tmp_path, **normalizer)
    assert tokens(tmp_path, given, add_special_tokens=False) == expected


def test_bos_and_eos_follow_config(tmp_path):
    model(tmp_path)
    assert tokens(tmp_path, "hi") == ["<s>", "▁hi"]
    model(tmp_path, config={"add_bos_token": False, "add_eos_token": True})
    assert tokens(tmp_path, "hi") == ["▁hi", "</s>"]
    tokenizer = text.load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_every_field_is_read(tmp_path):
    proto = model(tmp_path, scores=(-1.5, -2.5, -3.5, -4.5, -5.5, -6.5))
    words = sentencepiece.read(tmp_path / "tokenizer.model", {})
    assert words.tokens == [piece.piece for piece in proto.pieces]
    assert words.scores == [piece.score for piece in proto.pieces]
    assert words.types == [piece.type for piece in proto.pieces] and words.ids == {"unk": 0, "bos": 1, "eos": 2}


OTHERS = {"a table": {"precompiled_charsmap": b"xxxx"}, "user-defined tokens": {"kind": 4}}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_unsupported_models_error_names_package(tmp_path, changes, monkeypatch):
    model(tmp_path, **changes)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sentencepiece" else name)
    with pytest.raises(convert.CheckpointError, match=r"pip install sentencepiece, or add the model's tokenizer.json"):
        text.load_tokenizer(tmp_path)


def test_tiktoken_file_is_not_called_damaged(tmp_path, monkeypatch):
    model(tmp_path)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tiktoken" else name)
    with pytest.raises(convert.CheckpointError, match=r"is not a SentencePiece model.*pip install tiktoken, or"):
        text.load_tokenizer(tmp_path)


def test_damaged_bytes_raise_checkpoint_error_or_load(tmp_path):
    model(tmp_path)
    file = tmp_path / "tokenizer.model"
    whole = file.read_bytes()
    for at in range(0, len(whole), 37):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]):
            file.write_bytes(damaged)
            try:
                sentencepiece.read(file, {})
            except convert.CheckpointError:
                continue
