"""`python docs/picture.py` renders docs/terminal.svg: what `jspec generate` shows of a prompt, from a real run."""

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

import jspec
from jspec.cli import report

FILE = Path(__file__).parent / "terminal.svg"
PROMPT = "def fibonacci(n):"


def picture() -> str:
    """Return the SVG: command, legend, text by origin, and figures, without the speed, which varies."""
    target, draft, tokenizer = jspec.demo_pair()
    (done,) = jspec.complete(target, draft, tokenizer, PROMPT)
    figures, _ = report.sentence(done, seconds=1).rsplit(";", 1)
    screen = Console(record=True, width=88, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    screen.print(Text(f'$ jspec generate "{PROMPT}"\n'))
    screen.print(report.legend(), end="\n\n")
    screen.print(report.coloured(done), end="\n\n")
    screen.print(Text(figures, "dim"))
    drawn = screen.export_svg(title="jspec", unique_id="jspec")
    # Without the font that a reader's browser would fetch.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
