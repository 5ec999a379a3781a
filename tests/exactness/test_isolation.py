"""A request's output depends on its key, prompt and settings, but not on its slot, its neighbours, or padding."""

import dataclasses

import jax
import numpy as np
import pytest

import jspec

pytestmark = pytest.mark.usefixtures("quick_compile")

SIZE, NEW = 8, 32
PER_ROW = jspec.SamplingParams(
    temperature=np.array([1.0, 0.0, 0.7, 1.3, 1.0, 2.0, 0.5, 1.0], np.float32),
    top_k=np.array([0, 0, 10, 0, 3, 40, 0, 0], np.int32),
    top_p=np.array([1.0, 1.0, 0.9, 0.8, 1.0, 1.0, 0.5, 1.0], np.float32),
    min_p=np.array([0.0, 0.1, 0.0, 0.05, 0.0, 0.0, 0.0, 0.0], np.float32),
    repetition_penalty=np.array([1.3, 1.2, 1.0, 0.9, 1.5, 1.0, 1.0, 1.1], np.float32),
    presence_penalty=np.array([0.0, 0.0, 0.5, 0.0, 0.0, -0.3, 0.0, 0.2], np.float32),
    max_tokens=np.array([0, 5, 0, 20, 1, 0, 0, 31], np.int32),
)
LENGTHS = [9, 1, 9, 5, 2, 7, 3, 4]


def _rows(params, rows):
    """Return the settings of the requests `rows`."""
    values = {name: value for name, value in vars(params).items() if isinstance(value, np.ndarray)}
    return dataclasses.replace(params, **{name: value[rows] for name, value in values.items()})


@pytest.fixture(scope="module")
def decode(toy):
    target, draft = toy(0), toy(0, distance=0.1)

    def run(batch, params, **options):
        options = {"max_new_tokens": NEW, "num_draft_tokens": 3, "sampling": params, **options}
        return jax.tree.map(np.asarray, jspec.speculative_generate(target, draft, *batch, **options))

    return run


def _same(out, row, other, other_row):
    """Return whether two rows hold the same output, up to rounding in the log-probabilities."""
    np.testing.assert_allclose(out.logprobs[row], other.logprobs[other_row], atol=1e-4)
    return np.array_equal(out.tokens[row], other.tokens[other_row]) and out.lengths[row] == other.lengths[other_row]


def test_output_is_same_alone_and_in_batch(decode, prompts, report):
    tokens, lengths, keys = prompts(LENGTHS)
    together = decode((tokens, lengths, keys), PER_ROW)
    same = 0
    for row in range(SIZE):
        rows = np.array([row])
        alone = decode((tokens[rows], lengths[rows], keys[rows]), _rows(PER_ROW, rows))
        same += _same(alone, 0, together, row)
    report(requests=SIZE, tokens=together.lengths.sum(), same=f"{same / SIZE:.0%}")
    assert same == SIZE


def test_output_does_not_depend_on_slot_or_neighbours(decode, prompts, report):
    """Every request is tested in every slot, among its neighbours in another order and then among strangers."""
    tokens, lengths, keys = prompts(LENGTHS)
    together = decode((tokens, lengths, keys), PER_ROW)
    strange_tokens, _, strange_keys = prompts([9] * SIZE, seed=77)
    rng = np.random.default_rng(0)
    same, compared = 0, 0
    for shift in range(SIZE):
        order = np.roll(rng.permutation(SIZE), shift)
        shuffled = decode((tokens[order], lengths[order], keys[order]), _rows(PER_ROW, order))
        same += sum(_same(shuffled, slot, together, row) for slot, row in enumerate(order))
        # Only the request in slot `shift` stays; the others change prompt, length, key and settings.
        stays = np.arange(SIZE) == shift
        other = rng.permutation(SIZE)
        mixed_tokens = np.where(stays[:, None], tokens, strange_tokens)
        mixed_lengths = np.where(stays, lengths, 1 + other).astype(np.int32)
        mixed_keys = strange_keys.at[shift].set(keys[shift])
        mixed_params = _rows(PER_ROW, np.where(stays, np.arange(SIZE), other))
        among = decode((mixed_tokens, mixed_lengths, mixed_keys), mixed_params)
        same += _same(among, shift, together, shift)
        compared += SIZE + 1
    report(compared=compared, same=f"{same / compared:.0%}")
    assert same == compared


def test_padding_is_never_read(decode, prompts, report):
    """Another width and other junk after the prompts, including ids outside the vocabulary, change no output."""
    tokens, lengths, keys = prompts(LENGTHS)
    outs = [decode((tokens, lengths, keys), PER_ROW)]
    for width, junk in ((9, 0), (9, 60), (9, -5), (9, 2**31 - 1), (23, 10**6)):
        wide = np.full((SIZE, width), junk, np.int32)
        for row, length in enumerate(lengths):
            wide[row, :length] = tokens[row, :length]
        outs.append(decode((wide, lengths, keys), PER_ROW))
    same = sum(_same(out, row, outs[0], row) for out in outs[1:] for row in range(SIZE))
    report(compared=5 * SIZE, same=f"{same / (5 * SIZE):.0%}")
    assert same == 5 * SIZE


def test_key_determines_output(decode, prompts, report):
    tokens, lengths, keys = prompts([5] * SIZE)
    tokens = np.broadcast_to(tokens[:1], tokens.shape)
    settings = dataclasses.replace(_rows(PER_ROW, np.zeros(SIZE, int)), min_p=np.zeros(SIZE, np.float32))
    first, again = (decode((tokens, lengths, keys), settings) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    report(texts=SIZE, distinct=len(np.unique(first.tokens, axis=0)))
    assert len(np.unique(first.tokens, axis=0)) == SIZE


def test_rows_with_one_key_and_prompt_agree(decode, prompts):
    """Nothing else may affect the output: eight copies of one request give eight equal outputs."""
    tokens, lengths, keys = prompts([5] * SIZE)
    same = np.zeros(SIZE, int)
    out = decode((tokens[same], lengths, keys[same]), _rows(PER_ROW, same))
    assert len(np.unique(out.tokens, axis=0)) == 1
