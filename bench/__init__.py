"""Benchmarks: `python -m bench COMMAND`. They use jspec as a user would, and say under what conditions they ran."""
