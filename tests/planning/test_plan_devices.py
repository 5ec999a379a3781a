"""Predictions of `jspec.plan` for models that are sharded over several devices."""

import dataclasses

import pytest

import jspec
from bench.pairs import SHAPES
from jspec.core.devices import DEVICES
from jspec.planning.memory import Weights

BIG, SMALL, H100 = SHAPES["llama-3.2-3b"], SHAPES["llama-3.2-1b"], DEVICES["h100"]


def test_several_devices_share_the_bytes_and_exchange_sums():
    """Each device reads its share of the matrices and of the cache, and each layer waits for two sums."""
    whole, shared = (jspec.plan(BIG, SMALL, device="h100", num_devices=count) for count in (1, 8))
    layers, norms = BIG.num_hidden_layers, 2 * BIG.hidden_size * (2 * BIG.num_hidden_layers + 1)
    read = (Weights(BIG, 2).bytes_read - norms + Weights(BIG, 2).cache_bytes(1, 4104)) / 8 + norms
    sent = 2 * 7 / 8 * (2 * layers * BIG.hidden_size * 2 + BIG.hidden_size + BIG.vocab_size * 4)
    exchanges, launches = (2 * layers + 2) * 10e-6 + sent / 450e9, (19 * layers + 14 + 26) * 2e-6
    assert shared.plain_seconds == pytest.approx(read / H100.bandwidth + exchanges + launches, rel=1e-9)
    assert (whole.num_devices, shared.num_devices) == (1, 8)
    assert shared.plain_footprint.caches * 8 == whole.plain_footprint.caches
    assert shared.largest_batch > 8 * whole.largest_batch


def test_devices_that_do_not_divide_the_matrices_are_rejected():
    uneven = dataclasses.replace(BIG, intermediate_size=8196)
    for target, draft, name in ((uneven, SMALL, "target"), (BIG, uneven, "draft")):
        with pytest.raises(ValueError, match=f"The {name}'s matrices cannot be split into num_devices=8 equal parts"):
            jspec.plan(target, draft, device="h100", num_devices=8)
    grouped = dataclasses.replace(SMALL, hidden_size=896)  # seven groups of 128
    with pytest.raises(
        ValueError, match=r"The draft's matrices .* of whole quantisation groups; use a smaller divisor of 8"
    ):
        jspec.plan(BIG, grouped, device="h100", num_devices=2, quantize="int4")
