"""The shipped `convert.load` rejects damaged GGUF files in one sentence, using little memory and time."""

import re
import tracemalloc

import numpy as np
import pytest

import convert
from convert import CheckpointError
from convert.config import gguf_config
from convert.gguf import header as gguf_header
from convert.gguf import reader as from_gguf
from convert.gguf.vocabulary import vocabulary
from jspec import text
from support import gguf_damage_cases
from support.gguf_damage_cases import CHANGES, FILES, good

OUTCOMES: list[bool] = []  # whether each damaged file was rejected
_MIB = 2**20


def check_refused(file, message, load=convert.load):
    OUTCOMES.append(False)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as error:
            load(file)
        assert tracemalloc.get_traced_memory()[1] < 4 * _MIB
    finally:
        tracemalloc.stop()
    OUTCOMES[-1] = True
    said = str(error.value)
    assert said.endswith(".") and re.search("[;:] ", said) and "\n" not in said and len(said) < 600
    assert file.name in said


@pytest.fixture(autouse=True, scope="module")
def imported(tmp_path_factory):
    """Load an intact file first, so that imports do not count as memory used by a test."""
    file = tmp_path_factory.mktemp("whole") / "x.gguf"
    file.write_bytes(good().bytes())
    assert convert.load(file).config.vocab_size == gguf_damage_cases.RAW["vocab_size"]
    assert text.load_tokenizer(file)("ab a")["input_ids"] == [10, 11]


@pytest.mark.parametrize("name", CHANGES)
def test_damaged_parts_are_rejected(tmp_path, name):
    change, message = CHANGES[name]
    parts = good()
    change(parts)
    file = tmp_path / "x.gguf"
    file.write_bytes(parts.bytes())
    check_refused(file, message)


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_rejected(tmp_path, name):
    change, message = FILES[name]
    file = tmp_path / "x.gguf"
    file.write_bytes(change(good().bytes()))
    check_refused(file, message)


LIES = {
    "string": (gguf_damage_cases.STRING + (2**39).to_bytes(8, "little"), "count of"),
    "strings": (gguf_damage_cases.ARRAY + (8).to_bytes(4, "little") + (2**38).to_bytes(8, "little"), "count of"),
    "numbers": (gguf_damage_cases.ARRAY + (4).to_bytes(4, "little") + (2**38).to_bytes(8, "little"), "count of"),
}


@pytest.mark.parametrize("name", LIES)
def test_impossible_sizes_in_sparse_file_are_rejected(tmp_path, name):
    """An impossible size is rejected even in a sparse file of a terabyte, which takes no space on disk."""
    parts = good()
    parts.keys = {"general.architecture": "llama", "general.x": LIES[name][0]}
    file = tmp_path / "x.gguf"
    file.write_bytes(parts.bytes())
    with file.open("r+b") as stream:
        stream.truncate(2**40)
    check_refused(file, LIES[name][1])


def test_impossible_shapes_in_sparse_file_are_rejected(tmp_path):
    parts = good()
    parts.tensors = {gguf_damage_cases.Q: ((2**19, 2**19), 0, b"")}
    file = tmp_path / "x.gguf"
    file.write_bytes(parts.bytes())
    header = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(header + 2**40)
    check_refused(file, "lacks model.embed_tokens.weight")


def described(file):
    """Return everything that a file's header describes, without reading the data."""
    header = gguf_header.read(file)
    config = gguf_config(header)
    return config, from_gguf.tensors(header, config), vocabulary(header)


def structure(parts, data):
    """Return the positions of bytes that hold lengths, counts, types, names and offsets.

    Numbers and text are left out, because any value of them could be intended.
    """
    marks = set(range(24))
    for key in parts.keys:
        if not key.startswith("general.name"):
            start = data.index(len(key).to_bytes(8, "little") + key.encode())
            marks |= set(range(start, start + 8 + len(key) + 4))
    first = next(iter(parts.tensors))
    start = data.index(len(first).to_bytes(8, "little") + first.encode())
    return sorted(
        marks | set(range(start, len(data) - sum(len(t[2]) + -len(t[2]) % 32 for t in parts.tensors.values())))
    )


def test_flipped_structure_bits_are_rejected_or_harmless(tmp_path, report):
    parts = good()
    data = parts.bytes()
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    whole = described(file)
    rng, refused, same = np.random.default_rng(0), 0, 0
    for byte in structure(parts, data)[::3]:
        bad = bytearray(data)
        bad[byte] ^= 1 << rng.integers(8)
        file.write_bytes(bad)
        OUTCOMES.append(False)
        try:
            assert described(file) == whole, byte
            same += 1
        except CheckpointError as error:
            assert file.name in str(error)
            refused += 1
        OUTCOMES[-1] = True
    assert refused > 20 * same > 0
    report(flips=refused + same, refused=refused, changing_nothing=same)


def test_damaged_tokenizer_is_rejected_when_loaded(tmp_path):
    for key, value, message in (
        ("tokenizer.ggml.pre", "unheard-of", "tokenizer.ggml.pre 'unheard-of', an unknown way to split text"),
        ("tokenizer.ggml.pre", None, "tokenizer.ggml.pre None, an unknown way to split text"),
        ("tokenizer.ggml.merges", ["a b c"], "the merge 'a b c' does not have two tokens"),
        ("tokenizer.ggml.merges", ["a z"], "cannot be read: .*z"),
    ):
        parts = good()
        parts.keys = {name: one for name, one in (parts.keys | {key: value}).items() if one is not None}
        file = tmp_path / "x.gguf"
        file.write_bytes(parts.bytes())
        assert convert.load(file).params
        check_refused(file, message, text.load_tokenizer)
        with pytest.raises(CheckpointError, match=message):
            convert.save(convert.load(file), tmp_path / "store")
        assert not (tmp_path / "store").exists()


def test_paths_that_are_not_files_are_rejected(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    for place, message in ((tmp_path / "x.gguf", "is empty"), (tmp_path / "y.gguf", "is neither a directory")):
        with pytest.raises(CheckpointError, match=message):
            convert.load(place)


def test_file_truncated_while_reading_is_rejected(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(good().bytes())
    header = gguf_header.read(file)
    found = from_gguf.tensors(header, gguf_config(header))
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="cut short while it was read"):
        for tensor in found.values():
            tensor.read(slice(0, tensor.shape[0]))


def test_no_damaged_file_loads_silently(report):
    """No damaged file loads silently; this test runs last and reports the count."""
    report(damaged_files=len(OUTCOMES), silent_loads=OUTCOMES.count(False))
    assert False not in OUTCOMES
