"""Reports: a table in the terminal, and the same data as JSON and as a plot in a folder, all with conditions."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import plots
from bench.conditions import conditions, summary
from bench.figures import plain

RESULTS = Path(__file__).parent / "results"


def publish(
    name: str,
    title: str,
    rows: plots.Rows,
    draw: plots.Drawing,
    notes: Sequence[str] = (),
    folder: Path = RESULTS,
    **facts: Any,
) -> Path:
    """Print `rows` as a table, write them with `facts` and the conditions, plot them, and return the JSON file.

    Args:
        name: the name of the files. Characters other than letters, digits, points and hyphens become hyphens.
        title: the title above the table and the plot.
        rows: dictionaries with the same keys, one per line. The keys are the column heads.
        draw: the function that plots `rows`. See `bench.plots`.
        notes: sentences below the table.
        folder: the folder for the files.
        facts: further contents of the JSON file.
    """
    table = Table(title=title, title_justify="left")
    for head in rows[0]:
        table.add_column(head, justify="left" if isinstance(rows[0][head], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    here = conditions()
    for note in notes:
        console.print(note, highlight=False)
    console.print(", ".join(f"{key} {value}" for key, value in here.items() if value), highlight=False, style="dim")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / (re.sub(r"[^\w.]+", "-", name) + ".json")
    report = {"title": title, "conditions": here, "notes": list(notes), "rows": rows, **facts}
    file.write_text(json.dumps(plain(report), indent=1) + "\n", encoding="utf-8")
    plots.save(file.with_suffix(".png"), draw, rows, title, summary(here))
    return file
