"""Helpers for the mutant tests and others."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jspec.acceptance import RULES
from jspec.core import sampling
from jspec.drafters import ModelDrafter
from support import oracle, toys
from support.oracle import ALPHA

DRAWS, VOCAB, NUM_TOKENS, EOS, PROMPT = 20_000, 8, 3, 5, (3, 6)


SETTINGS = {"temperature": 0.7, "top_p": 0.85}
SETTINGS |= {"repetition_penalty": 1.2, "presence_penalty": 0.6, "frequency_penalty": 0.4}


def texts(sampling_settings, drafter=None, rule="rejection", length=2, draws=DRAWS, target=None):
    """Return `draws` outputs of up to three tokens from jspec as patched now, with only the given settings.

    `target` must be a model with the distributions of the default target.
    """
    tables, other = toys.markov_pair(7)
    fields = {name: jnp.float32(value) for name, value in sampling_settings.items()}
    transforms = toys.both_transforms(sampling.SamplingParams(**fields), draws)
    tokens = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (draws, len(PROMPT)))
    batch = tokens, jnp.full(draws, len(PROMPT)), jax.random.split(jax.random.key(8), draws), transforms
    options = {"max_new_tokens": NUM_TOKENS, "num_draft_tokens": length, "eos_ids": (EOS,), "rule": RULES[rule]}
    return toys.decode(target or tables, drafter or ModelDrafter(other), *batch, **options)


def law(settings=SETTINGS, **options):
    """Return the p-value of the outputs' joint distribution, and the power to detect the observed bias at `ALPHA`."""
    table = np.asarray(toys.markov_pair(7)[0].table)

    def next_law(text):
        last = text[-1] if text else PROMPT[-1]
        return oracle.sampling_law(table[last], prompt=PROMPT, generated=text, **settings)

    out = texts(settings, **options)
    observed = np.bincount(np.asarray(out.tokens) @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**NUM_TOKENS)
    statistic, freedom = oracle.chi_square(observed, oracle.joint_law(next_law, VOCAB, NUM_TOKENS, eos=(EOS,)))
    seen = max(statistic - freedom, 0)
    # scipy's noncentral chi-square is slow, and useless if the statistic is astronomic.
    power = 1.0 if seen > 1e4 else stats.ncx2.sf(stats.chi2.isf(ALPHA, freedom), freedom, seen)
    p, sees = oracle.p_of(statistic, freedom), oracle.detectable(observed.sum(), freedom)
    return p, f"p = {p:.1e}, power {power:.4f}, sees any tv of {sees:.3f}"
