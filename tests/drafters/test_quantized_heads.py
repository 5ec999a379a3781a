"""Quantised heads and candidate selectors draft from the distribution that they report."""

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from convert.heads.block.config import DFlash2Config
from jspec.core.tree import Tree
from jspec.drafters import EagleDrafter
from jspec.drafters.draft_length import DEFAULT
from jspec.drafters.heads.quantized_heads import quantize_for
from jspec.models.layers import copy_tree
from jspec.models.llama import all_parts, matrices, set_weight
from jspec.models.matrix_parts import widen
from jspec.models.quantize import packed_quantized_matrices, quantized_copy
from support import blocks, eagle_heads, heads, toys
from support.matrix import check_texts, pair, text_p_values

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 3)
V = TARGET.config.vocab_size


def quantized_pair(name, kind):
    """Return a target whose sizes suit int4, a head with every kind of matrix, and its quantised copy."""
    target = toys.tiny_llama(0, 3, hidden_size=32, intermediate_size=64, num_attention_heads=4, head_dim=8)
    if name == "eagle":
        head = eagle_heads.eagle(target, fc_norm=True, own_embedding=True, own_head=True, draft_vocab_size=V // 2)
        drafter = EagleDrafter(head)
    else:
        drafter = blocks.drafter(target, own_embedding=True, own_head=True, dflash2=DFlash2Config(3, 8, 32, 4))
    return target, drafter, drafter.quantize(kind)


def module_of(drafter):
    return drafter.head if isinstance(drafter, EagleDrafter) else drafter.block


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["eagle", "block"])
def test_quantized_head_computes_rounded_weights(prompts, name, kind):
    """Its distributions are those of a head with the same weights, and it drafts from them."""
    target, original, drafter = quantized_pair(name, kind)
    parts = matrices(module_of(drafter))
    assert parts.keys() == matrices(module_of(original)).keys() and all(module.parts for module in parts.values())
    assert module_of(drafter).quantized == kind and module_of(original).quantized is None
    batch = prompts([5, 1, 3], vocab_size=V)
    options = {"max_new_tokens": 20, "num_draft_tokens": 3}
    wide = copy_tree(module_of(drafter))
    for module in matrices(wide).values():
        set_weight(module, jnp.asarray(widen(module.parts).T))
    found, expected = (
        jspec.speculative_generate(target, one, *batch, accept="block", **options)
        for one in (drafter, type(drafter)(wide))
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.stats.accepted, expected.stats.accepted)
    assert found.stats.accepted.sum()


def test_quantized_head_is_not_saved(tmp_path):
    for name, words in {"block": "block drafter", "eagle": "EAGLE head"}.items():
        with pytest.raises(ValueError, match=f"The {words} is int8 and cannot be saved"):
            quantized_pair(name, "int8")[2].save(tmp_path / "drafter")
    with pytest.raises(ValueError, match="need a multiple of 32"):
        blocks.drafter(TARGET).quantize("int4")


@pytest.mark.parametrize("bits", [8, 24])
def test_heads_are_quantised_for_packed_target(bits):
    """Their activations are rounded like the target's. Heads are unchanged if the target is not quantised."""
    target, drafter, _ = quantized_pair("eagle", "int8")
    packed = quantized_copy(target, "int8", target.dtype, bits)
    if not packed_quantized_matrices(packed):
        pytest.skip("native kernels are not available here")
    found = quantize_for(packed, drafter)
    assert found.head.quantized == "int8"
    assert {part.activation_bits for part in all_parts(found.head)} == {bits}
    assert quantize_for(target, drafter) is drafter
    assert quantize_for(target, drafter, "int4").head.quantized == "int4"
    odd = blocks.drafter(target, dflash2=DFlash2Config(3, 8, 5, 4))  # a rank of 5 cannot be packed
    assert quantize_for(packed, odd) is odd and quantize_for(packed, odd, "int8").block.quantized == "int8"
    medusa = heads.medusa(target)
    assert quantize_for(packed, medusa) is medusa


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["quantized", "tree"])
def test_candidates_keep_target_distribution(report, kind):
    one = blocks.drafter(pair()[0], num_layers=1, own_head=True, dflash2=DFlash2Config(2, 4, 5, 3))
    if kind == "tree":
        drafter, rule, length = jspec.TreeDrafter(one, Tree.branching((2, 2))), "traversal", DEFAULT
    else:
        drafter, rule, length = one.quantize(), "rejection", 2
    check_texts(report, text_p_values(drafter, rule, 8192, length), 8192, 2)
