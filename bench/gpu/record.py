"""The measurements of one drill step, written to disk one by one."""

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.figures import plain


class Record:
    """The results of one step, which are written to a file whenever a row is added.

    The file is replaced atomically, so it is complete JSON at all times.

    Attributes:
        file: the file for the results.
        facts: facts about the step: its name, its state, the conditions, and the seconds it took.
        rows: one dictionary for each measurement, in order.
    """

    def __init__(self, file: Path, **facts: Any):
        self.file, self.facts = file, facts | {"state": "running"}
        self.rows: list[dict[str, Any]] = []
        self._begin = time.monotonic()
        self._write()

    def add(self, what: str, **figures: Any) -> None:
        """Append the row `what` with the values in `figures`, print it, and write the file."""
        self.rows.append({"what": what} | figures | {"at": round(time.monotonic() - self._begin, 2)})
        print(what, *(f"{name}={value}" for name, value in figures.items()), flush=True)
        self._write()

    def fail(self, what: str, error: BaseException) -> None:
        """Append a row with the traceback of `error`, because an error is a result, too."""
        lines = traceback.format_exception(error)
        self.add(what, error=f"{type(error).__name__}: {error}"[:2000], traceback="".join(lines)[-4000:])

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Record an exception in the block as the result of `what`, and continue after the block."""
        try:
            yield
        except Exception as error:
            self.fail(what, error)

    def finish(self, state: str, **facts: Any) -> None:
        """Write the file for the last time. `state` is "done" or "failed"."""
        self.facts |= {"state": state} | facts
        self._write()

    def _write(self) -> None:
        self.facts["seconds"] = round(time.monotonic() - self._begin, 2)
        write(self.file, self.facts | {"rows": self.rows})


def write(file: Path, facts: dict[str, Any]) -> None:
    """Atomically replace `file` with `facts` as JSON.

    A reader sees the old or the new content, even if this process is killed.
    """
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(plain(facts), indent=1, default=_number) + "\n", encoding="utf-8")
    os.replace(partial, file)


def _number(value: Any) -> Any:
    """Return the number in an array, or the text of anything else, so that no value prevents writing a step's file."""
    try:
        return value.item()
    except Exception:
        return str(value)
