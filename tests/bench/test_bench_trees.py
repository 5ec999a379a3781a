"""The tree and noise benchmarks: their results against closed forms, and both commands on tiny models."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import jspec
from bench import chats, noise, passes, play, plots, trees
from bench.__main__ import app
from bench.drafters import joined
from bench.subject import Subject, ragged
from bench.synthetic import Synthetic
from jspec import theory
from support import text_pair
from support.templates import TEMPLATE

pytestmark = pytest.mark.usefixtures("quick_compile")
TREE = jspec.Tree((0, 0, 1, 1, 3))
RATES = 0.5, 0.3


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return the folder of a tiny two-layer target with a chat template."""
    folder = text_pair.write(tmp_path_factory.mktemp("two") / "two", num_hidden_layers=2)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def played(target, draft, temperature=0.0, rows=2, new_tokens=24):
    request = ragged(np.random.default_rng(0).integers(1, target.config.vocab_size, (rows, 6)))
    return play.Play(Subject("x", target, draft), request, 1, new_tokens, temperature)


def test_synthetic_trees_have_predicted_yield(two):
    """Synthetic acceptance gives the predicted yield for any draft, even if lookup drafts nothing."""
    game = played(jspec.load(two), jspec.NGramDrafter(), rows=4, new_tokens=100)
    outs = game.drafted(play.branching(jspec.NGramDrafter(), TREE), accept=Synthetic(RATES))()
    tokens = np.concatenate([out.lengths for out in outs]).sum() / sum(int(out.stats.rounds.sum()) for out in outs)
    deviation = TREE.max_depth / 2 / (400 / theory.tree_yield(TREE, RATES)) ** 0.5  # an upper bound, for 400 tokens
    assert abs(tokens - theory.tree_yield(TREE, RATES)) < 4 * deviation
    assert str(Synthetic(RATES)) == "synthetic 0.5 0.3"


def test_rows_run_in_sequence_and_ranks_are_recorded(two):
    """Greedy outputs are the same for any keys and tree, and each rank counts as often as it is accepted."""
    game, tree = played(jspec.load(two), jspec.NGramDrafter()), jspec.Tree.branching((3,))
    plain = game.plain()()
    assert [out.tokens.shape for out in plain] == [(1, 24)] * 2
    assert [int(out.lengths.sum()) for out in game.plain(limit=1)()] == [1, 1]
    np.testing.assert_array_equal(game.run(0, 24, 1, "rejection").tokens, plain[0].tokens)
    out = joined(game.drafted(play.branching(jspec.NGramDrafter(), tree), accept="rejection", record=True)())
    np.testing.assert_array_equal(out.tokens, joined(plain).tokens)
    rates = play.by_rank(out, tree, 5)
    assert rates.shape == (5,) and not rates[3:].any()
    assert rates.sum() == pytest.approx(out.stats.accepted.sum() / out.stats.rounds.sum())


def test_each_drafter_gets_its_tree_and_chain():
    made = {
        type(draft): play.branching(draft, TREE)
        for draft in (jspec.NGramDrafter(2), jspec.TokenRecyclingDrafter(), jspec.EarlyExitDrafter(1))
    }
    assert made[jspec.NGramDrafter] == jspec.NGramDrafter(2, tree=TREE)
    assert made[jspec.TokenRecyclingDrafter] == jspec.TokenRecyclingDrafter(5)
    assert made[jspec.EarlyExitDrafter].tree.size == 5 and not made[jspec.EarlyExitDrafter].replacement
    assert play.chain(jspec.NGramDrafter(), 3)["num_draft_tokens"] == 3
    assert play.chain(jspec.EarlyExitDrafter(1), 3)["drafter"].tree.is_chain


def test_round_time_excludes_start():
    times = {
        name: np.array([value])
        for name, value in {"plain": 5.0, "plain, start": 1.0, "a": 3.0, "a, start": 1.0}.items()
    }
    assert play.rounds_alone(times, "a", {"plain": 1.0, "a": 1.0}) == [2.0]
    assert play.rounds_alone(times, "a", {"plain": 1.25, "a": 2.0}) == [1.25]


def test_one_round_per_batch_counts_as_start():
    """Batches of two, two and one rows play 4, 3 and 2 rounds; 6 of these come after a batch's first."""
    out = SimpleNamespace(stats=SimpleNamespace(rounds=np.array([4, 1, 3, 3, 2])))
    assert play.whole_over_rest(out, 2) == 9 / 6


RATES_OF = np.array([0.6, 0.2, 0.1, 0.05])


@pytest.mark.parametrize(
    ("rule", "draft", "temperature", "names"),
    [
        (
            "rejection",
            jspec.NGramDrafter(),
            0.0,
            ["chain of 1", "chain of 2", "chain of up to 2", "best of 8", "2 chains of 2", "4 chains of 2"],
        ),
        ("rejection", jspec.TokenRecyclingDrafter(), 0.0, ["tree of 4", "tree of 8"]),
        ("rejection", jspec.EarlyExitDrafter(1), 0.0, ["chain of 1", "chain of 2", "best of 8"]),
        ("k-seq", jspec.EarlyExitDrafter(1), 1.0, ["best of 8", "2 chains of 2", "4 chains of 2"]),
        (
            "coupled",
            jspec.EarlyExitDrafter(1),
            1.0,
            ["chain of 1", "chain of 2", "best of 8", "dynamic of 4", "dynamic of 8"],
        ),
    ],
)
def test_tree_settings_for_each_rule_and_drafter(rule, draft, temperature, names):
    """Each setting appears once; a best of four that is a chain, and drafts no rule can verify, are left out."""
    game = play.Play(Subject("x", None, draft), (), 1, 8, temperature)
    found = trees.settings(game, rule, RATES_OF, [4, 8], 2)
    found = [one for one in found if one.name != f"{rule}, best of 4"]
    assert [one.name for one in found] == [f"{rule}, {name}" for name in names]
    independent = [bool(getattr(one.options["drafter"], "replacement", False)) for one in found]
    assert independent == [rule == "k-seq"] * len(found)


def test_only_applicable_rules_are_compared():
    def rules(draft, temperature, acceptance=()):
        return list(trees.judges(play.Play(Subject("x", None, draft), (), 1, 8, temperature), acceptance))

    assert rules(jspec.EarlyExitDrafter(1), 1.0) == ["rejection", "traversal", "k-seq", "coupled"]
    assert rules(jspec.NGramDrafter(), 1.0) == ["rejection", "traversal", "coupled"]
    assert rules(jspec.EarlyExitDrafter(1), 0.0) == ["rejection"]
    assert rules(jspec.NGramDrafter(), 1.0, [0.5]) == ["synthetic 0.5"]


def test_fastest_chain_and_tree_are_named():
    rows = [
        trees._row("r", f"r, {name}", 0.5, 4, 2.0, 2.0, 1.0, alone, expected)
        for name, alone, expected in (("chain of 4", 1.25, 1.5), ("best of 8", 1.1, 1.3), ("dynamic of 8", 1.2, ""))
    ]
    first, second = trees.fastest([trees._row("r", "2 children", 0.5), *rows])
    assert "chain r, chain of 4, 2.00 tokens per round, 1.25 x plain, predicted 1.50" in first
    assert first.endswith("tree r, dynamic of 8, 2.00 tokens per round, 1.20 x plain.") and "chain of 4" in second


@pytest.mark.slow
def test_trees_command_with_recycling_on_chats(two, tmp_path, monkeypatch):
    """The whole command runs and writes its report."""
    monkeypatch.setattr(chats, "questions", lambda kind: [f"the {kind}", "in a"])
    words = "trees --draft recycling --chats --batch 1 --requests 4 --nodes 2 --nodes 8 --children 1 --max-depth 1"
    how = "--repeats 1 --max-new-tokens 8 --temperature 0"
    files = "--target", str(two), "--output", str(tmp_path)
    done = CliRunner().invoke(app, [*words.split(), *files, *how.split()])
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob("*.json")
    report = json.loads(file.read_text())
    assert file.name.startswith("trees-two-recycling-chats-b1-t0") and "4 prompts" in report["title"]
    assert [row["tree"] for row in report["rows"]] == ["1 children", "rejection, tree of 2", "rejection, tree of 8"]
    for row in report["rows"][1:]:
        assert 1 <= row["tokens per round"] <= 9 and row["predicted x"] > 0 and row["rounds alone"] != 0


def laws(count, size, seed=0):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(2, count, size)) + rng.normal(size=(count, size))
    return tuple(np.asarray(jax.nn.softmax(part.astype(np.float32))) for part in logits)


def test_full_noise_acceptance_matches_closed_form(report):
    """One draft token is kept at ``sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)``.

    This holds within four standard errors for 40,000 noises.
    """
    (p,), (q,) = laws(1, 12)
    chance = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(12))
    ranks = np.asarray(noise.ranks_at_once(jax.random.split(jax.random.key(0), 40_000), p, q, 3))
    report(chance=f"{chance:.4f}", found=f"{(ranks == 0).mean():.4f}")
    assert abs((ranks == 0).mean() - chance) < 4 * (chance * (1 - chance) / 40_000) ** 0.5


@pytest.mark.parametrize("ranks", [noise.ranks_in_two_steps, noise.ranks_at_once])
def test_children_are_distinct_tokens(ranks):
    """If children cover the vocabulary, the target's token is among them, and is first if the draft is the target."""
    (p,), (q,) = laws(1, 5)
    keys = jax.random.split(jax.random.key(0), 64)
    assert set(np.asarray(ranks(keys, p, q, 5))) <= set(range(5)) and not ranks(keys, p, p, 5).any()


@pytest.mark.parametrize("name", noise.WAYS)
def test_every_noise_method_samples_from_distribution(name):
    """Each token's share of 20,000 draws equals its probability to within four standard errors."""
    p = laws(1, 8)[0][0]
    keys, positions = jax.random.split(jax.random.key(1), 20_000), np.zeros((20_000, 1), np.int32)
    tokens = noise.WAYS[name](keys, positions, np.broadcast_to(p, (20_000, 1, 8)))
    shares = np.bincount(np.asarray(tokens)[:, 0], minlength=8) / 20_000
    assert (abs(shares - p) < 4 * np.sqrt(p * (1 - p) / 20_000)).all()


def test_coarse_noise_samples_rare_tokens_too_rarely():
    """The closed form matches the sum over all 10-bit values."""
    p = np.array([1e-1, 1e-2, 1e-3, 2e-4])
    v = (np.arange(1024) + 0.5) / 1024
    exact = ((1 - v) ** ((1 - p) / p)[:, None]).mean(1) / p
    np.testing.assert_allclose(noise.share(p, 10), exact, rtol=3e-3)
    assert noise.share(1.0, 16) == pytest.approx(1) and noise.share(1e-12, 16) < 1e-100
    assert noise.lost(np.array([[1 - 1e-7, 1e-7]]), 16) == pytest.approx(1e-7, rel=1e-3)


def test_noise_command_writes_report_and_plot(tmp_path, two, monkeypatch):
    """The whole command, except for its models, writes its report and its plot."""
    for module in (noise, passes):
        monkeypatch.setattr(module, "LOOP_SECONDS", 0.001)
    monkeypatch.setattr(noise, "SIZES", ((2, 5),))
    monkeypatch.setattr(noise, "CHILDREN", (1, 4))
    target = jspec.load(two)
    pair = Subject("x", target, jspec.EarlyExitDrafter(1), text_pair.tokenizer(), folder=tmp_path)
    pair = noise.with_questions(pair, 2 * noise.EACH)
    assert len(pair.prompts) >= 2 and all(len(row) == noise.WIDTH for row in pair.prompts)
    noise.run([pair], 9, 4, 1)
    report = json.loads((tmp_path / "noise-cpu.json").read_text())
    rows = {row["what"]: row for row in report["rows"]}
    assert list(rows) == [
        "accepted, of 1",
        "accepted, of 4",
        "us per distribution, 2 x 5",
        "tokens/s, 1 per level",
        "tokens/s, 4 per level",
    ]
    assert 0 <= rows["accepted, of 1"]["two steps"] <= rows["accepted, of 4"]["two steps"] <= 1
    assert rows["us per distribution, 2 x 5"]["pass"] > 0
    assert report["notes"][-1].endswith("jspec draws in two steps.")
    figure = Figure()
    plots.noise(figure, report["rows"])
    assert [line.get_xdata().tolist() for line in figure.axes[0].lines] == [[1, 4]] * 2


def test_speed_combines_acceptance_noise_and_pass_time():
    rates = {"two steps": np.full((2, 4), 0.5), "full noise": np.array([[0.5] * 4, [1.0] * 4])}
    taken = {size: {"two steps": 1.0, "full noise": 3.0, "of 32 bits": 2.0, "pass": 1.0} for size in noise.SIZES}
    rows = {row["what"]: row for row in noise.table(7, rates, taken)}
    assert rows["accepted, of 2"]["full - two steps"] == 0.25
    assert rows["accepted, of 2"]["standard error"] == pytest.approx(0.25)
    one = rows["tokens/s, 1 per level"]
    assert one["two steps"] == pytest.approx(theory.expected_tokens(0.5, 4) / 5 / 2 * 1e6)
    assert one["of 32 bits"] == pytest.approx(theory.expected_tokens(0.75, 4) / 5 / 3 * 1e6)
