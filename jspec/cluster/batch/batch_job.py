"""A batch job's output folder: the parts of the job, and which of them are complete."""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from jspec.cluster.batch.completed import Completed
from jspec.cluster.batch.prompt_files import Entry, PromptFile
from jspec.text.chat_template import Prompt

_FILE = "job.json"
_MAX_ROWS = (
    256  # in a part, if there are few slots: enough that the slots that its last requests leave idle cost little
)
_ROWS_PER_SLOT = 4  # per part, with many slots
_PARTS_PER_WORKER = 4


class Part(NamedTuple):
    """The prompts of one output file, with their indices in the input."""

    number: int
    indices: list[int]
    prompts: list[Prompt]


Decode = Callable[[Sequence[Part]], Iterator[tuple[int, list[Completed]]]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that completes the prompts of `file`, and writes each part to its own file in `folder`.

    A part's file is complete as soon as it exists. The bytes of a part do not depend on how often it is decoded.
    """

    folder: Path
    file: PromptFile
    parts: dict[int, Part]

    @classmethod
    def open(
        cls, folder: Path, file: PromptFile, entries: Sequence[Entry], identity: Mapping[str, object], new_size: int
    ) -> "Job":
        """Return the job in `folder`. Create the folder if it does not exist.

        Args:
            entries: the valid entries of the file.
            identity: the other settings that determine the output, except the weights, as JSON values.
            new_size: the number of rows for each part of a new job, from `part_size`.

        Raises:
            ValueError: the folder belongs to a job with another identity, or contains other files.
            OSError: the folder cannot be created, read or written.
        """
        indices = [entry.prompt_index for entry in entries]
        known = dict(identity) | {
            "SHA-256 of the valid indices": hashlib.sha256(json.dumps(indices).encode()).hexdigest()
        }
        size = _known_or_new_size(folder, json.loads(json.dumps(known)), new_size)
        groups = itertools.groupby(entries, lambda entry: entry.prompt_index // size)
        return cls(folder, file, {number: _part(number, [*group]) for number, group in groups})

    def missing(self) -> list[Part]:
        """Return the parts whose files do not exist yet."""
        return [part for part in self.parts.values() if not self._path(part.number).exists()]

    def run(self, decode: Decode, report: Callable[[int, int], None]) -> None:
        """Decode the missing parts, and write their files.

        Args:
            decode: a function that completes parts, in any order.
            report: a function that is called after each part, with its number of prompts and of new tokens.

        Raises:
            OSError: a file cannot be written, for example because the disk is full.
        """
        for number, completed in decode(self.missing()):
            _write(self._path(number), self.file.part(self.parts[number].indices, completed))
            report(len(completed), sum(len(row["generated_tokens"]) for row in completed))

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}{self.file.suffix}"


def part_size(num_prompts: int, workers: int, slots: int) -> int:
    """Return the number of rows for each part, so that all workers, each with this number of slots, have work."""
    rows = -(-num_prompts // (_PARTS_PER_WORKER * workers))
    return min(max(_MAX_ROWS, _ROWS_PER_SLOT * slots), max(slots, rows))


def _known_or_new_size(folder: Path, identity: dict[str, object], new_size: int) -> int:
    """Return the number of rows for each part of the job in `folder`. In a new folder, write `new_size`."""
    path = folder / _FILE
    if path.exists():
        return _known_size(path, identity)
    folder.mkdir(parents=True, exist_ok=True)
    if any(not file.name.startswith(".") for file in folder.iterdir()):
        raise ValueError(f"{folder} contains files, but no {_FILE}; pass a new or an empty folder as --output.")
    _write(path, json.dumps({"part_size": new_size, "job": identity}, indent=1).encode())
    return new_size


def _known_size(path: Path, identity: dict[str, object]) -> int:
    """Return the number of rows for each part of the job in `path`.

    Raises:
        ValueError: the job has another identity.
    """
    try:
        known = json.loads(path.read_bytes())
        size, job = int(known["part_size"]), dict(known["job"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a valid job file; pass another --output.") from error
    for name in [*identity, *job]:
        if identity.get(name) != job.get(name):
            raise ValueError(
                f"{path.parent} belongs to another job, whose {name} is {job.get(name)!r} instead of "
                f"{identity.get(name)!r}; pass another --output, or use the same input and options."
            )
    return size


def _part(number: int, entries: Sequence[Entry]) -> Part:
    return Part(number, [entry.prompt_index for entry in entries], [cast(Prompt, entry.prompt) for entry in entries])


def _write(path: Path, content: bytes) -> None:
    """Write a file that exists only when it is complete.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(
            f"{path} cannot be written ({error.strerror}); free disk space or correct the permissions, and run the "
            "command again to continue."
        ) from error
