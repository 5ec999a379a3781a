"""Raw log-probabilities are those of the model's own logits over the finished text, wherever tokens are emitted."""

import jax
import numpy as np
import pytest

import jspec
from jspec import Tree, TreeDrafter
from support import drafters

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")

NEW = 12
TREE = Tree((0, 0, 1, 1, 3))
# Drafter, rule, draft length.
PROGRAMS = {
    "plain": (None, None, None),
    "model": ("model", "rejection", 3),
    "coupled": ("early exit", "coupled", 2),
    "block": ("ngram", "block", jspec.UpTo(3)),
    "typical": ("model", jspec.Typical(0.3, 0.6), jspec.WhileConfident(3)),
    "tree": ("model", "traversal", TREE),
    "longest branch": ("bigram", jspec.Typical(0.3, 0.6), TREE),
}
FEW = ("plain", "longest branch")


def decoded(name, target, draft, batch, **options):
    drafter, rule, length = PROGRAMS[name]
    if drafter is None:
        return jax.device_get(jspec.generate(target, *batch, **options))
    made = drafters.make(drafter, target, draft)
    if isinstance(length, Tree):
        return drafters.generate(target, TreeDrafter(made, length), batch, accept=rule, **options)
    return drafters.generate(target, made, batch, accept=rule, num_draft_tokens=length, **options)


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS])
def test_raw_logprobs_equal_log_softmax_of_logits(report, toy, prompts, name):
    """Raw log-probabilities are the logits' log-softmax despite filters, penalties, a logit bias, limits and EOS."""
    target, draft = (toy(0, distance=distance, num_hidden_layers=2) for distance in (0, 0.1))
    tokens, lengths, keys = prompts([3, 1, 6, 4, 2, 5, 3, 4])
    options = drafters.every_parameter(8, 61)
    options["sampling"] = jspec.SamplingParams(
        **vars(options["sampling"]) | {"logit_bias": np.linspace(-1, 1, 61, dtype=np.float32)}
    )
    out = decoded(name, target, draft, (tokens, lengths, keys), max_new_tokens=NEW, **options)
    text = np.zeros((8, tokens.shape[1] + NEW), np.int32)
    for row, n in enumerate(lengths):
        text[row, : n + NEW] = np.concatenate([tokens[row, :n], out.tokens[row]])
    laws = np.asarray(jax.nn.log_softmax(target(text)))
    expected = np.stack([laws[b, np.arange(n - 1, n + NEW - 1), out.tokens[b]] for b, n in enumerate(lengths)])
    kept = np.arange(NEW) < out.lengths[:, None]
    worst = np.abs(out.raw_logprobs - np.where(kept, expected, 0)).max()
    report(tokens=int(kept.sum()), ended=int((out.lengths < NEW).sum()), max_difference=f"{worst:.1e}")
    assert worst <= 1e-4 and out.raw_logprobs.dtype == np.float32 and (out.lengths < NEW).any()
    assert np.abs(out.raw_logprobs - out.logprobs)[kept].max() > 0.1
