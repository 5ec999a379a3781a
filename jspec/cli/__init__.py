"""The `jspec` command. Slow modules are imported only when a command runs, so that help appears at once."""

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with 0 (done), 1 (failed), 2 (wrong usage) or 130 (interrupted).

    Print an error as one line on stderr. Without `arguments`, use the command line of this process, and end the
    process. With `arguments`, raise SystemExit instead.
    """
    if arguments is None:
        from jspec.cli import interrupts

        interrupts.end_at_once()
    from jspec.cli import app

    try:
        app.run(arguments)
    except SystemExit as end:
        if arguments is not None:
            raise
        for stream in filter(None, (sys.stdout, sys.stderr)):  # either may be closed
            stream.flush()
        os._exit(int(end.code or 0))  # XLA takes half a second to shut down, and ignores Ctrl-C
