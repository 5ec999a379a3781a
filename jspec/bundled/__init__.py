"""The models and trained heads that ship with jspec, and known models that have short names."""

from pathlib import Path

PAIR = Path(__file__).parent / "pair_data"
"""The folder of the bundled pair: ``target`` and ``draft``."""
