"""Code shared by all clients: a server for the bundled pair in its own process, its metrics, and the report."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from bench.serve import served
from jspec.bundled import PAIR

NAME, SLOTS = "model", 8
TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
TEXTS = ("import os\n", "def area(width, height):\n    return", "class Stack:\n    def push(self, item):\n", "for i in")


@contextlib.contextmanager
def pair(options: Sequence[str] = ()) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve the bundled pair with a chat template; yield the server's address and process."""
    with tempfile.TemporaryDirectory() as folder:
        target = shutil.copytree(PAIR / "target", Path(folder) / "target")
        (target / "chat_template.jinja").write_text(TEMPLATE)
        usual = [str(target), "--draft", str(PAIR / "draft"), "--name", NAME, "--slots", str(SLOTS)]
        with served([*usual, *options]) as server:
            yield server


def client(url: str) -> openai.AsyncOpenAI:
    """Return a client that sends every request once."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def metrics(url: str) -> dict[str, float]:
    """Return the metrics by name without `jspec_`, summed over labels and without buckets."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text):
        for sample in family.samples:
            if "le" not in sample.labels:
                name = sample.name.removeprefix("jspec_")
                found[name] = found.get(name, 0.0) + sample.value
    return found


class Report:
    """A report that prints one line per value; `end` exits with status 1 if a value missed its target."""

    def __init__(self) -> None:
        self._missed = 0

    def tell(self, what: str, figure: str, is_met: bool) -> None:
        """Print one value and whether it met its target."""
        self._missed += not is_met
        print(f"{'ok  ' if is_met else 'MISS'}  {what}: {figure}", flush=True)

    def end(self) -> None:
        """Exit with status 1 if a value missed its target, and 0 otherwise."""
        sys.exit(self._missed > 0)
