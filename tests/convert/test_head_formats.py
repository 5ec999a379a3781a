"""EAGLE heads loaded from files of every layout compute what PyTorch does and are saved unchanged."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from support import toys

torch = pytest.importorskip("torch")
from safetensors.numpy import load_file  # noqa: E402

import jspec  # noqa: E402
from support.eagle_checkpoints import KNOWN, TARGET, V, eagle1, eagle3, write  # noqa: E402
from support.eagle_torch import drafted  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")
OWN = ("lm_head", "embed_tokens")
CASES = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "3.1": {"fc_norm": True, "norm_output": True},
    "all tokens": {"known": None, "own": OWN},
    "all tokens, the target's head": {"known": None, "own": ()},
    "the target's rows": {"own": ()},
    "other order": {"known": [9, 30, 2, 17]},
    "the target's rows in that order": {"known": [9, 30, 2, 17], "own": ()},
    "another width": {"hidden_size": 24, "own": OWN, "fc_norm": True, "ids": (0, 8)},
    "biased": {"attention_bias": True, "mlp_bias": True, "norm_output": True, "norm_before_residual": True},
    "qwen3": {"model_type": "qwen3", "norm_before_fc": True},
}
# Cases that SGLang does not read.
ONLY_SPECULATORS = ("normed residual", "biased", "qwen3", "another width")
LAYOUTS = [
    (name, layout)
    for name in CASES
    for layout in ("speculators", "sglang")
    if layout == "speculators" or name not in ONLY_SPECULATORS
]


def logits_of(drafter, features, tokens, drafts):
    """Compute what `eagle_torch.drafted` returns, with the same forward passes as `EagleDrafter`."""
    head, (batch, size) = drafter.head, tokens.shape
    cache = head.new_cache(batch, size + drafts.shape[1])
    pairs = head.embed(tokens[:, 1:], TARGET), head.fuse(features[:, :-1], TARGET)
    states, cache = head.forward(*pairs, cache, jnp.zeros(batch, jnp.int32))
    found = [states]
    for i in range(drafts.shape[1]):
        start = jnp.full(batch, size - 1 + i)
        states, cache = head.forward(head.embed(drafts[:, i : i + 1], TARGET), states[:, -1:], cache, start)
        found.append(states)
    return head.logits(jnp.concatenate(found, 1), TARGET)


def check_logits(drafter, module, known=None):
    """Compare logits to 1e-4 over a sequence and three more tokens that use the head's own states."""
    rng = np.random.default_rng(0)
    tokens, drafts = rng.integers(V, size=(2, 6)), rng.integers(V, size=(2, 3))
    features = rng.normal(size=(2, 6, len(drafter.features), 16)).astype(np.float32)
    told = features / np.sqrt((features**2).mean(-1, keepdims=True) + 1e-5) if drafter.features == (-1,) else features
    head = torch.tensor(np.array(TARGET.lm_head.weight[...].T))
    with torch.no_grad():
        expected = drafted(module, *map(torch.tensor, (told, tokens, drafts)), head)
    found = logits_of(drafter, *map(jnp.asarray, (features, tokens, drafts)))
    assert expected.std() > 0.3
    if known is not None:
        assert np.isneginf(np.delete(found, known, axis=2)).all()
        found = found[..., np.array(known)]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def check_same_files(first, second):
    """Compare tensors byte by byte, and the fields of the first config; the second may have more fields."""
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    before, after = (json.loads((one / "config.json").read_text()) for one in (first, second))
    assert kept(after, before) == before


def kept(after, before):
    """Return `after` with only the fields of `before`."""
    return {
        key: kept(after[key], value) if isinstance(value, dict) and after[key] is not None else after[key]
        for key, value in before.items()
    }


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_generation_3_heads_match_torch(tmp_path, name, layout):
    case = CASES[name]
    module, path = eagle3(layout, tmp_path / "head", **case)
    drafter = jspec.EagleDrafter.load(path, TARGET)
    assert drafter.features == case.get("ids", (2, 4, 5))
    check_logits(drafter, module, case.get("known", KNOWN))
    drafter.save(tmp_path / "again", layout)
    check_same_files(path, tmp_path / "again")


@pytest.mark.parametrize("case", [{}, {"bias": False, "own": ()}, {"qkv_bias": True, "model_type": "qwen2"}])
def test_generation_1_heads_match_torch(tmp_path, case):
    module, path = eagle1(tmp_path / "head", **case)
    drafter = jspec.EagleDrafter.load(path, TARGET)
    check_logits(drafter, module)
    drafter.save(tmp_path / "again", "eagle")
    check_same_files(path, tmp_path / "again")


def test_generation_1_speculators_layout_is_read(tmp_path):
    module, path = eagle1(tmp_path / "head", own=())
    fields, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    wrapped = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "layernorms": False,
        "fusion_bias": True,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": fields,
    }
    renamed = {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): torch.tensor(tensor)
        for name, tensor in tensors.items()
    }
    check_logits(jspec.EagleDrafter.load(write(tmp_path / "fusion", wrapped, renamed), TARGET), module)


@pytest.mark.parametrize("layout", ["speculators", "sglang"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_preserved(tmp_path, layout, dtype):
    """A head computes in the device's default dtype and is saved in its files' dtype, unless `dtype` is given."""
    _, path = eagle3(layout, tmp_path / "head", dtype=dtype, fc_norm=True)
    drafter = jspec.EagleDrafter.load(path)
    assert drafter.head.dtype == jnp.float32
    drafter.save(tmp_path / "again", layout)
    check_same_files(path, tmp_path / "again")
    jspec.EagleDrafter.load(path, dtype="float32").save(tmp_path / "wide", layout)
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert {wide[name].dtype.name for name in wide} == {"float32", "int64", "bool"}
    asked = jspec.EagleDrafter.load(path, dtype=str(dtype).removeprefix("torch."))
    assert asked.head.fc.weight.dtype.name == str(dtype).removeprefix("torch.")
    asked.save(tmp_path / "asked", layout)
    check_same_files(path, tmp_path / "asked")


def test_modified_head_is_saved_with_changes(tmp_path):
    """A changed head is saved with its full precision and its new config."""
    _, path = eagle3("speculators", tmp_path / "head", dtype=torch.bfloat16)
    drafter = jspec.EagleDrafter.load(path)
    drafter.head.fc.weight.set_value(drafter.head.fc.weight[...] * 1.001)
    drafter.head.config = dataclasses.replace(drafter.head.config, norm_output=True)
    again = jspec.EagleDrafter.load(drafter.save(tmp_path / "again"))
    np.testing.assert_array_equal(again.head.fc.weight[...], drafter.head.fc.weight[...])
    assert again.head.config == drafter.head.config
    assert json.loads((tmp_path / "again" / "config.json").read_text())["norm_output"] is True


def test_layouts_convert_into_each_other(tmp_path):
    module, path = eagle3("sglang", tmp_path / "head", fc_norm=True, norm_output=True)
    between = jspec.EagleDrafter.load(path).save(tmp_path / "between", "speculators")
    back = jspec.EagleDrafter.load(between).save(tmp_path / "back", "sglang")
    assert (path / "model.safetensors").read_bytes() == (back / "model.safetensors").read_bytes()
    check_logits(jspec.EagleDrafter.load(between), module, KNOWN)


def test_output_head_may_be_left_out(tmp_path):
    module, path = eagle3("speculators", tmp_path / "head", own=())
    whole = jspec.EagleDrafter.load(path, TARGET).save(tmp_path / "whole", own_head=True)
    small = jspec.EagleDrafter.load(whole).save(tmp_path / "small", own_head=False)
    more, fewer = (set(load_file(one / "model.safetensors")) for one in (whole, small))
    assert more - fewer == {"lm_head.weight"}
    check_same_files(path, small)
    check_logits(jspec.EagleDrafter.load(whole), module, KNOWN)


@pytest.mark.parametrize("layout", ["speculators", "sglang"])
def test_default_feature_layers_depend_on_target(tmp_path, layout):
    _, path = eagle3(layout, tmp_path / "head")
    fields = json.loads((path / "config.json").read_text())
    fields.pop("eagle_aux_hidden_state_layer_ids", None), fields.pop("eagle_config", None)
    (path / "config.json").write_text(json.dumps(fields))
    assert jspec.EagleDrafter.load(path, TARGET).features == (2, 4, 5)


def test_original_eagle_3_names_are_read(tmp_path):
    """A head loads with a plain Llama config, `midlayer` names, no flags, and no `t2d`, which NVIDIA leaves out."""
    module, path = eagle3("sglang", tmp_path / "head")
    fields, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    del fields["eagle_config"], tensors["t2d"]
    fields = {key: value for key, value in fields.items() if "norm_" not in key or key == "rms_norm_eps"}
    fields["architectures"] = ["LlamaForCausalLM"]
    write(tmp_path / "original", fields, {name: torch.tensor(tensor) for name, tensor in tensors.items()})
    drafter = jspec.EagleDrafter.load(tmp_path / "original", TARGET)
    check_logits(drafter, module, KNOWN)
    check_same_files(tmp_path / "original", drafter.save(tmp_path / "again", "sglang"))


# ---- the names that vLLM (llama_eagle3.py) and SGLang (llama_eagle3.py, and SpecForge's check of its export) read
LAYER = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "hidden_norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
BESIDE = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
FC_NORMS = {f"fc_norm.{i}.weight" for i in range(3)}
VLLM = {f"layers.0.{name}" for name in LAYER} | BESIDE
SGLANG = {f"midlayer.{name}" for name in LAYER} | BESIDE
VLLM_FIELDS = {
    *("speculators_model_type", "transformer_layer_config", "speculators_config"),
    *("draft_vocab_size", "target_hidden_size", "norm_before_residual"),
    *("norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids"),
}
SGLANG_FIELDS = {
    *("architectures", "draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm"),
    *("norm_output", "num_aux_hidden_states", "eagle_config", "tie_word_embeddings", "rope_theta"),
}


@pytest.mark.parametrize(
    ("layout", "names", "fields"), [("speculators", VLLM, VLLM_FIELDS), ("sglang", SGLANG, SGLANG_FIELDS)]
)
def test_every_name_and_flag_is_written(tmp_path, layout, names, fields):
    """A head that comes from no file is saved with every field; the input of layer i is the output of layer i - 1."""
    _, path = eagle3("speculators", tmp_path / "head", fc_norm=True)
    drafter = jspec.EagleDrafter.load(path)
    drafter.head.origin = None
    drafter.save(tmp_path / "again", layout)
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert set(found) == names | FC_NORMS
    assert found["d2t"].tolist() == [token - i for i, token in enumerate(KNOWN)]
    assert np.flatnonzero(found["t2d"]).tolist() == KNOWN
    raw = json.loads((tmp_path / "again" / "config.json").read_text())
    assert fields <= set(raw)
    assert (raw["fc_norm"], raw["norm_output"], raw["norm_before_residual"]) == (True, False, False)
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    if layout == "sglang":
        assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    else:
        assert {"name_or_path", "architectures"} <= set(raw["speculators_config"]["verifier"])
        assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] >= 1


def test_loaded_head_drafts_only_its_own_vocabulary(tmp_path, prompts):
    """A head loaded from files drafts for a small target, and drafts only tokens of its own vocabulary."""
    _, path = eagle3("speculators", tmp_path / "head", ids=(0, 1, 2), norm_output=True)
    target = toys.tiny_llama(1, 2, vocab_size=V)
    drafter = jspec.EagleDrafter.load(path, target)
    batch = prompts([4, 1], vocab_size=V)
    out = jspec.speculative_generate(target, drafter, *batch, max_new_tokens=8, num_draft_tokens=2, record=True)
    guesses = np.asarray(out.record.tokens)[np.asarray(out.record.fates) > 0]
    assert set(guesses.tolist()) <= set(KNOWN)
