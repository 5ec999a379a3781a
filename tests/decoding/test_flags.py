"""The main paths run under JAX's flags: no jit, no implicit promotion, no NaN, no implicit transfer.

Caches are cleared first, because JAX does not recheck programs that it traced or compiled without a flag.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from support import eagle_heads, heads, text_pair, toys
from support.few import by_default

pytestmark = pytest.mark.usefixtures("quick_compile")
EVERYTHING = {
    "temperature": 0.8,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": np.linspace(-1, 1, 8),
    "max_tokens": 3,
    "min_tokens": 1,
    "draft_temperature": 0.5,
    "draft_top_p": 0.8,
}
TREE = jspec.Tree.branching((2, 1))
# Name -> options and a function that makes the drafter from target and draft. Plain decoding has no drafter.
PATHS = {
    "plain": (None, {}),
    "rejection": (lambda target, draft: draft, {"num_draft_tokens": 2, "record": True}),
    "block": (lambda target, draft: draft, {"num_draft_tokens": jspec.ByAcceptance(2), "accept": "block"}),
    "coupled": (lambda target, draft: jspec.EarlyExitDrafter(1), {"num_draft_tokens": 2, "accept": "coupled"}),
    "lookup": (lambda target, draft: jspec.NGramDrafter(2, 1), {"num_draft_tokens": jspec.UpTo(2)}),
    "tree": (lambda target, draft: jspec.TreeDrafter(draft, TREE), {"accept": "traversal"}),
    "k-seq": (lambda target, draft: jspec.TreeDrafter(draft, TREE, replacement=True), {"accept": "k-seq"}),
    "lookup tree": (lambda target, draft: jspec.NGramDrafter(2, 1, TREE), {}),
    "heads": (lambda target, draft: heads.medusa(target, 2), {"num_draft_tokens": 2}),
    "eagle": (lambda target, draft: jspec.EagleDrafter(eagle_heads.eagle(target)), {"num_draft_tokens": 2}),
    "without a receipt": (lambda target, draft: draft, {"num_draft_tokens": 2, "accept": jspec.Threshold(0.1)}),
}


@pytest.fixture(scope="module")
def pair():
    target = toys.tiny_llama(0)
    return target, toys.tiny_llama(1, 1, related_to=target)


@pytest.fixture(scope="module")
def batch():
    """Return a batch of two rows as arrays on the device."""
    tokens, lengths = jnp.array([[1, 2, 1, 2], [3, 0, 0, 0]]), jnp.array([4, 1])
    return jax.block_until_ready((tokens, lengths, jax.random.split(jax.random.key(0, impl="threefry2x32"), 2)))


@pytest.fixture(autouse=True)
def no_programs():
    jax.clear_caches()


def decode(pair, batch, drafter, options):
    target = pair[0]
    shared = {"max_new_tokens": 3, "sampling": jspec.SamplingParams(**EVERYTHING), "eos_ids": (7,)}
    if drafter is None:
        return jspec.generate(target, *batch, **shared)
    return jspec.speculative_generate(target, drafter, *batch, **shared, **options)


def check(pair, batch, name, flag):
    make, options = PATHS[name]
    drafter = None if make is None else make(*pair)
    with flag:
        out = decode(pair, batch, drafter, options)
        out.stats.acceptance_rate, out.stats.acceptance_rate_at, out.stats.mean_acceptance_length  # noqa: B018
    return out


@contextlib.contextmanager
def strict():
    """Forbid implicit transfers and unexpected NaNs."""
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        yield


@contextlib.contextmanager
def explicit_types():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("name", PATHS)
def test_no_implicit_promotion(pair, batch, name):
    """Tracing a program finds implicit promotions, so nothing needs to run."""
    make, options = PATHS[name]
    drafter = None if make is None else make(*pair)
    with explicit_types():
        jax.eval_shape(lambda *batch: decode(pair, batch, drafter, options), *batch)


@pytest.mark.parametrize("name", by_default(list(PATHS), ["plain", "rejection", "lookup", "tree", "without a receipt"]))
def test_no_implicit_transfer_and_no_nan(pair, batch, name):
    out = check(pair, batch, name, strict())
    assert (np.asarray(out.lengths) > 0).all() and not np.asarray(out.stats.invalid).any()


@pytest.mark.parametrize("name", by_default(list(PATHS), ["plain", "coupled"]))
def test_output_without_jit_is_the_same(pair, batch, name):
    """The output without jit is also the same."""
    out = check(pair, batch, name, jax.disable_jit())
    np.testing.assert_array_equal(out.tokens, check(pair, batch, name, contextlib.nullcontext()).tokens)


@pytest.mark.parametrize("flag", [strict, explicit_types])
def test_complete_and_stream_agree_under_flags(flag):
    """`complete` decodes in a single call, `stream` with an engine, and both give the same text."""
    target = toys.tiny_llama(0, vocab_size=text_pair.RAW["vocab_size"])
    tokenizer, how = text_pair.tokenizer(), {"max_new_tokens": 4, "sampling": jspec.SamplingParams(0.8, top_k=3)}
    with flag():
        (text,) = jspec.complete(target, jspec.NGramDrafter(), tokenizer, "the", accept="coupled", **how)
        parts = list(jspec.stream(target, None, tokenizer, "the", **how))
    assert "".join(part.text for part in parts) == text.text


def test_transfer_guard_rejects_host_arrays(pair, batch):
    """Host arrays raise JAX's own error, and the stricter guard forbids even numbers from the host."""
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        jspec.generate(pair[0], *map(np.asarray, batch[:2]), batch[2], max_new_tokens=3)
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        jspec.generate(pair[0], *batch, max_new_tokens=3)
