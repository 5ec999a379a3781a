"""`python -m jspec`: the `jspec` command."""

from jspec.cli import main

main()
