"""A plot for each table. Each function draws a table's rows, whose keys contain the units, on an empty figure."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

Rows = Sequence[dict[str, Any]]
Drawing = Callable[[Figure, Rows], None]


def save(file: Path, draw: Drawing, rows: Rows, title: str, conditions: str) -> None:
    """Plot `rows` with `draw` and save a PNG, with `title` above and `conditions` in one small line below."""
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    draw(figure, rows)
    figure.suptitle(title, fontsize="medium")
    figure.supxlabel(conditions, fontsize="x-small", color="dimgrey")
    figure.savefig(file)
    # Plots are kept in the repository, and a palette reduces a file to a third of its size.
    Image.open(file).convert("RGB").quantize(128).save(file, optimize=True)


def speedups(figure: Figure, rows: Rows) -> None:
    """Plot `bench.latency`: speed-up against K, measured and in theory, with one colour per batch size."""
    axes = figure.subplots()
    drafting = [row for row in rows if row["predicted"] != ""]
    for number, (batch, mine) in enumerate(_groups(drafting, "batch").items()):
        ks, middle, low, high, predicted, dearer = (
            [row[key] for row in mine] for key in ("K", "x own plain", "from", "to", "predicted", "with K + 1 rows")
        )
        bars = [[m - x for m, x in zip(middle, low, strict=True)], [x - m for m, x in zip(middle, high, strict=True)]]
        axes.errorbar(
            ks,
            middle,
            bars,
            fmt="o",
            capsize=3,
            color=f"C{number}",
            label=f"batch {batch}, cost ratio {mine[0]['cost ratio']:.2f}",
        )
        axes.plot(ks, predicted, ":", color=f"C{number}")
        axes.plot(ks, dearer, "--", color=f"C{number}")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({row["K"] for row in drafting}))
    _finish(
        axes,
        "K, drafted tokens per round",
        "speed-up over own plain decoding",
        "points measured; dots theorem 3.8;\ndashes with the cost of K + 1 rows",
    )


def bars(label: str, value: str) -> Drawing:
    """Return a drawing with one bar per row. The bar's length is ``row[value]`` and its label is ``row[label]``."""

    def draw(figure: Figure, rows: Rows) -> None:
        axes = figure.subplots()
        names = [textwrap.fill(row[label], 40) for row in rows]
        axes.bar_label(axes.barh(names, [row[value] for row in rows]), fmt="%.3g", padding=3)
        axes.invert_yaxis()
        axes.tick_params("y", labelsize="small")
        axes.margins(x=0.12)
        axes.set_xlabel(value)

    return draw


def columns(*names: str) -> Drawing:
    """Return a drawing with one bar for each of these columns of the first row."""

    def draw(figure: Figure, rows: Rows) -> None:
        axes = figure.subplots()
        axes.bar_label(axes.barh(names, [rows[0][name] for name in names]), fmt="%.3g", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)

    return draw


def drafters(figure: Figure, rows: Rows) -> None:
    """Plot `bench.drafters`: the speed-up of every drafter and rule, with one panel per prompt kind."""
    kinds = _groups(rows, "prompt")
    panels = figure.subplots(1, len(kinds), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (kind, mine) in zip(panels, kinds.items(), strict=True):
        names = [row["drafter and rule"] for row in mine]
        bars = axes.barh(names, [row["x own plain"] for row in mine], 0.9)
        axes.bar_label(bars, fmt="%.2f", label_type="center", fontsize="x-small", color="white")
        known = [(row["predicted"], i) for i, row in enumerate(mine) if row["predicted"] != ""]
        axes.plot([x for x, _ in known], [i for _, i in known], "kd", markersize=3)
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.tick_params("y", labelsize="x-small")
        axes.set_title(kind, fontsize="small")
        axes.set_xlabel("x own plain decoding;\ndiamonds: theory, rounds alone", fontsize="small")
    axes.invert_yaxis()


def answers(figure: Figure, rows: Rows) -> None:
    """Plot `bench.answers`: tokens per second, with one panel per batch size and one group per question kind."""
    batches, programs = _groups(rows, "batch"), list(_groups(rows, "program"))
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    colours = matplotlib.colormaps["tab20"]
    for axes, (batch, mine) in zip(panels, batches.items(), strict=True):
        kinds = list(_groups(mine, "question"))
        for number, program in enumerate(programs):
            speeds = {row["question"]: row["tokens/s"] for row in mine if row["program"] == program}
            at = [kinds.index(kind) + (number + 0.5) / (len(programs) + 1) for kind in speeds]
            axes.barh(at, list(speeds.values()), 0.9 / (len(programs) + 1), label=program, color=colours(number))
        axes.set_yticks([i + 0.45 for i in range(len(kinds))], kinds)
        axes.set_title(f"batch {batch}", fontsize="small")
        axes.set_xlabel("tokens/s")
        axes.invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="x-small")


def rules(figure: Figure, rows: Rows) -> None:
    """Plot `bench.rules`: tokens per round under each rule, with a group per setting and a panel per temperature."""
    temperatures = _groups(rows, "temperature")
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for axes, (temperature, mine) in zip(panels, temperatures.items(), strict=True):
        names = [f"{row['drafter']}, K = {row['K']}" for row in mine]
        for number, rule in enumerate(("rejection", "block", "coupled")):
            at = [i + (number - 1) * 0.27 for i in range(len(mine))]
            axes.barh(at, [row[rule] for row in mine], 0.25, label=rule)
        axes.set_yticks(range(len(mine)), names, fontsize="small")
        axes.set_title(f"temperature {temperature:g}", fontsize="small")
        axes.set_xlabel("tokens per round")
    axes.invert_yaxis()
    axes.legend(fontsize="small", loc="upper right")


def trees(figure: Figure, rows: Rows) -> None:
    """Plot `bench.trees`: first-token acceptance by the number of children, and tokens per round of whole trees."""
    left, right = figure.subplots(1, 2)
    for rule, mine in _groups(rows, "rule").items():
        fans = [row["first token"] for row in mine if row["nodes"] == ""]
        left.plot(range(1, len(fans) + 1), fans, "o-", label=rule)
        shapes = _groups([row | {"shape": _shape(row["tree"])} for row in mine if row["nodes"] != ""], "shape")
        static = shapes.get("", [])
        line = right.plot(
            [row["nodes"] for row in static], [row["tokens per round"] for row in static], "o-", label=rule
        )
        right.plot(
            [row["nodes"] for row in static], [row["predicted"] for row in static], ":", color=line[0].get_color()
        )
        for kind, others in shapes.items():
            if kind:
                right.plot(
                    [row["nodes"] for row in others],
                    [row["tokens per round"] for row in others],
                    "s-",
                    label=f"{rule}, {kind}",
                )
    _finish(left, "children", "first token accepted")
    _finish(right, "nodes", "tokens per round", "dots: predicted")


def _shape(tree: str) -> str:
    """Return the shape in a tree's name, or "" for chains and the best trees."""
    return next((shape for shape in ("dynamic", "up to", "chains") if shape in tree), "")


def noise(figure: Figure, rows: Rows) -> None:
    """Plot `bench.noise`: acceptance by the number of children, and microseconds per distribution.

    Each vocabulary has its own colour.
    """
    left, right = figure.subplots(1, 2)
    for number, (size, mine) in enumerate(_groups(rows, "V").items()):
        fans = {int(row["what"].split()[-1]): row for row in mine if row["what"].startswith("accepted")}
        costs = {row["what"].removeprefix("us per distribution, "): row for row in mine if row["what"].startswith("us")}
        for way, line in (("two steps", "o-"), ("full noise", "s--")):
            left.plot(
                list(fans), [row[way] for row in fans.values()], line, color=f"C{number}", label=f"V = {size:,}, {way}"
            )
        for way, line in (("two steps", "o-"), ("full noise", "s--"), ("of 32 bits", "^:"), ("pass", "x")):
            right.plot(
                list(costs),
                [row[way] for row in costs.values()],
                line,
                color=f"C{number}",
                label=f"V = {size:,}, {way}",
            )
    right.set_yscale("log")
    _finish(left, "children", "target's token among them")
    _finish(right, "requests x distributions of each", "us per distribution")


def shares(figure: Figure, rows: Rows) -> None:
    """Plot `bench.trace`: the phases of a round, side by side in one bar."""
    _stack(
        figure,
        [""],
        {f"{row['phase']}, {row['share, %']:.1f} %": [row["share, %"]] for row in rows},
        "share of the time from first to last instruction, %",
    )


def startup(figure: Figure, rows: Rows) -> None:
    """Plot `bench.startup`: the time to the first token by phase, with one bar per program and cache state."""
    parts = [key for key in rows[0] if key.endswith(", s")]
    names = [f"{row['program']},\npersistent cache {row['persistent cache']}" for row in rows]
    _stack(figure, names, {part.removesuffix(", s"): [row[part] for row in rows] for part in parts}, "seconds")


def acceptance(figure: Figure, rows: Rows) -> None:
    """Plot `bench.acceptance`: conditional acceptance by position, with one line per prompt kind and temperature."""
    axes = figure.subplots()
    for number, (temperature, mine) in enumerate(_groups(rows, "temperature").items()):
        for row, line in zip(mine, ("o-", "s--"), strict=False):  # the user's own prompts are one kind
            rates = [value for key, value in row.items() if key.startswith("after ")]
            axes.plot(
                range(1, len(rates) + 1),
                rates,
                line,
                color=f"C{number}",
                label=f"{row['prompt']}, temperature {temperature:g}",
            )
    axes.set_ylim(0, 1.02)
    _finish(axes, "position in the draft", "share of verified draft tokens that are accepted")


def scaling(figure: Figure, rows: Rows) -> None:
    """Plot `bench.scaling`: three panels, in each of which one size grows and the others stay as in the first row."""
    labels = {"rows": "rows, tokens per request", "batch": "batch, requests", "context": "context, tokens"}
    for axes, size in zip(figure.subplots(1, 3, sharey=True), labels, strict=True):
        rest = [other for other in labels if other != size]
        line = [row for row in rows if all(row[other] == rows[0][other] for other in rest)]
        for model, mine in _groups(line, "model").items():
            axes.plot([row[size] for row in mine], [row["ms"] for row in mine], "o-", label=model)
        ticks = sorted({row[size] for row in line})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        _finish(axes, labels[size], "ms per pass")
    axes.set_ylim(bottom=0)


def llamacpp(figure: Figure, rows: Rows) -> None:
    """Plot `bench.llamacpp`: the time of a pass against its number of tokens, with one line per program."""
    axes = figure.subplots()
    for program in ("jspec", "llama.cpp"):
        axes.plot([row["rows"] for row in rows], [row[f"{program}, ms"] for row in rows], "o-", label=program)
    axes.set_ylim(bottom=0)
    _finish(axes, "rows, tokens per pass", "ms per pass")


def interrupts(figure: Figure, rows: Rows) -> None:
    """Plot `bench.interrupts`: seconds from each signal to the exit against the moment, with one colour per phase."""
    axes = figure.subplots()
    for phase, mine in _groups(rows, "phase").items():
        axes.plot(
            [row["s into the phase"] for row in mine], [row["s after the signal"] for row in mine], "o", label=phase
        )
    axes.set_ylim(bottom=0)
    _finish(axes, "moment of the signal, seconds into the phase", "seconds until the exit")


def training(figure: Figure, rows: Rows) -> None:
    """Plot `bench.training`: the parts of a step, with one bar per drafter kind."""
    parts = {name: [row[f"{name}, ms"] for row in rows] for name in ("target", "forward", "back")}
    _stack(figure, [row["kind"] for row in rows], parts, "ms per step")


def online(figure: Figure, rows: Rows) -> None:
    """Plot `bench.online`: acceptance against the requests served, with and without learning."""
    axes = figure.subplots()
    for name in ("as it was", "learning"):
        axes.plot([row["tokens served"] for row in rows], [row[name] for row in rows], "o-", label=name)
    axes.set_ylim(bottom=0)
    _finish(axes, "tokens served", "accepted / judged draft tokens")


def rollouts(accepted: Mapping[str, Sequence[float]], rewards: Sequence[float]) -> Drawing:
    """Return a drawing for `bench.rollouts`: accepted tokens of every way, and rewards, step by step."""

    def draw(figure: Figure, _: Rows) -> None:
        axes = figure.subplots()
        for name, shares in accepted.items():
            axes.plot(_smooth(shares), label=name)
        axes.plot(_smooth(rewards), "--", color="dimgrey", label="reward")
        axes.set_ylim(0, 1)
        _finish(axes, "training step", "accepted draft tokens / new tokens")

    return draw


def _smooth(values: Sequence[float], width: int = 4) -> np.ndarray:
    """Return the mean of the last `width` values at each step."""
    return np.array([np.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))])


def engine(figure: Figure, rows: Rows) -> None:
    """Plot `bench.engine`: tokens per second against concurrent requests, with one line per draft length."""
    axes = figure.subplots()
    for name in [key for key in rows[0] if key != "requests" and "/" not in key]:
        axes.plot([row["requests"] for row in rows], [row[name] for row in rows], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["requests"] for row in rows], [str(row["requests"]) for row in rows])
    axes.set_ylim(bottom=0)
    _finish(axes, "requests at once", "tokens per second")


def serve(figure: Figure, rows: Rows) -> None:
    """Plot `bench.serve`: tokens per second and the slowest first tokens for every load, with one line per server."""
    for axes, value, name in zip(
        figure.subplots(1, 2), ("tokens/s", "TTFT p99, ms"), ("tokens per second", "first token, p99, ms"), strict=True
    ):
        for server, mine in _groups(rows, "server").items():
            axes.plot([row["load"] for row in mine], [row[value] for row in mine], "o-", label=server)
        axes.set_ylim(bottom=0)
        axes.tick_params("x", rotation=60)
        _finish(axes, "", name)


def _groups(rows: Rows, key: str) -> dict[Any, list[dict[str, Any]]]:
    """Return the rows for each value of `key`, in order of appearance."""
    return {value: [row for row in rows if row[key] == value] for value in dict.fromkeys(row[key] for row in rows)}


def _stack(figure: Figure, names: list[str], parts: dict[str, list[float]], unit: str) -> None:
    """Draw one bar per name, with its parts stacked."""
    axes = figure.subplots()
    ends = [0.0] * len(names)
    for part, lengths in parts.items():
        axes.barh(names, lengths, left=ends, label=part)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    figure.legend(loc="outside right upper", fontsize="small")


def _finish(axes: Axes, x: str, y: str, legend: str = "") -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(title=legend, fontsize="small", title_fontsize="small")
