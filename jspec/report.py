"""Completions and tunings as they are shown: texts by origin in colour, figures in a line, JSON."""

import dataclasses
import itertools
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from jspec.completion import Completion
from jspec.draft_length import doubling
from jspec.prompts import is_conversation
from jspec.tuning import Tuning
from jspec.types import ACCEPTED, BONUS, CORRECTED, NO_DRAFT

NAMES = {ACCEPTED: "accepted", CORRECTED: "corrected", BONUS: "bonus", NO_DRAFT: "no draft"}
COLOURS = {ACCEPTED: "green", CORRECTED: "bold red", BONUS: "cyan", NO_DRAFT: "yellow"}
# Characters that are seldom in texts and often in fonts.
MARKS = {ACCEPTED: ("", ""), CORRECTED: ("«", "»"), BONUS: ("°", "°"), NO_DRAFT: ("¦", "¦")}
_PROMPT_ENDS = "►"
# A control character in a text could recolour or rewrite the terminal.
_VISIBLE = {i: "\ufffd" for i in [*range(32), *range(127, 160)] if chr(i) not in "\t\n"} | {ord("\r"): ""}


def as_json(done: Completion) -> dict[str, Any]:
    """`done` as JSON takes it, origins by name."""
    fields = {"prompt": done.prompt, "text": done.text} | dataclasses.asdict(done)
    del fields["pieces"]
    return fields | {"origins": [NAMES[origin] for origin in done.origins]}


def sentence(done: Completion, seconds: float) -> str:
    """The figures of one request in one line; `seconds` is how long its batch ran."""
    stats, speed = done.stats, f"{done.stats['tokens'] / seconds:.0f} tokens/s"
    counts = f"{stats['tokens']} tokens ({done.finish_reason}) in {stats['rounds']} rounds"
    if stats["acceptance_rate"] is None:
        return f"{counts}; {speed}"
    predicted = stats["predicted_tokens_per_round"]
    theirs = "" if predicted is None else f"{predicted:.2f} predicted from "
    measured = f"{stats['tokens_per_round']:.2f} a round"
    return f"{counts}: {measured}, {theirs}{stats['acceptance_rate']:.0%} acceptance; {speed}"


def coloured(done: Completion) -> Text:
    """Figure 1 of Leviathan et al. 2023 for terminals and notebooks: the text, coloured by origin."""
    text = Text().append(visible(_before(done.prompt)), "dim")
    for piece, origin in zip(done.pieces, done.origins, strict=True):
        text.append(visible(piece), COLOURS[origin])
    return text


def marked(done: Completion) -> Text:
    """The same where there are no colours: what was not accepted stands between the marks of its origin."""
    text = _before(done.prompt) + _PROMPT_ENDS
    for origin, run in itertools.groupby(zip(done.pieces, done.origins, strict=True), lambda pair: pair[1]):
        if new := "".join(piece for piece, _ in run):
            text += new.join(MARKS[origin])
    return Text(visible(text))


def _before(prompt: Any) -> str:
    """What a new text is shown behind: the prompt, the last message of a conversation, nothing of ids."""
    if isinstance(prompt, str):
        return prompt
    return prompt[-1]["content"] + "\n\n" if is_conversation(prompt) else ""


def visible(text: str) -> str:
    """`text` without what would do more on a terminal than be seen."""
    return text.translate(_VISIBLE)


def legend(marks: bool = False) -> Text:
    """What the colours of `coloured`, or the marks of `marked`, mean."""
    if marks:
        return Text(" ".join(["prompt" + _PROMPT_ENDS, *(NAMES[i].join(MARKS[i]) for i in NAMES)]))
    return Text(" ").join([Text("prompt", "dim"), *(Text(NAMES[i], COLOURS[i]) for i in NAMES)])


def tuning_table(found: Tuning, conditions: dict[str, Any]) -> Table:
    """Cost, yield and predicted speed of plain decoding and of every K, the fastest marked."""
    title = ", ".join(f"{name} {value}" for name, value in conditions.items())
    lengths = range(len(found.round_seconds) + 1)
    timed = {0, *doubling(len(found.round_seconds))}
    notes = ["~ interpolated"] if timed < {*lengths} else []
    table = Table(title=title, caption="; ".join([*notes, "tokens/s of each text"]), box=box.SIMPLE_HEAD)
    for title in ("K", "ms/round", "tokens/round", "tokens/s", "speed-up", ""):
        table.add_column(title, justify="right", no_wrap=True)
    costs, yields = (found.plain_seconds, *found.round_seconds), (1.0, *found.expected_tokens)
    for k, seconds, tokens, speedup in zip(lengths, costs, yields, (1.0, *found.speedups), strict=True):
        best = k == found.num_draft_tokens
        cost = f"{'' if k in timed else '~'}{seconds * 1e3:.3g}"
        cells = ("plain" if k == 0 else str(k), cost, f"{tokens:.2f}", f"{tokens / seconds:.0f}", f"{speedup:.2f}x")
        table.add_row(*cells, "<- best" if best else "", style="bold green" if best else None)
    return table


def advice(found: Tuning) -> str:
    """What to do about it, in one sentence."""
    if found.num_draft_tokens:
        return f"use num_draft_tokens={found.num_draft_tokens} ({found.speedup:.2f}x plain)"
    best = max(found.speedups)
    k = found.speedups.index(best) + 1
    return (
        f"do not speculate: at best, with num_draft_tokens={k}, it would run at {best:.2f}x the speed of plain decoding"
    )
