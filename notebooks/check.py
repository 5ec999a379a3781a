"""Committed outputs of notebooks against a fresh run: python notebooks/check.py [--update] NOTEBOOK...

What a cell shows must be the same to the letter. Of pictures only the kind is compared, for their bytes depend on
fonts. In cells with the tag "varies" (times, versions) every number counts as the same, and so does a longer run of
spaces or lines, which tables draw around longer numbers. Standard error is no part of it. With --update, a notebook
of which a cell differs gets all outputs of the fresh run: what one cell measured another speaks of.
"""

import argparse
import copy
import difflib
import re
import sys
from pathlib import Path
from typing import Any

VARIES = "varies"


def tidy(outputs: list[Any]) -> list[Any]:
    """Drop standard error, and join pieces of standard output, because a kernel cuts it at random places."""
    found: list[Any] = []
    for output in outputs:
        stream = output["output_type"] == "stream"
        if stream and output["name"] == "stderr":
            continue
        if stream and found and found[-1]["output_type"] == "stream":
            found[-1]["text"] += output["text"]
        else:
            found.append(copy.copy(output))
    return found


def masked(text: str) -> str:
    """Return `text` with every number as 0, and runs of spaces or of lines as one."""
    return re.sub(r"([ ─━])\1+", r"\1", re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", text))


def shown(cell: Any) -> list[str]:
    """Return lines for what a code cell shows. Two runs agree if these lines are equal."""
    varies, lines = VARIES in cell["metadata"].get("tags", []), []
    for output in tidy(cell["outputs"]):
        data = output.get("data") or {"text/plain": output.get("text") or output["ename"]}  # a stream, or an error
        for kind in sorted(data):
            text = data[kind] if kind.startswith("text/") else ""
            lines += [f"{kind}:", *(masked(text) if varies else text).splitlines()]
    return lines


def differences(committed: Any, fresh: Any) -> dict[int, str]:
    """Return cell number -> how the lines of `shown` differ, for cells whose outputs do not agree."""
    found = {}
    for number, cells in enumerate(zip(committed["cells"], fresh["cells"], strict=True)):
        if cells[0]["cell_type"] == "code":
            old, new = map(shown, cells)
            if old != new:
                found[number] = "\n".join(difflib.unified_diff(old, new, "committed", "fresh", n=1, lineterm=""))
    return found


def take_over(committed: Any, fresh: Any) -> None:
    """Give every code cell of `committed` what it shows in `fresh`, so that all outputs are of one run."""
    for old, new in zip(committed["cells"], fresh["cells"], strict=True):
        if old["cell_type"] == "code":
            old["execution_count"], old["outputs"] = new["execution_count"], tidy(new["outputs"])


def check(file: Path, update: bool) -> bool:
    """Run all cells of `file` in a new kernel, and return whether its outputs are, in the end, those of this run."""
    import nbformat
    from nbclient import NotebookClient

    committed, fresh = (nbformat.read(file, as_version=4) for _ in range(2))
    resources = {"metadata": {"path": str(file.parent)}}
    NotebookClient(fresh, kernel_name="python3", timeout=600, resources=resources).execute()
    found = differences(committed, fresh)
    for number, difference in found.items():
        print(f"{file}: what cell {number} shows is not what was committed\n{difference}")
    if update and found:
        take_over(committed, fresh)
        nbformat.write(committed, file)
    updated = "; all outputs are those of this run now" if update and found else ""
    print(f"{file}: {len(found)} of {len(fresh['cells'])} cells differ{updated}")
    return update or not found


def main() -> None:
    """Exit with 1 and the command that mends it, if outputs are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the outputs of a file that differs")
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    options = parser.parse_args()
    stale = [str(file) for file in options.notebooks if not check(file, options.update)]
    if stale:
        sys.exit(
            f"Outputs are stale; where the new ones are right: python notebooks/check.py --update {' '.join(stale)}"
        )


if __name__ == "__main__":
    main()
