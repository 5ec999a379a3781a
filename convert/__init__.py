"""Hugging Face Llama checkpoints <-> flat dictionaries of named arrays; no model code."""

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
