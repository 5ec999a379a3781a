"""Batches of prompts: few shapes, either padding side, and results in the order of the prompts."""

import itertools

import jax
import numpy as np
import pytest

import jspec
from jspec.decoding.program import decode_program
from support import text_pair

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENIZER = text_pair.tokenizer()
RNG = np.random.default_rng(0)


def prompts_of(lengths, vocab_size=50):
    return [RNG.integers(1, vocab_size, length).tolist() for length in lengths]


def rows_of(batches):
    """Return the prompt of each row by its index, and check that repeated rows agree."""
    rows = {}
    for batch in batches:
        for tokens, length, index in zip(batch.tokens, batch.lengths, batch.indices, strict=True):
            assert rows.setdefault(int(index), tokens[:length].tolist()) == tokens[:length].tolist()
    return [rows[i] for i in range(len(rows))]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 20])
@pytest.mark.parametrize("widths", [None, (5, 40), (40, 7, 20)])
def test_every_prompt_is_in_one_row_of_the_smallest_width(batch_size, widths):
    prompts = prompts_of(RNG.integers(1, 41, 7))
    parts = jspec.batches(prompts, batch_size=batch_size, widths=widths)
    assert rows_of(parts) == prompts
    assert len(parts) == -(-7 // batch_size)
    for batch in parts:
        assert batch.tokens.shape[0] == len(batch.lengths) == len(batch.indices) == batch_size
        allowed = widths or (32, 64)
        assert batch.tokens.shape[1] == min(width for width in allowed if width >= batch.lengths.max())
        assert not (batch.tokens * (np.arange(batch.tokens.shape[1]) >= batch.lengths[:, None])).any()


def test_longest_prompts_share_the_first_batch():
    lengths = [3, 90, 4, 80, 5]
    first, second, third = jspec.batches(prompts_of(lengths), batch_size=2)
    assert [batch.lengths.tolist() for batch in (first, second, third)] == [[90, 80], [5, 4], [3, 3]]
    assert third.indices.tolist() == [0, 0]


def test_one_batch_keeps_the_order():
    prompts = prompts_of([3, 9, 4])
    (batch,) = jspec.batches(prompts)
    assert batch.indices.tolist() == [0, 1, 2]
    assert rows_of([batch]) == prompts


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tensors", [None, "np", "pt"])
def test_padding_of_transformers_is_removed(side, tensors):
    texts = ["the thing in a", "x", "the"]
    TOKENIZER.pad_token, before = TOKENIZER.eos_token, TOKENIZER.padding_side
    try:
        TOKENIZER.padding_side = side
        encoding = TOKENIZER(texts, padding=True, return_tensors=tensors)
    finally:
        TOKENIZER.padding_side = before
    assert rows_of(jspec.batches(encoding, batch_size=2)) == rows_of(jspec.batches(texts, TOKENIZER))
    assert rows_of(jspec.batches({"input_ids": [[1, 2], [3]], "attention_mask": None})) == [[1, 2], [3]]
    assert rows_of(jspec.batches(TOKENIZER("the thing"))) == rows_of(jspec.batches("the thing", TOKENIZER))


def test_pad_ids_inside_a_prompt_are_kept():
    """A prompt that contains its pad token inside keeps it, because only the mask decides."""
    masks = [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert rows_of(jspec.batches({"input_ids": [[0, 5, 0, 6], [0, 0, 7, 8]], "attention_mask": masks})) == [
        [5, 0, 6],
        [0, 0, 7, 8],
    ]


@pytest.mark.parametrize("samples", [1, 3])
def test_results_equal_those_of_one_batch_in_order(toy, samples):
    """Batches give every prompt the output that it has in one batch of all prompts."""
    target, prompts = toy(0), prompts_of([3, 30, 5, 8, 21])
    keys = jax.random.split(jax.random.key(1), 5 * samples)
    temperatures = np.linspace(0.5, 1.5, 5 * samples)

    def run(batch):
        return jspec.generate(
            target,
            batch.tokens,
            batch.lengths,
            batch.take(keys),
            max_new_tokens=6,
            sampling=jspec.SamplingParams(temperature=batch.take(temperatures)),
            samples_per_prompt=samples,
        )

    (whole,) = jspec.batches(prompts)
    parts = jspec.batches(prompts, batch_size=2, widths=(8, 32))
    expected, joined = run(whole), parts.restore(map(run, parts))
    assert isinstance(joined, jspec.Output)
    assert np.array_equal(joined.tokens, expected.tokens)
    assert np.array_equal(joined.lengths, expected.lengths)
    np.testing.assert_allclose(joined.logprobs, expected.logprobs, atol=1e-5)


def test_narrower_results_are_padded_with_zeros():
    parts = jspec.batches(prompts_of([2, 40]), batch_size=1)
    joined = parts.restore(np.full((1, batch.tokens.shape[1], 2), batch.indices[0] + 1.0) for batch in parts)
    assert joined.shape == (2, 64, 2)
    assert (joined[0, :32] == 1).all()
    assert not joined[0, 32:].any()
    assert (joined[1] == 2).all()


def test_hundred_batches_of_random_widths_need_six_programs(toy):
    target, before = toy(0, max_position_embeddings=2048), decode_program._cache_size()
    for number in range(100):
        prompts = prompts_of(RNG.integers(1, 2 ** RNG.uniform(1, 10), RNG.integers(1, 5)))
        for batch in jspec.batches(prompts, batch_size=4):
            keys = jax.random.split(jax.random.key(number), 4)
            jspec.generate(target, batch.tokens, batch.lengths, keys, max_new_tokens=3)
    assert decode_program._cache_size() - before <= 6


def bad(match, *arguments, **options):
    return pytest.param(arguments, options, match, id=match[:30])


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        bad("There are no prompts", []),
        bad("Prompt 2 is empty", [[1], []]),
        bad(
            r"attention_mask\[1\] has a 0 between ones, at column 1",
            {"input_ids": [[1, 2, 3]] * 2, "attention_mask": [[1, 1, 1], [1, 0, 1]]},
        ),
        bad("different shapes", {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}),
        bad("different shapes", {"input_ids": [[1, 2, 3]], "attention_mask": []}),
        bad("The prompt is empty", {"input_ids": [[1, 2, 3]], "attention_mask": [[0, 0, 0]]}),
        bad("without 'input_ids'", {"tokens": [[1, 2, 3]]}),
        bad("pass the target's tokenizer", ["some text"]),
        bad("Prompt 2 has 9 tokens, but the largest width is 8; add a larger width", [[1], [1] * 9], widths=(4, 8)),
        bad("largest width is 0", [[1]], widths=()),
        bad("Prompt 2 has 9 tokens, but the largest width is 8", [[1], [1] * 9], widths=8),
        bad("Each width must be an int of at least 1", [[1]], widths=(0, 4)),
        bad("batch_size must be an int of at least 1", [[1]], batch_size=0),
    ],
)
def test_invalid_arguments_are_named(arguments, options, match):
    with pytest.raises(ValueError, match=match) as caught:
        jspec.batches(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_wrong_results_are_named():
    parts = jspec.batches(prompts_of([1, 2, 3]), batch_size=2)
    with pytest.raises(ValueError, match="There are 1 results for 2 batches"):
        parts.restore([np.zeros(2)])
    with pytest.raises(ValueError, match=r"A result has 3 rows for a batch of 2 prompts; expected 2 rows"):
        parts.restore([np.zeros(2), np.zeros(3)])
    with pytest.raises(ValueError, match="values has 4 entries for 3 prompts"):
        parts[0].take(np.zeros(4))


def test_slices_are_batches():
    parts = jspec.batches(prompts_of([1, 2, 3]), batch_size=1)
    assert [len(part.tokens) for part in itertools.chain(parts[1:], [parts[-1]])] == [1, 1, 1]
