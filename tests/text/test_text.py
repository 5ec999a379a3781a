"""Text in and out: every character survives, and padding, neighbours and batch size change nothing."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import convert
import jspec
from jspec import text
from jspec.decoding.program import decode_program
from jspec.text.chat_template import Batch, encode, room
from support import text_pair

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENIZER = text_pair.tokenizer()
PROMPTS = ["the thing", "in a", "Ω ≠ 🙂 then", "x"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return [jspec.load(text_pair.write(folder / str(distance), distance)) for distance in (0.0, 0.3)]


def continued(pair, batch, keys, temperature=0.0, size=24):
    """Return each prompt's new tokens up to EOS, decoded as the command line does."""
    sampling = jspec.SamplingParams(temperature=temperature, max_tokens=24)
    options = {"keys": keys, "max_new_tokens": size, "sampling": sampling, "eos_ids": (0,)}
    out = jspec.speculative_generate(*pair, batch.tokens, batch.lengths, **options)
    return [out.tokens[i, : out.lengths[i]].tolist() for i in range(len(batch.lengths))]


def test_missing_tokenizer_files_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(convert.CheckpointError, match=r"no tokenizer files \(tokenizer.json"):
        text.load_tokenizer(tmp_path)


def test_invalid_folder_is_reported_before_missing_tokenizer(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(convert.CheckpointError, match=r"has no config.json; expected a checkpoint directory"):
        text.load_tokenizer(tmp_path)


def test_damaged_tokenizer_gives_one_sentence(tmp_path):
    text_pair.tokenizer().save_pretrained(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(convert.CheckpointError, match="cannot be read") as caught:
        text.load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_first_differing_token_is_named():
    swapped = text_pair.tokenizer(swapped=40)
    ours, theirs = (one.convert_ids_to_tokens(40) for one in (TOKENIZER, swapped))
    text.check_same_tokenizer(TOKENIZER, text_pair.tokenizer())
    with pytest.raises(ValueError, match="id 40 is") as caught:
        text.check_same_tokenizer(TOKENIZER, swapped)
    assert f"{theirs!r} for the draft and {ours!r} for the target" in str(caught.value)


def test_added_token_is_a_difference():
    longer = text_pair.tokenizer()
    longer.add_tokens(["<|more|>"])
    with pytest.raises(ValueError, match=rf"id {len(TOKENIZER)} is '<\|more\|>' for the draft and None"):
        text.check_same_tokenizer(TOKENIZER, longer)


def test_eos_ids_combine_model_and_tokenizer(pair, toy):
    assert text.eos_ids(pair[0], TOKENIZER) == (0,)
    assert text.eos_ids(toy(0, eos_token_ids=(7, 5)), TOKENIZER) == (0, 5, 7)


def test_encoded_batch_contains_prompts():
    batch = encode(TOKENIZER, PROMPTS[:3])
    assert batch.tokens.shape == (3, 32) and batch.tokens.dtype == batch.lengths.dtype == np.int32
    for prompt, row, length in zip(PROMPTS[:3], batch.tokens, batch.lengths, strict=True):
        assert row[:length].tolist() == TOKENIZER(prompt)["input_ids"]


@pytest.mark.parametrize(
    ("count", "characters", "shape"),
    [
        (1, 1, (1, 32)),
        (1, 32, (1, 32)),
        (1, 33, (1, 64)),
        (2, 64, (2, 64)),
        (5, 65, (5, 128)),
        (9, 1, (9, 32)),
    ],
)
def test_batch_widths_are_powers_of_two(count, characters, shape):
    assert encode(TOKENIZER, ["x" * characters] * count).tokens.shape == shape


def test_empty_prompt_requires_bos():
    with pytest.raises(ValueError, match="Prompt 2 is empty"):
        encode(TOKENIZER, ["a", ""])
    batch = encode(text_pair.tokenizer(bos=True), ["a", ""])
    assert batch.lengths.tolist() == [2, 1] and batch.tokens[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("wanted", "longest", "positions", "size"),
    [
        (1, 5, 1024, 128),
        (128, 5, 1024, 128),
        (129, 5, 1024, 256),
        (600, 5, 1024, 992),  # 1024 are too many; a prompt of 32 leaves room for this many
        (1000, 5, 1024, 1019),
        (1019, 5, 1024, 1019),
        (1020, 5, 1024, 1020),  # too many, which `jspec.generate` reports
        (24, 9, 128, 96),
    ],
)
def test_padded_budget_has_few_sizes(wanted, longest, positions, size):
    batch = encode(TOKENIZER, ["x", "y" * longest])
    assert room(wanted, batch, positions) == size


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_larger_budget_does_not_change_text(pair, temperature):
    batch, keys = encode(TOKENIZER, PROMPTS), text.request_keys(2, 4)
    assert continued(pair, batch, keys, temperature, size=96) == continued(pair, batch, keys, temperature)


def test_keys_do_not_depend_on_other_requests():
    eight = jax.random.key_data(text.request_keys(5, 8)).tolist()
    assert eight[:3] == jax.random.key_data(text.request_keys(5, 3)).tolist()
    assert (
        len({tuple(key) for seed in (5, 6) for key in jax.random.key_data(text.request_keys(seed, 8)).tolist()}) == 16
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_changes_nothing(pair, temperature):
    batch, keys = encode(TOKENIZER, PROMPTS), text.request_keys(0, 4)
    bare = Batch(batch.tokens[:, : batch.lengths.max()], batch.lengths)
    assert continued(pair, bare, keys, temperature) == continued(pair, batch, keys, temperature)


def test_ragged_batch_equals_single_prompts(pair):
    keys = text.request_keys(3, 4)
    together = continued(pair, encode(TOKENIZER, PROMPTS), keys, 1.0)
    alone = [continued(pair, encode(TOKENIZER, [p]), keys[i : i + 1], 1.0)[0] for i, p in enumerate(PROMPTS)]
    assert together == alone and len({tuple(row) for row in alone}) == len(PROMPTS)


def test_new_prompts_of_known_shape_do_not_compile(pair, report):
    continued(pair, encode(TOKENIZER, PROMPTS), text.request_keys(0, 4))
    compiled = decode_program._cache_size()
    for seed, prompts in enumerate([["a", "bc", "def", "ghij"], ["x" * 32, "y", "z", "zz"]]):
        continued(pair, encode(TOKENIZER, prompts), text.request_keys(seed, 4), temperature=0.5 + seed)
    report(compilations=decode_program._cache_size() - compiled)
    assert decode_program._cache_size() == compiled


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8")))
def test_pieces_are_whole_characters(prompt, new):
    ids, prompt_ids = TOKENIZER(new)["input_ids"], TOKENIZER(prompt)["input_ids"]
    result = text.pieces(TOKENIZER, prompt_ids, [*ids, TOKENIZER.eos_token_id])
    assert "".join(result) == new and len(result) == len(ids) + 1 and result[-1] == ""
    assert all(("\ufffd" in piece) <= ("\ufffd" in new) for piece in result)


def test_space_before_first_piece_is_kept():
    """Tokenizers that mark words by a leading space drop the first space when they decode; the pieces keep it."""
    words = Tokenizer(models.WordLevel({"▁the": 0, "▁thing": 1}, unk_token="▁the"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=words)
    assert words.decode([1]) == "thing" and text.pieces(words, [0], [1, 1]) == [" thing", " thing"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=1, max_size=40))
def test_pieces_of_any_tokens_join_to_their_text(ids):
    """Even bytes that are not valid text, which models also emit, are neither lost nor repeated."""
    prompt = TOKENIZER("in the ")["input_ids"]
    whole = TOKENIZER.decode([*prompt, *ids], skip_special_tokens=True)
    assert "in the " + "".join(text.pieces(TOKENIZER, prompt, ids)) == whole
