"""Training: unrolling equals drafting, a stopped run continues, and the trained drafter drafts better."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core.tree import Level, Tree
from jspec.drafters import PassDrafter
from jspec.drafters.base import Context, TargetView
from jspec.drafters.capabilities import features_of
from jspec.drafters.signals import NO_SIGNALS, PromptSignals
from jspec.models.kv_cache import prefill_with_features
from jspec.training import batches, boost, fit, kinds, losses, objective, target_states, train
from jspec.training import dataset as rows
from support import heads
from support.trainings import LONG, TARGET, V, chats, chatty, some_rows

pytestmark = pytest.mark.usefixtures("quick_compile")
LONG.lm_head.weight.set_value(6 * LONG.lm_head.weight[...])  # and confident


@pytest.mark.parametrize("name", losses.LOSSES)
def test_losses_match_numpy(name):
    rng = np.random.default_rng(0)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in rng.normal(size=(2, 5, 7)) * 2)
    m, covered = (p + q) / 2, rng.random(5)

    def kl(a, b):
        return (a * np.log(a / b)).sum(-1)

    accepted = np.minimum(covered[:, None] * p, q).sum(-1).mean()
    weight = np.exp(-3 * accepted)
    apart = {"kl": kl(p, q), "reverse-kl": kl(q, p), "jsd": (kl(p, m) + kl(q, m)) / 2, "tvd": np.abs(p - q).sum(-1) / 2}
    expected = {loss: (covered * divergence).mean() for loss, divergence in apart.items()}
    expected["dspark"] = 0.1 * expected["kl"] + 1.8 * (1 - accepted)
    expected["lk"] = weight * expected["kl"] + (1 - weight) * (1 - accepted)
    found = losses.LOSSES[name](jnp.log(jnp.asarray(p)), jnp.log(jnp.asarray(q)), jnp.asarray(covered), jnp.mean)
    np.testing.assert_allclose(found, expected[name], rtol=2e-5)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_gradients_are_finite_for_zero_probabilities(name):
    p, q = jnp.array([0.0, -jnp.inf, -300.0, 2.0]), jnp.array([400.0, 0.0, -200.0, 0.0])
    for covered in (0.0, 0.5, 1.0):
        laws = losses.log_probs(p)[None], jnp.array([covered])
        slope = jax.grad(
            lambda q, laws=laws: losses.LOSSES[name](laws[0], losses.log_probs(q)[None], laws[1], jnp.mean)
        )(q)
        assert np.isfinite(slope).all()


@pytest.mark.parametrize("kind", ["eagle", "medusa", "hydra", "blockwise", "kangaroo", "model"])
def test_unrolled_logits_equal_drafted_logits(kind):
    """Unrolled logits equal those of a draft that starts there and matches the text, at every position and depth."""
    trainee = kinds.trainee_of(kinds.KINDS[kind](TARGET, None, 4, 0))
    weights = heads.drawn(trainee.weights)
    tokens = jnp.asarray(np.random.default_rng(1).integers(V, size=(1, 9)))
    drafter = trainee.drafter(weights)
    unroll, offset = kinds.UNROLLS[type(drafter)]
    said = list(unroll(drafter, TARGET, tokens, target_states.run_target(TARGET, tokens, trainee.features), 4))
    for length in (2, 3, 5):  # the length of the text before the draft
        lengths = jnp.array([length])
        prompt = jnp.where(jnp.arange(9) < length, tokens, 0)
        features = features_of(drafter)
        cache, states = prefill_with_features(TARGET, prompt, 16, features)
        signals = PromptSignals(states, lengths, TARGET) if features else NO_SIGNALS
        noise = jnp.zeros((1, 4, 1, 2, 1))
        context = Context(tokens, lengths, noise, None, None, TargetView(TARGET, cache, 1), V)
        logits, carry = drafter.begin(drafter.init(prompt, 16, signals), context, Tree.chain(4))
        for depth in range(4):
            at = length - 1 - offset + depth
            np.testing.assert_allclose(said[depth % len(said)][0, at], logits[0], atol=2e-5)
            if depth < 3:
                new = tokens[:, length + depth][:, None]
                logits, carry = drafter.extend(carry, new, Level(depth + 1), context)
                logits = logits[:, 0]


def test_unrolled_pass_logits_equal_target_logits():
    """After every token, unrolled logits equal those of the target if the text ended there."""
    trainee = kinds.trainee_of(kinds.of_pass(TARGET, None, 3, 0))
    weights = heads.drawn(trainee.weights)
    tokens = np.random.default_rng(1).integers(V, size=(2, 6), dtype=np.int32)

    @jax.jit
    def unrolled(weights):
        unroll, _ = kinds.UNROLLS[PassDrafter]
        return list(unroll(trainee.drafter(weights), TARGET, tokens, target_states.run_target(TARGET, tokens, ()), 3))

    @jax.jit
    def read(nodes):
        cache, vectors = TARGET.new_cache(*nodes.shape), trainee.drafter(weights).embeddings
        return TARGET.logits(TARGET.forward(nodes, cache, jnp.zeros(2, jnp.int32), embeddings=vectors)[0])

    said = jax.device_get(unrolled(weights))
    for upto in (1, 4, 6):
        nodes = np.concatenate([tokens[:, :upto], np.tile(V + np.arange(3, dtype=np.int32), (2, 1))], axis=1)
        logits = np.asarray(read(nodes))
        for i in range(min(3, 7 - upto)):
            np.testing.assert_allclose(said[i][:, upto - 1 + i], logits[:, upto + i], atol=2e-5)


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kind_improves(tmp_path, kind):
    trainee = kinds.trainee_of(kinds.KINDS[kind](TARGET, None, 2, 0))
    train, held = batches.Plan(some_rows(16), 256, 0), batches.Plan(some_rows(4, seed=1), 256, 0)
    schedule = fit.Schedule(12, 2, "kl", rate=0.02, save_every=12)
    training = fit.begin(trainee, schedule)
    before = fit.measure(training, training.state, TARGET, fit.Source(held))
    weights = fit.fit(trainee, TARGET, fit.Source(train), fit.Source(held), schedule, tmp_path)
    after = fit.measure(training, training.state | {"weights": weights}, TARGET, fit.Source(held))
    assert after.loss[0] < before.loss[0]


def test_reduced_output_head_is_an_argument_in_target_dtype():
    """The head is passed in the target's dtype: no constant is as large, and no product is in float32."""
    target = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), LONG)
    trainee = kinds.trainee_of(kinds.of_eagle(target, np.arange(100), 2, 0))
    training = fit.begin(trainee, fit.Schedule(2, 2))
    shapes = jax.ShapeDtypeStruct((2, 16), "int32"), jax.ShapeDtypeStruct((2, 16), "bool")
    program = training.step.lower(training.state, target, *shapes, None).as_text()
    assert "tensor<16x100xbf16>" in program
    large = [line for line in program.splitlines() if "<16x100x" in line]
    assert not [line for line in large if ("stablehlo.constant" in line and "0x" in line) or "HIGHEST" in line]
    head = trainee.drafter(trainee.weights).head
    np.testing.assert_array_equal(head.lm_head.weight[...], LONG.lm_head.weight[...][:, :100].astype(jnp.bfloat16))


@pytest.mark.parametrize("stored", [False, True])
def test_only_learned_tokens_are_scored(stored):
    """Scores equal those of a loop over positions: the distribution of token t + 2, if that token is learned.

    If the target's most likely token cannot be drafted, the two do not agree.
    """
    rng, ids = np.random.default_rng(0), np.array([1, 2, 5, 7])
    states = jnp.asarray(rng.normal(size=(2, 6, 16)), jnp.float32)
    logits = np.asarray(TARGET.logits(states))
    said = logits[:, 1:, ids] + 0.5 * rng.normal(size=(2, 2, 5, 4))  # often right, if it can be
    learned = rng.random((2, 6)) < 0.6
    known = target_states.TargetStates(
        states[:, :, None], states, target_states.distribution_stats(TARGET, states) if stored else None
    )
    judge = objective.judge(TARGET, known, jnp.asarray(ids), jnp.asarray(learned))
    found = objective.score(list(map(jnp.asarray, said)), 1, judge, "tvd")
    for depth in range(2):
        kept, same = [], []
        for b, t in np.ndindex(2, 4):
            if learned[b, t + 2] and t >= depth:
                p, q = (np.exp(x) / np.exp(x).sum() for x in (logits[b, t + 1], said[depth, b, t]))
                kept.append(np.minimum(p[ids], q).sum())
                same.append(p.argmax() == ids[q.argmax()])
        np.testing.assert_allclose(found.acceptance[depth], np.mean(kept), rtol=1e-5)
        np.testing.assert_allclose(found.agreement[depth], np.mean(same), rtol=1e-5)
        assert found.tokens[depth] == len(kept)
    none = objective.score([jnp.asarray(said[0])], 1, judge._replace(learned=jnp.zeros((2, 6), bool)), "tvd")
    assert none.tokens[0] == 0 and none.acceptance[0] == 0  # it must not count in a mean


def test_every_row_is_used_once_per_epoch():
    texts = [rows.of_answer([1], [2] * size) for size in (5, 70, 70, 100, 200, 9, 8, 64)]
    plan = batches.Plan(texts, 256, seed=1)
    seen = [plan.batch(step) for step in range(2 * plan.steps)]
    numbers = [
        sorted(n for one in half for n in one.numbers if n >= 0) for half in (seen[: plan.steps], seen[plan.steps :])
    ]
    assert numbers == [list(range(8))] * 2
    assert [one.numbers.tolist() for one in seen] == [plan.batch(s).numbers.tolist() for s in range(len(seen))]
    for devices in (3, 4):  # the same steps, with padding rows
        wider = batches.Plan(texts, 256, seed=1, devices=devices)
        for step, one in enumerate(seen):
            other = wider.batch(step)
            assert len(other.numbers) % devices == 0
            assert [n for n in other.numbers if n >= 0] == [n for n in one.numbers if n >= 0]
    for one in seen:
        assert one.tokens.size <= 256 and one.learned[one.numbers < 0].sum() == 0
        for number, row in zip(one.numbers, one.tokens, strict=True):
            if number >= 0:
                np.testing.assert_array_equal(row[: len(texts[number].tokens)], texts[number].tokens)


def test_nan_target_is_rejected(tmp_path):
    target = jax.tree.map(lambda leaf: leaf * jnp.nan, TARGET)
    plan = batches.Plan(some_rows(4), 64, 0)
    trainee, source = kinds.trainee_of(kinds.of_eagle(TARGET, None, 2, 0)), fit.Source(plan)
    with pytest.raises(ValueError, match=r"the loss is 0\.0 and the held-out loss is 0\.0, over 0 scored tokens"):
        fit.fit(trainee, target, source, source, fit.Schedule(2, 2), tmp_path)
    assert not [*fit.read_log(tmp_path)]


def test_weights_damaged_in_last_step_are_not_saved(tmp_path, monkeypatch):
    """The loss that a step reports is that of the weights before the step, so weights are checked again at the end."""
    begin = fit.begin

    def damaging(trainee, schedule):
        training = begin(trainee, schedule)

        def step(state, *batch):
            state, loss = training.step(state, *batch)
            return state | {"weights": jax.tree.map(lambda leaf: leaf * jnp.nan, state["weights"])}, loss

        return training._replace(step=step)

    monkeypatch.setattr(fit, "begin", damaging)
    trainee = kinds.trainee_of(kinds.of_medusa(TARGET, None, 2, 0))
    source = fit.Source(batches.Plan(some_rows(4), 64, 0))
    with pytest.raises(
        ValueError, match=r"After 1 steps the loss is .* and the held-out loss is nan, over .* the rate is too high"
    ):
        fit.fit(trainee, TARGET, source, source, fit.Schedule(1, 2), tmp_path)
    assert not [*fit.read_log(tmp_path)]


@pytest.mark.parametrize("kind, depths", [("eagle", [1, 1, 1, 2, 2]), ("medusa", [2] * 5)])
def test_single_layer_heads_unroll_deeper_at_the_end(tmp_path, monkeypatch, kind, depths):
    """Single-layer heads unroll deep only at the end; others have weights for every depth, trained from step one."""
    begin, found = fit.begin, []

    def noted(trainee, schedule):
        training = begin(trainee, schedule)
        return training._replace(step=lambda *rest: (found.append(schedule.depth), training.step(*rest))[1])

    monkeypatch.setattr(fit, "begin", noted)
    trainee = kinds.trainee_of(kinds.KINDS[kind](TARGET, None, 2, 0))
    plan = batches.Plan(some_rows(4), 64, 0)
    fit.fit(trainee, TARGET, fit.Source(plan), fit.Source(plan), fit.Schedule(5, 2), tmp_path)
    assert found == depths


@pytest.mark.slow
def test_boosted_model_learns_tokens_that_earlier_models_miss(tmp_path, prompts, monkeypatch):
    asked = []
    monkeypatch.setattr(
        train,
        "fit",
        lambda trainee, target, source, *rest: asked.append(source) or fit.fit(trainee, target, source, *rest),
    )
    data, recipe = chats(tmp_path / "chats.jsonl"), {"steps": 2, "depth": 2, "step_tokens": 512, "boost": 2}
    several = jspec.train_drafter(LONG, chatty(), "model", data, folder=tmp_path / "run", **recipe)
    first, second = ({row.tokens.tobytes(): row for row in source.plan.rows} for source in asked)
    assert set(second) <= set(first) and len(several.drafts) == 2
    for text, row in first.items():
        laws = [model(row.tokens[None])[0] for model in (LONG, several.drafts[0].model)]
        wrong = np.append(False, (laws[0].argmax(-1) != laws[1].argmax(-1))[:-1]) & row.learned
        np.testing.assert_array_equal(second[text].learned if text in second else False, wrong)
    batch = prompts([4, 2], vocab_size=V)
    out = jspec.speculative_generate(LONG, several, *batch, max_new_tokens=12, accept="coupled")
    np.testing.assert_array_equal(out.tokens, jspec.generate(LONG, *batch, max_new_tokens=12).tokens)
    with pytest.raises(
        ValueError, match="The draft models so far already predict every token of the target; train fewer"
    ):
        boost.left_over(LONG, jspec.ModelDrafter(LONG), asked[0].plan.rows, 512)


@pytest.mark.slow
def test_boosted_training_resumes(tmp_path):
    seen = []

    def stop(news):
        seen.append(news)
        if seen.count(2) == 2:  # the second step of the second model
            raise KeyboardInterrupt

    data = chats(tmp_path / "chats.jsonl")
    options = {"steps": 3, "depth": 2, "step_tokens": 512, "boost": 2}
    with pytest.raises(KeyboardInterrupt):
        jspec.train_drafter(LONG, chatty(), "model", data, folder=tmp_path / "stopped", say=stop, **options)
    again, more = [], options | {"say": lambda news: again.append(news)}
    went_on = jspec.train_drafter(LONG, chatty(), "model", data, folder=tmp_path / "stopped", **more)
    assert [one for one in again if isinstance(one, int)] == [2, 3]  # only the second model's, whose first step is kept
    whole = jspec.train_drafter(LONG, chatty(), "model", data, folder=tmp_path / "whole", **options)
    jax.tree.map(np.testing.assert_array_equal, went_on, whole)


def test_trained_drafter_accepts_more_and_keeps_output(tmp_path, prompts):
    looks, data = [], chats(tmp_path / "chats.jsonl")
    options = {"depth": 3, "step_tokens": 512, "draft_vocab": 200, "rate": 0.02}
    drafter = jspec.train_drafter(
        LONG, chatty(), data=data, folder=tmp_path / "run", steps=40, say=looks.append, **options
    )
    untrained = jspec.train_drafter(
        LONG, chatty(), data=data, folder=tmp_path / "none", steps=1, store_states=False, **options
    )
    first, last = next(fit.read_log(tmp_path / "none")), looks[-1]
    assert [one for one in looks if isinstance(one, int)] == list(range(1, 41))
    assert last.acceptance[0] > first.acceptance[0] + 0.2
    assert fit.predicted([0.5, 0.5]) == 1.75
    batch = prompts([4, 2], vocab_size=V)
    plain = jspec.generate(LONG, *batch, max_new_tokens=24)
    for one in (drafter, untrained):
        out = jspec.speculative_generate(LONG, one, *batch, max_new_tokens=24, accept="coupled")
        np.testing.assert_array_equal(out.tokens, plain.tokens)
