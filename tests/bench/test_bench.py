"""The benchmarks' computations on their readings, and the models they measure. Nothing here is timed."""

import importlib.util
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import jspec
from bench import (
    acceptance,
    drafters,
    gap,
    latency,
    llamacpp,
    pairs,
    plots,
    regret,
    rivals,
    roofline,
    subject,
    timing,
    trace,
)
from bench import report as reporting
from bench.__main__ import app
from convert import RopeConfig
from jspec import text, theory
from jspec.bundled import PAIR
from pair.corpus import Document
from support.tuned import made

pytestmark = pytest.mark.usefixtures("quick_compile")
SMALL = pairs.llama(vocab=64, hidden=32, inner=48, layers=2, heads=4, groups=2, size=8)
TOKENS = np.arange(1, 25).reshape(2, 12)
logits = jax.jit(lambda model: model(TOKENS))


def test_stretched_pair_agrees_if_extra_layers_write_nothing(report):
    pair = pairs.Stretched(SMALL, 1, 0.0)
    same = pairs.stretched(pair, jnp.float32)
    far = pairs.stretched(pair, jnp.float32, write_scale=1.0)
    differences = [float(abs(logits(target) - logits(draft)).max()) for target, draft in (same, far)]
    report(at_0=differences[0], at_1=f"{differences[1]:.2f}")
    assert differences[0] == 0 and differences[1] > 0.5
    assert len(same[0].layers) == 2 and len(same[1].layers) == 1


def test_idle_neurons_add_weights_but_keep_logits(toy):
    model = toy(0)
    wider = pairs.with_idle_neurons(model, 16)
    np.testing.assert_allclose(logits(wider), logits(model), atol=1e-5)
    assert pairs.weight_bytes(wider) - pairs.weight_bytes(model) == 3 * 16 * 32 * len(model.layers) * 4
    assert wider.config.intermediate_size == 64 and model.config.intermediate_size == 48


def test_weight_bytes_exclude_untied_embedding(toy):
    tied, untied = (toy(0, tie_word_embeddings=tied) for tied in (True, False))
    assert pairs.weight_bytes(tied) == pairs.weight_bytes(untied)


def test_unknown_pair_is_rejected():
    with pytest.raises(ValueError, match="no pair 'llama'"):
        pairs.pair("llama")


LLAMA3 = RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=4)
YARN = RopeConfig(kind="yarn", factor=8.0, original_max_position_embeddings=16, attention_factor=1.2, truncate=False)
RIVALS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope": LLAMA3},
    "qwen2": {"qkv_bias": True, "rope": YARN},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("family", RIVALS)
def test_torch_twin_has_same_logits(family, toy, report):
    torch = pytest.importorskip("torch")
    model = toy(0, **RIVALS[family])
    with torch.no_grad():
        theirs = rivals.twin(model)(torch.tensor(TOKENS)).logits.numpy()
    difference = float(np.abs(theirs - logits(model)).max())
    report(max_difference=f"{difference:.1e}")
    assert difference < 1e-4


def test_torch_twin_continues_left_padded_prompts(toy, monkeypatch):
    """Each row continues as it does alone, because padding on the left is not read."""
    torch = pytest.importorskip("torch")
    twin, rows, texts = rivals.twin(toy(0)), [TOKENS[0, :7], TOKENS[1, :3]], []
    generate = twin.generate
    monkeypatch.setattr(
        twin, "generate", lambda *args, **options: texts.append(generate(*args, **options)) or texts[-1]
    )
    rivals.decoder(twin, None, rows, 4, 0.0, 0)()
    for row in rows:
        rivals.decoder(twin, None, [row], 4, 0.0, 0)()
    together, *alone = texts
    assert torch.equal(together[:, -4:], torch.cat([text[:, -4:] for text in alone]))


def test_int8_weights_and_lookup_have_no_twin(toy):
    assert rivals.has_twin(toy(0))
    assert not rivals.has_twin(jspec.quantize(toy(0), "int8")) and not rivals.has_twin(jspec.NGramDrafter())


def test_trace_assigns_instructions_to_phases(toy):
    target, draft = toy(0), toy(0, 0.3)
    request = (TOKENS, np.array([12, 5]), jax.random.split(jax.random.key(0), 2))

    def decode(target, draft, *request):
        return jspec.speculative_generate(target, draft, *request, max_new_tokens=4, num_draft_tokens=2)

    found = trace.phases(jax.jit(decode).lower(target, draft, *request).compile().as_text())
    assert set(trace.PHASES) <= set(found.values())
    assert None in found.values()  # the loops themselves


def test_overlapping_time_is_counted_once():
    assert trace.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    found = [trace.Event("draft", 0, 4), trace.Event("draft", 2, 6), trace.Event("verify", 8, 10)]
    rows = {row["phase"]: row for row in trace.summary(found, rounds=2)}
    assert rows["draft"]["share, %"] == 60 and rows["idle"]["share, %"] == 20
    assert rows["draft"]["us per round"] == 3 / 1e3 and rows["draft"]["instructions per round"] == 1


def test_calls_take_turns_and_warm_up_is_not_counted():
    order = []
    times = timing.in_turns({name: lambda name=name: order.append(name) for name in "ab"}, repeats=3, warmup=1)
    assert order == list("ab") * 4
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


def test_ratios_are_taken_turn_by_turn():
    found = timing.ratio(np.array([1.0, 10.0, 100.0]), np.array([2.0, 20.0, 200.0]))
    assert (found.low, found.median, found.high, found.count) == (0.5, 0.5, 0.5, 3)


def test_acceptance_by_position_is_conditional():
    figures = acceptance._figures(made([[(0, "c")] * 2 + [(1, "c")] * 4 + [(2, "c")] * 2 + [(3, "c"), (4, "b")]], k=4))
    assert [figures[f"after {n}"] for n in range(4)] == [0.8, 0.5, 0.5, 0.5]
    assert figures["acceptance"] == pytest.approx(1.5 / 2.4)
    assert figures["tokens in the first 4 + 1"] == 2.5


def test_missing_draft_token_counts_as_rejected():
    """A missing draft token counts as a rejected one.

    Otherwise the theorem, whose rounds have K draft tokens, would promise more than lookup can deliver.
    """
    assert (
        acceptance.acceptance_rate(made([[(0, "n"), (0, "n"), (1, "b"), (2, "b"), (0, "c"), (0, "c")]], k=2)) == 3 / 8
    )


def test_prediction_ignores_unverified_draft_tokens():
    """In two rounds of K = 2, all draft tokens are accepted, but the limit comes before the last is verified."""
    row = latency._drafting(made([[(2, "b"), (1, "-")]], k=2), 4, {"draft": 0.25, "3 rows": 1.5})
    assert row == {
        "K": 2,
        "tokens per round": 2.0,
        "acceptance": 1.0,
        "cost ratio": 0.25,
        "predicted": 3 / (0.5 + 1),
        "with K + 1 rows": 3 / (0.5 + 1.5),
    }


def test_gap_starts_with_theory_and_ends_with_measurement():
    cost = {"target": 4.0, "verify": 5.0, "draft": 1.0, "draft 2 rows": 1.5, "plain": 4.5, "round": 9.0}
    rows = gap.steps(3, 0.5, cost, np.array([5, 10]), 15, 0.7)
    assert rows[0]["speed-up"] == pytest.approx(theory.speedup(0.5, 3, 0.25))
    assert [row["ms per round"] for row in rows[1:5]] == [7e3, 8e3, 8.5e3, 9e3]
    assert [row["tokens per round"] for row in rows[1:]] == [2.0] * 5 + [1.5] * 2
    assert rows[-2]["speed-up"] == 1.5 * 4.5 / 9 and rows[-1]["speed-up"] == 0.7


def test_gap_without_difference_in_rounds_is_rejected():
    output = SimpleNamespace(stats=SimpleNamespace(rounds=np.array([1, 1])))
    with pytest.raises(ValueError, match="raise --max-new-tokens"):
        gap.Calls(lambda **options: output, (2, 16), 0.0)


def test_roofline_of_int8_weights_is_rejected_on_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setenv("JSPEC_NATIVE", "0")
    with pytest.raises(ValueError, match="widens them to float32"):
        roofline.run("bundled:int8", 1, [1], 64, 1)


def test_interleaved_rope_equals_half_split_rope():
    rng = np.random.default_rng(0)
    weight, x, angles = rng.normal(size=(3 * 8, 5)), rng.normal(size=5), rng.normal(size=4)
    first, second = np.split((weight @ x).reshape(3, 8), 2, axis=1)
    halves = (first + 1j * second) * np.exp(1j * angles)
    neighbours = (llamacpp.interleaved(weight, 3) @ x).reshape(3, 4, 2)
    turned = (neighbours[..., 0] + 1j * neighbours[..., 1]) * np.exp(1j * angles)
    np.testing.assert_allclose(turned, halves)


def test_different_model_in_llama_cpp_is_rejected():
    logits = np.random.default_rng(0).normal(size=(10, 7))
    llm = SimpleNamespace(reset=lambda: None, eval=lambda tokens: None, scores=logits + 1e-5)
    assert llamacpp.check_same(lambda tokens: logits[None], llm) == pytest.approx(1e-5)
    llm.scores = logits[:, ::-1]
    with pytest.raises(ValueError, match="not the same model"):
        llamacpp.check_same(lambda tokens: logits[None], llm)


def test_speedup_plot_shows_measurements_and_theory():
    rows = [
        {
            "batch": batch,
            "K": k,
            "x own plain": k + 0.0,
            "from": k - 0.5,
            "to": k + 0.25,
            "predicted": batch * k,
            "with K + 1 rows": batch * k / 2,
            "cost ratio": 0.2,
        }
        for batch in (1, 8)
        for k in (1, 4)
    ]
    figure = Figure()
    plots.speedups(figure, [{"batch": 1, "K": "", "predicted": ""}, *rows])
    (axes,) = figure.axes
    curves = {
        style: [line.get_ydata().tolist() for line in axes.lines if line.get_linestyle() == style]
        for style in (":", "--")
    }
    assert curves == {":": [[1, 4], [8, 32]], "--": [[0.5, 2], [4, 16]]}
    assert [bars[0].get_ydata().tolist() for bars in axes.containers] == [[1, 4]] * 2
    ends = axes.containers[0].lines[2][0].get_segments()
    assert [segment[:, 1].tolist() for segment in ends] == [[0.5, 1.25], [3.5, 4.25]]


def test_drafters_plot_has_panel_per_prompt_kind():
    figure = Figure()
    plots.drafters(
        figure,
        [
            {"prompt": kind, "drafter and rule": name, "x own plain": 1.5, "predicted": predicted}
            for kind in ("new", "old")
            for name, predicted in (("a", 1.4), ("b", ""), ("c", 1.6))
        ],
    )
    assert all(panel.lines[0].get_xydata().tolist() == [[1.4, 0], [1.6, 2]] for panel in figure.axes)
    assert [panel.get_title() for panel in figure.axes] == ["new", "old"]
    assert all([bar.get_width() for bar in panel.patches] == [1.5] * 3 for panel in figure.axes)


def test_rules_plot_has_bar_per_rule():
    rows = [
        {"drafter": name, "K": 2, "temperature": t, "rejection": 1.0, "block": 2.0, "coupled": 3.0}
        for t in (0.7, 1)
        for name in ("a", "b")
    ]
    figure, one = Figure(), Figure()
    plots.rules(figure, rows)
    plots.rules(one, rows[:2])
    assert len(one.axes) == 1
    assert [[bar.get_width() for bar in panel.patches] for panel in figure.axes] == [[1, 1, 2, 2, 3, 3]] * 2


def test_prompts_of_every_kind_have_same_width(monkeypatch):
    """A library of three modules, one of them too short to be held out, gives prompts of one width."""
    modules = [
        Document(f"{name}.py", f"def {name}(x):\n    return x\n" * size)
        for name, size in (("a", 200), ("b", 300), ("c", 3))
    ]
    monkeypatch.setattr(subject, "read_documents", lambda: modules)
    monkeypatch.setattr(subject, "is_held_out", lambda path: True)
    kinds = drafters.prompts(text.load_tokenizer(PAIR / "target"), 2)
    assert len(kinds) == 3
    for tokens, lengths, keys in kinds.values():
        assert tokens.shape == (2, subject.WIDTH) and keys.shape == (2,)
        np.testing.assert_array_equal(lengths, subject.WIDTH)


def test_scaling_plot_varies_one_size_per_panel():
    base = {"model": "target", "rows": 1, "batch": 1, "context": 64, "ms": 1.0}
    figure = Figure()
    plots.scaling(figure, [base, base | {"rows": 9, "ms": 2.0}, base | {"batch": 8, "ms": 5.0}])
    assert [panel.lines[0].get_xydata().tolist() for panel in figure.axes] == [
        [[1, 1], [9, 2]],
        [[1, 1], [8, 5]],
        [[64, 1]],
    ]
    assert all(panel.get_ylim()[0] == 0 and panel.get_ylim()[1] > 5 for panel in figure.axes)


def test_phases_are_stacked_in_one_bar():
    figure = Figure()
    plots.shares(figure, [{"phase": "draft", "share, %": 30.0}, {"phase": "verify", "share, %": 70.0}])
    assert [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches] == [(0, 30), (30, 70)]


def test_interrupt_plot_groups_signals_by_phase():
    rows = [
        {"phase": p, "s into the phase": s, "s after the signal": 0.1}
        for p, s in (("load", 1), ("tune", 2), ("load", 3))
    ]
    figure = Figure()
    plots.interrupts(figure, rows)
    assert {line.get_label(): line.get_xdata().tolist() for line in figure.axes[0].lines} == {
        "load": [1, 3],
        "tune": [2],
    }


def test_report_contains_conditions_and_small_picture(tmp_path, capsys):
    rows = [{"what": "read", "GB/s": 1 / 3}]
    file = reporting.publish(
        "x", "a title", rows, plots.bars("what", "GB/s"), notes=["a note"], folder=tmp_path, extra=timing.spread([1.0])
    )
    written = json.loads(file.read_text())
    assert written["rows"] == [{"what": "read", "GB/s": 0.333333}]
    assert written["conditions"]["jax"] == jax.__version__ and written["extra"]["median"] == 1.0
    assert "a title" in capsys.readouterr().out
    picture = file.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 60_000


def test_missing_matplotlib_fails_before_measuring(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    monkeypatch.setattr(roofline, "run", lambda *_: pytest.fail("it was measured"))
    done = CliRunner().invoke(app, ["roofline"])
    assert done.exit_code == 1 and "[bench]" in done.output


def test_regret_is_loss_against_best_setting():
    """Regret is known for settings of 10, 8 and 9 tokens/s in every repeat, and for one that is best in half."""
    steady = np.tile([[[10.0, 1.0], [8.0, 1.0], [9.0, 1.0]]], (5, 1, 1))
    assert regret.regret(steady, 0) == (0.0, 0.0) and regret.regret(steady, 1) == pytest.approx((0.2, 0.2))
    noisy = np.array([[[10.0, 1.0], [10.0, 0.5 if repeat % 2 else 2.0]] for repeat in range(20)])
    median, high = regret.regret(noisy, 1)
    assert median == pytest.approx(0.2) and 0.2 < high < 0.5
