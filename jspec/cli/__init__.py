"""The `jspec` command. Nothing slow is imported until a command runs, so that help comes at once."""

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted. A failure is a sentence on stderr.

    Without `arguments` it is that of this process, which then ends as a command should; else it raises SystemExit.
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
        os._exit(int(end.code or 0))  # XLA takes half a second to take itself down, deaf to Ctrl-C
