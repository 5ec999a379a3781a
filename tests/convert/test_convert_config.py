"""Parsing config.json into a `LlamaConfig`: spellings, defaults, and values that are rejected by name."""

import dataclasses
import json

import pytest

import convert
from convert import CheckpointError, LlamaConfig, RopeConfig, parse_config
from support.checkpoints import LLAMA3_ROPE, raw_config

LLAMA3 = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 32)


def _without(section: dict, *keys: str) -> dict:
    return {key: value for key, value in section.items() if key not in keys}


def test_plain_config_is_parsed():
    assert parse_config(raw_config()) == LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(),
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_configs_are_hashable_and_frozen():
    config = parse_config(raw_config())
    assert hash(config) == hash(parse_config(raw_config()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3  # type: ignore[misc]


@pytest.mark.parametrize("value", [None, ...])
def test_missing_fields_of_old_configs_have_defaults(value):
    keys = ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "pretraining_tp", "hidden_act")
    keys += ("rope_parameters", "tie_word_embeddings", "architectures", "bos_token_id", "eos_token_id")
    config = parse_config(raw_config(**dict.fromkeys(keys, value)))
    assert (config.num_key_value_heads, config.head_dim, config.rope) == (4, 8, RopeConfig())
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (False, False, False)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7], (7,)), ([7, 9], (7, 9)), ([], ()), (0, (0,))])
def test_eos_token_id_is_parsed(value, ids):
    assert parse_config(raw_config(eos_token_id=value)).eos_token_ids == ids


@pytest.mark.parametrize(
    ("generation", "ids"),
    [({"eos_token_id": [2, 7]}, (2, 7)), ({"eos_token_id": 7}, (2, 7)), ({"eos_token_id": None}, (2,)), ({}, (2,))],
)
def test_eos_ids_from_generation_config_are_added(tmp_path, generation, ids):
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert convert.read_config(tmp_path).eos_token_ids == ids


@pytest.mark.parametrize(
    ("content", "phrase"), [('{"eos_token_id": "7"}', "eos_token_id is '7'"), ("[7]", "holds a JSON list")]
)
def test_damaged_generation_config_is_rejected(tmp_path, content, phrase):
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"generation_config.json.* {phrase}"):
        convert.read_config(tmp_path)


OLD = {"rope_parameters": ...}
ROPES = {
    "new_default": ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(5e5)),
    "new_theta_only": ({"rope_parameters": {"rope_theta": 5e5}}, RopeConfig(5e5)),
    "new_theta_on_top": ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, RopeConfig(5e5)),
    "new_integer_theta": ({"rope_parameters": {"rope_theta": 500000}}, RopeConfig(5e5)),
    "new_linear": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2}},
        RopeConfig(1e4, "linear", 2.0),
    ),
    "new_llama3": ({"rope_parameters": LLAMA3_ROPE}, LLAMA3),
    "old_theta": (OLD | {"rope_theta": 5e5}, RopeConfig(5e5)),
    "old_null": (OLD | {"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
    "old_type": (OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(1e4, "linear", 2.0)),
    "old_llama3": (OLD | {"rope_theta": 5e5, "rope_scaling": _without(LLAMA3_ROPE, "rope_theta")}, LLAMA3),
    "old_both_names": (
        OLD | {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
        RopeConfig(1e4, "linear", 2.0),
    ),
    "both_agree": (
        {"rope_theta": 5e5, "rope_parameters": LLAMA3_ROPE, "rope_scaling": _without(LLAMA3_ROPE, "rope_theta")},
        LLAMA3,
    ),
    "both_differ": (
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3_ROPE},
        LLAMA3,
    ),
    "types_differ": (
        OLD | {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}},
        RopeConfig(1e4, "linear", 2.0),
    ),
    "empty_scaling": ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {}}, RopeConfig(5e5)),
    "unknown_key": (
        OLD | {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}},
        RopeConfig(1e4, "linear", 2.0),
    ),
    "full_rotary": (
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 1.0}},
        RopeConfig(5e5),
    ),
    "unused_factor": (
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default", "factor": 3.0}},
        RopeConfig(5e5),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_spellings_are_parsed(name):
    changes, expected = ROPES[name]
    assert parse_config(raw_config(**changes)).rope == expected


def _rope(**changes):
    return {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"} | changes}


REFUSED = {
    "another_model": ({"model_type": "gemma"}, "model_type is 'gemma'"),
    "no_word_for_a_model": ({"model_type": ["llama"]}, "model_type is .'llama'"),
    "another_family_s_class": ({"model_type": "mistral"}, "model_type is 'mistral' and architectures is .'LlamaFor"),
    "no_model_type": ({"model_type": ...}, "model_type is None"),
    "another_head": ({"architectures": ["LlamaForSequenceClassification"]}, "only 'llama' with"),
    "base_model": ({"architectures": ["LlamaModel"]}, "architectures is"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config is for weights quantised with a method"),
    "partial_rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "partial_rotary_in_rope": (_rope(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    **{
        kind: (_rope(rope_type=kind, factor=2.0), f"rope_type '{kind}' is not supported")
        for kind in ("dynamic", "longrope", "proportional")
    },
    "rope_type_null": (_rope(rope_type=None), "rope_type None is not supported"),
    "rope_untyped": ({"rope_parameters": {"factor": 2.0}}, "names no rope_type"),
    "rope_per_layer": (_rope(full_attention={}), "unsupported .'full_attention'"),
    "rope_is_text": ({"rope_parameters": "linear"}, "expected an object or null"),
    "rope_types_unknown": (_rope(type="linear", rope_type="ntk", factor=2.0), "rope_type 'ntk' is not supported"),
    "theta_unread": (
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_theta 500000.0 is in rope_parameters, which transformers ignores",
    ),
    "theta_twice": ({"rope_theta": 5e5}, "rope_theta is given as"),
    "theta_zero": ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0"),
    "linear_without_factor": (_rope(rope_type="linear"), "factor is missing"),
    **{
        f"llama3_without_{key}": ({"rope_parameters": _without(LLAMA3_ROPE, key)}, f"{key} is missing")
        for key in LLAMA3_ROPE
        if key not in ("rope_type", "rope_theta")
    },
    "llama3_factors_equal": ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "must exceed"),
    "llama3_fraction": (
        {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 8.5}},
        "original_max_position_embeddings is 8.5",
    ),
    **{
        f"no_{key}": ({key: ...}, f"{key} is missing")
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "rms_norm_eps",
        )
    },
    "zero_layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "negative_size": ({"hidden_size": -32}, "hidden_size is -32"),
    "float_size": ({"hidden_size": 32.0}, "hidden_size is 32.0"),
    "text_size": ({"vocab_size": "97"}, "vocab_size is '97'"),
    "bool_size": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "text_flag": ({"attention_bias": "false"}, "attention_bias is 'false'"),
    "number_flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    "text_eps": ({"rms_norm_eps": "1e-05"}, "rms_norm_eps is '1e-05'"),
    "zero_eps": ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
    "infinite_eps": ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
    "nan_eps": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "uneven_groups": ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
    "uneven_heads": ({"hidden_size": 33, "head_dim": None}, "not a multiple of num_attention_heads"),
    "odd_head": ({"head_dim": 7}, "head_dim is 7"),
    "text_eos": ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    "bool_eos": ({"eos_token_id": True}, "eos_token_id is True"),
    "negative_eos": ({"eos_token_id": [2, -1]}, "eos_token_id is"),
    "two_bos": ({"bos_token_id": [1, 2]}, "expected one token id or null"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_config_is_rejected(name):
    changes, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message) as error:
        parse_config(raw_config(**changes))
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_read_config_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_config(hidden_act="gelu")), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_act is 'gelu'"):
        convert.read_config(tmp_path)


def test_checkpoint_error_is_a_value_error():
    assert issubclass(CheckpointError, ValueError)
