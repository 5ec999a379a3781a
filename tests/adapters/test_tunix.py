"""`JSpecRollout` agrees with tunix's vanilla worker on the same weights. bash tests/clients/run runs these tests."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jspec
from support import text_pair

pytest.importorskip("tunix")

from flax import nnx

with warnings.catch_warnings(action="ignore"):  # tunix imports names that JAX deprecates
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common, rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from jspec.adapters.tunix import JSpecRollout
from jspec.adapters.tunix_weights import hugging_face_weights, llama_from_tunix

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.filterwarnings("ignore"),  # of tunix and of the packages that it needs
]
SIZES = {"num_layers": 2, "vocab_size": 261, "embed_dim": 32, "hidden_dim": 48}
SIZES |= {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "norm_eps": 1e-5}
KINDS = {
    "llama3": (llama3, "Llama3", {"rope_theta": 500_000, "weight_tying": False}),
    "llama3 tied": (llama3, "Llama3", {"rope_theta": 500_000, "weight_tying": True}),
    "qwen2": (qwen2, "Qwen2", {"rope_theta": 10_000}),
    "qwen3": (qwen3, "Qwen3", {"rope_theta": 5_000_000, "use_tied_embedding": True}),
}
PROMPTS = ["the thing", "in a", "the thing in a thing, the thing in a", "x"]
CONFIG = {"max_tokens_to_generate": 12, "max_prompt_length": 40, "kv_cache_size": 64, "return_logprobs": True}
# VanillaRollout decodes greedily if top_p is None, and JSpecRollout if the temperature is 0.
GREEDY = RolloutConfig(temperature=0.0, top_p=None, **CONFIG)


def randomise(module, seed=0):
    """Replace all weights, of which tunix initialises some with zeros, so that distributions are peaked."""
    state = nnx.state(module, nnx.Param)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    new = [
        (1.0 if leaf.shape == (SIZES["embed_dim"],) else 0.0) + 0.25 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    nnx.update(module, jax.tree.unflatten(structure, new))


def module_of(kind, seed=0):
    source, name, changes = KINDS[kind]
    module = getattr(source, name)(source.ModelConfig(**SIZES, **changes), rngs=nnx.Rngs(0))
    randomise(module, seed)
    return module


def tokenizer():
    found = text_pair.tokenizer()
    found.pad_token = found.convert_ids_to_tokens(1)
    return TokenizerAdapter(found)


def vanilla(module):
    return VanillaRollout(module, tokenizer(), CacheConfig(64, SIZES["num_layers"], 2, 8))


def check_same(ours, theirs):
    """Check that both workers have generated the same, and score it equally."""
    assert ours.text == theirs.text
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens)
    for mine, other in zip(ours.tokens, theirs.tokens, strict=True):
        np.testing.assert_array_equal(mine, other)
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind):
    module = module_of(kind)
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, SIZES["vocab_size"])
    positions, mask = jnp.tile(jnp.arange(24), (2, 1)), jnp.tile(jnp.tril(jnp.ones((24, 24), bool)), (2, 1, 1))
    theirs, _ = module(tokens, positions, None, mask)
    np.testing.assert_allclose(llama_from_tunix(module)(tokens), theirs, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
@pytest.mark.parametrize("draft", [None, "lookup", "retrieval"])
def test_greedy_roll_outs_and_updates(kind, draft):
    """Both workers generate the same, also after the weights have changed; the second call drafts from the first."""
    module, source = module_of(kind), module_of(kind)
    target = llama_from_tunix(module_of(kind, 2))  # the worker replaces these weights
    draft = {"lookup": jspec.NGramDrafter(), "retrieval": jspec.online.Retrieval(target, 256)}.get(draft)
    ours, theirs = JSpecRollout(module, tokenizer(), target=target, draft=draft), vanilla(module)
    before = [ours.generate(PROMPTS, GREEDY) for _ in range(2)]
    for found in before:
        check_same(found, theirs.generate(PROMPTS, GREEDY))
    if draft is not None:
        assert ours.last_output.stats.accepted.sum() > 0
    randomise(source, 1)
    for worker in (ours, theirs):
        worker.update_params(nnx.state(source, nnx.Param))
    after = ours.generate(PROMPTS, GREEDY)
    check_same(after, theirs.generate(PROMPTS, GREEDY))
    assert after.text != before[0].text


@pytest.mark.parametrize("keep_eos", [False, True])
def test_ends(keep_eos):
    """A row ends at the first end token, which vanilla leaves out. `keep_eos` adds it, but not to the text."""
    module = module_of("qwen2")
    free = vanilla(module).generate(PROMPTS, GREEDY)
    ends = sorted({int(free.tokens[0][3]), int(free.tokens[1][0])})
    config = RolloutConfig(temperature=0.0, top_p=None, eos_tokens=ends, **CONFIG)
    theirs = vanilla(module).generate(PROMPTS, config)
    ours = JSpecRollout(module, tokenizer(), draft=jspec.NGramDrafter(), keep_eos=keep_eos).generate(PROMPTS, config)
    if not keep_eos:
        return check_same(ours, theirs)
    assert ours.text == theirs.text
    for mine, other, scores in zip(ours.tokens, theirs.tokens, ours.logprobs, strict=True):
        np.testing.assert_array_equal(mine[: len(other)], other)
        assert len(scores) == len(mine) and (len(other) == 12 or (len(mine) == len(other) + 1 and mine[-1] in ends))


def test_log_probabilities_of_tokens():
    """The scores agree wherever there is a token, also if prompts contain padding tokens between others."""
    module = module_of("llama3")
    ours, theirs = JSpecRollout(module, tokenizer()), vanilla(module)
    prompts = np.array(jax.random.randint(jax.random.key(1), (3, 9), 2, SIZES["vocab_size"]))
    completions = np.array(jax.random.randint(jax.random.key(2), (3, 7), 2, SIZES["vocab_size"]))
    pad = ours.pad_id()
    prompts[0, :4], prompts[1, 3], completions[1, 5:], completions[2, 1:] = pad, pad, pad, pad
    found, expected = (np.array(worker.get_per_token_logps(prompts, completions)) for worker in (ours, theirs))
    real = completions != pad
    np.testing.assert_allclose(found[real], expected[real], atol=1e-4)
    assert (found[~real] == 0).all()


def test_padding_tokens_in_prompts():
    """A padding token in a prompt is ignored, as tunix's learners and vanilla do."""
    module, text = module_of("qwen3"), tokenizer()
    prompts = [f"the{text.pad_token} thing", "in a"]
    check_same(JSpecRollout(module, text).generate(prompts, GREEDY), vanilla(module).generate(prompts, GREEDY))


def test_sampling():
    """Calls with one seed differ, and repeat in a new worker; scores are those of tunix; filters are applied.

    As with the tokenizers of Llama 3, the padding token is EOS.
    """
    module, text = module_of("llama3"), text_pair.tokenizer()
    config = RolloutConfig(temperature=0.7, seed=jax.random.PRNGKey(3), **CONFIG)
    group = [PROMPTS[0]] * 4 + [PROMPTS[1]] * 4
    workers = [JSpecRollout(module, text, draft=jspec.NGramDrafter()) for _ in range(2)]
    first, second = ([worker.generate(group, config) for _ in range(2)] for worker in workers)
    assert [found.text for found in first] == [found.text for found in second]
    assert first[0].text != first[1].text and len(set(first[0].text[:4])) > 1
    top = RolloutConfig(temperature=0.7, top_k=1, **CONFIG)
    assert workers[0].generate(PROMPTS, top).text == workers[0].generate(PROMPTS, GREEDY).text
    found = first[0]
    completions = np.array([np.pad(row, (0, 12 - len(row))) for row in found.tokens])
    prompts = found.left_padded_prompt_tokens
    expected = common.compute_per_token_logps(*nnx.split(module), prompts, completions, 0, 0, temperature=0.7)
    for row, scores, theirs in zip(found.tokens, found.logprobs, expected, strict=True):
        np.testing.assert_allclose(scores, theirs[: len(row)], atol=1e-4)


def test_own_weights_replace_each_other():
    """A state of `jspec.Llama` replaces that of another."""
    old, new = (llama_from_tunix(module_of("qwen2", seed)) for seed in (0, 1))
    worker = JSpecRollout(new, tokenizer(), target=old)
    tokens = jnp.arange(8)[None]
    np.testing.assert_array_equal(worker.target(tokens), new(tokens))
    assert worker.target is old


def test_quantised_target():
    """An update quantises again, also while tunix forbids transfers."""
    module, source = module_of("llama3"), module_of("llama3", 1)
    worker = JSpecRollout(module, tokenizer(), target=jspec.quantize(llama_from_tunix(module)))
    params = nnx.state(source, nnx.Param)
    with jax.transfer_guard_device_to_host("disallow_explicit"), jax.transfer_guard_host_to_device("disallow_explicit"):
        worker.update_params(params, (nnx.Param,))
    tokens = jnp.arange(8)[None]
    np.testing.assert_array_equal(worker.target(tokens), jspec.quantize(llama_from_tunix(source))(tokens))


def test_errors():
    module = module_of("llama3")
    params = nnx.state(module, nnx.Param)
    params["layers"][0]["attn"]["q_proj"]["w_lora_a"] = nnx.Param(jnp.zeros((32, 2)))
    with pytest.raises(ValueError, match=r"include layers.0.attn.q_proj.w_lora_a, which jspec does not know"):
        hugging_face_weights(params)
    with pytest.raises(ValueError, match="is a Linear; pass one of tunix's Llama3, Qwen2, Qwen3"):
        llama_from_tunix(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="got images; pass only prompts"):
        JSpecRollout(module, tokenizer()).generate(["the"], GREEDY, images=[])
    with pytest.raises(ValueError, match=r"unexpected shapes: embed_tokens\.weight"):
        small = llama3.Llama3(llama3.ModelConfig(**SIZES | {"vocab_size": 300}, rope_theta=1), rngs=nnx.Rngs(0))
        JSpecRollout(llama_from_tunix(small), tokenizer(), target=llama_from_tunix(module))


def test_grpo_step():
    """Two steps of tunix's GRPO learner roll out with jspec, and update the weights of its target."""
    module, reference = module_of("llama3"), module_of("llama3")
    target = llama_from_tunix(module)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    engine = functools.partial(JSpecRollout, target=target, draft=jspec.online.Retrieval(target, 256), keep_eos=True)
    cluster = rl_cluster.RLCluster(
        actor=module,
        reference=reference,
        tokenizer=tokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: mesh for role in rl_cluster.Role},
            rollout_engine=engine,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.sgd(0.1), eval_every_n_steps=10, max_steps=2
            ),
            rollout_config=RolloutConfig(temperature=1.0, **CONFIG),
        ),
    )
    learner = grpo_learner.GRPOLearner(
        cluster,
        grpo_learner.GRPOConfig(num_generations=4, num_iterations=2),
        reward_fns=lambda prompts, completions, **_: [float(len(set(text))) for text in completions],
    )
    before = np.array(target.embed_tokens.weight[...])
    learner.train([{"prompts": np.array(["the thing", "in a"])}] * 2)
    assert cluster.rollout.last_output.tokens.shape == (8, 12)
    trained = cluster.actor_trainer.model
    assert np.abs(np.array(target.embed_tokens.weight[...]) - before).max() > 1e-6
    tokens = jax.random.randint(jax.random.key(1), (1, 16), 0, SIZES["vocab_size"])
    np.testing.assert_array_equal(target(tokens), llama_from_tunix(trained)(tokens))
