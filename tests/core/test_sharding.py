"""Several devices: any mesh, explicit, automatic or under shard_map, gives the output of one device."""

import json

import pytest

from support import on_devices


def _outcomes(cases):
    """Return the outcomes of the quick or the slow cases in devices.py by name; errors are strings."""
    return dict(map(json.loads, on_devices.output(4, "devices", cases)))


def _wrong(outcomes):
    """Return the cases that differ from one device: mismatches in `devices.compare`, and other outcomes but True."""
    return {
        name: found
        for name, found in outcomes.items()
        if not (found["same"] and found["off"] < 1e-5 if isinstance(found, dict) else found is True)
    }


COLUMNS = {
    f"{name}.{part}": parts
    for name in ("qkv_proj", "gate_up_proj")
    for part, parts in (("codes", [1, 2, 1]), ("scales", [1, 2]))
}
# int8 has one group, which is divided. int4 has several.
DIVIDED = {"int8": (("codes", [1, 1, 2]), ("scales", [1, 1])), "int4": (("codes", [2, 1, 1]), ("scales", [2, 1]))}
ROWS = {
    bits: {f"{name}.{part}": parts for name in ("o_proj", "down_proj", "embed_tokens") for part, parts in divided}
    for bits, divided in DIVIDED.items()
}
NORMS = {f"{name}.weight": [1] for name in ("norm", "input_layernorm", "post_attention_layernorm")}
REFUSED = {
    "no such axis": "ValueError: The mesh has the axes ('data', 'model'), but none named 'tensor'",
    "no sharding": "TypeError: sharding must be a jax.sharding.Sharding, or a function",
    "gives none": "TypeError: sharding must return a jax.sharding.Sharding for every weight",
    "rank": "ValueError: layers.0.input_layernorm.weight has shape (256,), which",
    "uneven": "ValueError: embed_tokens.weight has shape (256, 2048), which",
    "part of a mesh": "ValueError: jax.shard_map over ('data',) leaves the axes ('model',) to XLA",
}


def test_sharded_output_equals_single_device_output(report):
    """All cases share one process, because its start and the single-device programs are a large part of the cost."""
    outcomes = _outcomes("quick")
    groups = {}
    for name, found in outcomes.items():
        kind, what = name.split(": ")
        groups.setdefault(kind, {})[what] = found
    texts = groups["text"]
    assert not _wrong(texts)
    for place, found in texts.items():
        report(place=place, logprobs_off=f"{found['off']:.0e}", exchanges=found["exchanges"])
        if not place.endswith("plain"):  # the other outputs have a row without a distribution
            assert found["invalid"] == [False, False, False, True] and found["accepted"] > 0
    # Devices that divide the rows only exchange whether all rows are done and, before the loop, whether any row uses
    # top-k or top-p; under shard_map they exchange nothing.
    assert texts["automatic, rows, plain"]["exchanges"] == {"all-reduce": 1}
    # With sharded weights, devices only all-reduce sums and all-gather embeddings: once in prefill, once in the loop.
    assert texts["automatic, weights, plain"]["exchanges"].keys() == {"all-reduce", "all-gather"}
    assert texts["automatic, weights, plain"]["exchanges"]["all-gather"] == 2
    assert texts["explicit, rows"]["exchanges"] == texts["explicit, rows, tree"]["exchanges"] == {"all-reduce": 2}
    assert texts["shard_map"]["exchanges"] == texts["shard_map, dynamic tree"]["exchanges"] == {}
    assert len(groups["traced"]) > 10 and not any(groups["traced"].values()), groups["traced"]
    for kind, parts in groups["loaded"].items():
        assert parts == COLUMNS | ROWS["int4" if "int4" in kind else "int8"] | NORMS, kind
    assert not _wrong(groups["head"]) and not _wrong(groups["changed"]), groups["changed"]
    assert groups["refused"].keys() == REFUSED.keys()
    for case, found in groups["refused"].items():
        assert str(found).startswith(REFUSED[case]), found
    first, *others = groups["documented"]["text"]
    assert len(others) == 3 and isinstance(first, list), groups["documented"]
    assert all(text == first for text in others)


@pytest.mark.slow
def test_every_program_on_every_mesh_equals_single_device(report):
    """Every drafter, rule and draft length, int8, bfloat16, vmap, and tuning give the output of one device."""
    found = _outcomes("slow")
    half, tuned = found.pop("half precision"), found.pop("tuned")
    off = max(outcome["off"] for outcome in found.values() if isinstance(outcome, dict))
    report(programs=len(found), wrong=len(_wrong(found)), logprobs_off=f"{off:.1e}", same_in_bfloat16=half)
    assert not _wrong(found)
    assert half in (True, False), half
    assert tuned in range(3), tuned


def test_mapped_calls_keep_the_rows_of_a_batch_on_their_devices():
    """`jax.vmap` over a parameter adds rows next to each row, so no device needs another device's rows."""
    assert on_devices.output(2, "mapped_rows") == ["Auto True 0 0 0", "Explicit True 0 0 0"]
