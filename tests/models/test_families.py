"""Mistral, Qwen2, Qwen3 and yarn: logits and greedy output match transformers; unsupported configs are rejected."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert
import jspec
from convert import CheckpointError, parse_config
from jspec.models.rope import rope_frequencies, rope_tables
from support.checkpoints import MISTRAL, QWEN2, QWEN3, make, raw_config
from support.families import checkpoint, hf_logits, twin

OLD = {"rope_parameters": ..., "rope_theta": 1e6}  # as before transformers 5
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
SIZES = {"hidden_size": 48, "head_dim": 16, "vocab_size": 83}  # 4 heads of 16: more than the hidden size
SHAPES = {
    "mistral": MISTRAL | SIZES,
    "mistral, a window as long as the text": MISTRAL | {"sliding_window": 32, "num_key_value_heads": 4},
    "mistral, tied, one group": MISTRAL | OLD | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "mistral, yarn": MISTRAL | SIZES | {"rope_parameters": YARN},
    "qwen2": QWEN2 | SIZES,
    "qwen2, no group shared": QWEN2 | {"num_key_value_heads": 4, "head_dim": ..., "sliding_window": 4},
    "qwen2, tied, one group": QWEN2 | OLD | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2, a window as long as the text": QWEN2 | SIZES | WINDOW,
    "qwen2, yarn as before": QWEN2
    | OLD
    | {"rope_scaling": {"type": "yarn", "factor": 8.0} | {"original_max_position_embeddings": 16}},
    "qwen3": QWEN3 | SIZES,
    "qwen3, biases, tied": QWEN3 | SIZES | {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3, one group": QWEN3 | OLD | {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
    "qwen3, no group shared": QWEN3 | SIZES | {"num_key_value_heads": 4},
    "qwen3, yarn": QWEN3 | {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}},
    "llama, yarn": {"rope_parameters": YARN | {"attention_factor": 1.7, "beta_fast": 8, "beta_slow": 2}},
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_match_transformers(name, tmp_path, quick_compile, report):
    folder = checkpoint(tmp_path / "hf", **SHAPES[name])
    model = jspec.load(folder, dtype=np.float32)
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (3, 32)).astype(np.int32)
    expected = hf_logits(twin(folder), tokens)
    logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens))
    difference, agree = np.abs(logits - expected).max(), (logits.argmax(-1) == expected.argmax(-1)).mean()
    report(max_difference=f"{difference:.1e}", argmax=f"{agree:.1%}", logits_std=f"{expected.std():.2f}")
    assert difference <= 1e-4
    assert agree == 1


DRAFTERS = {
    "mistral": lambda folder: jspec.NGramDrafter(1, 1),
    "qwen2": lambda folder: jspec.EarlyExitDrafter(1),
    "qwen3": lambda folder: jspec.load(folder, dtype="bfloat16"),
}


@pytest.mark.parametrize("family", DRAFTERS)
def test_greedy_text_matches_transformers(family, tmp_path, quick_compile, report):
    new, folder = 16, checkpoint(tmp_path / "hf", **SHAPES[family])
    model, theirs = jspec.load(folder, dtype=np.float32), twin(folder)
    tokens, lengths = np.random.default_rng(2).integers(0, 83, (3, 7)).astype(np.int32), np.array([7, 4, 1])
    options = {"max_new_tokens": new, "num_draft_tokens": 3, "sampling": jspec.SamplingParams(temperature=0)}
    batch = tokens, lengths, jax.random.split(jax.random.key(0), 3)
    out = jspec.speculative_generate(model, DRAFTERS[family](folder), *batch, **options)
    for row, length, text in zip(tokens, lengths, np.asarray(out.tokens), strict=True):
        expected = list(row[:length])
        for _ in range(new):
            expected.append(hf_logits(theirs, [expected])[0, -1].argmax())
        assert text.tolist() == expected[length:]
    accepted, drafted = int(out.stats.accepted.sum()), int(out.stats.drafted.sum())
    report(accepted=accepted, drafted=drafted)
    assert accepted > 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_quantisation_keeps_norms_and_biases(family, tmp_path):
    folder = checkpoint(tmp_path / "hf", **SHAPES[family])
    exact, rounded = jspec.load(folder, dtype=np.float32), jspec.load(folder, dtype=np.float32, quantize="int8")
    for one, other in zip(exact.layers, rounded.layers, strict=True):
        assert [part.format for part in other.self_attn.qkv_proj.parts] == ["int8"]
        for part in ("qkv_proj.bias",) if family == "qwen2" else ("q_norm.weight", "k_norm.weight"):
            owner, leaf = part.split(".")
            pair = (getattr(getattr(layer.self_attn, owner), leaf) for layer in (one, other))
            np.testing.assert_array_equal(*(array[...] for array in pair))


def test_text_length_is_limited_by_sliding_window(tmp_path):
    model = jspec.load(make(tmp_path / "hf", **MISTRAL | {"sliding_window": 8}), dtype=np.float32)
    batch = np.array([[1, 2, 3]]), np.array([3]), jax.random.split(jax.random.key(0), 1)
    assert jax.eval_shape(lambda: jspec.generate(model, *batch, max_new_tokens=5)).tokens.shape == (1, 5)
    with pytest.raises(ValueError, match=r"need 9 positions, but the target model has 8; .* its sliding window if"):
        jspec.generate(model, *batch, max_new_tokens=6)


# ---- yarn


def yarn_sections():
    """Yield random yarn sections, each with some of the optional fields, and head sizes."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        section = {
            "rope_type": "yarn",
            "rope_theta": float(10 ** rng.uniform(1, 7)),
            "factor": rng.uniform(0.5, 40),
            "original_max_position_embeddings": int(rng.integers(1, 5000)),
        }
        optional = {
            "attention_factor": rng.uniform(0.5, 2),
            "mscale": rng.uniform(0.1, 2),
            "truncate": False,
            "mscale_all_dim": rng.uniform(0.1, 2),
            "beta_fast": rng.uniform(8, 64),
            "beta_slow": rng.uniform(0.1, 8),
        }
        section |= {name: value for name, value in optional.items() if rng.random() < 0.5}
        if rng.random() < 0.2:
            del section["original_max_position_embeddings"]
        yield section, int(rng.choice([8, 16, 64, 128]))


@pytest.mark.filterwarnings("ignore")
def test_yarn_frequencies_and_scale_match_transformers(report):
    pytest.importorskip("torch")
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    worst, scaled = 0.0, 0
    for section, head_dim in yarn_sections():
        raw = raw_config(**QWEN3 | {"head_dim": head_dim, "rope_parameters": section})
        rope = parse_config(raw).rope
        frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](Qwen3Config(**json.loads(json.dumps(raw))))
        worst = max(worst, np.abs(rope_frequencies(rope, head_dim) / frequencies.numpy() - 1).max())
        assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
        cosines, _ = rope_tables(jnp.zeros((1, 1), jnp.int32), rope, head_dim)
        np.testing.assert_allclose(cosines, np.float32(factor), rtol=1e-6)
        scaled += factor != 1
    report(sections=200, scaled=scaled, largest_relative_difference=f"{worst:.1e}")
    assert worst < 2e-6


# ---- config.json

# Configs as published, except for the sizes.
SHRUNK = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
COMMON = SHRUNK | {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
QWEN = COMMON | {"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_sliding_window": False, "bos_token_id": 151643}
QWEN25 = QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "transformers_version": "4.40.1"}
QWEN3_REAL = QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "sliding_window": None,
    "transformers_version": "4.51.0",
    "eos_token_id": 151645,
}
MISTRAL_REAL = COMMON | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
PUBLISHED = {
    "Mistral-7B-v0.1": (
        MISTRAL_REAL | {"rope_theta": 10000.0, "sliding_window": 4096, "transformers_version": "4.34.0.dev0"},
        4096,
    ),
    "Mistral-7B-v0.3": (
        MISTRAL_REAL | {"rope_theta": 1000000.0, "sliding_window": None, "transformers_version": "4.42.0.dev0"},
        32768,
    ),
    "Qwen2.5-0.5B": (
        QWEN25
        | {
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
            "eos_token_id": 151643,
        },
        32768,
    ),
    "Qwen2.5-7B": (
        QWEN25
        | {
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "use_mrope": False,
            "eos_token_id": 151643,
        },
        131072,
    ),
    "Qwen2.5-7B-Instruct, long": (
        QWEN25
        | {
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "sliding_window": 131072,
            "eos_token_id": 151645,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
        131072,
    ),
    "Qwen3-0.6B": (QWEN3_REAL | {"max_window_layers": 28, "tie_word_embeddings": True}, 40960),
    "Qwen3-8B": (QWEN3_REAL | {"max_window_layers": 36, "tie_word_embeddings": False}, 40960),
}
LEFT_OUT = {
    "mistral": ("head_dim", "num_key_value_heads", "tie_word_embeddings", "sliding_window", "rope_parameters"),
    "qwen2": ("head_dim", "num_key_value_heads", "tie_word_embeddings", "use_sliding_window", "rope_parameters"),
    "qwen3": ("head_dim", "num_key_value_heads", "tie_word_embeddings", "attention_bias", "rope_parameters"),
}


def check_against_transformers(raw, folder):
    """Compare every field that both configs have, with `raw` as transformers reads it from disk; return our config."""
    transformers = pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    ours, theirs = parse_config(raw), transformers.AutoConfig.from_pretrained(folder)
    for name in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size", "bos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.rope.theta, ours.rope.kind) == tuple(theirs.rope_parameters[f"rope_{x}"] for x in ("theta", "type"))
    if ours.rope.kind != "yarn":  # transformers then has no limit
        assert ours.max_position_embeddings == min(theirs.max_position_embeddings, theirs.sliding_window or 10**9)
    return ours


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_parsed(name, tmp_path):
    raw, longest = PUBLISHED[name]
    ours = check_against_transformers(raw, tmp_path)
    assert ours.max_position_embeddings == longest
    assert (ours.qkv_bias, ours.qk_norm) == ("Qwen2" in name, "Qwen3" in name)
    assert not ours.attention_bias and not ours.mlp_bias
    assert ours.eos_token_ids == (raw["eos_token_id"],)


@pytest.mark.parametrize("family", LEFT_OUT)
def test_missing_fields_have_defaults_of_transformers(family, tmp_path):
    changes = {"max_position_embeddings": 1 << 15, "num_attention_heads": 32, "hidden_size": 64}
    check_against_transformers(raw_config(**SHAPES[family] | changes | dict.fromkeys(LEFT_OUT[family], ...)), tmp_path)


def test_null_key_value_heads_default_to_attention_heads(tmp_path):
    for family in ("qwen2", "qwen3"):  # transformers rejects it in Mistral
        check_against_transformers(raw_config(**SHAPES[family] | {"num_key_value_heads": None}), tmp_path)


SLIDING = ["full_attention", "sliding_attention"]
REFUSED = {
    "a classifier": (QWEN2 | {"architectures": ["Qwen2ForSequenceClassification"]}, "'qwen2' with .'Qwen2ForCausalLM'"),
    "another's class": (QWEN3 | {"architectures": ["Qwen2ForCausalLM"]}, "model_type is 'qwen3' and architectures"),
    "gelu": (MISTRAL | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "no window": (MISTRAL | {"sliding_window": 0}, "sliding_window is 0; expected a positive integer"),
    "text for a window": (QWEN2 | WINDOW | {"sliding_window": "8"}, "sliding_window is '8'"),
    "text for a flag": (QWEN2 | {"use_sliding_window": "no"}, "use_sliding_window is 'no'"),
    **{
        f"a sliding layer of {raw['model_type']}": (
            raw | {"layer_types": SLIDING},
            "layer_types is .*sliding_attention",
        )
        for raw in ({"model_type": "llama"}, MISTRAL, QWEN2, QWEN3)
    },
    "too few layer types": (QWEN3 | {"layer_types": ["full_attention"]}, "in each of the 2 layers"),
    "text for layer types": (QWEN3 | {"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
    "positions in three axes": (QWEN2 | {"use_mrope": True}, "use_mrope is True"),
    "uneven groups": (QWEN2 | {"num_key_value_heads": ...}, "not a multiple of num_key_value_heads 32"),
    "odd heads": (QWEN3 | {"head_dim": 15}, "head_dim is 15"),
    "no norm": (QWEN3 | {"rms_norm_eps": ...}, "rms_norm_eps is missing"),
    **{
        f"yarn, {name} {value!r}": ({"rope_parameters": YARN | {name: value}}, message)
        for name, value, message in (
            ("factor", "4", "factor is '4'"),
            ("attention_factor", 0, "attention_factor is 0; expected a positive number"),
            ("mscale", -1.0, "mscale is -1.0"),
            ("beta_fast", True, "beta_fast is True"),
            ("beta_slow", 33, "beta_fast must not be less than beta_slow"),
            ("truncate", "no", "truncate is 'no'; expected true or false"),
            ("original_max_position_embeddings", 8.5, "original_max_position_embeddings is 8.5"),
            ("rope_theta", 1.0, "rope_theta is 1.0; yarn needs a value above 1"),
        )
    },
    "yarn, two lengths": ({"rope_parameters": YARN, "original_max_position_embeddings": 32}, r"given as \[16, 32\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_config_is_rejected(name):
    changes, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message) as error:
        parse_config(raw_config(**changes))
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (QWEN2, MISTRAL, r"unexpected model\.layers\.0\.self_attn\.k_proj\.bias"),
        (MISTRAL, QWEN2, r"lacks model\.layers\.0\.self_attn\.k_proj\.bias"),
        (QWEN3, MISTRAL | {"head_dim": 16}, r"unexpected model\.layers\.0\.self_attn\.k_norm"),
        (QWEN2 | {"head_dim": 16}, QWEN3, r"lacks .*self_attn\.k_norm\.weight"),
    ],
)
def test_weights_of_different_family_are_rejected(one, other, message, tmp_path):
    folder = checkpoint(tmp_path / "hf", **one)
    (folder / "config.json").write_text(json.dumps(raw_config(**other)), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        convert.load(folder)


def test_config_is_plain_llama_by_default():
    plain = parse_config(raw_config())
    assert (plain.qkv_bias, plain.qk_norm) == (False, False)
    assert dataclasses.replace(plain, qkv_bias=True) == parse_config(raw_config(**QWEN2))
