"""Ways to damage a checkpoint directory; each helper returns a function that damages a copy."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

Damage = Callable[[Path], object]
SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"

Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"


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
    """Return a function that replaces the weights with something else."""

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


# ---- faults of one safetensors file, applied to the only file and to a shard
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
        "is a git-lfs pointer",
    ),
    "a web page": (lambda f: overwrite(f, "<!DOCTYPE html><html>not found</html>"), "is a web page or message"),
    "an answer of the hub": (lambda f: overwrite(f, "Entry not found"), "is a web page or message"),
    "an error in XML": (lambda f: overwrite(f, "<?xml version='1.0'?><Error/>"), "is a web page or message"),
    "an error in JSON": (
        lambda f: overwrite(f, '{"error":"Invalid username or password."}'),
        "is a web page or message",
    ),
    "a web page with a mark": (lambda f: overwrite(f, "\ufeff<html></html>"), "is a web page or message"),
    "a dangling link": (
        lambda f: lambda d: ((d / f).unlink(), (d / f).symlink_to("../../blobs/0")),
        "is a link to .*blobs/0, which does not exist",
    ),
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
    "unknown dtype": (lambda f: header_text(f, '"F32"', '"F31"'), "has tensors of dtype F31, which safetensors"),
}


def _first(header: dict) -> str:
    return min(name for name in header if name != "__metadata__")


def _last(header: dict) -> str:
    return max(name for name in header if name != "__metadata__")


def integers(weights: dict) -> None:
    weights[NORM] = np.ones(32, np.int32)
