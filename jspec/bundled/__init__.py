"""Models and trained heads that ship with jspec, and models with a short name."""

from pathlib import Path

PAIR = Path(__file__).parent / "pair_data"
"""The folder of the bundled pair: ``target`` and ``draft``."""
