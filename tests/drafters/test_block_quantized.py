"""Quantised block drafters, and candidate selectors: they draft from the distribution that they report."""

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from convert.heads.block.config import DFlash2Config
from jspec.core.tree import Tree
from jspec.drafters import BlockDrafter
from jspec.drafters.draft_length import DEFAULT
from jspec.models.layers import copy_tree
from jspec.models.llama import matrices, set_weight
from jspec.models.matrix_parts import widen
from support import blocks, toys
from support.matrix import check_texts, pair, text_p_values

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 3)
V = TARGET.config.vocab_size


def quantized_pair(kind):
    """Return a target whose number of inputs suits int4, and a quantised block with every kind of matrix."""
    target = toys.tiny_llama(0, 3, hidden_size=32, intermediate_size=64, num_attention_heads=4, head_dim=8)
    details = {"own_embedding": True, "own_head": True, "dflash2": DFlash2Config(3, 8, 32, 4)}
    return target, blocks.drafter(target, **details), blocks.drafter(target, **details).quantize(kind)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_block_computes_rounded_weights(prompts, kind):
    """Its distributions are those of a block with the same weights, and it drafts from them."""
    target, original, drafter = quantized_pair(kind)
    parts = matrices(drafter.block)
    assert parts.keys() == matrices(original.block).keys() and all(module.parts for module in parts.values())
    assert drafter.block.quantized == kind and original.block.quantized is None
    batch = prompts([5, 1, 3], vocab_size=V)
    options = {"max_new_tokens": 20, "num_draft_tokens": 3}
    wide = copy_tree(drafter.block)
    for module in matrices(wide).values():
        set_weight(module, jnp.asarray(widen(module.parts).T))
    found, expected = (
        jspec.speculative_generate(target, one, *batch, accept="block", **options)
        for one in (drafter, BlockDrafter(wide))
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.stats.accepted, expected.stats.accepted)
    assert found.stats.accepted.sum()


def test_quantized_block_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="The block drafter is int8 and cannot be saved"):
        quantized_pair("int8")[2].save(tmp_path / "drafter")
    with pytest.raises(ValueError, match="need a multiple of 32"):
        blocks.drafter(TARGET).quantize("int4")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["quantized", "tree"])
def test_candidates_keep_target_distribution(report, kind):
    one = blocks.drafter(pair()[0], num_layers=1, own_head=True, dflash2=DFlash2Config(2, 4, 5, 3))
    if kind == "tree":
        drafter, rule, length = jspec.TreeDrafter(one, Tree.branching((2, 2))), "traversal", DEFAULT
    else:
        drafter, rule, length = one.quantize(), "rejection", 2
    check_texts(report, text_p_values(drafter, rule, 8192, length), 8192, 2)
