"""One of every drafter, for the tests that hold all of them to the same contract: a new drafter is one more line."""

import jax
import numpy as np

import jspec
from jspec.drafters import (
    BigramDrafter,
    CascadeDrafter,
    EarlyExitDrafter,
    FallbackDrafter,
    MixtureDrafter,
    ModelDrafter,
    NGramDrafter,
    UnigramDrafter,
)

NAMES = (
    "model", "ngram", "unigram", "bigram", "early exit", "fallback", "mixture", "cascade", "nested cascade",
    "cascade of exits",
)  # fmt: skip


def make(name, target, draft, seed=0):
    """The drafter called `name`; `draft` is a model with the target's vocabulary."""
    vocab_size = target.config.vocab_size
    corpus = np.random.default_rng(seed).integers(vocab_size, size=400)
    return {
        "model": lambda: ModelDrafter(draft),
        "ngram": lambda: NGramDrafter(max_ngram=3, min_ngram=1),
        "unigram": lambda: UnigramDrafter.from_tokens(corpus, vocab_size),
        "bigram": lambda: BigramDrafter.from_tokens(corpus, vocab_size, smoothing=0.5),
        "early exit": lambda: EarlyExitDrafter(1),
        "fallback": lambda: FallbackDrafter(NGramDrafter(2, 2), ModelDrafter(draft)),
        "mixture": lambda: MixtureDrafter(EarlyExitDrafter(1), draft, 0.3),
        "cascade": lambda: CascadeDrafter(draft, NGramDrafter(), num_small_draft_tokens=2),
        "nested cascade": lambda: CascadeDrafter(
            target, CascadeDrafter(draft, BigramDrafter.from_tokens(corpus, vocab_size), 1), num_small_draft_tokens=2
        ),
        "cascade of exits": lambda: CascadeDrafter(target, EarlyExitDrafter(1), num_small_draft_tokens=2),
    }[name]()


def generate(target, drafter, batch, **options):
    """`jspec.speculative_generate` of ``(tokens, lengths, keys)``, on the host."""
    return jax.device_get(jspec.speculative_generate(target, drafter, *batch, **options))
