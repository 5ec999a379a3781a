"""Draws over a large vocabulary, against the same two draws in float64, with designed rather than random noise."""

import pytest

from support.probs import LLAMA_3, NEAR, wrong_draws


@pytest.mark.parametrize("vocab_size", [97, LLAMA_3])
def test_draws_equal_float64_reference(report, vocab_size):
    wrong, last = wrong_draws(vocab_size=vocab_size)
    report(draws=80, vocab=vocab_size, near_tie=NEAR, wrong=wrong, last_token=last)
    assert wrong == 0
    assert last > 0.8 * vocab_size
