"""Shared by the tests of gguf tokenizer and others."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from support import gguf_files

END, START, TOOL = "<|endoftext|>", "<|start|>", "<|tool call|>"


CHAT = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": f"What is {END}? ñ 漢"}]


@pytest.fixture(scope="module")
def byte_level():
    """Keys of a trained byte-level vocabulary."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[END, START], initial_alphabet=gguf_files.LETTERS, show_progress=False
    )
    inner.train([str(path) for path in sorted((Path(__file__).parents[1] / "convert").glob("test_g*.py"))], trainer)
    tokens = [inner.id_to_token(i) for i in range(inner.get_vocab_size())] + [TOOL, "<|more|>"]
    merges = [" ".join(pair) for pair in json.loads(inner.to_str())["model"]["merges"]]
    kinds = [3, 3, *[1] * (len(tokens) - 4), 4, 4]
    return {"tokens": tokens, "token_type": kinds, "merges": merges, "bos_token_id": 1, "padding_token_id": 0}


def check_same(ours, theirs, texts, ids):
    for special in (True, False):
        encoded = ours(texts, add_special_tokens=special)["input_ids"]
        assert encoded == theirs(texts, add_special_tokens=special, verbose=False)["input_ids"]
    for skip in (True, False):
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        assert [ours.decode(row, **options) for row in ids] == [theirs.decode(row, **options) for row in ids]
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.chat_template == theirs.chat_template
    for start in (False, True):
        rendered = [
            one.apply_chat_template(CHAT, add_generation_prompt=start, tokenize=False) for one in (ours, theirs)
        ]
        assert rendered[0] == rendered[1]
        chats = [one.apply_chat_template(CHAT, add_generation_prompt=start)["input_ids"] for one in (ours, theirs)]
        assert chats[0] == chats[1]


def splitting_digits(tokenizer):
    """Transformers' tokenizer of a GGUF file, with the splits that tokenizer.json of a SmolLM has and it leaves out."""
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return tokenizer
