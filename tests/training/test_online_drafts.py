"""Drafters that learn during training: retrieval, new weights, saved states, and the controller of draft lengths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jspec
from jspec.decoding.program import decode_program
from support import heads, toys

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET, V = toys.tiny_llama(0, 3), 8
TARGET.lm_head.weight.set_value(4 * TARGET.lm_head.weight[...])
PROMPTS = [[1, 2, 3], [4, 5, 6]]
TOKENS, LENGTHS = np.array(PROMPTS), np.array([3, 3])
NEW = 16


def call(drafter, seed, k=3, samples=4, **options):
    keys = jax.random.split(jax.random.key(seed), 2 * samples)
    options = {"max_new_tokens": NEW, "samples_per_prompt": samples} | options
    if drafter is None:
        return jspec.generate(TARGET, TOKENS, LENGTHS, keys, **options)
    return jspec.speculative_generate(TARGET, drafter, TOKENS, LENGTHS, keys, num_draft_tokens=k, **options)


def test_retrieval_follows_its_outputs(report):
    """Acceptance rises, texts stay those of plain decoding, and no call compiles a new program."""
    recent, rates = jspec.online.Retrieval(TARGET, 2_000), []
    options = {"accept": "coupled", "sampling": jspec.SamplingParams(temperature=0.5)}
    call(recent.drafter, 0, **options)
    before = decode_program._cache_size()
    for seed in range(8):
        out = call(recent.drafter, seed, **options)
        plain = call(None, seed, sampling=options["sampling"])
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        rates.append(float(out.stats.accepted.sum()) / NEW / 8)
        recent.learn([prompt for prompt in PROMPTS for _ in range(4)], out)
    report(accepted_per_token=f"{rates[0]:.2f} to {rates[-1]:.2f}")
    assert decode_program._cache_size() <= before + 1  # one for plain decoding
    assert rates[0] < 0.05
    assert np.mean(rates[-3:]) > 0.3


def test_retrieval_keeps_the_latest_tokens_and_separates_texts():
    recent = jspec.online.Retrieval(TARGET, 12)
    out = call(None, 0, samples=1)
    short = dataclasses.replace(out, lengths=jnp.array([2, 3]))
    recent.learn(PROMPTS, short)
    (first, second), tokens = np.asarray(out.tokens), np.asarray(recent.drafter.tokens)
    expected = [0, *PROMPTS[0], *first[:2], 0, *PROMPTS[1], *second[:3], 0]
    assert tokens.tolist() == expected[-12:]


def test_outputs_with_a_reused_key_are_biased_and_those_with_new_keys_are_not(report):
    """Retrieval knows the noise of the outputs it stores. "rejection" may use it only with new keys."""
    count, prompt = 20_000, [1, 2, 3]

    def texts(drafter, seed):
        keys = jax.random.split(jax.random.key(seed), count)
        batch = np.tile(prompt, (count, 1)), np.full(count, 3), keys
        options = {"max_new_tokens": 2, "num_draft_tokens": 2, "sampling": jspec.SamplingParams(temperature=4.0)}
        return jspec.speculative_generate(TARGET, drafter, *batch, **options)

    def knows(out, row):
        recent = jspec.online.Retrieval(TARGET, 64)
        recent.learn([prompt], jax.tree.map(lambda leaf: leaf[row : row + 1], out))
        return recent.drafter

    first = jax.device_get(texts(knows(jax.device_get(texts(jspec.NGramDrafter(), 0)), 0), 1))
    known, distances = np.bincount(first.tokens[:, 0], minlength=V) / count, {"reused": 0.0, "new": 0.0}
    for token in np.flatnonzero(known):
        rows = np.flatnonzero(first.tokens[:, 0] == token)
        drafter = knows(first, rows[0])
        found = {
            "reused": np.asarray(texts(drafter, 1).tokens)[rows, 0],
            "new": np.asarray(texts(drafter, 2).tokens)[:, 0],
        }
        for name, tokens in found.items():  # outputs with keys whose first output was this token
            shares = np.bincount(tokens, minlength=V) / len(tokens)
            distances[name] += known[token] * 0.5 * np.abs(shares - known).sum()
    report(**distances)
    assert distances["new"] < 0.02 < 0.05 < distances["reused"]


def test_learner_follows_new_weights_and_restores_its_state(tmp_path):
    """A learner that was saved with Orbax and restored in the middle ends with the same drafter, bit for bit."""
    targets = [TARGET, jax.tree.map(lambda leaf: 1.1 * leaf, TARGET)]

    def learner():
        return jspec.online.Learner(TARGET, heads.medusa(TARGET, 2), rate=0.02, depth=2, batch=2, length=32)

    outs = [call(None, seed, samples=1) for seed in range(2)]
    whole, half = learner(), learner()
    for target, out in zip(targets, outs, strict=True):
        whole.learn(PROMPTS, out, target)
    half.learn(PROMPTS, outs[0], targets[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "learner", half.state)
        checkpointer.wait_until_finished()
        resumed = learner()
        resumed.state = checkpointer.restore(tmp_path / "learner", resumed.state)
    jax.tree.map(np.testing.assert_array_equal, resumed.drafter, half.drafter)
    resumed.learn(PROMPTS, outs[1], targets[1])
    jax.tree.map(np.testing.assert_array_equal, resumed.drafter, whole.drafter)
    stale = learner()
    for out in outs:
        stale.learn(PROMPTS, out)
    with pytest.raises(AssertionError):
        jax.tree.map(np.testing.assert_array_equal, stale.drafter, whole.drafter)


def test_a_saved_state_survives_later_steps():
    """Each step donates its own arrays, so `state` returns copies."""
    learner = jspec.online.Learner(TARGET, heads.medusa(TARGET, 2), depth=2, batch=2, length=32)
    state = learner.state
    learner.learn(PROMPTS, call(None, 0, samples=1))
    changed = jax.tree.map(lambda old, new: bool((old != new).any()), state, learner.state)
    assert any(jax.tree.leaves(changed))


def test_a_failed_call_leaves_retrieval_as_it_was():
    recent, out = jspec.online.Retrieval(TARGET, 64), call(None, 0, samples=1)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        recent.learn([[1, V], [1]], out)
    recent.learn(PROMPTS, out)


def test_wrong_states_and_targets_are_rejected():
    learner = jspec.online.Learner(TARGET, heads.medusa(TARGET, 2), depth=2)
    for state in ({"weights": jnp.zeros(2)}, jax.tree.map(lambda leaf: leaf[..., None], learner.state)):
        with pytest.raises(ValueError, match="does not fit this Learner"):
            learner.state = state
    out = call(None, 0, samples=1)
    with pytest.raises(ValueError, match="The output has 3 draft tokens per round, but num_draft_tokens is 0"):
        jspec.online.DraftLengthController().record(call(jspec.NGramDrafter(), 0), 1.0)
    with pytest.raises(ValueError, match="other shapes or dtypes"):
        learner.learn(PROMPTS, out, toys.tiny_llama(0, 2))
    with pytest.raises(ValueError, match="3 prompts but 2 outputs"):
        jspec.online.Retrieval(TARGET).learn([[1]] * 3, out)
    for lengths in ((), (0, -1), (0, 1.5), (True,)):
        with pytest.raises(ValueError, match="at least one int, each at least 0"):
            jspec.online.DraftLengthController(lengths)


def simulated(k, rate, rng, rows=8, tokens=64):
    """Return the statistics of a call in which each draft token is accepted with probability `rate`."""
    judged, accepted = np.zeros((rows, k), int), np.zeros((rows, k), int)
    rounds = np.zeros(rows, int)
    for row in range(rows):
        done = 0
        while done < tokens:
            count = 0 if not k else int(np.argmin([*(rng.uniform(size=k) < rate), False]))
            judged[row, : min(k, count + 1)] += 1
            accepted[row, :count] += 1
            rounds[row], done = rounds[row] + 1, done + count + 1
    template = call(None, 0, samples=1)
    stats = dataclasses.replace(template.stats, rounds=rounds, accepted_at=accepted, judged_at=judged)
    return dataclasses.replace(template, stats=stats)


@pytest.mark.parametrize(("rate", "best"), [(0.9, 4), (0.5, 2), (0.05, 0)])
def test_controller_finds_the_best_length(rate, best):
    """A round costs 1, or 1.6 with two draft tokens, or 2 with four. The first call of each length compiles."""
    costs, rng, controller, seen, chosen = (
        {0: 1, 2: 1.6, 4: 2.0},
        np.random.default_rng(0),
        jspec.online.DraftLengthController(),
        set(),
        [],
    )
    for _ in range(24):
        k = controller.num_draft_tokens
        chosen.append(k)
        out = simulated(k, rate, rng)
        controller.record(out, costs[k] * out.stats.rounds.max() + (0 if k in seen else 100))
        seen.add(k)
    assert chosen[:6] == [0, 0, 2, 2, 4, 4]
    assert np.mean(np.array(chosen[6:]) == best) > 0.5


def test_controller_stops_drafting_when_acceptance_falls():
    costs, rng, controller, chosen = (
        {0: 1, 2: 1.6, 4: 2.0},
        np.random.default_rng(0),
        jspec.online.DraftLengthController(),
        [],
    )
    for step in range(60):
        k = controller.num_draft_tokens
        chosen.append(k)
        out = simulated(k, 0.9 if step < 30 else 0.02, rng)
        controller.record(out, costs[k] * out.stats.rounds.max())
    assert np.mean(np.array(chosen[20:30]) == 4) > 0.5
    assert np.mean(np.array(chosen[50:]) == 0) > 0.5
