"""Lines of a JSON Lines file."""

import json
import reprlib
from typing import NoReturn, cast

from convert.json_file import Json, no_duplicates


def parse_object(line: bytes, place: str) -> dict[str, Json]:
    """Return the JSON object in `line`.

    Args:
        place: the file and the line, for error messages.

    Raises:
        ValueError: the line is not UTF-8, or not a JSON object.
    """
    try:
        entry = cast("Json", json.loads(line.decode(), object_pairs_hook=no_duplicates, parse_constant=_refuse))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 text (byte {error.start + 1}); convert it first.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON ({error}); write one object per line.") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{place} is {reprlib.repr(entry)}; expected an object with 'prompt' or 'messages'.")
    return entry


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
