"""Predictions of `jspec.plan` match explicit formulas, published figures, and limiting cases."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jspec
from bench.pairs import SHAPES
from convert.config import LlamaConfig
from jspec.core import devices
from jspec.planning import plan as planning
from jspec.planning import roofline
from jspec.planning.memory import Weights

BIG, SMALL = SHAPES["llama-3.2-3b"], SHAPES["llama-3.2-1b"]
H100 = devices.DEVICES["h100"]


# The device.


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v6 lite", "v6e"),
    ],
)
def test_local_device_is_recognised(monkeypatch, kind, name):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    assert devices.find() is devices.DEVICES[name] is devices.find(name)
    assert jspec.plan(BIG, SMALL).device is devices.DEVICES[name]


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA L40S", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "TPU v5"])
def test_similar_device_is_not_confused(monkeypatch, kind):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    with pytest.raises(ValueError, match=f"the local device, {kind}; .*h200, h100, .*local device with `jspec tune`"):
        jspec.plan(BIG, SMALL)


# Seconds.


def oracle(target, draft, device, batch, length, acceptance, quantized):
    """Return the seconds of plain decoding, and the seconds and tokens of rounds with 1..16 draft tokens.

    Every pass and every kernel is counted.
    """

    def one_pass(config: LlamaConfig, kind, rows, k):
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        matrices = [(config.vocab_size, hidden)]
        for _ in range(config.num_hidden_layers):
            matrices += [
                ((heads + 2 * groups) * size, hidden),
                (hidden, heads * size),
                (2 * inner, hidden),
                (hidden, inner),
            ]
        numbers = sum(out * into for out, into in matrices)
        norms = hidden * (2 * config.num_hidden_layers + 1)
        slots = 8 * int(np.ceil((length + k + 1) / 8))
        read = {
            None: 2 * numbers,
            "int8": numbers + 4 * sum(out for out, _ in matrices),
            "int4": numbers // 2 + 4 * sum(out * (into // 128) for out, into in matrices),
        }[kind]
        read += 2 * norms + 2 * 2 * batch * slots * config.num_hidden_layers * groups * size
        more = {"int8": (2, 0), "int4": (3, 6)}.get(kind, (0, 0))
        if kind and device.platform == "cuda":
            at_once, half = batch * rows, device.dtype == "float16"
            for out, into in matrices:
                groups = 1 if kind == "int8" else into // 128
                sums = 8 * (at_once if half else max(at_once, 2)) * groups * out if groups > 1 else 0
                stored = (out * into if kind == "int8" else out * into // 2) + 4 * groups * out
                if half and at_once <= 32:
                    read += (int(np.ceil(at_once / 8)) - 1) * stored + sums
                elif half or (groups > 1 and at_once >= 64):
                    read += 2 * 2 * out * into
                else:
                    read += sums
        kernels = 18 + more[1] if device.dtype == "float16" else 10 + more[0]
        launches = kernels * config.num_hidden_layers + 14
        work = max(read / device.bandwidth, 2 * (numbers + norms) * batch * rows / device.flops)
        return work + launches * device.launch

    plain = one_pass(target, None, 1, 0) + 26 * device.launch
    rounds, tokens = [], []
    for k in range(1, 17):
        passes = [one_pass(draft, quantized, 2, k), *(one_pass(draft, quantized, 1, k) for _ in range(k - 1))]
        rounds.append(sum(passes) + one_pass(target, None, k + 1, k) + 26 * device.launch)
        stops = [acceptance**n * (1 - acceptance) * (n + 1) for n in range(k)]
        tokens.append(sum(stops) + acceptance**k * (k + 1))
    return plain, rounds, tokens


@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
@pytest.mark.parametrize(
    ("name", "batch", "length", "acceptance"),
    [("h100", 1, 4096, 0.8), ("t4", 3, 700, 0.35), ("v5e", 1, 33, 1.0), ("l4", 64, 512, 0.9), ("a100", 200, 90, 0.6)],
)
def test_predicted_seconds_match_explicit_count(name, batch, length, acceptance, quantized):
    """Predicted seconds equal the counted ones for memory-bound and compute-bound shapes."""
    device = devices.DEVICES[name]
    options = {"batch": batch, "length": length, "acceptance": acceptance, "quantize": quantized}
    found = jspec.plan(BIG, SMALL, device=name, **options)
    plain, rounds, tokens = oracle(BIG, SMALL, device, batch, length, acceptance, quantized)
    assert found.plain_seconds == pytest.approx(plain, rel=1e-12)
    assert found.draft.round_seconds == pytest.approx(rounds, rel=1e-12)
    assert found.draft.expected_tokens == pytest.approx(tokens, rel=1e-12)
    speeds = [1.0, *(n * plain / s for n, s in zip(tokens, rounds, strict=True))]
    assert found.draft.best == found.draft.num_draft_tokens == int(np.argmax(speeds))
    assert found.draft.speedup == pytest.approx(max(speeds))
    assert (found.int8 == found.draft) == (quantized == "int8")


def test_plan_matches_published_bounds():
    """The plan gives the published bounds at 4.3 TB/s, which an H200 reaches, without launch costs."""
    device = dataclasses.replace(devices.DEVICES["h200"], bandwidth=4.3e12, bandwidth_share=1.0, launch=0.0)
    found = jspec.plan(BIG, SMALL, device=device, length=512, acceptance=0.8)
    seconds = roofline.pass_seconds(Weights(BIG, 2), device, 1, 1, 512)
    assert round(1 / seconds) == 663 == round(1 / found.plain_seconds)
    assert (found.draft.best, round(found.draft.speedup, 2)) == (2, 1.38)


def test_bandwidth_share_scales_bandwidth():
    shared = dataclasses.replace(H100, bandwidth_share=0.8)
    found = jspec.plan(BIG, SMALL, device=shared)
    expected = jspec.plan(BIG, SMALL, device=dataclasses.replace(H100, bandwidth=0.8 * H100.bandwidth))
    assert found.plain_seconds == pytest.approx(expected.plain_seconds)
    assert found.draft.round_seconds == pytest.approx(expected.draft.round_seconds)
    assert found.plain_seconds > jspec.plan(BIG, SMALL, device=H100).plain_seconds


def test_launch_costs_are_counted_per_kernel():
    quiet = dataclasses.replace(H100, launch=0.0)
    with_, without = (jspec.plan(BIG, SMALL, device=device) for device in (H100, quiet))
    assert with_.plain_seconds - without.plain_seconds == pytest.approx((10 * 28 + 14 + 26) * 2e-6)
    first, second = (with_.draft.round_seconds[k] - without.draft.round_seconds[k] for k in (0, 1))
    assert second - first == pytest.approx((10 * 16 + 14) * 2e-6)


rates = st.floats(0, 1)
plan_quickly = functools.partial(jspec.plan, SHAPES["109m"], dataclasses.replace(SHAPES["109m"], num_hidden_layers=2))


@settings(max_examples=40, deadline=None)
@given(st.tuples(rates, rates), st.sampled_from(["h100", "t4", "v5e"]), st.integers(1, 64))
def test_higher_acceptance_is_never_slower(pair, name, batch):
    worse, better = (plan_quickly(device=name, batch=batch, acceptance=rate, length=512) for rate in sorted(pair))
    for one, other in ((worse.draft, better.draft), (worse.int8, better.int8)):
        assert one.speedup <= other.speedup * (1 + 1e-12)
        assert all(a <= b * (1 + 1e-12) for a, b in zip(one.speedups, other.speedups, strict=True))


# Verdicts.


def test_zero_acceptance_recommends_plain_decoding():
    found = jspec.plan(BIG, TINY_DRAFT, device="h100", acceptance=0.0)
    assert (found.verdict, found.draft.best, found.draft.speedup) == (planning.PLAIN, 0, 1.0)


TINY_DRAFT = dataclasses.replace(SMALL, hidden_size=64, intermediate_size=64, num_hidden_layers=1)


@pytest.mark.parametrize("acceptance", [0.5, 1.0])
def test_a_draft_as_large_as_the_target_does_not_pay(acceptance):
    """At an acceptance rate of 1, the draft ties with plain decoding except for rounding."""
    device = dataclasses.replace(H100, launch=0.0)
    found = jspec.plan(BIG, BIG, device=device, acceptance=acceptance, length=470)
    assert found.draft.best == 0
    if acceptance == 0.5:
        assert found.verdict == planning.PLAIN


def test_free_draft_uses_maximum_length():
    found = jspec.plan(BIG, TINY_DRAFT, device=dataclasses.replace(H100, launch=0.0), acceptance=1.0, length=470)
    assert found.draft.best == 16 and found.draft.speedup == pytest.approx(17, rel=0.05)
    assert found.verdict == planning.SPECULATE  # int8 gains less than 5 % on a draft that is free


def test_int8_draft_is_recommended_if_worthwhile():
    found = jspec.plan(BIG, SMALL, device="h100")
    assert found.verdict == planning.QUANTIZE and found.int8.speedup > 1.05 * found.draft.speedup
    assert jspec.plan(BIG, SMALL, device="h100", quantize="int8").verdict == planning.SPECULATE
    at_peak = jspec.plan(BIG, SMALL, device="t4", batch=1, length=64, acceptance=0.2)
    assert at_peak.int8.speedup < 1.05 and at_peak.verdict == planning.PLAIN


def test_requested_number_of_draft_tokens_is_used():
    best = jspec.plan(BIG, SMALL, device="h100")
    found = jspec.plan(BIG, SMALL, device="h100", num_draft_tokens=9)
    assert (found.draft.num_draft_tokens, found.int8.num_draft_tokens, found.draft.best) == (9, 9, best.draft.best)
    assert found.draft.speedup == best.draft.speedups[8] and found.draft.speedups == best.draft.speedups


def holding(size):
    return dataclasses.replace(devices.DEVICES["t4"], memory=size)


def test_plan_fits_up_to_exact_memory_size():
    found = jspec.plan(BIG, SMALL, device="t4", quantize="int8")
    for parts, fits in ((found.draft.footprint.total, True), (found.draft.footprint.total - 1, False)):
        again = jspec.plan(BIG, SMALL, device=holding(parts), quantize="int8")
        assert again.draft.fits == fits and (again.verdict != planning.NO_ROOM) == fits and again.plain_fits
    alone = found.plain_footprint.total
    assert jspec.plan(BIG, SMALL, device=holding(alone)).plain_fits
    for acceptance in (0.0, 0.8):
        found = jspec.plan(BIG, SMALL, device=holding(alone - 1), acceptance=acceptance)
        assert not found.plain_fits and found.verdict == planning.NO_ROOM


def test_unprofitable_draft_that_does_not_fit_is_no_obstacle():
    found = jspec.plan(BIG, SMALL, device=holding(8e9), acceptance=0.1)
    assert found.plain_fits and not found.draft.fits and found.verdict == planning.PLAIN


def test_largest_fitting_batch_and_length_are_suggested():
    make = functools.partial(jspec.plan, BIG, SMALL, device="t4", num_draft_tokens=2)
    found = make(batch=64, length=2048, prompt=512)
    assert found.verdict == planning.NO_ROOM and 1 < found.largest_batch < 64 and 1 < found.largest_length < 512
    few, many = (make(batch=found.largest_batch + more, length=2048, prompt=512) for more in (0, 1))
    assert few.draft.fits and not many.draft.fits
    # Shorter sequences have shorter prompts, too.
    short, long = (make(batch=64, length=length, prompt=length) for length in found.largest_length + np.arange(2))
    assert short.draft.fits and not long.draft.fits
    assert jspec.plan(BIG, SMALL, device=holding(8e9)).largest_batch == 0


# Valid and invalid arguments.


def test_plan_reads_only_configs(tmp_path, monkeypatch):
    target, draft, _ = jspec.demo_pair()
    monkeypatch.setattr("jspec.models.load.stream", lambda *_: pytest.fail("weights were read"))
    folders = []
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        text = (jspec.bundled.PAIR / name / "config.json").read_text(encoding="utf-8")
        (tmp_path / name / "config.json").write_text(text, encoding="utf-8")
        folders.append(tmp_path / name)
    expected = jspec.plan(target.config, draft.config, device="h100")
    assert jspec.plan(target, draft, device="h100") == expected
    assert jspec.plan(*folders, device="h100") == jspec.plan(*map(str, folders), device="h100") == expected
    assert expected.length == target.config.max_position_embeddings  # not 4096
    assert jspec.plan(target, jspec.quantize(draft), device="h100").draft == expected.int8
    int4 = jspec.plan(*folders, device="h100", quantize="int4").draft
    assert jspec.plan(target, jspec.quantize(draft, "int4"), device="h100").draft == int4
    assert int4.footprint.weights < expected.int8.footprint.weights
    json.dumps(dataclasses.asdict(expected), allow_nan=False)


GOOD = {"target": BIG, "draft": SMALL, "device": "h100", "length": 64}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "num_devices",
            3,
            "num_devices=3 does not divide the 8 key-value heads of the target; use a number that divides 8",
        ),
        ("num_devices", 0, "num_devices must be an int of at least 1; got 0"),
        ("device", "h1000", "no device 'h1000'; choose one of h200, h100, a100, l4, t4, v5e, v6e"),
        ("batch", 0, "batch must be an int of at least 1; got 0"),
        ("length", 1.5, "length must be an int"),
        ("length", 1 << 18, r"length=262144 is more than the 131072 positions that both models have"),
        ("prompt", 65, "prompt=65 is more than length=64"),
        ("prompt", 0, "prompt must be an int of at least 1"),
        ("acceptance", 1.1, r"acceptance must be a probability from 0 to 1; got 1.1"),
        ("acceptance", float("nan"), "acceptance must be a probability"),
        ("acceptance", "0.8", "acceptance must be a probability from 0 to 1; got '0.8'"),
        ("acceptance", True, "acceptance must be a probability"),
        ("num_draft_tokens", 2.0, "whole number from 1 to 16; got 2.0"),
        ("num_draft_tokens", 0, r"num_draft_tokens must be a whole number from 1 to 16; got 0"),
        ("num_draft_tokens", 17, "whole number from 1 to 16; got 17"),
        ("quantize", "int3", "quantize='int3' is not supported"),
        (
            "draft",
            dataclasses.replace(SMALL, vocab_size=32000),
            "has 32000 tokens and the target's 128256; use a draft",
        ),
        ("draft", "no-such", "no-such is neither a directory nor a file"),
    ],
)
def test_bad_input_is_rejected(name, value, message):
    with pytest.raises(ValueError, match=message):
        jspec.plan(**GOOD | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("device", 4, "device is of type int"),
        ("draft", jspec.NGramDrafter(), "not an object of type NGramDrafter; pass a configuration"),
    ],
)
def test_wrong_types_are_rejected(name, value, message):
    with pytest.raises(TypeError, match=message):
        jspec.plan(**GOOD | {name: value})


def test_vocabularies_may_differ_by_padding():
    assert jspec.plan(BIG, dataclasses.replace(SMALL, vocab_size=128256 + 64), device="h100").draft.best


def test_int8_draft_that_does_not_pay_is_not_advised():
    found = jspec.plan(BIG, SMALL, device="h100", acceptance=0.1, num_draft_tokens=16)
    assert found.int8.speedup > 1.05 * found.draft.speedup and found.int8.speedup < 1
    assert found.verdict == "do not speculate"
