"""The file MANIFEST.sha256: one line per file, in the format that `sha256sum -c` reads.

Orbax stores no checksum of array data, so a flipped bit would load as a slightly different model. The strict line
parser also detects flipped bits in the manifest itself.
"""

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from convert.errors import CheckpointError, listing

NAME = "MANIFEST.sha256"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")
_CHUNK_BYTES = 4 * 2**20


def _digest(file: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _digests(directory: Path) -> dict[str, str]:
    paths = [Path(root, name) for root, _, names in os.walk(directory) for name in names]
    names = {path.relative_to(directory).as_posix(): path for path in paths}
    names.pop(NAME, None)
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        return dict(zip(sorted(names), pool.map(_digest, (names[name] for name in sorted(names))), strict=True))


def write(directory: Path) -> None:
    """Write a manifest of all files in `directory`, at any depth."""
    lines = [f"{digest}  {name}\n" for name, digest in _digests(directory).items()]
    (directory / NAME).write_text("".join(lines), encoding="utf-8")


def _parse(data: bytes) -> dict[str, str]:
    """Return the digests by file name. Raise ValueError unless every byte of `data` belongs to a well-formed line."""
    text = data.decode("utf-8")
    lines = _LINE.findall(text)
    if "".join(f"{digest}  {name}\n" for digest, name in lines) != text:
        raise ValueError("a malformed line")
    return {name: digest for digest, name in lines}


def _read(directory: Path) -> dict[str, str]:
    path = directory / NAME
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, so {directory} cannot be checked; convert the source again.")
    try:
        return _parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); convert the source again.") from error


def verify(directory: Path) -> None:
    """Check that `directory` holds exactly the files of its manifest, bit for bit.

    Raises:
        CheckpointError: a file or the manifest is missing or changed, or there is a new file.
    """
    expected = _read(directory)
    try:
        actual = _digests(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read ({error}); check its permissions and the disk.") from error
    for names, fault in (
        (expected.keys() - actual.keys(), "lacks"),
        (actual.keys() - expected.keys(), "has unexpected"),
        ({name for name in expected.keys() & actual.keys() if expected[name] != actual[name]}, "has damaged"),
    ):
        if names:
            raise CheckpointError(
                f"{directory} {fault} {listing(names)} (according to {NAME}); convert the source again."
            )
