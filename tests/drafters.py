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
    RetrievalDrafter,
    UnigramDrafter,
)

# Name -> the drafter, made of target, draft, a corpus of tokens, and V.
_MAKERS = {
    "model": lambda target, draft, corpus, v: ModelDrafter(draft),
    "ngram": lambda target, draft, corpus, v: NGramDrafter(max_ngram=3, min_ngram=1),
    "unigram": lambda target, draft, corpus, v: UnigramDrafter.from_tokens(corpus, v),
    "bigram": lambda target, draft, corpus, v: BigramDrafter.from_tokens(corpus, v, smoothing=0.5),
    "retrieval": lambda target, draft, corpus, v: RetrievalDrafter.from_tokens(corpus, v, max_ngram=3, min_ngram=1),
    "early exit": lambda target, draft, corpus, v: EarlyExitDrafter(1),
    "fallback": lambda target, draft, corpus, v: FallbackDrafter(NGramDrafter(2, 2), draft),
    "mixture": lambda target, draft, corpus, v: MixtureDrafter(EarlyExitDrafter(1), draft, 0.3),
    "cascade": lambda target, draft, corpus, v: CascadeDrafter(draft, NGramDrafter(), num_small_draft_tokens=2),
    "nested cascade": lambda target, draft, corpus, v: CascadeDrafter(
        target, CascadeDrafter(draft, BigramDrafter.from_tokens(corpus, v), 1), num_small_draft_tokens=2
    ),
    "cascade of exits": lambda target, draft, corpus, v: CascadeDrafter(target, EarlyExitDrafter(1), 2),
}
NAMES = tuple(_MAKERS)


def make(name, target, draft, seed=0):
    """The drafter called `name`; `draft` is a model with the target's vocabulary."""
    vocab_size = target.config.vocab_size
    return _MAKERS[name](target, draft, np.random.default_rng(seed).integers(vocab_size, size=400), vocab_size)


def generate(target, drafter, batch, **options):
    """`jspec.speculative_generate` of ``(tokens, lengths, keys)``, on the host."""
    return jax.device_get(jspec.speculative_generate(target, drafter, *batch, **options))
