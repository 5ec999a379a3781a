"""Helpers for the tests of tokenizer.json files and others."""

from pathlib import Path

import numpy as np

from support import text_pair

ALPHABETS = (
    *("def return (self): \n\t  []{}#'\"._=+-*/0123456789", "abcxyzTHEtheina ", "Ωμέγα ≠ 🙂🙃 ñçß 漢字 \u200b\u0301"),
    "".join(map(chr, range(256))),
)


def strings(count):
    """Yield texts of every kind, some of them with special tokens."""
    rng = np.random.default_rng(0)
    words = [*Path(__file__).read_text(encoding="utf-8").split(" "), text_pair.END, "<|endoftext|>", "<|more|>"]
    for number in range(count):
        letters = [*ALPHABETS[number % len(ALPHABETS)]]
        yield "".join(rng.choice(letters, rng.integers(0, 40))) + " ".join(rng.choice(words, number % 5))
