"""Popular clients with their defaults against one server of SmolLM2: a line per check, then a table of the clients."""

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.serve import served
from jspec.bundled import PAIR

HERE = Path(__file__).parent / "programs"
MODEL = "smollm2"
LIMIT = 900
LINE = re.compile(r"(ok|MISS) +([^:]+): (.*)")


def lines(program: Path, python: Path, url: str) -> list[re.Match[str]]:
    """Run a program with its client's Python, print its lines and return them.

    A crash counts as a missed check, and so does a program that does not end within `LIMIT` seconds.
    """
    command = [python, program, url, MODEL, PAIR / "target"]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")}
    begun, printed = time.monotonic(), []
    with tempfile.TemporaryFile("w+") as noise:
        with subprocess.Popen(command, env=clean, stdout=subprocess.PIPE, stderr=noise, text=True) as process:
            assert process.stdout is not None
            limit = threading.Timer(LIMIT, process.kill)
            limit.start()
            for line in process.stdout:
                print(line, end="", flush=True)
                printed.append(line.strip())
            limit.cancel()
        noise.seek(0)
        if process.returncode and not any(line.startswith("MISS") for line in printed):
            printed.append(f"MISS  {program.stem}: the program: {' '.join(noise.read().split())[-600:]}")
            print(printed[-1])
    print(f"      {program.stem}: {time.monotonic() - begun:.0f} s", flush=True)
    return [*filter(None, map(LINE.fullmatch, printed))]


def main() -> None:
    """Run the programs of the given environments, print the table, and exit with status 1 if a check has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with an environment per client, named like its program")
    parser.add_argument("names", nargs="*", help="the clients [default: all]")
    options = parser.parse_args()
    names = options.names or sorted(path.stem.removeprefix("use_").replace("_", "-") for path in HERE.glob("use_*.py"))
    table: dict[str, list[str]] = collections.defaultdict(list)
    missed = 0
    with served([MODEL, "--name", MODEL, "--max-length", "8192", "--slots", "2"]) as (url, _):
        for name in names:
            for line in lines(HERE / f"use_{name.replace('-', '_')}.py", options.folder / name / "bin/python", url):
                missed += line[1] == "MISS"
                table[line[2]].append(line[3] if line[1] == "ok" else f"not {line[3]}")
    print("\n| client | what works |\n|---|---|")
    for client, works in table.items():
        print(f"| {client} | {'; '.join(works)} |")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
