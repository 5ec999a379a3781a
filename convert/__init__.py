"""Conversion between Llama, Mistral, Qwen2 and Qwen3 checkpoints and flat dictionaries of named arrays.

The package contains no model code.
"""

import importlib
from typing import TYPE_CHECKING

from convert import moved

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.config import LlamaConfig, RopeConfig, parse_config, read_config
    from convert.errors import CheckpointError
    from convert.keymap import shapes
    from convert.loading import load
    from convert.saving import save, save_hf
    from convert.source import resolve

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "LlamaConfig",
    "RopeConfig",
    "load",
    "parse_config",
    "read_config",
    "resolve",
    "save",
    "save_hf",
    "shapes",
]

# Import the modules on first use: they are slow to import, and `--help` should be fast.
_HOMES = {
    "Checkpoint": "convert.checkpoint",
    "CheckpointError": "convert.errors",
    "LlamaConfig": "convert.config",
    "RopeConfig": "convert.config",
    "load": "convert.loading",
    "parse_config": "convert.config",
    "read_config": "convert.config",
    "resolve": "convert.source",
    "save": "convert.saving",
    "save_hf": "convert.saving",
    "shapes": "convert.keymap",
}

moved.install()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'convert' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
