"""The trained heads that ship with jspec. Each has a folder named after the known model that it was trained for."""

from pathlib import Path

_FOLDER = Path(__file__).parent


def head_of(name: str) -> Path | None:
    """Return the folder of the head for the known model `name`, or None if there is no such head.

    A `name` that exists as a path is not treated as a model name.
    """
    folder = _FOLDER / name
    is_known = folder.parent == _FOLDER and (folder / "config.json").is_file()
    return folder if is_known and not Path(name).exists() else None
