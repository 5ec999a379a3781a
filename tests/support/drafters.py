"""One of every drafter, for tests that hold all drafters to the same contract; a new drafter takes one more line."""

import dataclasses

import jax
import numpy as np

import jspec
from convert.heads.block.config import DFlash2Config, MarkovConfig
from jspec.core.sampling import SamplingParams
from jspec.drafters import (
    BigramDrafter,
    CascadeDrafter,
    EagleDrafter,
    EarlyExitDrafter,
    FallbackDrafter,
    HorizontalDrafter,
    LookaheadDrafter,
    MixtureDrafter,
    ModelDrafter,
    MultiDrafter,
    NGramDrafter,
    RetrievalDrafter,
    TokenRecyclingDrafter,
    UnigramDrafter,
)
from support import blocks, eagle_heads, heads

# Name -> a function that makes the drafter from the target, the draft, a corpus of tokens, and V.
_MAKERS = {
    "model": lambda target, draft, corpus, v: ModelDrafter(draft),
    "ngram": lambda target, draft, corpus, v: NGramDrafter(max_ngram=3, min_ngram=1),
    "unigram": lambda target, draft, corpus, v: UnigramDrafter.from_tokens(corpus, v),
    "bigram": lambda target, draft, corpus, v: BigramDrafter.from_tokens(corpus, v, smoothing=0.5),
    "retrieval": lambda target, draft, corpus, v: RetrievalDrafter.from_tokens(corpus, v, max_ngram=3, min_ngram=1),
    "early exit": lambda target, draft, corpus, v: EarlyExitDrafter(1),
    "eagle": lambda target, draft, corpus, v: EagleDrafter(eagle_heads.eagle(target, 1)),
    "eagle 3": lambda target, draft, corpus, v: EagleDrafter(
        eagle_heads.eagle(target, 3, fc_norm=True, norm_output=True, draft_vocab_size=v // 2, own_head=True)
    ),
    # The corpus is so short that its end is near: sometimes it drafts one token and cannot draft the next.
    "fallback": lambda target, draft, corpus, v: FallbackDrafter(
        RetrievalDrafter.from_tokens(corpus[:v], v, 1, 1), draft
    ),
    "mixture": lambda target, draft, corpus, v: MixtureDrafter(EarlyExitDrafter(1), draft, 0.3),
    "cascade": lambda target, draft, corpus, v: CascadeDrafter(draft, NGramDrafter(), num_small_draft_tokens=2),
    "nested cascade": lambda target, draft, corpus, v: CascadeDrafter(
        target, CascadeDrafter(draft, BigramDrafter.from_tokens(corpus, v), 1), num_small_draft_tokens=2
    ),
    "cascade of exits": lambda target, draft, corpus, v: CascadeDrafter(target, EarlyExitDrafter(1), 2),
    "horizontal": lambda target, draft, corpus, v: HorizontalDrafter(
        draft, HorizontalDrafter(RetrievalDrafter.from_tokens(corpus[:v], v, 1, 1), EarlyExitDrafter(1), 1), 1
    ),
    "medusa": lambda target, draft, corpus, v: heads.medusa(target, 5),
    "hydra": lambda target, draft, corpus, v: heads.hydra(target, 5),
    "blockwise": lambda target, draft, corpus, v: heads.blockwise(target, 5),
    "kangaroo": lambda target, draft, corpus, v: heads.kangaroo(target),
    # The outer drafter passes each inner one the signals that it asks for. One of them is unrolled, so both are.
    "combined heads": lambda target, draft, corpus, v: FallbackDrafter(
        RetrievalDrafter.from_tokens(corpus[:v], v, 1, 1),
        MixtureDrafter(EagleDrafter(eagle_heads.eagle(target, 3)), heads.hydra(target, 5), 0.5),
    ),
    "few tokens": lambda target, draft, corpus, v: ModelDrafter.with_vocabulary(draft, np.arange(0, v, 2)[::-1]),
    "block": lambda target, draft, corpus, v: blocks.drafter(target),
    "block with corrections": lambda target, draft, corpus, v: blocks.drafter(
        target,
        drafts_from_first=True,
        causal=True,
        markov=MarkovConfig("rnn", 4),
        confidence="state and token",
        draft_vocab_size=v // 2,
        own_head=True,
    ),
    "block with candidates": lambda target, draft, corpus, v: blocks.drafter(
        target, dflash2=DFlash2Config(num_taps=2, group_size=4, rank=4, num_candidates=3), windows=(None, 7)
    ),
}
NAMES = tuple(_MAKERS)
HEADS = (
    "medusa",
    "hydra",
    "blockwise",
    "kangaroo",
    "block",
    "block with corrections",
    "block with candidates",
)  # those with trained weights, here random
# Drafters with trees of their own, made in the same way.
_TREES = {
    "lookup tree": lambda target, draft, corpus, v: NGramDrafter(3, 1, jspec.Tree.branching((2, 2))),
    "recycling": lambda target, draft, corpus, v: TokenRecyclingDrafter(6),
    "lookahead": lambda target, draft, corpus, v: LookaheadDrafter(window=3, ngram=3, guesses=2),
    "several": lambda target, draft, corpus, v: MultiDrafter(
        [NGramDrafter(), draft, EagleDrafter(eagle_heads.eagle(target, 1)), EarlyExitDrafter(1)], 2
    ),
    "vectors": lambda target, draft, corpus, v: heads.vectors(target),
}
TREE_NAMES = tuple(_TREES)


def make(name, target, draft, seed=0):
    """Return the drafter called `name`; `draft` is a model with the target's vocabulary."""
    vocab_size = target.config.vocab_size
    return (_MAKERS | _TREES)[name](
        target, draft, np.random.default_rng(seed).integers(vocab_size, size=400), vocab_size
    )


def every_parameter(batch, vocab_size):
    """Return options that vary all sampling parameters, limits and EOS ids by row; one row in four has an EOS id."""

    def turns(*values):
        return np.resize(np.array(values), batch)

    sampling = SamplingParams(
        temperature=turns(1.0, 0.7, 0.0, 1.3, 1.0),
        top_k=turns(0, 0, 9),
        top_p=turns(1.0, 0.9, 1.0, 0.8),
        min_p=turns(0.0, 0.0, 0.0, 0.05),
        repetition_penalty=turns(1.3, 1.0, 1.2, 1.0, 1.0, 0.8),
        presence_penalty=turns(0.0, 0.5, 0.0, 0.0, -0.3),
        frequency_penalty=turns(0.0, 0.0, 0.2, 0.0, 0.4, 0.0, 0.0),
        draft_temperature=turns(1.0, 0.0, 1.0, 0.5, 2.0),
        draft_top_p=turns(0.5, 1.0, 1.0),
        max_tokens=turns(0, 0, 0, 7, 0, 0, 11),
        min_tokens=turns(0, 9, 0, 0, 0),
    )
    eos_ids = np.where(np.arange(batch) % 4 == 1, np.arange(batch) % vocab_size, -1)[:, None]
    return {"sampling": sampling, "eos_ids": eos_ids}


def of_rows(options, rows):
    """Return the `every_parameter` options of a slice of rows."""
    sampling = options["sampling"]
    kept = {
        field.name: getattr(sampling, field.name)[rows]
        for field in dataclasses.fields(sampling)
        if np.ndim(getattr(sampling, field.name))
    }
    return {"sampling": dataclasses.replace(sampling, **kept), "eos_ids": options["eos_ids"][rows]}


def generate(target, drafter, batch, **options):
    """Run `jspec.speculative_generate` on ``(tokens, lengths, keys)``, and return the output on the host."""
    return jax.device_get(jspec.speculative_generate(target, drafter, *batch, **options))
