"""EAGLE heads that cannot be used or saved are rejected with a one-sentence reason, and no files are left."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from support import toys

torch = pytest.importorskip("torch")
import jspec  # noqa: E402
from convert import CheckpointError  # noqa: E402
from support.damage import both, config, cut, edit_json, edit_tensors, overwrite, pickled, rename  # noqa: E402
from support.disks import small_disk  # noqa: E402
from support.eagle_checkpoints import LAYERS, TARGET, V, eagle1, eagle3  # noqa: E402

FILE, IDS = "model.safetensors", "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    made = {layout: eagle3(layout, root / layout)[1] for layout in ("speculators", "sglang")}
    return made | {"eagle": eagle1(root / "eagle")[1]}


def tensors(**changes):
    """Return an edit that replaces tensors with their functions' results; `...` removes one. `__` stands for a dot."""
    named = {name.replace("__", "."): change for name, change in changes.items()}

    def change(found):
        for name, new in named.items():
            found[name] = found[name] if new is ... else new(found.get(name))
            if new is ...:
                del found[name]

    return edit_tensors(FILE, change)


def section(name, **changes):
    return edit_json("config.json", lambda c: c[name].update(changes))


def dropped(*names):
    return edit_json("config.json", lambda c: [c.pop(name) for name in names])


def set_first(value):
    def change(array):
        return np.concatenate([np.array([value], array.dtype), array[1:]])

    return change


Q3 = "midlayer.self_attn.q_proj.weight"
CASES = {
    # tensors
    "fc is missing": ("sglang", tensors(fc__weight=...), "lacks fc.weight"),
    "q_proj is missing": ("sglang", tensors(**{Q3: ...}), f"lacks {Q3}"),
    "hidden_norm is missing": ("speculators", tensors(layers__0__hidden_norm__weight=...), "lacks layers.0.hidden"),
    "unknown": ("sglang", tensors(mask_hidden=lambda _: np.ones(3, np.float32)), "has unexpected mask_hidden"),
    "names of both layouts": (
        "sglang",
        tensors(layers__0__hidden_norm__weight=lambda _: np.ones(16, np.float32)),
        "has unexpected layers.0.hidden_norm.weight",
    ),
    "fc_norm without its flag": (
        "sglang",
        tensors(fc_norm__0__weight=lambda _: np.ones(16, np.float32)),
        "has unexpected fc_norm.0.weight",
    ),
    "a flag without its norms": ("sglang", config(fc_norm=True), "lacks fc_norm.0.weight, fc_norm.1.weight, fc_norm.2"),
    "bias without its tensor": ("eagle", tensors(fc__bias=...), "lacks fc.bias"),
    "a tensor without its bias": ("eagle", config(bias=False), "has unexpected fc.bias"),
    "an output head of generation 1": (
        "eagle",
        tensors(lm_head__weight=lambda _: np.ones((V, 16), np.float32)),
        "has unexpected lm_head.weight",
    ),
    "transposed": (
        "sglang",
        tensors(fc__weight=lambda x: np.ascontiguousarray(x.T)),
        r"fc.weight .* shape \[48, 16\], expected \[16, 48\]",
    ),
    "two states for three": ("speculators", config(**{IDS: [2, 5]}), r"shape \[16, 48\], expected \[16, 32\]"),
    "a head of other rows": ("sglang", tensors(lm_head__weight=lambda x: x[:6]), r"\[6, 16\], expected \[7, 16\]"),
    "integers": ("sglang", tensors(fc__weight=lambda x: x.astype(np.int8)), "fc.weight .* is I8; expected one of F32"),
    # vocabulary tables
    "d2t is missing": ("sglang", tensors(d2t=...), "lacks d2t"),
    "t2d alone": ("sglang", both(tensors(d2t=...), config(draft_vocab_size=V)), "has unexpected t2d"),
    "d2t in another dtype": ("sglang", tensors(d2t=lambda x: x.astype(np.float32)), "d2t .* is F32; expected I64"),
    "t2d in another dtype": ("sglang", tensors(t2d=lambda x: x.astype(np.int64)), "t2d .* is I64; expected BOOL"),
    "d2t beyond the end": (
        "sglang",
        tensors(d2t=set_first(V)),
        "d2t names token 31 in row 0; the target's tokens are 0",
    ),
    "d2t below 0": ("sglang", tensors(d2t=set_first(-1)), "d2t names token -1 in row 0"),
    "d2t with a token twice": ("speculators", tensors(d2t=set_first(3)), "d2t names token 3 in two rows"),
    "t2d of other tokens": ("sglang", tensors(t2d=np.logical_not), "t2d and d2t disagree about token 0"),
    "t2d is short": ("sglang", tensors(t2d=lambda x: x[:9]), r"t2d .* shape \[9\], expected \[31\]"),
    # config.json
    "two layers": ("sglang", config(num_hidden_layers=2), "num_hidden_layers is 2; only single-layer heads"),
    "another layer": (
        "speculators",
        section("transformer_layer_config", model_type="deepseek_v3"),
        "model_type of its layer is 'deepseek_v3'; expected one of llama, qwen3",
    ),
    "no layer": ("speculators", dropped("transformer_layer_config"), "transformer_layer_config is None; expected"),
    "another head": ("speculators", config(speculators_model_type="dflash"), "speculators_model_type 'dflash' and"),
    "architectures that are no list": ("sglang", config(architectures=5), "architectures is 5; expected a list"),
    "another architecture": ("sglang", config(architectures=["Eagle3DeepseekV2ForCausalLM"]), "is not an EAGLE head"),
    "a whole model": ("eagle", both(tensors(fc__weight=..., fc__bias=...)), "is not an EAGLE head with one Llama"),
    "layernorms": ("eagle", config(layernorms=True), "layernorms is True, which changes the computed function"),
    "parallel drafting": ("speculators", config(mask_token_id=3), "mask_token_id is 3, which changes"),
    "a window": ("speculators", section("transformer_layer_config", sliding_window=8), "sliding_window is 8"),
    "tied to an unknown end": ("sglang", config(tie_word_embeddings=True), "tie_word_embeddings is true, which SGLang"),
    "norm_before_residual is missing": (
        "speculators",
        dropped("norm_before_residual"),
        "norm_before_residual is missing, which vLLM treats as true and",
    ),
    "a flag that is none": ("sglang", config(norm_output=1), "norm_output is 1; expected true or false"),
    "both norms": ("sglang", config(fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm are both true"),
    "two values": (
        "sglang",
        both(config(norm_before_fc=False), section("eagle_config", norm_before_fc=True)),
        "norm_before_fc differs between config.json and its eagle_config",
    ),
    "no states": ("sglang", section("eagle_config", use_aux_hidden_state=False), "use_aux_hidden_state is False"),
    "unknown flag": ("sglang", section("eagle_config", use_moe=True), "eagle_config has unknown use_moe"),
    "no section": ("sglang", config(eagle_config=[1]), r"eagle_config has unknown \[1\]"),
    "layers in both conventions": ("sglang", config(**{IDS: [1, 3, 4]}), "layer outputs, so each must be one less"),
    "layers out of order": ("speculators", config(**{IDS: [2, 5, 4]}), "expected distinct layers in ascending order"),
    "a layer twice": ("speculators", config(**{IDS: [2, 4, 4]}), "distinct layers in ascending order"),
    "a layer below 0": ("speculators", config(**{IDS: [-1, 4, 5]}), "expected distinct layers in ascending order"),
    "layers by name": ("speculators", config(**{IDS: "low"}), "is 'low'; expected distinct layers"),
    "another count": ("sglang", config(num_aux_hidden_states=2), "num_aux_hidden_states is 2 and .* name 3 states"),
    "more than all tokens": ("sglang", config(draft_vocab_size=40), "draft_vocab_size 40 is more than vocab_size 31"),
    "a negative size": ("sglang", config(target_hidden_size=-1), "target_hidden_size is -1; expected a positive"),
    # for another target
    "of a wider target": (
        "speculators",
        both(config(target_hidden_size=24), tensors(fc__weight=lambda x: np.ones((16, 72), np.float32))),
        "whose hidden size is 24, but this target's is 16",
    ),
    "of more layers": (
        "speculators",
        config(**{IDS: [2, 4, 9]}),
        "input of layer 9, but this target has only 8 layers",
    ),
    # files
    "cut": ("sglang", cut(FILE, 0.7), "is damaged or cut short"),
    "no config": ("sglang", rename("config.json", "other.json"), "config.json is missing"),
    "config is no JSON": ("sglang", overwrite("config.json", "{"), "cannot be read as JSON"),
    "a shard alone": ("sglang", rename(FILE, "model-00001-of-00002.safetensors"), "without model.safetensors.ind"),
    "pickles": (
        "eagle",
        pickled("pytorch_model.bin"),
        r"only pickle files \(pytorch_model.bin\); .* convert it with "
        r"PyTorch: `safetensors\.torch\.save_file.*torch\.load\('pytorch_model\.bin', weights_only=True\)",
    ),
    "nothing": ("eagle", rename(FILE, "model.txt"), r"holds no \*.safetensors file; pickles can run code"),
}


def check_refusal(error):
    """Require one sentence that says what is wrong, then how to fix it."""
    message = str(error.value)
    assert message.endswith(".") and re.search("[;:] ", message) and "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize("name", CASES)
def test_damage_is_rejected(bases, tmp_path, name):
    base, damage, message = CASES[name]
    shutil.copytree(bases[base], tmp_path / "head")
    damage(tmp_path / "head")
    with pytest.raises(ValueError, match=message) as error:
        jspec.EagleDrafter.load(tmp_path / "head", TARGET)
    check_refusal(error)
    assert not (tmp_path / "opened").exists()


def test_target_with_different_vocabulary_is_rejected(bases):
    with pytest.raises(ValueError, match="a target whose vocabulary is 31, but this target's is 9") as error:
        jspec.EagleDrafter.load(bases["sglang"], toys.tiny_llama(0, LAYERS, vocab_size=9))
    check_refusal(error)


def test_head_that_needs_target_is_rejected_without_it(tmp_path):
    _, path = eagle3("speculators", tmp_path / "rows", own=())
    with pytest.raises(CheckpointError, match=r"no lm_head.weight for the 7 tokens .* load\(path, target\)") as error:
        jspec.EagleDrafter.load(path)
    check_refusal(error)
    _, path = eagle3("speculators", tmp_path / "layers")
    dropped(IDS)(path)
    with pytest.raises(CheckpointError, match=f"has no {IDS}, .* pass the target") as error:
        jspec.EagleDrafter.load(path)
    check_refusal(error)
    with pytest.raises(
        CheckpointError, match=r"the default \[2, 3, 3\] for a target of 6 layers are not three"
    ) as error:
        jspec.EagleDrafter.load(path, toys.tiny_llama(0, 6, vocab_size=V))
    check_refusal(error)


@pytest.mark.parametrize(
    ("made", "format", "message"),
    [
        ({"norm_before_residual": True}, "sglang", "read sglang files do not read norm_before_residual and would"),
        ({"attention_bias": True, "mlp_bias": True}, "sglang", "do not read attention_bias, mlp_bias and"),
        ({"model_type": "qwen3"}, "sglang", "do not read the norms of queries and keys and"),
        ({"ids": (0, 3, 5)}, "sglang", "do not read features that start with the input of layer 0"),
        (
            {},
            "eagle",
            "eagle files hold heads of generation 1, and this head is of generation 3; choose speculators or sglang",
        ),
        ({}, "vllm", "format 'vllm' is unknown; choose one of speculators, sglang, eagle"),
    ],
)
def test_head_inexpressible_in_layout_is_rejected(tmp_path, made, format, message):
    drafter = jspec.EagleDrafter.load(eagle3("speculators", tmp_path / "head", **made)[1])
    with pytest.raises(CheckpointError, match=message) as error:
        drafter.save(tmp_path / "out", format)
    check_refusal(error)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_unsavable_heads_are_rejected(bases, tmp_path):
    drafter = jspec.EagleDrafter.load(bases["sglang"])
    for features in ((4, 2, 5), (2, 4, -1)):
        drafter.head.config = dataclasses.replace(drafter.head.config, features=features)
        with pytest.raises(CheckpointError, match="files need distinct layers in ascending order"):
            drafter.save(tmp_path / "out")
    layer = dataclasses.replace(drafter.head.config.layer, qkv_bias=True)
    drafter.head.config = dataclasses.replace(drafter.head.config, layer=layer, features=(2, 4, 5))
    with pytest.raises(CheckpointError, match="speculators files do not read biases on q, k and v alone"):
        drafter.save(tmp_path / "out")
    first = jspec.EagleDrafter.load(bases["eagle"])
    with pytest.raises(CheckpointError, match=r"speculators files hold heads of generation 3, .* choose eagle"):
        first.save(tmp_path / "out")
    with pytest.raises(CheckpointError, match="no output head of its own that could be saved"):
        first.save(tmp_path / "out", "eagle", own_head=True)
    assert not list(tmp_path.iterdir())


def test_existing_path_and_full_disk_are_rejected(bases, tmp_path):
    drafter = jspec.EagleDrafter.load(bases["sglang"])
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="taken exists and is not overwritten"):
        drafter.save(tmp_path / "taken")
    for limit in (10, 5000):
        with small_disk(limit), pytest.raises(CheckpointError, match="check the disk"):
            drafter.save(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_values_too_large_for_float16_are_rejected(tmp_path):
    _, path = eagle3("sglang", tmp_path / "head")
    tensors(norm__weight=lambda x: 1e6 * x)(path)
    with pytest.raises(CheckpointError, match=r"norm\.weight has values too large for float16"):
        jspec.EagleDrafter.load(path, dtype="float16")


def test_paths_without_head_are_rejected(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"x\.gguf is a file; expected the directory of a head"):
        jspec.EagleDrafter.load(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="is neither a directory nor a file here"):
        jspec.EagleDrafter.load(tmp_path / "absent")
    fields = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(fields)
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors file"):
        jspec.EagleDrafter.load(tmp_path / "empty")
