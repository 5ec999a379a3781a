"""Helpers for the documentation tests and others."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
