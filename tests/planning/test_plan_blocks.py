"""Predictions of `jspec.plan` for block drafters match explicit counts."""

import dataclasses
import math

import pytest
from flax import nnx

import jspec
from bench.pairs import SHAPES, dspark, nbytes
from convert.heads.block.config import DFlash2Config, MarkovConfig
from jspec.core import devices
from jspec.planning import plan as planning
from jspec.planning import roofline
from jspec.planning.block_costs import BlockWeights
from jspec.planning.memory import Weights
from support import blocks, toys

BIG, SMALL = SHAPES["llama-3.2-3b"], SHAPES["llama-3.2-1b"]
H100 = devices.DEVICES["h100"]


QWEN, DSPARK = SHAPES["qwen3-8b"], dspark(SHAPES["qwen3-8b"])


def test_block_round_matches_explicit_count():
    """A round reads layers and head once, W2 once per token, and fc and the projections for the context."""
    device = devices.DEVICES["h100"]
    found = jspec.plan(QWEN, DSPARK, device=device, length=500, acceptance=0.9)
    hidden, inner, vocab = 4096, 12288, 151936
    layer = hidden * (48 + 32) * 128 + 3 * hidden * inner + 2 * hidden + 2 * 128
    stored = 5 * hidden * hidden + 5 * (hidden * 48 * 128 + 128)
    for k in range(1, 8):
        read = 5 * layer + 2 * hidden + hidden * vocab + k * 256 * vocab + stored
        cache = 2 * 5 * 8 * 128 * (8 * math.ceil((8 * math.ceil((501 + k) / 8) + 7) / 8))
        features = 2 * (k + 1) * 5 * hidden
        drafting = 2 * (read + cache + features) / device.bandwidth
        kernels = 5 * (10 + 5) + 33 + 9 + 22 * (k - 1) + 26
        verify = roofline.pass_seconds(Weights(QWEN, 2), device, 1, k + 1, 8 * math.ceil((501 + k) / 8))
        assert found.draft.round_seconds[k - 1] == pytest.approx(drafting + verify + kernels * device.launch)
    assert len(found.draft.speedups) == 7 and found.int8 is None and found.verdict == planning.SPECULATE


@pytest.mark.parametrize("details", [{}, {"own_head": False, "own_embedding": False}, {"draft_vocab_size": 5}], ids=str)
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_block_bytes_match_block(kind, details):
    target = toys.tiny_llama(0, 3)
    own = {"own_head": True, "own_embedding": True, "confidence": "state and token"}
    block = blocks.block(target, markov=MarkovConfig(kind, 5), **own | details)
    found = jspec.plan(target.config, block.config, device="h100", length=16)
    held, table = BlockWeights(block.config, 4), 0 if block.draft_ids is None else block.draft_ids[...].nbytes
    assert 2 * sum(found.block[name] for name in held.parts) == held.bytes == nbytes(nnx.state(block)) - table
    assert held.cache_bytes(3, 24) == nbytes(block.new_cache(3, 24 + 8))
    assert found.draft.footprint.weights - found.plain_footprint.weights == held.bytes // 2


def test_selector_and_missing_head_are_planned():
    """A candidate selector's codebooks take memory, and so do the target's rows for a reduced vocabulary."""
    target = toys.tiny_llama(0, 3)
    block = blocks.block(target, dflash2=DFlash2Config(num_taps=2, group_size=4, rank=6, num_candidates=3))
    assert BlockWeights(block.config, 4).bytes == nbytes(nnx.state(block))
    few = blocks.block(target, draft_vocab_size=5, own_head=True).config
    planned = [
        jspec.plan(target.config, dataclasses.replace(few, own_head=own), device="h100", length=16).block["head"]
        for own in (True, False)
    ]
    assert planned[0] == planned[1] > 0


def test_block_for_other_target_is_rejected():
    with pytest.raises(ValueError, match="made for a target whose hidden size is 4096, but this target's is 3072"):
        jspec.plan(BIG, DSPARK, device="h100")
    with pytest.raises(ValueError, match="num_devices=8 is not supported for block drafters; use num_devices=1"):
        jspec.plan(QWEN, DSPARK, device="h100", num_devices=8)
    with pytest.raises(ValueError, match="num_draft_tokens must be a whole number from 1 to 7; got 8"):
        jspec.plan(QWEN, DSPARK, device="h100", num_draft_tokens=8)
