"""Saving: Hugging Face -> Orbax -> Hugging Face preserves every byte, and failures leave no partial files."""

import dataclasses
import filecmp
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import convert
from convert import CheckpointError
from support.checkpoints import BFLOAT16, VARIANTS, make, raw_config, tensors, write
from support.disks import small_disk

# When a write fails, Orbax leaves other writes in flight, and their callbacks find the event loop closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CARRIED = ["config.json", "generation_config.json", "tokenizer.model", "tokenizer_config.json"]


def run(*arguments: object) -> tuple[int, str]:
    """Run `python -m convert ARGUMENTS` in this process; return the exit status and all output."""
    import typer

    from convert.__main__ import main

    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(a) for a in arguments], terminal_width=200)
    return result.exit_code, result.output


def assert_same_files(first: Path, second: Path, names: list[str]) -> None:
    assert filecmp.cmpfiles(first, second, names, shallow=False)[0] == names


def weight_files(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.glob("*.safetensors*"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("shards", "dtype"), [(1, BFLOAT16), (3, np.float32)])
def test_round_trip_preserves_every_byte(tmp_path, variant, shards, dtype):
    source = make(tmp_path / "hf", dtype, shards, **VARIANTS[variant])
    loaded = convert.load(source)
    convert.save(loaded, tmp_path / "orbax")
    stored = convert.load(tmp_path / "orbax")
    assert (stored.config, list(stored.params)) == (loaded.config, list(loaded.params))
    for name, array in loaded.params.items():
        assert stored.params[name].dtype == array.dtype
        assert stored.params[name].tobytes() == array.tobytes()
    back = convert.save_hf(stored, tmp_path / "back")
    assert weight_files(back) == weight_files(source)
    assert_same_files(source, back, weight_files(source) + CARRIED)
    assert sorted(file.name for file in back.iterdir()) == sorted(weight_files(source) + CARRIED)
    assert convert.load(back).params.keys() == loaded.params.keys()


@pytest.mark.parametrize("via_orbax", [True, False])
def test_round_trip_keeps_repeated_tied_head(tmp_path, via_orbax):
    raw = raw_config(tie_word_embeddings=True)
    weights = tensors(raw)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    loaded = convert.load(write(tmp_path / "hf", raw, weights))
    if via_orbax:
        loaded = convert.load(convert.save(loaded, tmp_path / "orbax"))
    convert.save_hf(loaded, tmp_path / "back")
    assert_same_files(tmp_path / "hf", tmp_path / "back", ["model.safetensors"])


def test_second_conversion_keeps_shard_layout(tmp_path):
    source = make(tmp_path / "hf", shards=3)
    convert.save(convert.load(source), tmp_path / "one")
    convert.save(convert.load(tmp_path / "one"), tmp_path / "two")
    convert.save_hf(convert.load(tmp_path / "two"), tmp_path / "back")
    assert_same_files(source, tmp_path / "back", weight_files(source))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_casting_from_source_and_store_is_equal(tmp_path, dtype):
    source = make(tmp_path / "hf")
    convert.save(convert.load(source), tmp_path / "orbax")
    direct, stored = convert.load(source, dtype), convert.load(tmp_path / "orbax", dtype)
    for name, array in direct.params.items():
        assert stored.params[name].dtype == np.dtype(dtype if dtype != "bfloat16" else BFLOAT16)
        assert stored.params[name].tobytes() == array.tobytes()


def test_values_too_large_for_float16_in_store_are_rejected(tmp_path):
    raw = raw_config()
    weights = tensors(raw)
    weights["model.norm.weight"][3] = 70000.0
    convert.save(convert.load(write(tmp_path / "hf", raw, weights)), tmp_path / "orbax")
    with pytest.raises(CheckpointError, match=r"norm\.weight has values too large"):
        convert.load(tmp_path / "orbax", dtype="float16")


def test_transformers_reads_converted_checkpoint(tmp_path):
    pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    from support.checkpoints import save_torch

    model = save_torch(tmp_path / "hf", **VARIANTS["llama3_rope"])
    convert.save(convert.load(tmp_path / "hf"), tmp_path / "orbax")
    convert.save_hf(convert.load(tmp_path / "orbax"), tmp_path / "back")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert all((a == b).all() for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_odd_sizes_survive_chunking(tmp_path, monkeypatch):
    """Arrays are written in chunks that divide the rows; a prime number of rows works, too, without a good divisor."""
    from convert import store

    monkeypatch.setattr(store, "_CHUNK_BYTES", 1000)
    loaded = convert.load(make(tmp_path / "hf", vocab_size=101))
    stored = convert.load(convert.save(loaded, tmp_path / "orbax"))
    assert all(stored.params[name].tobytes() == array.tobytes() for name, array in loaded.params.items())


def test_device_arrays_can_be_saved(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    loaded = convert.load(make(tmp_path / "hf", BFLOAT16))
    on_device = {name: jnp.asarray(array) for name, array in loaded.params.items()}
    convert.save(dataclasses.replace(loaded, params=on_device), tmp_path / "orbax")
    stored = convert.load(tmp_path / "orbax")
    assert all(stored.params[name].tobytes() == array.tobytes() for name, array in loaded.params.items())


def test_manifest_is_valid_for_sha256sum(tmp_path):
    convert.save(convert.load(make(tmp_path / "hf")), tmp_path / "orbax")
    check = ["sha256sum", "--check", "--strict", "--quiet", "MANIFEST.sha256"]
    subprocess.run(check, cwd=tmp_path / "orbax", check=True)
    named = {line[66:] for line in (tmp_path / "orbax" / "MANIFEST.sha256").read_text().splitlines()}
    found = {p.relative_to(tmp_path / "orbax").as_posix() for p in (tmp_path / "orbax").rglob("*") if p.is_file()}
    assert found - named == {"MANIFEST.sha256"}
    assert any(name.startswith("arrays/") for name in named)


# ---- rejected saves: existing files stay, and failures leave nothing

SAVERS = [convert.save, convert.save_hf]


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_existing_path_is_not_overwritten(tmp_path, saver, kind):
    loaded, target = convert.load(make(tmp_path / "hf")), tmp_path / "out"
    {"directory": target.mkdir, "file": target.touch, "dangling link": lambda: target.symlink_to("nowhere")}[kind]()
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        saver(loaded, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize("saver", SAVERS)
def test_saving_into_source_is_rejected(tmp_path, saver):
    with pytest.raises(CheckpointError, match="choose a directory outside the source"):
        saver(convert.load(make(tmp_path / "hf")), tmp_path / "hf" / "out")


@pytest.mark.parametrize("saver", SAVERS)
def test_mismatched_params_and_config_are_rejected(tmp_path, saver):
    loaded = convert.load(make(tmp_path / "hf"))
    missing = {k: v for k, v in loaded.params.items() if k != "norm.weight"}
    misshapen = loaded.params | {"norm.weight": np.ones(3, np.float32)}
    mixed = loaded.params | {"norm.weight": loaded.params["norm.weight"].astype(np.float16)}
    double = {k: v.astype(np.float64) for k, v in loaded.params.items()}
    for params, message in (
        (missing, "not those"),
        (misshapen, "not those"),
        (mixed, "more than one"),
        (double, "float64"),
    ):
        with pytest.raises(CheckpointError, match=message):
            saver(dataclasses.replace(loaded, params=params), tmp_path / "out")
    other = dataclasses.replace(loaded.config, rms_norm_eps=0.5)
    with pytest.raises(CheckpointError, match="config differs"):
        saver(dataclasses.replace(loaded, config=other), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_respect_umask(tmp_path, saver, umask):
    loaded = convert.load(make(tmp_path / "hf", shards=2))
    before = os.umask(umask)
    try:
        saver(loaded, tmp_path / "out")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 6 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("limit", [10, 5000])
def test_full_disk_leaves_no_files(tmp_path, saver, limit):
    loaded = convert.load(make(tmp_path / "hf"))
    with small_disk(limit), pytest.raises(CheckpointError, match="check the disk"):
        saver(loaded, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_files_written_during_deletion_are_deleted(tmp_path, monkeypatch):
    """Files written during the deletion, as by Orbax threads unaware of the full disk, are deleted too."""
    from convert import unfinished

    rmtree, late = unfinished.shutil.rmtree, iter([True, True])

    def raced(folder, **how):
        rmtree(folder, **how)
        if next(late, False):
            folder.mkdir()
            (folder / "late").touch()

    monkeypatch.setattr(unfinished.shutil, "rmtree", raced)
    with unfinished.deleted_in_the_end(tmp_path / "half"):
        (tmp_path / "half").mkdir()
    assert not [*tmp_path.iterdir()]


def test_result_is_created_by_rename(tmp_path):
    """The result keeps its inode, so it was renamed; a copy would pass through half-written states."""
    from convert.destination import new_directory

    with new_directory(tmp_path / "out") as directory:
        inode = directory.stat().st_ino
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out").stat().st_ino == inode


@pytest.mark.parametrize("saver", SAVERS)
def test_uncreatable_directory_is_rejected(tmp_path, saver):
    loaded = convert.load(make(tmp_path / "hf"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=rf"^nothing can be created in {tmp_path}/file \(Not a dir"):
        saver(loaded, tmp_path / "file" / "out")


def test_interrupt_removes_partial_output(tmp_path, monkeypatch):
    from convert import saving

    def interrupted(*_):
        raise KeyboardInterrupt

    loaded = convert.load(make(tmp_path / "hf"))
    monkeypatch.setattr(saving.manifest, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert.save(loaded, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


# ---- the command line


def test_convert_command_round_trip(tmp_path):
    source = make(tmp_path / "hf", shards=2)
    code, output = run(source, tmp_path / "deep" / "orbax", "--dtype", "bfloat16")
    assert (code, "15 arrays, bfloat16" in output) == (0, True), output
    code, output = run(tmp_path / "deep" / "orbax", tmp_path / "back", "--to", "hf")
    assert code == 0, output
    back = {}
    for file in (tmp_path / "back").glob("*.safetensors"):
        back |= load_file(file)
    expected = {name: array.astype(BFLOAT16) for name, array in tensors(raw_config()).items()}
    assert {n: a.tobytes() for n, a in back.items()} == {n: a.tobytes() for n, a in expected.items()}
    assert_same_files(source, tmp_path / "back", CARRIED)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in back.values())


def test_convert_command_reports_errors_in_one_line(tmp_path):
    code, output = run(tmp_path / "absent", tmp_path / "out")
    assert code == 1
    assert output.startswith("error: ")
    assert output.count("\n") == 1
    code, output = run(make(tmp_path / "hf"), tmp_path / "out", "--revision", "main")
    assert (code, "only Hugging Face repo ids have revisions" in output) == (1, True)
    assert run(tmp_path / "hf", tmp_path / "out", "--dtype", "int8")[0] == 2


def test_convert_module_is_executable(tmp_path):
    make(tmp_path / "hf")
    environment = os.environ | {"PYTHONPATH": str(Path(convert.__file__).parents[1])}
    command = [sys.executable, "-m", "convert", "hf", "out"]  # relative paths
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out: 15 arrays, float32")
    assert convert.load(tmp_path / "out").params
