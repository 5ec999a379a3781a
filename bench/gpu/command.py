"""`python -m bench gpu`, a command of `bench.__main__`."""

from pathlib import Path
from typing import Annotated

import typer

from bench.gpu.steps import STEPS

app = typer.Typer()
_NAMES = ", ".join(step.name for step in STEPS)


@app.command()
def gpu(
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", file_okay=False, help="Folder for the JSON files, one per step.")
    ],
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Time limit for all steps together.")] = 540.0,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Run the same code on CPU with tiny shapes.")] = False,
    only: Annotated[list[str], typer.Option("--step", help=f"One of {_NAMES}; may be repeated.")] = [],  # noqa: B006
) -> None:
    """Run the GPU drill: device constants, correctness, decoding speed, rivals, settings, tests."""
    if unknown := set(only) - {step.name for step in STEPS}:
        raise typer.BadParameter(f"There is no step {min(unknown)!r}; choose from {_NAMES}.", param_hint="--step")
    from bench.gpu.drill import Drill

    drill = Drill(output, seconds, rehearse, only=only)
    drill.run()
    if any(entry["state"] != "done" for entry in drill.facts["steps"]):
        raise typer.Exit(1)
