"""Calls from JAX programs: traced parameters, arrays still being computed, export, pickling, gradients."""

import dataclasses
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import nnx

import jspec
from jspec.core.sampling import target_transforms
from jspec.engine import Engine, Request, weights
from support import heads, toys

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, max_position_embeddings=40)
KEYS = jax.random.split(jax.random.key(0), 2)
TOKENS, LENGTHS = np.ones((2, 24), np.int32), np.array([24, 10])
REFUSED = "positions, but the target model has 40"


@pytest.fixture
def busy(monkeypatch):
    """Make every array appear to be still being computed; reading one fails the test."""
    monkeypatch.setattr(jax, "device_get", lambda x: pytest.fail("a check has waited for its values"))
    monkeypatch.setattr(type(jnp.zeros(())), "is_ready", lambda x: False)


def generate(**options):
    return jspec.generate(TARGET, **{"tokens": TOKENS, "lengths": LENGTHS, "keys": KEYS, "max_new_tokens": 3} | options)


def test_call_does_not_wait_for_its_inputs(busy):
    arrays = {"tokens": jnp.asarray(TOKENS), "lengths": jnp.asarray(LENGTHS), "eos_ids": jnp.array([2])}
    fields = {"temperature": jnp.float32(0.5), "max_tokens": jnp.array([2, 3]), "logit_bias": jnp.zeros(8)}
    generate(**arrays, pad_id=jnp.int32(0), sampling=jspec.SamplingParams(**fields))


def test_computed_arrays_are_validated():
    with pytest.raises(ValueError, match="outside the vocabulary"):
        generate(tokens=jax.block_until_ready(jnp.full((2, 24), 8)))


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"max_new_tokens": 39}, False),
        ({"max_new_tokens": 40}, True),
        ({"max_new_tokens": 64}, True),
        ({"max_new_tokens": 64, "sampling": jspec.SamplingParams(max_tokens=np.array([3, 3]))}, False),
        ({"max_new_tokens": 64, "sampling": jspec.SamplingParams(max_tokens=np.array([3, 0]))}, True),
    ],
)
def test_length_limits_are_checked_inside_jit(options, refused):
    """Inside jit, a prompt is known only to have at least one token."""

    def call(tokens, lengths, keys):
        return generate(tokens=tokens, lengths=lengths, keys=keys, **options)

    shapes = TOKENS, LENGTHS, KEYS
    if not refused:
        jax.eval_shape(call, *shapes)
        return
    with pytest.raises(ValueError, match=f"A prompt of at least 1 token .* {REFUSED}"):
        jax.eval_shape(call, *shapes)


def test_rows_may_have_their_own_length_limits():
    limits = jspec.SamplingParams(max_tokens=[16, 30])
    assert generate(max_new_tokens=30, sampling=limits).lengths.tolist() == [16, 30]
    for max_tokens, row in (([17, 30], 0), ([16, 31], 1), ([0, 1], 0)):
        with pytest.raises(ValueError, match=f"Prompt {row} of .* {REFUSED}"):
            generate(max_new_tokens=31, sampling=jspec.SamplingParams(max_tokens=max_tokens))


def test_traced_parameters_omit_disabled_filters():
    """A field at its default is not a child of the pytree, for any number type."""
    seen = []

    @jax.jit
    def call(sampling):
        seen.append(target_transforms(sampling))
        return sampling

    same = call(jspec.SamplingParams(temperature=0.7, top_p=1, top_k=np.int64(0)))
    assert (same.top_k, same.top_p, same.max_tokens, same.logit_bias) == (0, 1.0, 0, None)
    assert {name for name, value in vars(seen[0]).items() if value is not None} == {"temperature"}
    call(jspec.SamplingParams(temperature=1.0))  # the same program
    call(jspec.SamplingParams(top_k=4, min_p=jnp.zeros(2)))
    assert {name for name, value in vars(seen[1]).items() if value is not None} == {"temperature", "top_k", "min_p"}
    assert len(seen) == 2


def test_parameters_work_with_vmap_key_paths_and_pickle():
    rows = jax.vmap(lambda sampling: sampling.temperature + sampling.top_k)(
        jspec.SamplingParams(temperature=jnp.ones(2), top_k=jnp.arange(2))
    )
    assert rows.tolist() == [1, 2]
    paths = jax.tree_util.tree_flatten_with_path(jspec.SamplingParams(top_p=0.5))[0]
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [".temperature", ".top_p"]
    params = jspec.SamplingParams(temperature=0.5, min_tokens=2)
    assert pickle.loads(pickle.dumps(params)) == params == jax.tree.map(lambda x: x, params)


def test_parameter_pytree_keeps_its_structure():
    """The structure is the same for any leaves: a `jax.vmap` axis may be 0, which is the default of some fields."""
    params = jspec.SamplingParams(temperature=jnp.ones(2), top_k=jnp.arange(2), top_p=jnp.full(2, 0.5))
    axes, structure = jax.tree.map(lambda _: 0, params), jax.tree.structure(params)
    assert jax.tree.structure(axes) == jax.tree.structure(pickle.loads(pickle.dumps(axes))) == structure
    assert jax.tree.structure(jax.tree.unflatten(structure, [1.0, 0, 1.0])) == structure
    summed = jax.vmap(lambda params, x: params.top_k + x, in_axes=(axes, 0))(params, jnp.ones(2))
    assert summed.tolist() == [1, 2]
    plain = jspec.SamplingParams(temperature=0.5, top_p=1.0)
    replaced = dataclasses.replace(jax.tree.unflatten(structure, [0.5, 0, 0.9]), top_p=1.0)
    assert replaced == plain and jax.tree.structure(replaced) == jax.tree.structure(plain)
    rows = jax.tree.map(lambda x: x, jspec.SamplingParams(temperature=[0.5, 0.0], top_p=[0.5, 1.0]))
    np.testing.assert_array_equal(
        generate(sampling=rows).tokens,
        generate(sampling=jspec.SamplingParams(temperature=np.array([0.5, 0.0]), top_p=np.array([0.5, 1.0]))).tokens,
    )


def test_traced_parameters_give_the_same_text():
    params = jspec.SamplingParams(temperature=0.7, top_p=0.8)
    traced = jax.jit(lambda sampling, *batch: jspec.generate(TARGET, *batch, max_new_tokens=3, sampling=sampling))
    np.testing.assert_array_equal(traced(params, TOKENS, LENGTHS, KEYS).tokens, generate(sampling=params).tokens)


def exported(*shapes):
    def call(tokens, lengths, keys, sampling):
        return jspec.generate(TARGET, tokens, lengths, keys, max_new_tokens=3, sampling=sampling)

    return jax.export.export(jax.jit(call))(*shapes, jspec.SamplingParams(top_k=2))


def test_program_is_exported_and_serialised():
    again = jax.export.deserialize(exported(TOKENS, LENGTHS, KEYS).serialize())
    out = again.call(TOKENS, LENGTHS, KEYS, jspec.SamplingParams(top_k=2))
    assert isinstance(out, jspec.Output)
    np.testing.assert_array_equal(out.tokens, generate(sampling=jspec.SamplingParams(top_k=2)).tokens)


def test_symbolic_shapes_are_rejected():
    (b,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((b, *part.shape[1:]), part.dtype) for part in (TOKENS, LENGTHS, KEYS)]
    with pytest.raises(ValueError, match=r"symbolic shape \(b, 24\), but a decoding program has one fixed shape"):
        exported(*shapes)


def test_reverse_mode_is_an_error_and_forward_mode_works():
    def loss(table):
        out = jspec.generate(toys.MarkovModel(table), TOKENS, LENGTHS, KEYS, max_new_tokens=3)
        return out.logprobs.sum() + out.raw_logprobs.sum()

    table = toys.markov_pair(0)[0].table
    for gradient in (jax.grad(loss), jax.grad(jax.jit(loss)), jax.jit(jax.grad(loss))):
        with pytest.raises(ValueError, match="have no reverse-mode derivative"):
            gradient(table)
    slope = jax.jvp(loss, (table,), (jnp.ones_like(table),))[1]
    np.testing.assert_allclose(slope, 0, atol=1e-4)  # adding a constant to all logits changes no distribution


def test_pickled_learner_continues_identically(prompts):
    """A restored learner learns the same from the next sequences, bit for bit."""
    target = toys.tiny_llama(0)
    learner = jspec.online.Learner(target, heads.medusa(target, 2), depth=2, batch=2, length=16)

    def learn(learner, seed):
        batch = prompts([2, 3, 4], seed=seed, vocab_size=8)
        out = jspec.generate(target, *batch, max_new_tokens=4)
        learner.learn([row[:size].tolist() for row, size in zip(*batch[:2], strict=True)], out)
        return learner.drafter

    learn(learner, 0)  # one of the three sequences is left waiting
    again = pickle.loads(pickle.dumps(learner))
    jax.tree.map(np.testing.assert_array_equal, learn(again, 1), learn(learner, 1))
    assert len(again.scores) == len(learner.scores) == 3


def test_orbax_restores_drafter(tmp_path):
    """Orbax saves the drafter's leaves, as the documentation describes."""
    drafter = heads.medusa(TARGET, 2)
    leaves, structure = jax.tree.flatten(drafter)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "drafter", leaves)
        checkpointer.wait_until_finished()
        again = jax.tree.unflatten(structure, checkpointer.restore(tmp_path / "drafter", leaves))
    jax.tree.map(np.testing.assert_array_equal, drafter, again)


REQUEST = Request((1, 2, 3), 4, jspec.SamplingParams(temperature=0.0))


@pytest.mark.parametrize("changed", ["target", "draft"])
def test_engine_rejects_requests_after_weight_update(changed):
    target = toys.tiny_llama(0)
    draft = toys.tiny_llama(1, 1, related_to=target)
    engine = Engine(target, draft, slots=1, max_length=32, num_draft_tokens=1, chunks=(8,))
    *_, first = engine.stream_sync(REQUEST)
    model = {"target": target, "draft": draft}[changed]
    nnx.update(model, jax.tree.map(lambda x: 0.3 * x, nnx.state(model)))
    calls = [
        lambda: engine.stream_sync(REQUEST),
        lambda: engine.submit(REQUEST, print),
        lambda: engine.generate([REQUEST]),
    ]
    for call in calls:
        with pytest.raises(
            RuntimeError, match=rf"weights of the {changed} have changed, .* call the engine's update\(\)"
        ):
            call()
    engine.update()
    *_, second = engine.stream_sync(REQUEST)
    np.testing.assert_array_equal(
        second.tokens,
        jspec.generate(target, [[1, 2, 3]], [3], KEYS[:1], max_new_tokens=4, sampling=REQUEST.sampling).tokens[0],
    )
    assert len(first.tokens) == 4


def test_engine_accepts_equal_copies_of_its_weights(monkeypatch):
    """A step under `nnx.jit` leaves new arrays even in a model that it only reads."""
    target, draft = toys.tiny_llama(0), toys.tiny_llama(1, 1)
    engine = Engine(target, draft, slots=1, max_length=32, num_draft_tokens=1, chunks=(8,))
    *_, first = engine.stream_sync(REQUEST)
    old = jax.tree.leaves((target, draft))
    nnx.jit(lambda target, draft: None)(target, draft)
    assert all(new is not leaf for new, leaf in zip(jax.tree.leaves((target, draft)), old, strict=True))
    gone = weakref.ref(old[0])
    del old
    *_, second = engine.stream_sync(REQUEST)
    assert second.tokens == first.tokens
    gc.collect()
    assert gone() is None  # the engine keeps one set of weights
    monkeypatch.setattr(weights, "_have_equal_values", None)  # and does not compare them again
    *_, third = engine.stream_sync(REQUEST)
    assert third.tokens == first.tokens


def changed_dtype(x):
    return x.astype(jnp.bfloat16)


def changed_element(x):
    return x.at[(0,) * x.ndim].add(1)


@pytest.mark.parametrize("change", [changed_dtype, changed_element, lambda x: x * jnp.nan, lambda x: x[..., None]])
def test_changed_weights_are_detected(change):
    target = toys.tiny_llama(0)
    engine = Engine(target, slots=1, max_length=32, chunks=(8,))
    nnx.update(target, jax.tree.map(change, nnx.state(target)))
    with pytest.raises(RuntimeError, match="weights of the target have changed"):
        engine.stream_sync(REQUEST)


def test_engine_reports_deleted_weights():
    """The error comes before a request, or in the middle of one, which then ends at once."""
    target = toys.tiny_llama(0)
    engine = Engine(target, slots=1, max_length=32, chunks=(8,), rounds=1)
    results = engine.stream_sync(Request((1, 2, 3), 20))
    next(results)
    for leaf in jax.tree.leaves(target):
        leaf.delete()
    *_, last = results
    assert last.finish_reason == "error" and "Weights were deleted" in last.error
    with pytest.raises(RuntimeError, match="Weights were deleted"):
        engine.stream_sync(REQUEST)
