"""Checks that print one line each. The programs run with their client's Python, so this file imports no package."""

import asyncio
import importlib.metadata
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

QUESTION = "What is the capital of France?"
MOST_TOKENS = 400  # a small model may not end by itself
BEGINNING = "The capital of France is"  # for completions; a model may not continue a question
TOOL_QUESTION = "What will the weather be in Paris for the next 3 days? Use the tool."


class Program:
    """A client under test, with the server's address, the model's name and a tokenizer from the command line.

    Args:
        package: the client's package, whose version is printed.
        name: the printed name, if it is not that of the package.

    Attributes:
        url: the server's address, without /v1.
        model: the model's name.
        tokenizer: a folder with a tokenizer, for clients that generate prompts of a given length.
    """

    def __init__(self, package: str, name: str = "") -> None:
        self._client = f"{name or package} {importlib.metadata.version(package)}"
        self.url, self.model, self.tokenizer = sys.argv[1:4]
        self._missed = 0
        self._out, sys.stdout = sys.stdout, sys.stderr  # clients print too
        self._loop = asyncio.Runner()  # one for all checks, because clients keep connections

    def check(self, what: str, *arguments: Any) -> Callable[[Callable[..., Any]], None]:
        """Run the decorated function, which may be a coroutine function, and print whether it returned."""

        def run(function: Callable[..., Any]) -> None:
            try:
                found = function(*arguments)
                if inspect.isawaitable(found):
                    self._loop.run(_awaited(found))
            except Exception as error:
                self._missed += 1
                print(f"MISS  {self._client}: {what}: {_in_one_line(error)}", file=self._out, flush=True)
            else:
                print(f"ok    {self._client}: {what}", file=self._out, flush=True)

        return run

    def end(self) -> None:
        """Exit with status 1 if a check has failed, and 0 otherwise."""
        sys.exit(self._missed > 0)


async def _awaited(found: Any) -> None:
    await found


def _in_one_line(error: Exception) -> str:
    """Return the kind of error, its message, and for a failed assertion its source line."""
    *_, last = traceback.extract_tb(error.__traceback__)
    text = " ".join(f"{error}".split())[:600]
    return f"{type(error).__name__}: {text or last.line}"


def weather(city: str, days: int) -> str:
    """Get the weather forecast of a city.

    Args:
        city: the city's name.
        days: the number of days.
    """
    return f"{city}: sunny for {days} days."
