"""The shipped `convert.load` rejects every damaged checkpoint and states the reason.

A flipped bit in a *source* tensor cannot be detected, because safetensors has no checksum. Bit flips are therefore
tested only in the converted store, whose manifest covers every byte.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import convert
from convert import CheckpointError, manifest
from support import quantized_files
from support.checkpoints import make, raw_config, tensors, write
from support.damage import Damage
from support.damage_cases import CASES as SOURCE_CASES
from support.damage_store_cases import STORE_CASES, largest_array
from support.quantized_damage_cases import QUANTIZED, QUANTIZED_CASES

# When a read fails, Orbax leaves other reads in flight, and their callbacks find the event loop closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CASES = SOURCE_CASES | STORE_CASES | QUANTIZED_CASES
OUTCOMES: list[bool] = []  # whether each damaged checkpoint was rejected


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    made = {
        "single": make(root / "single"),
        "sharded": make(root / "sharded", shards=3),
        "tied": make(root / "tied", tie_word_embeddings=True),
    }
    made["store"] = convert.save(convert.load(made["single"]), root / "store")
    for name, kind in QUANTIZED.items():
        quantized_files.write(root / name, kind)
        made[name] = root / name
    for directory in made.values():
        assert convert.load(directory).params  # each checkpoint loads before it is damaged
    return made


def check_refused(base: Path, target: Path, damage: Damage, message: str) -> None:
    shutil.copytree(base, target, symlinks=True)
    damage(target)
    OUTCOMES.append(False)
    with pytest.raises(CheckpointError, match=message) as error:
        convert.load(target)
    OUTCOMES[-1] = True
    # The message is one sentence: what is wrong, then, after ";" or ":", how to fix it.
    assert str(error.value).endswith(".")
    assert re.search("[;:] ", str(error.value))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("name", CASES)
def test_damage_is_rejected(bases, tmp_path, name):
    base, damage, message = CASES[name]
    check_refused(bases[base], tmp_path / "damaged", damage, message)
    assert not (tmp_path / "opened").exists()
    assert not Path("opened").exists()


def _flips(store: Path) -> list[tuple[Path, int]]:
    """Return (file, bit) pairs: one in the first, middle and last byte of each file, and forty in the largest array."""
    rng = np.random.default_rng(0)
    chosen = []
    for file in sorted(path.relative_to(store) for path in store.rglob("*") if path.is_file()):
        size = (store / file).stat().st_size
        bytes_ = {0, size // 2, size - 1} if size else set()
        chosen += [(file, 8 * byte + int(rng.integers(8))) for byte in sorted(bytes_)]
    largest = largest_array(store)
    bits = rng.choice(8 * largest.stat().st_size, 40, replace=False)
    return chosen + [(largest.relative_to(store), int(bit)) for bit in bits]


def test_flipped_bits_in_store_are_rejected(bases, tmp_path):
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


def test_every_bit_of_manifest_matters(bases):
    """Any flipped bit of the manifest is detected; all bits are tried because only its strict format protects it."""
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
    "absent": ("{tmp}/absent", "is neither a directory nor a file here"),
    "absent relative": ("./absent", "is neither a directory nor a file here"),
    "one word": ("llama", "is neither a directory nor a file here, nor a name .* repo ids have"),
    "three parts": ("a/b/c", "is neither a directory nor a file here, nor a name .* repo ids have"),
    "spaces": (
        "my org/my model",
        "is neither a directory nor a file here, nor a name .* repo ids have",
    ),
    "a file": ("{tmp}/base/model.safetensors", "is a file"),
    "a config": ("{tmp}/base/config.json", "is a file"),
    "a directory of checkpoints": ("{tmp}", "holds no .*safetensors file"),
    "a dangling link": ("{tmp}/link", "is a link to nowhere, which does not exist"),
}


@pytest.mark.parametrize("name", PLACES)
def test_invalid_paths_are_rejected(tmp_path, name):
    place, message = PLACES[name]
    write(tmp_path / "base", raw_config(), tensors(raw_config()))
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=message):
        convert.load(place.format(tmp=tmp_path))


def test_no_damaged_checkpoint_loads_silently(capsys):
    """No damaged checkpoint loads silently; this test runs last and prints the count."""
    with capsys.disabled():
        print(f"\ndamaged checkpoints: {len(OUTCOMES)} cases, silent loads {OUTCOMES.count(False)}")
    assert False not in OUTCOMES
