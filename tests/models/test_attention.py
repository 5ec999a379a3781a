"""Attention reads only as much of a cache as is filled, and the output is unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core.tree import Branches
from jspec.models.attention import AttentionContext, _prefixes
from jspec.models.kernels.cpu import native
from jspec.models.kv_cache import whole_tiles
from jspec.models.rope import rope_tables
from support import drafters, heads, toys
from support.packed_matrices import has_attention

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 2)
LARGE, SMALL = 600, 320  # slots, with two prefix lengths and with one
TREE = jspec.Tree.branching((2, 1))


def test_prefix_lengths_double_up_to_cache_size():
    found = {slots: _prefixes(slots) for slots in (8, SMALL, 384, 385, LARGE, 1072, 4096)}
    assert found == {
        8: [8],
        SMALL: [SMALL],
        384: [384],
        385: [256, 385],
        LARGE: [256, LARGE],
        1072: [256, 512, 1072],
        4096: [256, 512, 1024, 2048, 4096],
    }


def attend(layer, x, cache, slots, past, branches):
    tables = rope_tables(slots, TARGET.config.rope, TARGET.config.head_dim)
    return layer(x, AttentionContext(*cache, slots, tables, past, branches))[0]


@pytest.mark.parametrize("kind", ["chain", "tree", "past"])
@pytest.mark.parametrize("form", ["native", "XLA"])
def test_longer_cache_does_not_change_output(kind, form, report, monkeypatch):
    """Output is unchanged around prefix lengths, with one shorter row, and with NaN and huge values in unused slots."""
    if form == "XLA":
        monkeypatch.setattr(native, "register", lambda kernel: False)
    compiled = jax.jit(lambda *arguments: attend(*arguments))  # a new function, which JAX compiles for this form
    config, rng, worst = TARGET.config, np.random.default_rng(0), 0.0
    layer, size = TARGET.layers[0].self_attn, TREE.size + 1
    shape = 2, config.num_key_value_heads, config.head_dim
    keys, values = (rng.normal(size=(*shape, LARGE)).astype(np.float32) for _ in range(2))
    branches = Branches(TREE.offsets, TREE.ancestors) if kind == "tree" else None
    for filled in (1, 250, *range(252, 260), SMALL - size):
        start = np.array([filled, filled // 2], np.int32)
        slots = start[:, None] + np.arange(size)
        x = rng.normal(size=(2, size, config.hidden_size)).astype(np.float32)
        unseen = np.arange(LARGE) >= start.max() + size * (kind != "past")
        held = np.where(unseen, np.nan, keys), np.where(unseen, 1e30, values).swapaxes(2, 3)
        own = jnp.zeros((*shape, 8)), jnp.zeros((*shape[:2], 8, shape[2]))

        def mixed(length, start=start, slots=slots, x=x, held=held, own=own):
            cache = held[0][..., :length], held[1][:, :, :length]
            return (
                compiled(layer, x, own, slots, (*cache, None, start), None)
                if kind == "past"
                else compiled(layer, x, cache, slots, None, branches)
            )

        found, expected = np.asarray(mixed(LARGE)), np.asarray(mixed(SMALL))
        assert np.isfinite(expected).all()
        worst = max(worst, np.abs(found - expected).max())
    report(kind=kind, form=form, max_difference=f"{worst:.1e}")
    assert worst < 1e-5 and (form == "XLA" or not has_attention or worst == 0)


@pytest.mark.parametrize("name", ["model", "tree", "kangaroo"])
def test_texts_longer_than_a_prefix_equal_plain_decoding(name, prompts, report):
    """Every row equals plain decoding, even a shorter row that reads more slots because of the longest row."""
    drafter = {
        "model": lambda: drafters.make("model", TARGET, toys.tiny_llama(1, 1, related_to=TARGET)),
        "tree": lambda: jspec.TreeDrafter(jspec.ModelDrafter(toys.tiny_llama(1, 1, related_to=TARGET)), TREE),
        "kangaroo": lambda: heads.kangaroo(TARGET),
    }[name]()
    tokens, lengths, keys = prompts([1, 170, 9], vocab_size=TARGET.config.vocab_size)
    new = 240
    together = jspec.speculative_generate(TARGET, drafter, tokens, lengths, keys, max_new_tokens=new, accept="coupled")
    assert len(_prefixes(whole_tiles(tokens.shape[1] + new))) == 2
    same = 0
    for row, size in enumerate(lengths):
        rows = slice(row, row + 1)
        alone = jspec.generate(TARGET, tokens[rows, :size], lengths[rows], keys[rows], max_new_tokens=new)
        same += int((together.tokens[row] == alone.tokens[0]).sum())
    report(drafter=name, tokens=3 * new, same=same, accepted=int(together.stats.accepted.sum()))
    assert same == 3 * new
