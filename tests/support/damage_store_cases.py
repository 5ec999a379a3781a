"""The damaged converted directories that `convert.load` must reject: base, damage, and error message."""

import os
import shutil
from pathlib import Path

import convert
from convert import manifest
from support.checkpoints import make
from support.damage import Damage, append, config, cut, delete, edit_json, overwrite

STORE_CASES: dict[str, tuple[str, Damage, str]] = {
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
    "store data deleted": ("store", lambda d: _resealed(d, lambda d: largest_array(d).unlink()), "cannot be read"),
    "store data cut": (
        "store",
        lambda d: _resealed(d, lambda d: os.truncate(largest_array(d), largest_array(d).stat().st_size // 2)),
        "cannot be read",
    ),
    "bare Orbax directory": ("store", lambda d: _only_arrays(d), "holds no .*safetensors file"),
}


def _another_manifest(directory: Path) -> None:
    other = convert.save(convert.load(make(directory.parent / "other", seed=9)), directory.parent / "other_store")
    lines = (directory / "MANIFEST.sha256").read_text().splitlines()
    theirs = {line[66:]: line for line in (other / "MANIFEST.sha256").read_text().splitlines()}
    mixed = [line if line[66:] != "arrays/_CHECKPOINT_METADATA" else theirs[line[66:]] for line in lines]
    (directory / "MANIFEST.sha256").write_text("\n".join(mixed) + "\n")


def _resealed(directory: Path, damage: Damage) -> None:
    """Apply damage, then write a fresh manifest, to reach the checks after the manifest's."""
    damage(directory)
    manifest.write(directory)


def largest_array(directory: Path) -> Path:
    return max((directory / "arrays").rglob("d/*"), key=lambda file: file.stat().st_size)


def _only_arrays(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink() if file.is_file() else None
    for file in (directory / "arrays").iterdir():
        file.rename(directory / file.name)
    (directory / "arrays").rmdir()
