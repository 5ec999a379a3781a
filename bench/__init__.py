"""Benchmarks that use jspec as a user would and report the conditions of each run: `python -m bench COMMAND`."""
