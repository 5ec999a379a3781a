"""Block drafters: they compute what PyTorch does, after any number of rounds, in chains and trees."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
import jspec
from convert.heads.block.config import DFlash2Config, MarkovConfig
from convert.heads.block.write_config import FORMATS
from convert.heads.files import kind_of
from jspec.core.tree import Tree
from jspec.drafters import BlockDrafter
from support import block_checkpoints, block_checks, blocks, heads, toys
from support.block_checkpoints import CONFIGS, DFLASH2, FULL, SIZES, SLIDING, WINDOWS, without

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 3)
V, E = TARGET.config.vocab_size, TARGET.config.hidden_size
MARKOV = {kind: {"markov": MarkovConfig(kind, 5), "drafts_from_first": True} for kind in ("vanilla", "gated", "rnn")}
KINDS = {
    "dflash": {},
    "jetspec": {"causal": True},
    "output of the last layer": {"features": (0, 3), "num_layers": 1},
    **MARKOV,
    "dflash2": {"dflash2": DFlash2Config(3, 4, 5, 3), "windows": (6, None)},
    "few tokens": MARKOV["gated"] | {"draft_vocab_size": 5, "own_head": True, "own_embedding": True},
}
TREES = {
    "chain": (lambda one: one, 4, "rejection"),
    "varying": (lambda one: one, jspec.WhileConfident(4, 0.5), "block"),
    "tree": (lambda one: jspec.TreeDrafter(one, Tree.branching((2, 1, 2))), 4, "traversal"),
    "search": (lambda one: jspec.DynamicTreeDrafter(one, 6, 3, 2), 4, "coupled"),
}


FEW = {"max_new_tokens": 4}


@pytest.mark.parametrize("name", CONFIGS)
def test_loaded_drafter_matches_torch(report, tmp_path, name):
    """A teacher-forced chain after sequences of different lengths, one of them a single token."""
    pytest.importorskip("torch")
    worst = block_checks.reference_error(tmp_path / "drafter", name)
    report(max_error=worst)
    assert worst < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_drafter_is_the_loaded_one(tmp_path, name):
    """It keeps its fields and tensors in its own layout, and its function in any other that can hold it."""
    raw, target = CONFIGS[name], toys.tiny_llama(0, 3, rms_norm_eps=1e-5)
    weights = block_checkpoints.write(tmp_path / "drafter", raw)
    assert kind_of(tmp_path / "drafter") == "block"
    drafter, saved = BlockDrafter.load(tmp_path / "drafter", target), 0
    for format in FORMATS:
        try:
            drafter.save(tmp_path / format, format)
        except convert.CheckpointError as error:
            assert "do not support" in str(error)
            continue
        again, saved = BlockDrafter.load(tmp_path / format, target), saved + 1
        assert again.block.config == drafter.block.config
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(drafter))
        if FORMATS[format] == again.block.origin.layout == drafter.block.origin.layout:
            written = json.loads((tmp_path / format / "config.json").read_text())
            written.get("transformer_layer_config", written).pop("torch_dtype")
            assert written == raw, format
            assert load_file(tmp_path / format / "model.safetensors").keys() == weights.keys()
    assert saved


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        ("dflash", "varying"),
        ("rnn", "chain"),
        ("few tokens", "tree"),
        ("jetspec", "search"),
        ("dflash2", "tree"),
        *(pytest.param(kind, tree, marks=pytest.mark.slow) for kind in KINDS for tree in TREES),
    ],
)
def test_cache_matches_target_states_of_text(prompts, kind, tree):
    """This holds with rejected draft tokens, row ends and limits, and from one-token prompts on."""
    wrap, length, rule = TREES[tree]
    block, batch = blocks.block(TARGET, **KINDS[kind]), prompts([5, 1, 3, 9], vocab_size=V)
    inner = (lambda state: state) if tree in ("chain", "varying") else (lambda state: state[0])
    error, accepted = block_checks.cache_error(TARGET, wrap(BlockDrafter(block)), block, inner, batch, length, rule)
    assert error < 2e-5 and accepted


@pytest.mark.parametrize(
    "kind", ["chain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("varying", "tree", "search"))]
)
def test_exact_block_is_always_accepted(kind):
    """A token's distribution depends on the token before it, which the Markov head must receive."""
    table = np.random.default_rng(2).normal(size=(V, V)) * 2
    target = heads.markov_llama(table)
    block = blocks.block(
        target, num_layers=1, own_head=True, **MARKOV["vanilla"] | {"markov": MarkovConfig("vanilla", V)}
    )
    block.lm_head.weight.set_value(jnp.zeros((E, V)))
    block.markov_head.markov_w1.weight.set_value(jnp.eye(V))
    block.markov_head.markov_w2.weight.set_value(jnp.asarray(table, jnp.float32))
    check = functools.partial(heads.check_always_right, target, temperature=0.8)
    if kind == "tree":
        check(jspec.TreeDrafter(BlockDrafter(block), Tree.branching((2, 1, 2))), num_draft_tokens=None)
    elif kind == "search":  # verified with the target's noise, with which it is also drawn
        check(jspec.DynamicTreeDrafter(BlockDrafter(block), 9, 3, 2), num_draft_tokens=None, accept="coupled")
    else:
        check(BlockDrafter(block), num_draft_tokens=jspec.WhileConfident(3, 0.0) if kind == "varying" else 3)


def test_more_tokens_than_a_block_drafts_are_refused(prompts):
    for drafter, most in ((blocks.drafter(TARGET), 5), (blocks.drafter(TARGET, drafts_from_first=True), 6)):
        assert drafter.max_chain_length == most
        for one, length in (
            (drafter, {"num_draft_tokens": 7}),
            (jspec.TreeDrafter(drafter, Tree.chain(7)), {}),
            (jspec.DynamicTreeDrafter(drafter, 9, 7, 2), {"accept": "coupled"}),
        ):
            with pytest.raises(ValueError, match=f"at most {most}"):
                jspec.speculative_generate(TARGET, one, *prompts([4], vocab_size=V), **length, **FEW)


def test_output_head_may_be_left_out(tmp_path):
    """A drafter without its own rows for a reduced vocabulary uses the target's."""
    details = {"draft_vocab_size": 5, "own_head": True} | MARKOV["vanilla"]
    own = blocks.drafter(TARGET, qk_norm=True, **details)
    own.block.lm_head.weight.set_value(TARGET.head.wide(own.block.target_ids))
    whole, small = (own.save(tmp_path / str(kept), own_head=kept) for kept in (True, False))
    more, fewer = (set(load_file(one / "model.safetensors")) for one in (whole, small))
    assert more - fewer == {"lm_head.weight"}
    again = BlockDrafter.load(small, TARGET)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(convert.CheckpointError, match=r"has no lm_head\.weight for the 5 tokens"):
        BlockDrafter.load(small)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [({"hidden_size": 32}, "hidden size is 16"), ({"vocab_size": 10}, "vocab"), ({"num_layers": 2}, "from 0 to 2")],
)
def test_drafter_for_another_target_is_refused(prompts, sizes, found):
    drafter = blocks.drafter(TARGET, features=(1, 3))
    layers = sizes.pop("num_layers", 3)
    with pytest.raises(ValueError, match=found):
        jspec.speculative_generate(toys.tiny_llama(0, layers, **sizes), drafter, *prompts([4], vocab_size=V), **FEW)


def test_files_for_another_target_are_refused(tmp_path):
    """A layer's number and the target's own depth are in DAMAGED."""
    block_checkpoints.write(tmp_path, DFLASH)
    for sizes, found in (
        ({"hidden_size": 32}, "hidden size is 16, but this target's is 32"),
        ({"vocab_size": 10}, "vocabulary size is 8, but this target's is 10"),
    ):
        with pytest.raises(ValueError, match=found):
            BlockDrafter.load(tmp_path, toys.tiny_llama(0, 3, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["dflash", "few tokens"])
def test_quantised_target_is_drafted_for(report, prompts, name, kind):
    """The drafter reads the quantised target's states, and uses its embedding and head."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    target, batch = jspec.quantize(toys.tiny_llama(0, 3, **sizes), kind), prompts([5, 1, 3], vocab_size=V)
    drafter, options = blocks.drafter(target, **KINDS[name]), {"max_new_tokens": 20}
    plain = jspec.generate(target, *batch, **options)
    out = jspec.speculative_generate(target, drafter, *batch, num_draft_tokens=4, accept="coupled", **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    report(accepted=int(out.stats.accepted.sum()))
    assert out.stats.accepted.sum() > 0


def test_block_is_not_quantised():
    for drafter in (blocks.block(TARGET), blocks.drafter(TARGET)):
        with pytest.raises(TypeError, match=r"cannot be quantised; pass a jspec\.Llama"):
            jspec.quantize(drafter)


def test_wrong_block_is_refused(prompts):
    with pytest.raises(TypeError, match="pass a jspec"):
        jspec.speculative_generate(TARGET, BlockDrafter(TARGET), *prompts([4], vocab_size=V), **FEW)


def with_section(raw, **fields):
    """Return `raw` with some more fields in its section."""
    return raw | {"dflash_config": raw["dflash_config"] | fields}


DFLASH, DSPARK, SPECULATORS = CONFIGS["dflash"], CONFIGS["deepspec gated"], CONFIGS["speculators dflash"]
# What is wrong -> the content of config.json, and a part of the sentence.
DAMAGED = {
    "no block drafter": (block_checkpoints.BODY, "is not a block drafter"),
    "another speculator": (SPECULATORS | {"speculators_model_type": "eagle3"}, "'eagle3'.*is not a block drafter"),
    "unknown flag": (with_section(DFLASH, conv_taps=3), "unknown conv_taps"),
    "no mask token": (without(DSPARK, "mask_token_id"), "mask_token_id is missing"),
    "mask token outside": (DSPARK | {"mask_token_id": V}, f"0 to {V - 1}"),
    "no block size": (without(DFLASH, "block_size"), "block_size is missing"),
    "two block sizes": (with_section(DFLASH, block_size=3), "block_size is 5 in config.json and 3"),
    "both kinds of layer ids": (DSPARK | {"aux_hidden_state_layer_ids": [0, 1]}, "each must be one less"),
    "both kinds in one file": (SPECULATORS | {"target_layer_ids": [1, 3]}, "each must be one less"),
    "both kinds in two places": (with_section(DFLASH) | {"target_layer_ids": [0, 1]}, "each must be one less"),
    "no layers": (without(SPECULATORS, "transformer_layer_config"), "transformer_layer_config is None"),
    "layers of another family": (DFLASH | {"model_type": "gemma3"}, "expected llama or qwen3"),
    "another rotation": (DFLASH | {"is_neox_style": False}, "is_neox_style is False"),
    "more rows than positions": (DFLASH | {"block_size": 65}, "at most max_position_embeddings 64"),
    "no rows": (DFLASH | {"block_size": 0}, "block_size is 0"),
    "no flag of the first row": (SPECULATORS | {"sample_from_anchor": "yes"}, "expected true or false"),
    "no convolutions": (DFLASH2, "lacks .*attention_conv"),
    "layer ids out of order": (DSPARK | {"target_layer_ids": [1, 0]}, "ascending order"),
    "layer ids out of range": (without(DSPARK | {"target_layer_ids": [0, 3]}, "num_target_layers"), "layers 0 to 2"),
    "another target's depth": (DFLASH | {"num_target_layers": 4}, "num_target_layers is 4, but this target has 3"),
    "a wider target": (SPECULATORS | {"target_hidden_size": 32}, "target_hidden_size is 32"),
    "sliding windows": (DFLASH | {"layer_types": ["sliding_attention"] * 2}, "only 'full_attention'"),
    "unknown Markov head": (DSPARK | {"markov_head_type": "lstm"}, "expected one of vanilla, gated, rnn"),
    "no Markov rank": (without(DSPARK, "markov_rank"), "markov_rank is None"),
    "confidence of no Markov head": (DSPARK | {"markov_rank": 0}, "markov_rank is 0"),
    "no confidence flag": (without(DSPARK, "enable_confidence_head"), "enable_confidence_head is missing"),
    "draft vocabulary": (SPECULATORS | {"draft_vocab_size": 9}, "draft_vocab_size 9 is more than"),
    "nothing to draft": (DFLASH | {"block_size": 1}, "no row is left"),
    "millions of layers": (DFLASH | {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
    "convolutions of DFlash": (with_section(DFLASH, **SIZES), "unknown conv_group_size"),
    "causal DFlash": (DFLASH | {"is_causal": True}, "is_causal is True"),
    "two conventions of causality": (with_section(CONFIGS["jetspec"]) | {"is_causal": False}, "is_causal is False"),
    "no selector": (with_section(DFLASH2, selector_rank=None), "selector_rank is missing"),
    "more taps than rows": (with_section(DFLASH2, conv_kernel_size=6), "conv_kernel_size is 6; expected at most 5"),
    "too many candidates": (with_section(DFLASH2, selector_top_k=9), "selector_top_k is 9; expected at most 8"),
    "uneven groups": (with_section(DFLASH2, conv_group_size=3), "expected a divisor of hidden_size 16"),
    "negative scale": (with_section(DFLASH2, output_multiplier=-1), "output_multiplier is -1"),
    "a window that is off": (
        DFLASH2 | WINDOWS | {"layer_types": [SLIDING] * 2, "use_sliding_window": False},
        "expected true and at least block_size 5",
    ),
    "a window within a block": (
        DFLASH2 | WINDOWS | {"layer_types": [SLIDING] * 2, "sliding_window": 4},
        "sliding_window 4; expected",
    ),
    "windows of no layer": (DFLASH2 | WINDOWS, "layer_types is None; expected"),
    "two defaults of causality": (
        without(DFLASH2, "is_causal") | WINDOWS | {"layer_types": [SLIDING, FULL]},
        "is_causal is missing",
    ),
    "DFlash2 from the first row": (CONFIGS["speculators dflash2"] | {"sample_from_anchor": True}, "expected false"),
    "missing tensor": (DFLASH | {"num_hidden_layers": 3}, "lacks layers.2"),
    "unknown tensor": (DFLASH | {"num_hidden_layers": 1}, "unexpected layers.1"),
    "misshapen tensor": (DFLASH | {"intermediate_size": 25}, "expected \\[25, 16\\]"),
}


@pytest.mark.parametrize("wrong", DAMAGED)
def test_damaged_files_are_refused(tmp_path, wrong):
    raw, sentence = DAMAGED[wrong]
    original = DFLASH if "dflash_config" in raw else SPECULATORS if "speculators_model_type" in raw else DSPARK
    block_checkpoints.write(tmp_path, original)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(convert.CheckpointError, match=sentence):
        BlockDrafter.load(tmp_path, toys.tiny_llama(0, 3))


def test_missing_layer_ids_are_those_of_dflash(tmp_path):
    """They are evenly spaced between the second and the third-to-last layer."""
    section = without(DFLASH["dflash_config"], "target_layer_ids")
    block_checkpoints.write(tmp_path, DFLASH)
    for layers, features in ((8, (2, 6)), (36, (2, 34))):
        raw = DFLASH | {"dflash_config": section, "num_target_layers": layers}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert BlockDrafter.load(tmp_path).features == features
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 10**9}))
    with pytest.raises(convert.CheckpointError, match="not in ascending order"):
        BlockDrafter.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(without(raw, "num_target_layers")))
    with pytest.raises(convert.CheckpointError, match="pass the target"):
        BlockDrafter.load(tmp_path)


@pytest.mark.parametrize(
    ("details", "format", "sentence"),
    [
        ({}, "vllm", "format 'vllm' is unknown"),
        ({"qk_norm": False}, "speculators", "do not norm"),
        ({"causal": True}, "dflash", "causal blocks"),
        ({}, "deepspec", "the second row"),
        (MARKOV["rnn"], "dflash", "a Markov head"),
        ({}, "dflash2", "without a candidate selector"),
        (KINDS["dflash2"], "dflash", "a candidate selector"),
        (KINDS["dflash2"], "speculators", "sliding windows"),
        (KINDS["dflash2"] | {"windows": (6, 7)}, "dflash2", "windows of different sizes"),
        ({"dflash2": DFlash2Config(3, 4, 5, 3, 2.0)}, "speculators", "scales of embeddings"),
    ],
)
def test_format_that_cannot_hold_the_drafter_is_refused(tmp_path, details, format, sentence):
    qk_norm = details.get("qk_norm", True)
    drafter = blocks.drafter(toys.tiny_llama(0, 3, qk_norm=qk_norm), **without(details, "qk_norm"))
    with pytest.raises(convert.CheckpointError, match=sentence):
        drafter.save(tmp_path / "drafter", format)
