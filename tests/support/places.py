"""Shared by the tests of docs and others."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
