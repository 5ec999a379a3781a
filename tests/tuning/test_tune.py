"""The number of draft tokens: the choice is arithmetic, the counts are exact, and the clock is fake."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec import theory
from jspec.core.keys import Purpose, stream, trial_keys
from jspec.decoding import program
from jspec.drafters.draft_length import doubling
from jspec.tuning import tune as auto
from jspec.tuning import tune_chain as tuning
from support import toys
from support.tuned import made

pytestmark = pytest.mark.usefixtures("quick_compile")
CHOICES = {
    # plain seconds, round seconds, tokens per round: K, speedup
    "the best is chosen": (1.0, [1.5, 2.0, 3.0], [1.75, 3.0, 3.5], 2, 1.5),
    "also the last": (1.0, [1.0, 1.0, 1.0], [1.5, 2.0, 2.5], 3, 2.5),
    "also one between measured lengths": (0.75, [1.0, 1.25, 1.5, 2.0], [1.5, 2.0, 3.0, 3.5], 3, 1.5),
    "none": (1.0, [2.0, 2.5], [1.75, 2.25], 0, 1.0),
    "a tie with plain is not worth it": (1.0, [1.5, 2.0], [1.5, 2.0], 0, 1.0),
    "of equals the smaller": (1.0, [1.0, 1.5, 2.0], [1.25, 2.25, 3.0], 2, 1.5),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Play all trials, however slow the machine, and forget the measurements of other tests."""
    monkeypatch.setattr(tuning, "_PATIENCE", np.inf)
    monkeypatch.setattr(tuning, "_answers", {})


@pytest.mark.parametrize("case", CHOICES)
def test_best_length_maximises_speed(case):
    plain, seconds, tokens, k, speedup = CHOICES[case]
    assert tuning.best_length(plain, seconds, tokens) == (k, speedup)


def test_powers_of_two_and_maximum_are_measured():
    lengths = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4], 6: [1, 2, 4, 6], 8: [1, 2, 4, 8], 9: [1, 2, 4, 8, 9]}
    assert {k: list(doubling(k)) for k in lengths} == lengths


def test_acceptance_rates_ignore_drafts_cut_by_limit():
    first = made([[(3, "b"), (0, "c"), (2, "-")], [(1, "c"), (1, "c"), (2, "c")]], k=3)
    second = made([[(1, "-")], [(3, "-")]], k=3)
    # Depth 1: all 8 rounds are verified. Depth 2: one of 7 was cut off. Depth 3: one of 4 was cut off.
    np.testing.assert_array_equal(tuning.acceptance_rates([first, second]), [7 / 8, 4 / 6, 2 / 3])
    np.testing.assert_array_equal(tuning.acceptance_rates([made([[(0, "c")]], k=3)]), [0, 0, 0])


def test_missing_draft_tokens_count_as_rejected():
    """Missing draft tokens, all or the rest of a draft, count as rejected; tokens per round are those decoded."""
    out = made([[(2, "b"), (0, "n"), (0, "n"), (1, "b"), (3, "b"), (1, "c")]], k=3)
    rates = tuning.acceptance_rates([out])
    np.testing.assert_array_equal(rates, [4 / 6, 2 / 4, 1 / 2])
    assert theory.expected_tokens_from_rates(rates) == pytest.approx(out.lengths[0] / 6)


class Machine:
    """A clock, and a program with given costs that accepts all drafts."""

    def __init__(self, prompt, costs, slow_trials=()):
        self.now, self.prompt, self.costs, self.slow, self.calls = 0.0, prompt, costs, slow_trials, []

    def clock(self):
        return self.now

    def run(self, k, limit, trial):
        self.calls.append((k, limit, trial))
        rounds, last = divmod(limit, k + 1)
        played = [(k, "b")] * rounds + ([(last, "-")] if last else [])
        self.now += (self.prompt + len(played) * self.costs[k]) * (8 if trial in self.slow else 1)
        return made([played, played[:1]], k)


@pytest.mark.parametrize("slow_trials", [(), (1, 3)], ids=["quiet", "noisy"])
def test_known_costs_are_recovered_exactly(monkeypatch, slow_trials):
    """Prompt and dispatch costs cancel out, and so does an occasionally slow machine."""
    machine = Machine(32.0, {0: 1.0, 1: 1.5, 2: 2.0, 4: 2.25, 6: 3.75}, slow_trials)
    monkeypatch.setattr(tuning, "perf_counter", machine.clock)
    found = tuning.measure(machine.run, max_new_tokens=256, max_draft_tokens=6)
    assert found.plain_seconds == 1.0 and found.round_seconds == (1.5, 2.0, 2.125, 2.25, 3.0, 3.75)
    assert found.expected_tokens == (2, 3, 4, 5, 6, 7)
    assert (found.num_draft_tokens, found.speedup) == (4, 5 / 2.25) and found.speedups[3] == found.speedup
    in_turns = [k for k, *_ in machine.calls]
    assert in_turns == [0, 1, 2, 4, 6] + [k for k in (0, 1, 2, 4, 6) for _ in range(2)] * tuning.TRIALS


def test_measurement_stops_after_a_whole_trial(monkeypatch):
    machine = Machine(1.0, {0: 1.0, 1: 2.0})
    monkeypatch.setattr(tuning, "perf_counter", machine.clock)
    monkeypatch.setattr(tuning, "_PATIENCE", 1.0)
    found = tuning.measure(machine.run, max_new_tokens=16, max_draft_tokens=1)
    assert found.round_seconds == (2.0,) and {trial for *_, trial in machine.calls} == {0}


def test_tuning_reports_progress(monkeypatch, caplog):
    machine = Machine(0.0, {0: 1.0, 1: 2.0})
    monkeypatch.setattr(tuning, "perf_counter", machine.clock)
    caplog.set_level("INFO", "jspec")
    tuning.measure(machine.run, max_new_tokens=16, max_draft_tokens=1)
    trial = 16 + 2 + (8 + 1) * 2  # a long and a short run of each
    left = [f", at most {trial * (tuning.TRIALS - n):.0f} s left" for n in range(1, tuning.TRIALS)]
    assert caplog.messages[:2] == ["Compiling program 1 of 2", "Compiling program 2 of 2"]
    assert caplog.messages[2:4] == ["Measuring: 1 of 10", "Measuring: 2 of 10"]
    assert caplog.messages[4::2] == [f"Measuring: {2 * n + 1} of 10{said}" for n, said in enumerate(left, 1)]
    monkeypatch.setattr(tuning, "_PATIENCE", 40.0)  # ends after the second trial
    assert tuning._progress(2, 2, 36.0) == "Measuring: 3 of 10, at most 40 s left"


def test_whole_run_is_used_if_difference_is_noise(monkeypatch):
    machine = Machine(4.0, {0: 0.0, 1: 0.0})
    monkeypatch.setattr(tuning, "perf_counter", machine.clock)
    found = tuning.measure(machine.run, max_new_tokens=16, max_draft_tokens=1)
    assert found.plain_seconds == 4 / 16 and found.round_seconds == (4 / 8,)


def test_draft_equal_to_target_is_always_accepted():
    target, _ = toys.markov_pair(0)
    batch = np.zeros((2, 3), int), np.array([3, 1]), jax.random.split(jax.random.key(0), 2)
    found = jspec.tune(target, jspec.ModelDrafter(target), *batch, max_new_tokens=24, max_draft_tokens=3, max_nodes=0)
    assert found.expected_tokens == tuple(theory.expected_tokens(1.0, k) for k in (1, 2, 3)) == (2, 3, 4)


def test_tokens_per_round_match_theory(report):
    """With constant distributions, equation 1 of Leviathan et al. is exact for every K."""
    logits = 1.2 * np.random.default_rng(0).normal(size=(2, 8))
    target, draft = (toys.MarkovModel(jnp.tile(jnp.asarray(row, jnp.float32), (8, 1))) for row in logits)
    batch = np.zeros((64, 1), int), np.ones(64, int), jax.random.split(jax.random.key(0), 64)
    found = jspec.tune(target, jspec.ModelDrafter(draft), *batch, max_draft_tokens=4, max_nodes=0)
    alpha = theory.acceptance_rate(*np.exp(logits) / np.exp(logits).sum(1, keepdims=True))
    rounds = tuning.TRIALS * 64 * 128 / found.expected_tokens[-1]
    worst = 0.0
    for k, tokens in enumerate(found.expected_tokens, 1):
        chances = np.append(alpha ** np.arange(k) * (1 - alpha), alpha**k)
        mean, square = chances @ np.arange(1, k + 2), chances @ np.arange(1, k + 2) ** 2
        assert mean == pytest.approx(theory.expected_tokens(alpha, k))
        worst = max(worst, abs(tokens - mean) / np.sqrt((square - mean**2) / rounds))
    report(alpha=f"{alpha:.3f}", rounds=int(rounds), standard_errors=f"{worst:.1f}")
    assert worst < 4


def test_tokens_per_round_match_long_run(report):
    """Tokens per round match a long run if distributions depend on the last token, so that positions differ."""
    target, draft = toys.markov_pair(0)
    batch = np.zeros((64, 1), int), np.ones(64, int), jax.random.split(jax.random.key(1), 64)
    found = jspec.tune(target, jspec.ModelDrafter(draft), *batch, max_draft_tokens=3, max_nodes=0)
    as_long = {"max_new_tokens": 128 * tuning.TRIALS, "num_draft_tokens": 3}
    out = jspec.speculative_generate(target, jspec.ModelDrafter(draft), *batch, **as_long)
    by_row = np.asarray(out.lengths) / np.asarray(out.stats.rounds)
    error = np.sqrt(2 / 64) * by_row.std(ddof=1)
    deviation = (found.expected_tokens[2] - out.lengths.sum() / out.stats.rounds.sum()) / error
    report(tuned=f"{found.expected_tokens[2]:.3f}", long_run=f"{by_row.mean():.3f}", standard_errors=f"{deviation:.1f}")
    assert abs(deviation) < 4


def test_trials_use_no_key_of_the_request(monkeypatch, toy, prompts):
    """Settings learned from a request's own keys would steer its output."""
    runs, (tokens, lengths, keys) = [], prompts([4, 2])
    monkeypatch.setattr(auto, "measure", lambda run, *_: runs.append(run))
    monkeypatch.setattr(auto, "run_program", lambda *arguments: arguments[2].keys)
    jspec.tune(toy(0), toy(1), tokens, lengths, keys, max_nodes=0)
    used = np.concatenate([jax.random.key_data(runs[0](0, 1, trial)) for trial in range(tuning.TRIALS)])
    streams = [stream(keys, np.full(2, n, np.int32), purpose) for n in range(40) for purpose in Purpose]
    own = np.concatenate([jax.random.key_data(k) for k in [keys, *streams]])
    assert len(np.unique(np.concatenate([used, own]), axis=0)) == len(used) + len(own)
    np.testing.assert_array_equal(jax.random.key_data(trial_keys(keys, 0)), used[:2])


@pytest.fixture
def answers(monkeypatch):
    """Return ``answers(k)``: from then on measuring finds k, and the returned list grows with every measurement."""
    calls = []

    def answer(k):
        def measure(run, max_new_tokens, max_draft_tokens):
            calls.append((max_new_tokens, max_draft_tokens))
            return jspec.Tuning(k, 1.0, 1.0, (1.0,) * max_draft_tokens, (1.0,) * max_draft_tokens)

        monkeypatch.setattr(auto, "measure", measure)
        return calls

    return answer


@pytest.fixture
def only_lengths(monkeypatch):
    """Return the number of draft tokens instead of decoding."""
    lengths = lambda *_, spec: (spec.draft_length.max_draft_tokens, None)  # noqa: E731
    monkeypatch.setattr(program, "decode_program", lengths)


def _same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_auto_uses_tuned_draft_length(toy, prompts, answers):
    models, batch, calls = (toy(0), toy(0, 0.3)), prompts([4, 2, 5]), answers(3)
    options = {"max_new_tokens": 12, "sampling": jspec.SamplingParams(max_tokens=np.array([0, 9, 3]))}
    for _ in range(2):
        auto = jspec.speculative_generate(*models, *batch, num_draft_tokens="auto", **options)
    _same(auto, jspec.speculative_generate(*models, *batch, num_draft_tokens=3, **options))
    assert calls == [(64, 8)]  # measured once, with outputs that are long enough


def test_auto_works_under_transfer_guard(toy, prompts, answers, only_lengths):
    answers(2)
    (tokens, lengths, keys), models = prompts([4, 2]), (toy(0), toy(1))
    tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)
    sampling = jspec.SamplingParams(temperature=jnp.float32(0.5), top_p=jnp.full(2, 0.9))
    with jax.transfer_guard("disallow"):
        k = jspec.speculative_generate(
            *models, tokens, lengths, keys, max_new_tokens=8, num_draft_tokens="auto", sampling=sampling
        )
    assert k == 2


def test_auto_may_choose_plain_decoding(toy, prompts, answers):
    answers(0)
    models, batch, options = (toy(0), toy(1)), prompts([4, 2]), {"max_new_tokens": 12, "eos_ids": (3,)}
    auto = jspec.speculative_generate(*models, *batch, num_draft_tokens="auto", **options)
    _same(auto, jspec.generate(models[0], *batch, **options))
    assert auto.stats.accepted_at.shape == (2, 0)


def test_tuned_length_is_remembered_per_setting(toy, prompts, answers, only_lengths):
    target, draft, calls = toy(0), toy(1), answers(1)

    def news(draft=draft, lengths=(4, 2), seed=0, max_new_tokens=8, **sampling):
        before, batch = len(calls), prompts(lengths, seed)
        k = jspec.speculative_generate(
            target,
            draft,
            *batch,
            max_new_tokens=max_new_tokens,
            num_draft_tokens="auto",
            sampling=jspec.SamplingParams(**sampling),
        )
        assert k == 1
        return len(calls) - before

    assert news() == 1
    assert news() == news(seed=1, lengths=(1, 5), max_new_tokens=9, max_tokens=5) == 0
    assert news(draft=jspec.ModelDrafter(draft)) == 0
    assert news(draft=toy(2)) == 0  # other weights of the same shapes
    assert news(draft=toy(1, num_hidden_layers=2)) == 1
    assert news(lengths=(4, 2, 2)) == news(max_new_tokens=150) == 1
    assert news(temperature=0) == news(temperature=0.5) == news(top_k=4) == news(draft_temperature=1.0) == 1
    assert news(temperature=0.0) == 0
    assert news(temperature=np.array([0.5, 0.7])) == news(temperature=np.zeros(2)) == 1
    assert news(temperature=jnp.array([0.1, 0.0])) == news() == 0


def test_remembered_length_is_shared_by_shape_and_keeps_no_weights():
    first, second, calls = [np.zeros(3), 0.5], [np.ones(3), 0.5], []

    def measured(weights, key="here"):
        return tuning.remembered(weights, key, lambda: calls.append(1) or len(calls))

    kept = weakref.ref(first[0])
    assert measured(first) == measured(second) == 1
    del first
    gc.collect()
    assert kept() is None
    assert measured([np.ones(4), 0.5]) == 2 and measured([np.ones(3, np.float32), 0.5]) == 3
    assert measured([np.ones(3), 0.25]) == 4 and measured(second, "there") == 5


def test_threads_wait_for_running_measurement():
    calls, all_there = [], threading.Barrier(3)

    def measured(_):
        all_there.wait()
        return tuning.remembered([np.zeros(3)], "here", lambda: time.sleep(0.05) or calls.append(1) or len(calls))

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(measured, range(3))] == [1, 1, 1]


def test_auto_uses_plain_decoding_without_room_to_measure(toy, prompts, answers, only_lengths):
    calls, options = answers(1), {"max_new_tokens": 6, "num_draft_tokens": "auto"}
    assert jspec.speculative_generate(toy(0), toy(1), *prompts([250, 9]), **options) == 0 and not calls
    assert jspec.speculative_generate(toy(0), toy(1), *prompts([240]), **options) == 1 and calls == [(16, 3)]


@pytest.mark.parametrize(
    ("around", "most"),
    [
        (lambda heads: heads, 3),
        (lambda heads: jspec.FallbackDrafter(jspec.NGramDrafter(), heads), 8),
        (lambda heads: jspec.MixtureDrafter(heads, jspec.EarlyExitDrafter(1), 0.5), 3),
        (lambda heads: jspec.HorizontalDrafter(heads, jspec.NGramDrafter(), at=2), 8),
        (lambda heads: jspec.HorizontalDrafter(heads, jspec.NGramDrafter(), at=4), 3),
    ],
)
def test_auto_measures_at_most_the_maximum_chain_length(toy, prompts, answers, only_lengths, around, most):
    heads, calls = jspec.MedusaDrafter.untrained(toy(0), 3, rngs=nnx.Rngs(0)), answers(1)
    jspec.speculative_generate(toy(0), around(heads), *prompts([4]), max_new_tokens=64, num_draft_tokens="auto")
    assert calls == [(64, most)]


def test_tune_measures_at_most_the_maximum_chain_length(toy, prompts, monkeypatch):
    heads, asked = jspec.MedusaDrafter.untrained(toy(0), 1, rngs=nnx.Rngs(0)), []
    monkeypatch.setattr(auto, "measure", lambda run, new, most: asked.append(most))
    jspec.tune(toy(0), heads, *prompts([4]), max_nodes=0)
    assert asked == [1]


def test_measurement_inside_transformation_is_rejected(toy, prompts, answers):
    models, batch, calls = (toy(0), toy(1)), prompts([4, 2]), answers(1)

    def auto(*batch):
        return jspec.speculative_generate(*models, *batch, max_new_tokens=8, num_draft_tokens="auto")

    for call in (
        lambda: jax.jit(auto)(*batch),
        lambda: jax.jit(lambda: auto(*batch))(),
        lambda: jax.jit(jspec.tune)(*models, *batch),
    ):
        with pytest.raises(ValueError, match=r"is not possible inside jax.jit .* call jspec.tune beforehand and pass"):
            call()
    assert not calls


def test_measurement_in_several_processes_is_rejected(toy, prompts, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="or in several processes at once"):
        jspec.tune(toy(0), toy(1), *prompts([4, 2]))
