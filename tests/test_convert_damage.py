"""Damaged checkpoints through the shipped `convert.load`: every one is refused, with the reason.

A flipped bit in a *source* tensor cannot be seen (safetensors has no checksum), so flips count for the
converted store only, where the manifest covers every byte.
"""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make, raw_config, tensors, write
from safetensors.numpy import load_file, save_file

import convert
from convert import CheckpointError, manifest

# Orbax leaves reads in flight when one of them fails, and their callbacks find the event loop closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]
OUTCOMES: list[bool] = []  # of every damaged checkpoint: was it refused?


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    made = {
        "single": make(root / "single"),
        "sharded": make(root / "sharded", shards=3),
        "tied": make(root / "tied", tie_word_embeddings=True),
    }
    made["store"] = convert.save(convert.load(made["single"]), root / "store")
    for directory in made.values():
        assert convert.load(directory).params  # whole, each of them loads
    return made


def check_refused(base: Path, target: Path, damage: Damage, message: str) -> None:
    shutil.copytree(base, target, symlinks=True)
    damage(target)
    OUTCOMES.append(False)
    with pytest.raises(CheckpointError, match=message) as error:
        convert.load(target)
    OUTCOMES[-1] = True
    # One sentence (or two halves): what is wrong, then after ; or : how to fix it.
    assert str(error.value).endswith(".")
    assert re.search("[;:] ", str(error.value))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


# ---- ways to damage a file


def overwrite(name: str, content: bytes | str) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda d: (d / name).write_bytes(data)


def cut(name: str, keep: float) -> Damage:
    return lambda d: os.truncate(d / name, int(keep * (d / name).stat().st_size))


def append(name: str, data: bytes) -> Damage:
    return lambda d: (d / name).write_bytes((d / name).read_bytes() + data)


def delete(*names: str) -> Damage:
    return lambda d: [(d / name).unlink() for name in names]


def rename(old: str, new: str) -> Damage:
    return lambda d: (d / old).rename(d / new)


def edit_json(name: str, change: Callable[[dict], object]) -> Damage:
    def damage(directory: Path) -> None:
        content = json.loads((directory / name).read_text())
        change(content)
        (directory / name).write_text(json.dumps(content))

    return damage


def config(**changes: object) -> Damage:
    return edit_json("config.json", lambda c: c.update(changes))


def edit_tensors(name: str, change: Callable[[dict], object]) -> Damage:
    def damage(directory: Path) -> None:
        weights = load_file(directory / name)
        change(weights)
        save_file(weights, directory / name, {"format": "pt"})

    return damage


def edit_header(name: str, change: Callable[[dict], object]) -> Damage:
    def damage(directory: Path) -> None:
        data = (directory / name).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        (directory / name).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return damage


def header_text(name: str, old: str, new: str) -> Damage:
    def damage(directory: Path) -> None:
        data = (directory / name).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        text = data[8 : 8 + size].replace(old.encode(), new.encode(), 1)
        assert text != data[8 : 8 + size]
        (directory / name).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return damage


def move_tensor(name: str, source: str, target: str, keep: bool) -> Damage:
    def damage(directory: Path) -> None:
        first, second = load_file(directory / source), load_file(directory / target)
        second[name] = first[name] if keep else first.pop(name)
        save_file(first, directory / source)
        save_file(second, directory / target)

    return damage


def replace_all(make_file: Callable[[Path], object]) -> Damage:
    """Removes the weights and leaves something else in their place."""

    def damage(directory: Path) -> None:
        for file in directory.glob("*.safetensors*"):
            file.unlink()
        make_file(directory)

    return damage


def pickled(name: str) -> Damage:
    # A pickle that would create a file if anything opened it.
    payload = b"cos\nsystem\n(S'touch opened'\ntR."
    return replace_all(overwrite(name, payload))


def both(*damages: Damage) -> Damage:
    return lambda d: [damage(d) for damage in damages]


Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"

# ---- faults of one safetensors file, done to the only file and to a shard
FILE_FAULTS: dict[str, tuple[Callable[[str], Damage], str]] = {
    "half the data": (lambda f: cut(f, 0.5), "damaged or cut short"),
    "last byte missing": (
        lambda f: lambda d: os.truncate(d / f, (d / f).stat().st_size - 1),
        "damaged or cut short",
    ),
    "cut header": (lambda f: lambda d: os.truncate(d / f, 100), "damaged or cut short"),
    "cut length": (lambda f: lambda d: os.truncate(d / f, 5), "damaged or cut short"),
    "empty": (lambda f: overwrite(f, b""), "damaged or cut short"),
    "zeros": (lambda f: lambda d: (d / f).write_bytes(bytes((d / f).stat().st_size)), "damaged or cut short"),
    "trailing byte": (lambda f: append(f, b"\0"), "damaged or cut short"),
    "trailing page": (lambda f: append(f, bytes(4096)), "damaged or cut short"),
    "huge header": (lambda f: overwrite(f, struct.pack("<Q", 2**60) + b"{}"), "damaged or cut short"),
    "header no JSON": (lambda f: overwrite(f, struct.pack("<Q", 8) + b"{bad   }"), "damaged or cut short"),
    "LFS pointer": (
        lambda f: overwrite(f, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "damaged or cut short",
    ),
    "a web page": (lambda f: overwrite(f, "<!DOCTYPE html><html>not found</html>"), "damaged or cut short"),
    "a directory": (lambda f: lambda d: ((d / f).unlink(), (d / f).mkdir()), "damaged or cut short"),
    "overlap": (
        lambda f: edit_header(f, lambda h: h[_first(h)].update(data_offsets=h[_last(h)]["data_offsets"])),
        "damaged or cut short",
    ),
    "shape lies": (
        lambda f: edit_header(f, lambda h: h[_first(h)]["shape"].append(2)),
        "damaged or cut short",
    ),
    "dtype lies": (lambda f: header_text(f, '"F32"', '"F16"'), "damaged or cut short"),
    "unknown dtype": (lambda f: header_text(f, '"F32"', '"F31"'), "damaged or cut short"),
}


def _first(header: dict) -> str:
    return min(name for name in header if name != "__metadata__")


def _last(header: dict) -> str:
    return max(name for name in header if name != "__metadata__")


def _integers(weights: dict) -> None:
    weights[NORM] = np.ones(32, np.int32)


CASES: dict[str, tuple[str, Damage, str]] = {
    **{
        f"{name} ({base})": (base, fault(file), message)
        for name, (fault, message) in FILE_FAULTS.items()
        for base, file in (("single", "model.safetensors"), ("sharded", SHARD))
    },
    # names, shapes, dtypes
    "missing tensor": ("single", edit_tensors("model.safetensors", lambda w: w.pop(Q)), "lacks .*q_proj"),
    "missing norm": ("single", edit_tensors("model.safetensors", lambda w: w.pop(NORM)), "lacks model.norm"),
    "missing head": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.pop("lm_head.weight")),
        "lacks lm_head",
    ),
    "unknown tensor": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update(extra=w[NORM])),
        "unexpected extra",
    ),
    "adapter inside": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({Q.replace("weight", "lora_A.weight"): w[NORM]})),
        "unexpected .*lora_A",
    ),
    "unknown buffer": (
        "single",
        edit_tensors(
            "model.safetensors", lambda w: w.update({"model.layers.9.self_attn.rotary_emb.inv_freq": w[NORM]})
        ),
        "unexpected .*inv_freq",
    ),
    "unwanted bias": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({Q.replace("weight", "bias"): w[NORM]})),
        "unexpected .*q_proj.bias",
    ),
    "renamed tensor": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({"norm.weight": w.pop(NORM)})),
        "lacks model.norm",
    ),
    "transposed tensor": (
        "single",
        edit_tensors(
            "model.safetensors",
            lambda w: w.update({Q.replace("q_", "k_"): np.ascontiguousarray(w[Q.replace("q_", "k_")].T)}),
        ),
        r"shape \[32, 16\], expected \[16, 32\]",
    ),
    "flattened tensor": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({Q: w[Q].reshape(-1)})),
        r"has shape \[1024\]",
    ),
    "padded vocabulary": (
        "single",
        edit_tensors(
            "model.safetensors",
            lambda w: w.update({"model.embed_tokens.weight": np.zeros((128, 32), np.float32)}),
        ),
        r"has shape \[128, 32\], expected \[97, 32\]",
    ),
    "integers": (
        "single",
        edit_tensors("model.safetensors", _integers),
        "is I32; expected one of F32, BF16, F16",
    ),
    "float64": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({n: a.astype(np.float64) for n, a in w.items()})),
        "is F64; expected one of",
    ),
    "one half-precision tensor": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({Q: w[Q].astype(np.float16)})),
        "mixes dtypes",
    ),
    "no tensor at all": ("single", edit_tensors("model.safetensors", lambda w: w.clear()), "has 0 tensors"),
    "tied head differs": (
        "tied",
        edit_tensors("model.safetensors", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1})),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "tied head differs in the last value": (
        "tied",
        edit_tensors("model.safetensors", lambda w: w.update({"lm_head.weight": _last_changed(w)})),
        "lm_head.weight differs from",
    ),
    "tied head of another dtype": (
        "tied",
        edit_tensors(
            "model.safetensors",
            lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].astype(np.float16)}),
        ),
        "lm_head.weight differs from",
    ),
    # shards and index
    "missing shard": ("sharded", delete(SHARD), f"lacks {SHARD}, named by {INDEX}"),
    "extra shard": (
        "sharded",
        lambda d: shutil.copy(d / SHARD, d / "model-00004-of-00003.safetensors"),
        "holds model-00004-of-00003.safetensors, not named",
    ),
    "extra adapter": (
        "sharded",
        lambda d: shutil.copy(d / SHARD, d / "adapter_model.safetensors"),
        "not named",
    ),
    "extra file without index": (
        "single",
        lambda d: shutil.copy(d / "model.safetensors", d / "consolidated.safetensors"),
        f"consolidated.safetensors, model.safetensors without {INDEX}",
    ),
    "renamed file": ("single", rename("model.safetensors", "weights.safetensors"), f"without {INDEX}"),
    "no index": ("sharded", delete(INDEX), f"without {INDEX}; expected that index"),
    "whole model beside shards": (
        "sharded",
        lambda d: make(d, seed=5) and None,
        "holds model.safetensors, not named",
    ),
    "duplicate in two shards": (
        "sharded",
        move_tensor(NORM, SHARD, "model-00003-of-00003.safetensors", keep=True),
        f"{NORM} is in model-0000",
    ),
    "tensor moved to another shard": (
        "sharded",
        move_tensor(NORM, SHARD, "model-00003-of-00003.safetensors", keep=False),
        f"disagree about {NORM}",
    ),
    "shards swapped": (
        "sharded",
        both(
            rename(SHARD, "x"),
            rename("model-00001-of-00003.safetensors", SHARD),
            rename("x", "model-00001-of-00003.safetensors"),
        ),
        "disagree about",
    ),
    "index without a key": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].pop(NORM)),
        f"disagree about {NORM}",
    ),
    "index with a key too many": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update(ghost=SHARD)),
        "disagree about ghost",
    ),
    "index names another shard": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update({NORM: "model-00003-of-00003.safetensors"})),
        f"disagree about {NORM}",
    ),
    "index names an absent shard": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update({NORM: "model-00009-of-00003.safetensors"})),
        "lacks model-00009-of-00003.safetensors",
    ),
    "index leads outside": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update({NORM: f"../sharded/{SHARD}"})),
        "no usable weight_map",
    ),
    "index names a pickle": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update({NORM: "pytorch_model.bin"})),
        "no usable weight_map",
    ),
    "index names a number": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update({NORM: 3})),
        "no usable weight_map",
    ),
    "index without map": ("sharded", edit_json(INDEX, lambda i: i.pop("weight_map")), "no usable weight_map"),
    "index with empty map": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].clear()),
        "no usable weight_map",
    ),
    "index is a list": ("sharded", overwrite(INDEX, "[]"), "holds a JSON list, expected an object"),
    "index cut": ("sharded", cut(INDEX, 0.7), "cannot be read as JSON"),
    "index empty": ("sharded", overwrite(INDEX, ""), "cannot be read as JSON"),
    "index key twice": (
        "sharded",
        lambda d: (d / INDEX).write_text((d / INDEX).read_text().replace("{\n", '{"weight_map": {},', 1)),
        "'weight_map' appears twice",
    ),
    "single file under an index": (
        "single",
        overwrite(INDEX, json.dumps({"weight_map": {"a": "b.safetensors"}})),
        "lacks b.safetensors",
    ),
    # config.json
    "no config": ("single", delete("config.json"), "config.json is missing"),
    "config empty": ("single", overwrite("config.json", ""), "cannot be read as JSON"),
    "config cut": ("single", cut("config.json", 0.5), "cannot be read as JSON"),
    "config is text": ("single", overwrite("config.json", '"llama"'), "holds a JSON str, expected an object"),
    "config not UTF-8": ("single", overwrite("config.json", b"\xff\xfe{}"), "cannot be read as JSON"),
    "config nested without end": (
        "single",
        overwrite("config.json", '{"a":' * 100000),
        "cannot be read as JSON",
    ),
    "config is a directory": (
        "single",
        lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()),
        "config.json is missing",
    ),
    "config key twice": (
        "single",
        lambda d: (d / "config.json").write_text(json.dumps(raw_config())[:-1] + ', "head_dim": 16}'),
        "'head_dim' appears twice",
    ),
    "more layers": ("single", config(num_hidden_layers=3), r"lacks model\.layers\.2"),
    "fewer layers": ("single", config(num_hidden_layers=1), r"unexpected model\.layers\.1"),
    "a billion layers": ("single", config(num_hidden_layers=10**9), "num_hidden_layers 1000000000"),
    "another vocabulary": ("single", config(vocab_size=96), r"expected \[96, 32\]"),
    "another width": ("single", config(hidden_size=64), "has shape"),
    "another inner width": ("single", config(intermediate_size=44), "has shape"),
    "more kv heads": ("single", config(num_key_value_heads=4), "has shape"),
    "another head size": ("single", config(head_dim=16), "has shape"),
    "tied by mistake": ("single", config(tie_word_embeddings=True), "lm_head.weight differs"),
    "untied by mistake": ("tied", config(tie_word_embeddings=False), "lacks lm_head.weight"),
    "bias by mistake": ("single", config(attention_bias=True), "lacks .*bias"),
    "mlp bias by mistake": ("single", config(mlp_bias=True), "lacks .*bias"),
    "another architecture": ("single", config(model_type="qwen2"), "model_type is 'qwen2'"),
    "quantised": ("single", config(quantization_config={"quant_method": "gptq"}), "quantization_config is"),
    "yarn": ("single", config(rope_parameters={"rope_type": "yarn"}), "'yarn' is not supported"),
    # no safetensors
    **{
        f"only {name}": ("single", pickled(name), "holds only pickle files .*convert them to safetensors")
        for name in (
            "pytorch_model.bin",
            "model.pt",
            "model.pth",
            "weights.pkl",
            "weights.pickle",
            "model.ckpt",
        )
    },
    "no weights": ("single", replace_all(lambda d: None), "holds no .*safetensors file"),
    "only an index": ("sharded", replace_all(overwrite(INDEX, "{}")), "holds no .*safetensors file"),
    "nothing": ("single", lambda d: [file.unlink() for file in d.iterdir()], "is empty"),
    # the store: files
    **{
        f"store without {name}": ("store", delete(name), message)
        for name, message in (
            ("config.json", "lacks config.json"),
            ("jspec_checkpoint.json", "lacks jspec_checkpoint.json"),
            ("MANIFEST.sha256", "MANIFEST.sha256 is missing"),
            ("tokenizer.model", "lacks tokenizer.model"),
            ("arrays/commit_success.txt", "lacks arrays/commit_success.txt"),
            ("arrays/state/_METADATA", "lacks arrays/state/_METADATA"),
            ("arrays/state/manifest.ocdbt", "lacks arrays/state/manifest.ocdbt"),
        )
    },
    "store without arrays": (
        "store",
        lambda d: shutil.rmtree(d / "arrays"),
        "lacks arrays/_CHECKPOINT_METADATA",
    ),
    "store extra file": ("store", overwrite("arrays/state/extra", b""), "unexpected arrays/state/extra"),
    "store extra hidden file": ("store", overwrite(".extra", b""), "unexpected .extra"),
    "store manifest empty": ("store", overwrite("MANIFEST.sha256", b""), "unexpected"),
    "store manifest cut": ("store", cut("MANIFEST.sha256", 0.5), "MANIFEST.sha256"),
    "store manifest line gone": (
        "store",
        lambda d: (d / "MANIFEST.sha256").write_text("".join((d / "MANIFEST.sha256").read_text().splitlines(True)[1:])),
        "unexpected",
    ),
    "store manifest with junk": ("store", append("MANIFEST.sha256", b"junk\n"), "malformed line"),
    "store manifest without the last newline": (
        "store",
        lambda d: os.truncate(d / "MANIFEST.sha256", (d / "MANIFEST.sha256").stat().st_size - 1),
        "malformed line",
    ),
    "store manifest not UTF-8": ("store", append("MANIFEST.sha256", b"\xff"), "is damaged"),
    "store manifest of another": ("store", lambda d: _another_manifest(d), "damaged"),
    # the store: consistent manifest, inconsistent content
    "store config of another size": (
        "store",
        lambda d: _resealed(d, config(vocab_size=96)),
        "does not fit config.json",
    ),
    "store config of another depth": (
        "store",
        lambda d: _resealed(d, config(num_hidden_layers=1)),
        r"does not fit config.json in layers\.1",
    ),
    "store config with more layers": (
        "store",
        lambda d: _resealed(d, config(num_hidden_layers=3)),
        r"does not fit config.json in layers\.2",
    ),
    "store config unsupported": (
        "store",
        lambda d: _resealed(d, config(hidden_act="relu")),
        "hidden_act is 'relu'",
    ),
    "store dtype lies": (
        "store",
        lambda d: _resealed(d, edit_json("jspec_checkpoint.json", lambda c: c.update(dtype="float16"))),
        "does not fit config.json",
    ),
    "store dtype unknown": (
        "store",
        lambda d: _resealed(d, edit_json("jspec_checkpoint.json", lambda c: c.update(dtype="int8"))),
        "dtype 'int8' is not supported",
    ),
    "store of another version": (
        "store",
        lambda d: _resealed(d, edit_json("jspec_checkpoint.json", lambda c: c.update(version=2))),
        "is not of the format",
    ),
    "store arrays unreadable": (
        "store",
        lambda d: _resealed(d, delete("arrays/state/manifest.ocdbt")),
        "cannot be read",
    ),
    "store data deleted": ("store", lambda d: _resealed(d, lambda d: _largest(d).unlink()), "cannot be read"),
    "store data cut": (
        "store",
        lambda d: _resealed(d, lambda d: os.truncate(_largest(d), _largest(d).stat().st_size // 2)),
        "cannot be read",
    ),
    "bare Orbax directory": ("store", lambda d: _only_arrays(d), "holds no .*safetensors file"),
}


def _last_changed(weights: dict) -> np.ndarray:
    head = weights["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    return head


def _another_manifest(directory: Path) -> None:
    other = convert.save(convert.load(make(directory.parent / "other", seed=9)), directory.parent / "other_store")
    lines = (directory / "MANIFEST.sha256").read_text().splitlines()
    theirs = {line[66:]: line for line in (other / "MANIFEST.sha256").read_text().splitlines()}
    mixed = [line if line[66:] != "arrays/_CHECKPOINT_METADATA" else theirs[line[66:]] for line in lines]
    (directory / "MANIFEST.sha256").write_text("\n".join(mixed) + "\n")


def _resealed(directory: Path, damage: Damage) -> None:
    """Damage under a fresh manifest, to see the checks behind it."""
    damage(directory)
    manifest.write(directory)


def _largest(directory: Path) -> Path:
    return max((directory / "arrays").rglob("d/*"), key=lambda file: file.stat().st_size)


def _only_arrays(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink() if file.is_file() else None
    for file in (directory / "arrays").iterdir():
        file.rename(directory / file.name)
    (directory / "arrays").rmdir()


@pytest.mark.parametrize("name", CASES)
def test_damage_is_refused(bases, tmp_path, name):
    base, damage, message = CASES[name]
    check_refused(bases[base], tmp_path / "damaged", damage, message)
    assert not (tmp_path / "opened").exists()
    assert not Path("opened").exists()


def _flips(store: Path) -> list[tuple[Path, int]]:
    """(file, bit): first, middle and last byte of every file, and forty more in the largest."""
    rng = np.random.default_rng(0)
    chosen = []
    for file in sorted(path.relative_to(store) for path in store.rglob("*") if path.is_file()):
        size = (store / file).stat().st_size
        bytes_ = {0, size // 2, size - 1} if size else set()
        chosen += [(file, 8 * byte + int(rng.integers(8))) for byte in sorted(bytes_)]
    largest = _largest(store)
    bits = rng.choice(8 * largest.stat().st_size, 40, replace=False)
    return chosen + [(largest.relative_to(store), int(bit)) for bit in bits]


def test_flipped_bits_in_a_store_are_refused(bases, tmp_path):
    shutil.copytree(bases["store"], tmp_path / "store")
    flips = _flips(tmp_path / "store")
    assert len(flips) >= 75
    for file, bit in flips:
        path = tmp_path / "store" / file
        good = path.read_bytes()
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(bad)
        OUTCOMES.append(False)
        with pytest.raises(CheckpointError, match=r"damaged|lacks|unexpected"):
            convert.load(tmp_path / "store")
        OUTCOMES[-1] = True
        path.write_bytes(good)
    assert convert.load(tmp_path / "store").params


def test_every_bit_of_the_manifest_counts(bases):
    """The manifest protects itself by its strict form alone, so all its bits are tried."""
    good = (bases["store"] / "MANIFEST.sha256").read_bytes()
    expected = manifest._parse(good)
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << (bit % 8)
        try:
            parsed = manifest._parse(bytes(bad))
        except ValueError:
            continue
        assert parsed != expected, bit


PLACES = {
    "absent": ("{tmp}/absent", "does not exist"),
    "absent relative": ("./absent", "does not exist"),
    "one word": ("llama", "does not exist and is no hub id"),
    "three parts": ("a/b/c", "does not exist and is no hub id"),
    "spaces": ("my org/my model", "does not exist and is no hub id"),
    "a file": ("{tmp}/base/model.safetensors", "is a file"),
    "a config": ("{tmp}/base/config.json", "is a file"),
    "a directory of checkpoints": ("{tmp}", "holds no .*safetensors file"),
    "a dangling link": ("{tmp}/link", "does not exist"),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_that_are_no_checkpoint(tmp_path, name):
    place, message = PLACES[name]
    write(tmp_path / "base", raw_config(), tensors(raw_config()))
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=message):
        convert.load(place.format(tmp=tmp_path))


def test_summary(capsys):
    """Runs last: the figure this file is about."""
    with capsys.disabled():
        print(f"\ndamaged checkpoints: {len(OUTCOMES)} cases, silent loads {OUTCOMES.count(False)}")
    assert False not in OUTCOMES
