"""Read JSON objects from disk, and check them strictly."""

import json
from pathlib import Path
from typing import TypeAlias, cast

from convert import placeholders
from convert.errors import CheckpointError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Return a JSON object, or raise ValueError if a key appears twice. Use it as an `object_pairs_hook`."""
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return seen


def read_object(path: Path) -> dict[str, Json]:
    """Return the JSON object in `path`.

    Raises:
        CheckpointError: the file is missing, not UTF-8 or not JSON; it repeats a key, in which case Python would
            silently keep the last value; or it does not hold an object.
    """
    if not path.is_file():
        placeholders.check(path)
        raise CheckpointError(f"{path} is missing; copy or download the whole checkpoint directory again.")
    try:
        value = cast("Json", json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates))
    except (OSError, ValueError, RecursionError) as error:
        placeholders.check(path)
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download or write the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__} instead of an object; download it again.")
    return value
