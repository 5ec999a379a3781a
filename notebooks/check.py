"""Compare committed notebook outputs with those of a fresh run: python notebooks/check.py [--update] NOTEBOOK...

The outputs of a cell must be identical, except that only the type of a picture is compared, because its bytes depend on
fonts. In cells with the tag "varies" (times, versions), all numbers count as equal, and so do runs of spaces and of
lines, whose length in tables depends on the numbers. Standard error is ignored. With --update, a notebook with any
differing cell gets all outputs of the fresh run, because the text in one cell may refer to another cell's results.
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
    """Drop standard error, and join the pieces of standard output, because a kernel splits it at random places."""
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
    """Return `text` with every number replaced by 0, and each run of spaces or of lines by one."""
    return re.sub(r"([ ─━])\1+", r"\1", re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", text))


def shown(cell: Any) -> list[str]:
    """Return the outputs of a code cell as lines. Two runs agree if these lines are equal."""
    varies, lines = VARIES in cell["metadata"].get("tags", []), []
    for output in tidy(cell["outputs"]):
        data = output.get("data") or {"text/plain": output.get("text") or output["ename"]}  # a stream, or an error
        for kind in sorted(data):
            text = data[kind] if kind.startswith("text/") else ""
            lines += [f"{kind}:", *(masked(text) if varies else text).splitlines()]
    return lines


def differences(committed: Any, fresh: Any) -> dict[int, str]:
    """Return cell number -> a diff of the lines from `shown`, for each cell whose outputs differ."""
    found = {}
    for number, cells in enumerate(zip(committed["cells"], fresh["cells"], strict=True)):
        if cells[0]["cell_type"] == "code":
            old, new = map(shown, cells)
            if old != new:
                found[number] = "\n".join(difflib.unified_diff(old, new, "committed", "fresh", n=1, lineterm=""))
    return found


def take_over(committed: Any, fresh: Any) -> None:
    """Copy the outputs of every code cell from `fresh` to `committed`, so that all outputs come from one run."""
    for old, new in zip(committed["cells"], fresh["cells"], strict=True):
        if old["cell_type"] == "code":
            old["execution_count"], old["outputs"] = new["execution_count"], tidy(new["outputs"])


def check(file: Path, update: bool) -> bool:
    """Run all cells of `file` in a new kernel, update the file if requested, and return whether its outputs match."""
    import nbformat
    from nbclient import NotebookClient

    committed, fresh = (nbformat.read(file, as_version=4) for _ in range(2))
    resources = {"metadata": {"path": str(file.parent)}}
    NotebookClient(fresh, kernel_name="python3", timeout=600, resources=resources).execute()
    found = differences(committed, fresh)
    for number, difference in found.items():
        print(f"{file}: the output of cell {number} differs from the committed output\n{difference}")
    if update and found:
        take_over(committed, fresh)
        nbformat.write(committed, file)
    updated = "; all outputs now come from this run" if update and found else ""
    print(f"{file}: {len(found)} of {len(fresh['cells'])} cells differ{updated}")
    return update or not found


def main() -> None:
    """Exit with status 1 and print the command that updates the outputs if any of them are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="rewrite the outputs of each file that differs")
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    options = parser.parse_args()
    stale = [str(file) for file in options.notebooks if not check(file, options.update)]
    if stale:
        sys.exit(
            f"Outputs are stale; if the new ones are correct, run: python notebooks/check.py --update {' '.join(stale)}"
        )


if __name__ == "__main__":
    main()
