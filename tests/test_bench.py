"""What the benchmarks compute from their readings, and the models they measure. Nothing here is timed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from bench import acceptance, pairs, rivals, timing, trace
from bench import report as reporting

SMALL = pairs.shape(64, 32, 48, 3, 4, 2, 8)
TOKENS = np.arange(1, 25).reshape(2, 12)


def test_a_stretched_pair_agrees_as_far_as_its_further_layers_write(report):
    pair = pairs.Stretched(SMALL, 1, 0.0)
    same = pairs.stretched(pair, jnp.float32)
    far = pairs.stretched(pair, jnp.float32, write_scale=1.0)
    differences = [float(jnp.abs(target(TOKENS) - draft(TOKENS)).max()) for target, draft in (same, far)]
    report(at_0=differences[0], at_1=f"{differences[1]:.2f}")
    assert differences[0] == 0 and differences[1] > 1
    assert len(same[0].layers) == 3 and len(same[1].layers) == 1


def test_bytes_of_a_pass_leave_out_an_untied_embedding():
    tied, untied = (
        pairs.random_llama(dataclasses.replace(SMALL, tie_word_embeddings=tied), jnp.float32) for tied in (True, False)
    )
    assert pairs.weight_bytes(tied) == pairs.weight_bytes(untied)


def test_an_unknown_pair_is_refused():
    with pytest.raises(ValueError, match="no pair 'llama'"):
        pairs.pair("llama")


def test_the_rival_is_the_same_model(report):
    pytest.importorskip("torch")
    model = pairs.random_llama(SMALL, jnp.float32)
    import torch

    with torch.no_grad():
        logits = rivals.twin(model)(torch.tensor(TOKENS)).logits.numpy()
    difference = float(np.abs(logits - model(TOKENS)).max())
    report(max_difference=f"{difference:.1e}")
    assert difference < 1e-4


def test_time_is_given_to_the_phase_whose_instruction_ran():
    target, draft = pairs.stretched(pairs.Stretched(SMALL, 1, 0.5), jnp.float32)
    request = (TOKENS, np.array([12, 5]), jax.random.split(jax.random.key(0), 2))

    def decode(target, draft, *request):
        return jspec.speculative_generate(target, draft, *request, max_new_tokens=4, num_draft_tokens=2)

    found = trace.phases(jax.jit(decode).lower(target, draft, *request).compile().as_text())
    assert set(trace.PHASES) <= set(found.values())
    assert None in found.values()  # the loops themselves


def test_overlapping_time_counts_once():
    assert trace.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    found = [trace.Event("draft", 0, 4), trace.Event("draft", 2, 6), trace.Event("verify", 8, 10)]
    rows = {row["phase"]: row for row in trace.summary(found, rounds=2)}
    assert rows["draft"]["share, %"] == 60 and rows["idle"]["share, %"] == 20
    assert rows["draft"]["us a round"] == 3 / 1e3 and rows["draft"]["instructions a round"] == 1


def test_calls_take_turns_and_warm_up_is_not_counted():
    order = []
    times = timing.in_turns({name: lambda name=name: order.append(name) for name in "ab"}, repeats=3, warmup=1)
    assert order == list("ab") * 4
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


def test_ratios_are_taken_turn_by_turn():
    found = timing.ratio(np.array([1.0, 10.0, 100.0]), np.array([2.0, 20.0, 200.0]))
    assert (found.low, found.median, found.high, found.count) == (0.5, 0.5, 0.5, 3)


def test_acceptance_by_position_is_conditional():
    figures = acceptance._figures(np.array([0.8, 0.4, 0.2, 0.1]), k=4)
    assert [figures[f"after {n}"] for n in range(4)] == [0.8, 0.5, 0.5, 0.5]
    assert figures["acceptance"] == pytest.approx(1.5 / 2.4)
    assert figures["tokens in the first 4 + 1"] == 2.5


def test_a_report_carries_its_conditions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    file = reporting.publish(
        "x", "a title", [{"what": "read", "GB/s": 1 / 3}], notes=["a note"], extra=timing.spread([1.0])
    )
    written = json.loads(file.read_text())
    assert written["rows"] == [{"what": "read", "GB/s": 0.333333}]
    assert written["conditions"]["jax"] == jax.__version__ and written["extra"]["median"] == 1.0
    assert "a title" in capsys.readouterr().out
