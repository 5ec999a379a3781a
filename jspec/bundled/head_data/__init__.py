"""Trained heads that travel with jspec, each in a folder called as the known model that it was trained for."""

from pathlib import Path

_FOLDER = Path(__file__).parent


def head_of(name: str) -> Path | None:
    """The head for a model of that name, None where there is none; a path that exists is no name."""
    folder = _FOLDER / name
    is_known = folder.parent == _FOLDER and (folder / "config.json").is_file()
    return folder if is_known and not Path(name).exists() else None
