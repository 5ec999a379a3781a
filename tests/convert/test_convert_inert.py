"""Common config.json fields that change nothing: the logits equal those of transformers."""

import logging
import re

import jax
import numpy as np
import pytest

import convert
import jspec
from convert import notes, parse_config
from support.checkpoints import MISTRAL, QWEN2, QWEN3, raw_config
from support.families import checkpoint, hf_logits, twin

OLD = {"rope_parameters": ..., "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}


def yarn(**fields):
    return QWEN3 | OLD | {"rope_scaling": YARN | fields}


INERT = {
    **{f"pretraining_tp {value}": {"pretraining_tp": value} for value in (2, 8, 0, None)},
    "yarn, finetuned": yarn(finetuned=True),
    "yarn, attn_factor": yarn(attn_factor=0.8782488562869419),
    "yarn, attn_factor and attention_factor": yarn(attn_factor=0.5, attention_factor=1.25),
    "yarn, extrapolation_factor": yarn(extrapolation_factor=0.5),
    "yarn, mscale alone": yarn(mscale=0.7),
    "yarn, mscale_all_dim alone": yarn(mscale_all_dim=0.7),
    "yarn, mscale_all_dim 0": yarn(mscale=0.7, mscale_all_dim=0.0),
    "yarn, both mscales": yarn(mscale=1.4, mscale_all_dim=0.7),
    "yarn, mscales and attention_factor": yarn(mscale=1.4, mscale_all_dim=0.7, attention_factor=1.1),
    "yarn, attention_factor null": yarn(attention_factor=None),
    "yarn, betas null": yarn(beta_fast=None, beta_slow=None),
    "yarn, betas 0": yarn(beta_fast=0, beta_slow=0),
    "yarn, betas": yarn(beta_fast=16, beta_slow=2),
    "yarn, truncate false": yarn(truncate=False),
    "yarn, truncate null": yarn(truncate=None),
    "yarn, factor null": yarn(factor=None),
    "yarn, factor less than 1": yarn(factor=0.5),
    "yarn, keys of others": yarn(dynamic=True, alpha=2.0, low_freq_factor=1.0, mrope_section=[2, 3, 3], note="x"),
    "yarn, llama_4_scaling_beta": MISTRAL
    | {"rope_parameters": YARN | {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}},
    "yarn, type and rope_type": yarn(type="yarn"),
    "type is not rope_type": yarn(type="linear"),
    "yarn, the original length outside": QWEN3
    | OLD
    | {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
    "yarn, no original length": QWEN3 | OLD | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "rope_scaling and rope_parameters that differ": QWEN3
    | {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN},
    "rope_scaling and rope_parameters alike": QWEN3
    | {"rope_theta": 1e6, "rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": YARN},
    "rope_scaling is empty": QWEN3 | {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": {}},
    "rope_parameters is empty": QWEN3 | {"rope_theta": 1e6, "rope_parameters": {}, "rope_scaling": YARN},
    "rope_scaling is null": OLD | {"rope_scaling": None},
    "linear, keys of others": OLD
    | {"rope_scaling": {"type": "linear", "factor": 2.0, "truncate": True, "beta_fast": 8}},
    "default, keys of others": OLD
    | {"rope_scaling": {"rope_type": "default", "factor": 8.0, "mrope_section": [1, 1, 2]}},
    "llama3, keys of others": OLD
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "attn_factor": 2.0,
        }
    },
    "partial_rotary_factor 1": {"partial_rotary_factor": 1.0},
    "partial_rotary_factor 1 in the section": OLD
    | {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}},
    "a window longer than the text, llama": {"sliding_window": 64},
    "a window as long as the text, llama": {"sliding_window": 32},
    "windows that are off, qwen2": QWEN2 | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    "windows from a layer on that is not there, qwen2": QWEN2 | SLIDING | {"max_window_layers": 2},
    "windows from a layer on by default, qwen3": QWEN3 | SLIDING,
    "all layers full, qwen3": QWEN3 | SLIDING | {"max_window_layers": 0, "layer_types": ["full_attention"] * 2},
    "code of its own": {"auto_map": {"AutoModelForCausalLM": "modeling.Other", "AutoConfig": "configuration.Other"}},
    "quantization_config null": {"quantization_config": None},
    "head_dim null": {"head_dim": None},
    "what tools add": {
        "_name_or_path": "x/y",
        "_attn_implementation_autoset": True,
        "attn_implementation": "eager",
        "unsloth_fixed": True,
        "unsloth_version": "2025.1",
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"dtype": "q4"},
        "transformers_version": "4.40.0",
        "use_cache": False,
        "attention_dropout": 0.1,
        "initializer_range": 0.5,
        "pad_token_id": -1,
        "tokenizer_class": "X",
        "model_max_length": 5,
        "rope_interleaved": False,
        "z_loss": 1e-4,
        "output_attentions": False,
        "return_dict": True,
        "gradient_checkpointing": False,
        "vocab_padding": 3,
    },
    "ids in lists": {"eos_token_id": [2, 5], "pad_token_id": None},
    "no ids": {"bos_token_id": None, "eos_token_id": None},
}


@pytest.mark.parametrize("name", INERT)
def test_logits_match_transformers(name, tmp_path, quick_compile):
    folder = checkpoint(tmp_path / "hf", **INERT[name])
    model = jspec.load(folder, dtype=np.float32)
    tokens = np.random.default_rng(1).integers(0, 97, (2, 32)).astype(np.int32)
    assert model.config.max_position_embeddings >= 32
    logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens))
    assert np.abs(logits - hf_logits(twin(folder), tokens)).max() <= 1e-4


WARNINGS = {
    "attn_factor": (
        "yarn, attn_factor",
        r'attn_factor 0.878\d* .* vLLM does, set "attention_factor" to 1.0 in the rope',
    ),
    "extrapolation_factor": ("yarn, extrapolation_factor", "extrapolation_factor 0.5 is ignored, as in transformers"),
    "mscale": ("yarn, mscale alone", r'mscale 0.7 .* to use it alone, set "attention_factor" to 1.097041 in the rope'),
    "beta": ("yarn, llama_4_scaling_beta", "llama_4_scaling_beta 0.1 is ignored"),
    "types": ("type is not rope_type", "type 'linear' of the rope section is ignored beside rope_type 'yarn'"),
    "sections": ("rope_scaling and rope_parameters that differ", "rope_parameters is ignored beside rope_scaling"),
    "code": ("code of its own", "auto_map names code in the checkpoint, which is not run"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_fields_other_programs_may_read_cause_warning(name):
    case, message = WARNINGS[name]
    (warning,) = notes.warnings(raw_config(**INERT[case]))
    assert re.search(message, warning)


def test_other_inert_fields_cause_no_warning():
    ambiguous = {case for case, _ in WARNINGS.values()} | {"yarn, mscale_all_dim 0"}
    for name in INERT.keys() - ambiguous:
        assert not list(notes.warnings(raw_config(**INERT[name]))), name


def test_advised_attention_factor_removes_warning():
    """The advised value is the product of both factors, as in vLLM; setting it removes the warning."""
    product = 0.8 * parse_config(raw_config(**yarn())).rope.attention_factor
    (warning,) = notes.warnings(raw_config(**yarn(attn_factor=0.8)))
    value = float(re.search(r'"attention_factor" to ([\d.]+) in', warning)[1])
    assert value == pytest.approx(product, abs=1e-6)
    edited = raw_config(**yarn(attn_factor=0.8, attention_factor=value))
    assert parse_config(edited).rope.attention_factor == value and not list(notes.warnings(edited))


def test_warnings_name_file_and_appear_once(tmp_path, caplog):
    folder = checkpoint(tmp_path / "hf", **yarn(attn_factor=0.5, finetuned=True))
    with caplog.at_level(logging.INFO, "jspec"):
        convert.read_config(folder)
        convert.load(folder)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    assert caplog.messages[0].startswith(f"{folder / 'config.json'}: attn_factor 0.5 is ignored")
    assert caplog.messages[1].endswith("ignoring finetuned of the rope section, as transformers does.")
