"""Medusa heads loaded from files compute what PyTorch does, are saved unchanged, and are rejected if damaged."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import toys

torch = pytest.importorskip("torch")
from safetensors.numpy import load_file  # noqa: E402
from torch import nn  # noqa: E402

import jspec  # noqa: E402
from convert import CheckpointError  # noqa: E402
from support.checkpoints import raw_config  # noqa: E402
from support.checkpoints import tensors as llama_tensors  # noqa: E402
from support.damage import config, cut, edit_tensors, pickled, rename  # noqa: E402
from support.disks import small_disk  # noqa: E402
from support.eagle_checkpoints import write  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")
E, V, OWN = 16, 31, "medusa_lm_head.safetensors"
TARGET = toys.tiny_llama(0, 2, vocab_size=V)
FILES = {"medusa": OWN, "vllm": "model.safetensors"}


class ResBlock(nn.Module):
    """The residual block of Cai et al. 2024, section 2.1.1."""

    def __init__(self, bias=True):
        super().__init__()
        self.linear = nn.Linear(E, E, bias)

    def forward(self, x):
        return x + nn.functional.silu(self.linear(x))


class Blocks(nn.Module):
    """The residual blocks of a head, with vLLM's names."""

    def __init__(self, blocks, bias):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(E, E, bias) for _ in range(blocks))


def medusa(directory, blocks=1, count=3, dtype=torch.float32, tied=False):
    """Return ``(module, directory)`` of heads as published; `tied` repeats one block, as ``[ResBlock()] * n`` did."""
    torch.manual_seed(0)
    made = [[ResBlock()] * blocks if tied else [ResBlock() for _ in range(blocks)] for _ in range(count)]
    module = nn.ModuleList(nn.Sequential(*one, nn.Linear(E, V, bias=False)) for one in made)
    fields = {
        "medusa_num_heads": count,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": "org/target",
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return module, write(directory, fields, {k: t.to(dtype) for k, t in module.state_dict().items()}, OWN)


def vllm(directory, blocks=1, count=3, dtype=torch.float32, bias=False, shared=False, prefix=""):
    """Return ``(module, directory)`` of heads with vLLM's names; `shared` heads have one output head."""
    torch.manual_seed(0)
    outputs = [nn.Linear(E, V, bias=False)] * count if shared else [nn.Linear(E, V, bias=False) for _ in range(count)]
    module = nn.Module()
    module.blocks = nn.ModuleList(Blocks(blocks, bias) for _ in range(count))
    module.lm_heads = nn.ModuleList(outputs[:1] if shared else outputs)
    fields = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": E, "vocab_size": V}
    fields |= {"num_heads": count, "num_hidden_layers": blocks, "max_paths": 64, "topk": 10, "truncated_vocab_size": V}
    fields |= {"medusa_fc_bias": bias, "original_lm_head": shared, "torch_dtype": str(dtype).removeprefix("torch.")}
    write(directory, fields, {prefix + k: t.to(dtype) for k, t in module.state_dict().items()})
    heads = nn.ModuleList()
    for one, output in zip(module.blocks, outputs, strict=True):
        residual = [ResBlock(bias) for _ in range(blocks)]
        for block, linear in zip(residual, one.layers, strict=True):
            block.linear = linear
        heads.append(nn.Sequential(*residual, output))
    return heads, directory


CASES = [
    (medusa, {}),
    (medusa, {"blocks": 2}),
    (medusa, {"blocks": 2, "tied": True}),
    (vllm, {}),
    (vllm, {"blocks": 2, "bias": True}),
    (vllm, {"shared": True}),
    (vllm, {"prefix": "medusa_heads."}),
]


def check_logits(drafter, module):
    x = np.random.default_rng(1).normal(size=(2, 5, E)).astype(np.float32)
    found = drafter.logits(jnp.asarray(x), TARGET, len(module))
    with torch.no_grad():
        for i, head in enumerate(module):
            np.testing.assert_allclose(found[:, :, i], head(torch.tensor(x)), atol=1e-4)


def fields_of(path):
    return json.loads((path / "config.json").read_text())


def check_same_files(first, second):
    names = {file.name for file in first.iterdir()}
    assert names == {file.name for file in second.iterdir()}
    (weights,) = names - {"config.json"}
    assert (first / weights).read_bytes() == (second / weights).read_bytes()
    assert fields_of(second) | fields_of(first) == fields_of(second)


@pytest.mark.parametrize(("make", "case"), CASES)
def test_heads_match_torch_and_are_saved_unchanged(tmp_path, make, case):
    module, path = make(tmp_path / "heads", **case)
    drafter = jspec.MedusaDrafter.load(path, TARGET)
    assert drafter.num_heads == 3
    check_logits(drafter, module)
    check_same_files(path, drafter.save(tmp_path / "again", make.__name__))


@pytest.mark.parametrize("make", [medusa, vllm])
def test_half_precision_is_preserved_and_layouts_convert(tmp_path, make):
    module, path = make(tmp_path / "heads", dtype=torch.bfloat16)
    drafter = jspec.MedusaDrafter.load(path)
    assert drafter.heads[0].lm_head.weight[...].dtype == jnp.float32
    check_same_files(path, drafter.save(tmp_path / "again", make.__name__))
    other = "vllm" if make is medusa else "medusa"
    between = jspec.MedusaDrafter.load(drafter.save(tmp_path / "between", other))
    check_logits(between, module.to(torch.bfloat16).float())


def test_trained_biases_and_heads_are_saved(tmp_path):
    """Trained biases and output heads are saved even if the loaded files had no biases or one shared output head."""
    _, path = vllm(tmp_path / "heads", shared=True)
    drafter = jspec.MedusaDrafter.load(path)
    drafter.heads[1].blocks[0].linear.bias.set_value(jnp.ones(E))
    drafter.heads[2].lm_head.weight.set_value(jnp.zeros((E, V)))
    again = jspec.MedusaDrafter.load(drafter.save(tmp_path / "again"))
    x = jnp.ones((1, 1, E))
    np.testing.assert_array_equal(again.logits(x, TARGET, 3), drafter.logits(x, TARGET, 3))
    raw = fields_of(tmp_path / "again")
    assert (raw["medusa_fc_bias"], raw["original_lm_head"]) == (True, False)


def test_saved_names_match_vllm_and_medusa(tmp_path):
    """Heads from no file are saved with the names of vLLM's `Medusa` and `MedusaConfig`, or of the paper's code."""
    _, path = medusa(tmp_path / "heads", blocks=2, count=2)
    drafter = jspec.MedusaDrafter.load(path)
    for head in drafter.heads:
        head.origin = None
    found = load_file(drafter.save(tmp_path / "vllm") / "model.safetensors")
    assert set(found) == {
        f"blocks.{i}.layers.{j}.{kind}" for i in (0, 1) for j in (0, 1) for kind in ("weight", "bias")
    } | {"lm_heads.0.weight", "lm_heads.1.weight"}
    assert fields_of(tmp_path / "vllm") == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": E,
        "vocab_size": V,
        "truncated_vocab_size": V,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "torch_dtype": "float32",
    }
    found = load_file(drafter.save(tmp_path / "medusa", "medusa") / OWN)
    assert set(found) == {
        f"{i}.{name}"
        for i in (0, 1)
        for name in ("0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias", "2.weight")
    }


def test_wrong_head_count_in_published_config_is_corrected(tmp_path):
    module, path = medusa(tmp_path / "heads", count=5)
    config(medusa_num_heads=2)(path)
    drafter = jspec.MedusaDrafter.load(path)
    check_logits(drafter, module)
    assert fields_of(drafter.save(tmp_path / "again", "medusa"))["medusa_num_heads"] == 5


def test_heads_stored_with_their_target_are_loaded(tmp_path):
    """A Medusa-2 checkpoint loads as both a target and its heads."""
    module, heads = medusa(tmp_path / "heads")
    raw = raw_config(hidden_size=E, vocab_size=V, num_attention_heads=2, num_key_value_heads=1, medusa_num_heads=3)
    both_ = {name: torch.tensor(one) for name, one in llama_tensors(raw).items()}
    both_ |= {f"medusa_head.{name}": torch.tensor(one) for name, one in load_file(heads / OWN).items()}
    path = write(tmp_path / "both", raw, both_)
    drafter = jspec.MedusaDrafter.load(path, jspec.load(path))
    check_logits(drafter, module)
    alone = load_file(drafter.save(tmp_path / "alone", "medusa") / OWN)
    assert {name: one.tobytes() for name, one in alone.items()} == {
        name: one.tobytes() for name, one in load_file(heads / OWN).items()
    }


# ---- rejected files
@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("medusa")
    return {make.__name__: make(root / make.__name__, blocks=2)[1] for make in (medusa, vllm)}


def tensor(layout, name, change):
    """Return an edit that replaces `name` with the result of `change`; None removes it."""

    def edit(found):
        new = change(found.pop(name, None))
        if new is not None:
            found[name] = new

    return edit_tensors(FILES[layout], edit)


def gone(_):
    return None


DAMAGE = {
    "a block is missing": ("medusa", tensor("medusa", "1.1.linear.weight", gone), "lacks 1.1.linear.weight"),
    "a bias is missing": ("medusa", tensor("medusa", "0.0.linear.bias", gone), "lacks 0.0.linear.bias"),
    "a head is missing": ("vllm", tensor("vllm", "lm_heads.2.weight", gone), "lacks lm_heads.2.weight"),
    "unknown": ("vllm", tensor("vllm", "extra", lambda _: np.ones(2, np.float32)), "has unexpected extra"),
    "a bias too many": (
        "vllm",
        tensor("vllm", "blocks.0.layers.0.bias", lambda _: np.ones(E, np.float32)),
        "has unexpected blocks.0.layers.0.bias",
    ),
    "another shape": ("vllm", tensor("vllm", "blocks.0.layers.0.weight", lambda x: x[:9]), r"\[9, 16\], expected"),
    "integers": ("medusa", tensor("medusa", "0.2.weight", lambda x: x.astype(np.int8)), "0.2.weight .* is I8; exp"),
    "another count": ("vllm", config(num_heads=4), "lacks blocks.3.layers.0.weight"),
    "a count without end": ("vllm", config(num_heads=10**9), "describes 1000000000 heads of . blocks each, but"),
    "blocks without end": (
        "vllm",
        config(num_hidden_layers=10**9),
        "heads of 1000000000 blocks each, but there are only",
    ),
    "no count": ("vllm", config(num_heads=None), "num_heads is missing; expected a positive integer"),
    "another depth": ("medusa", config(medusa_num_layers=1), "medusa_num_layers is 1 but .* follows 2 blocks"),
    "fewer tokens": ("vllm", config(truncated_vocab_size=9), "truncated_vocab_size is 9, with the tokens in token_map"),
    "a scale": ("vllm", config(logit_scale=2.0), "logit_scale is 2.0, which changes"),
    "another model": ("vllm", config(architectures=["EAGLEModel"]), "architectures is .'EAGLEModel'., which changes"),
    "no heads": (
        "medusa",
        edit_tensors(OWN, lambda w: [w.pop(n) for n in list(w)[1:]] + [w.update(x=w.popitem()[1])]),
        "are not those of Medusa heads; expected the names of Medusa",
    ),
    "no output head": (
        "medusa",
        edit_tensors(OWN, lambda w: [w.pop(f"{i}.2.weight") for i in range(3)]),
        "there is no output head with two axes, such as 0.1.weight",
    ),
    "cut": ("medusa", cut(OWN, 0.6), "is damaged or cut short"),
    "no config": ("medusa", rename("config.json", "other.json"), "config.json is missing"),
    "pickles": (
        "medusa",
        pickled("medusa_lm_head.pt"),
        r"only pickle files \(medusa_lm_head.pt\); .* convert it with "
        r"PyTorch: .*torch\.load\('medusa_lm_head\.pt', weights_only=True\).*'medusa_lm_head\.safetensors'",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_rejected(bases, tmp_path, name):
    base, damage, message = DAMAGE[name]
    shutil.copytree(bases[base], tmp_path / "heads")
    damage(tmp_path / "heads")
    with pytest.raises(CheckpointError, match=message) as error:
        jspec.MedusaDrafter.load(tmp_path / "heads", TARGET)
    text = str(error.value)
    assert text.endswith(".") and re.search("[;:] ", text) and "\n" not in text and len(text) < 600


def test_only_the_heads_own_file_is_read(bases, tmp_path):
    folder = shutil.copytree(bases["medusa"], tmp_path / "heads")
    for name in ("model.safetensors", "consolidated.safetensors"):
        (folder / name).write_bytes(b"")
    drafter, expected = (jspec.MedusaDrafter.load(place) for place in (folder, bases["medusa"]))
    for one, other in zip(jax.tree.leaves(drafter), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_target_with_different_vocabulary_is_rejected(bases):
    with pytest.raises(ValueError, match="a target whose vocabulary is 31, but this target's is 9; use heads"):
        jspec.MedusaDrafter.load(bases["vllm"], toys.tiny_llama(0, 1, vocab_size=9))


def test_invalid_paths_and_formats_are_rejected(bases, tmp_path):
    drafter = jspec.MedusaDrafter.load(bases["vllm"])
    with pytest.raises(CheckpointError, match="format 'sglang' is unknown; choose one of medusa, vllm"):
        drafter.save(tmp_path / "out", "sglang")
    (tmp_path / "taken").touch()
    with pytest.raises(CheckpointError, match="taken exists and is not overwritten"):
        drafter.save(tmp_path / "taken")
    with small_disk(3000), pytest.raises(CheckpointError, match="check the disk"):
        drafter.save(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
