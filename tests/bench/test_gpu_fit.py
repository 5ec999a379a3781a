"""The drill's arithmetic: constants fitted to made-up measurements, and a trace matched with a round's kernels."""

import dataclasses
import json

import numpy as np
import pytest

from bench.compiled import Kernel
from bench.gpu import fit, profile
from jspec.core.devices import DEVICES

H100 = DEVICES["h100"]
# Milliseconds of work and numbers of kernels, close to plain decoding, rounds of K = 1, 2 and 4, and an 8B model.
LOADS = {"plain": (1.95, 296), "K=1": (2.73, 470), "K=2": (3.48, 640), "K=4": (4.98, 983), "8B": (4.6, 710)}


def write(folder, seconds, name="03-decoding.json", **changes):
    """Write the file of a drill in which a round took ``seconds(work, kernels)`` milliseconds."""
    rows = [{"what": "compiled", "seconds": 30.0}]
    rows += [
        {
            "what": what,
            "ms": float(seconds(work, kernels)),
            "work_ms": work,
            "kernels": kernels,
            "batch": 1,
            "predicted_ms": work + 2e-3 * kernels,
            "predicted_for": H100.title,
            "device": H100.title,
        }
        | changes
        for what, (work, kernels) in LOADS.items()
    ]
    (folder / name).write_text(json.dumps({"state": "done", "rows": rows}), encoding="utf-8")


@pytest.mark.parametrize(("share", "launch_us"), [(0.9, 1.3), (0.65, 3.0), (1.0, 0.5), (0.8, 0.0)])
def test_known_constants_are_recovered(tmp_path, share, launch_us):
    write(tmp_path, lambda work, kernels: work / share + kernels * launch_us / 1e3)
    title, measured = fit.rounds(tmp_path)
    found = fit.fit(measured)
    assert title == H100.title and len(measured) == len(LOADS)
    assert found.bandwidth_share == pytest.approx(share, rel=1e-6)
    assert found.launch == pytest.approx(launch_us * 1e-6, abs=1e-12)


def test_measurement_noise_changes_constants_little(tmp_path):
    rng = np.random.default_rng(0)
    write(tmp_path, lambda work, kernels: (work / 0.85 + kernels * 1.5e-3) * rng.normal(1, 0.002))
    found = fit.fit(fit.rounds(tmp_path)[1])
    assert found.bandwidth_share == pytest.approx(0.85, rel=0.05)
    assert found.launch == pytest.approx(1.5e-6, rel=0.1)


def test_constants_stay_in_range(tmp_path):
    """Constants stay in range for rounds faster than the published bandwidth or cheaper with more kernels."""
    write(tmp_path, lambda work, kernels: 0.9 * work)
    found = fit.fit(fit.rounds(tmp_path)[1])
    assert (found.launch, found.bandwidth_share) == (pytest.approx(0, abs=1e-12), pytest.approx(1))
    write(tmp_path, lambda work, kernels: 1.5 * work - 1e-3 * kernels)
    assert fit.fit(fit.rounds(tmp_path)[1]).launch == pytest.approx(0, abs=1e-12)


def test_fit_reports_constants_to_write(tmp_path, capsys):
    write(tmp_path, lambda work, kernels: work / 0.8 + kernels * 1.5e-3)
    assert fit.main([str(tmp_path)]) is None
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "In jspec/core/devices.py, NVIDIA H100 80GB HBM3: launch=1.5e-06, bandwidth_share=0.8"
    assert out[-2] == "Predicted by a fit to all other rounds, the worst round is 0.0 % off."
    assert out[1].split() == ["plain", "2.881", "ms", "0.882", "1.000", "1.000"]


def test_fit_holds_out_int8_and_rejects_too_few_rounds(tmp_path, monkeypatch):
    """An int8 round that takes twice as long changes no constant but shows in the report."""
    monkeypatch.setitem(LOADS, "int8 3B plain", (1.0, 300))
    write(tmp_path, lambda work, kernels: (2 if kernels == 300 else 1) * (work / 0.8 + kernels * 1.5e-3))
    assert fit.main([str(tmp_path)]) is None
    report = fit.report(tmp_path).splitlines()
    assert report[-1].endswith("launch=1.5e-06, bandwidth_share=0.8") and "50.0 % off" in report[-2]
    for name in ("K=1", "K=2"):
        monkeypatch.delitem(LOADS, name)
    write(tmp_path, lambda work, kernels: work)
    with pytest.raises(ValueError, match="3 measured rounds of the drill's decoding step, but a fit needs 4"):
        fit.report(tmp_path)


@pytest.mark.parametrize("rows", [None, [], [{"what": "3B plain", "error": "out of memory"}]])
def test_folder_without_rounds_is_rejected(tmp_path, rows):
    if rows is not None:
        (tmp_path / "03-decoding.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    write(tmp_path, lambda work, kernels: work, "05-settings.json")
    message = fit.main([str(tmp_path)])
    assert (
        message.endswith("run `python -m bench gpu` and pass the folder it wrote.") and "0 measured rounds" in message
    )


def test_rehearsal_is_rejected(tmp_path):
    write(tmp_path, lambda work, kernels: work, device="cpu")
    with pytest.raises(ValueError, match=r"measured on one device and predicted for another, \[\('cpu', 'NVIDIA H100"):
        fit.rounds(tmp_path)


def test_rounds_of_larger_batches_are_left_out(tmp_path):
    write(tmp_path, lambda work, kernels: work, batch=8)
    with pytest.raises(ValueError, match="0 measured rounds"):
        fit.rounds(tmp_path)


def kernel(name, part, read, times=1):
    return Kernel(name, "fusion", "bf16[1,16]{1,0}", part, times, read, 0, 0)


KERNELS = [
    kernel("gemm_fusion_dot.1", "verify", 3_352_320),
    kernel("gemm_fusion_dot.2", "verify", 3_352_320),
    kernel("loop_add-fusion", "commit", 0),
]


def launches():
    """Return two rounds of two 2 us products, a 1 us sum and 1 us gaps, with a prefill before and a copy between."""
    found, now = [profile.Launch("prefill.7", -50e3, -10e3)], 0.0
    for _ in range(2):
        for op, taken in (
            ("gemm_fusion_dot.1", 2e3),
            ("gemm_fusion_dot_2", 2e3),
            ("loop_add_fusion", 1e3),
            ("MemcpyD2H", 1e3),
        ):
            found.append(profile.Launch(op, now, now + taken))
            now += taken + 1e3
    return found


def test_trace_is_matched_with_kernels_of_a_round():
    device = dataclasses.replace(H100, launch=1e-6)
    found = profile.figures(launches(), KERNELS, 2, device, 8e-6)
    expected = {
        "rounds": 2,
        "kernels_a_round": 3,
        "kernel_ms": 5e-3,
        "idle_ms": 3e-3,
        "idle_us_a_kernel": 1.0,
        "gaps_in_trace_ms": 3e-3,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    product, sum_ = found["costliest"]
    assert product["kernel"] == "gemm_fusion_dot bf16[1,16] (verify)"
    numbers = {"count": 2, "us": 4.0, "predicted_us": 2 * (1 + 1), "mb": 6.70464, "gb_per_s": 1676.16}
    assert {key: product[key] for key in numbers} == pytest.approx(numbers)
    assert (sum_["kernel"], sum_["count"]) == ("loop_add-fusion bf16[1,16] (commit)", 1)
    assert {row["kernel"]: row["us"] for row in found["parts"]} == pytest.approx({"verify": 4.0, "commit": 1.0})


def test_trace_with_unknown_names_is_rejected():
    with pytest.raises(ValueError, match=r"None of the 1 launches .*\['kernel_17'\]"):
        profile.figures([profile.Launch("kernel_17", 0, 1)], KERNELS, 1, H100, 1e-3)
