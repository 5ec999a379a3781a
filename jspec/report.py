"""What became of each prompt: its text by origin, its counts beside theory; as JSON or in colour."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from rich import box
from rich.table import Table
from rich.text import Text

from jspec import theory
from jspec.draft_length import doubling
from jspec.text import Batch, pieces
from jspec.tuning import Tuning
from jspec.types import ACCEPTED, BONUS, CORRECTED, NO_DRAFT, Output

NAMES = {ACCEPTED: "accepted", CORRECTED: "corrected", BONUS: "bonus", NO_DRAFT: "no draft"}
COLOURS = {ACCEPTED: "green", CORRECTED: "bold red", BONUS: "cyan", NO_DRAFT: "yellow"}
# Characters that are seldom in texts and often in fonts.
MARKS = {ACCEPTED: ("", ""), CORRECTED: ("«", "»"), BONUS: ("°", "°"), NO_DRAFT: ("¦", "¦")}
_PROMPT_ENDS = "►"
# A control character in a text could recolour or rewrite the terminal.
_VISIBLE = {i: "\ufffd" for i in [*range(32), *range(127, 160)] if chr(i) not in "\t\n"} | {ord("\r"): ""}


@dataclasses.dataclass(frozen=True)
class Completion:
    """One prompt and its continuation.

    Attributes:
        prompt: as it was given.
        pieces: the text each new token added.
        tokens, logprobs, origins: as in `jspec.types.Output`, without the padding.
        finish_reason: "eos" or "length".
        stats: see `statistics`.
    """

    prompt: str
    pieces: list[str]
    tokens: list[int]
    logprobs: list[float]
    origins: list[int]
    finish_reason: str
    stats: dict[str, Any]

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(self.pieces)


def completions(
    prompts: Sequence[str], batch: Batch, out: Output, tokenizer: Any, eos_ids: Sequence[int]
) -> list[Completion]:
    """What `out` says of each of `prompts`, which were encoded as `batch`.

    Raises:
        ValueError: the target's logits were not finite.
    """
    if out.stats.invalid[: batch.count].any():
        raise ValueError("The target's logits are not finite: its weights are damaged, or too large for the dtype.")
    out, result = jax.device_get(out), []
    for row, prompt in enumerate(prompts):
        new = slice(int(out.lengths[row]))
        ids, tokens = batch.tokens[row, : batch.lengths[row]].tolist(), out.tokens[row, new].tolist()
        result.append(
            Completion(
                prompt=prompt,
                pieces=pieces(tokenizer, ids, tokens),
                tokens=tokens,
                logprobs=out.logprobs[row, new].tolist(),
                origins=out.origins[row, new].tolist(),
                finish_reason="eos" if tokens[-1] in eos_ids else "length",
                stats=statistics(out, row),
            )
        )
    return result


def statistics(out: Output, row: int) -> dict[str, Any]:
    """The counts of one request, and what the theory makes of its acceptance rate.

    ``acceptance_rate`` is that of the drafts that were judged: those after a rejection never are.
    ``predicted_tokens_per_round`` is equation 1 of Leviathan et al. 2023 at that rate, None where a round had fewer
    guesses than it supposes. The measured number is lower where the end of the text cuts the last round off, and
    differs where acceptance comes in streaks.
    """
    counts = out.lengths, out.stats.rounds, out.stats.judged, out.stats.accepted
    tokens, rounds, judged, accepted = (int(count[row]) for count in counts)
    accepted_at = out.stats.accepted_at[row].tolist()
    rate = accepted / judged if judged else None
    # A draft that was kept whole is followed by a bonus.
    whole = (out.origins[row] == BONUS).sum() <= sum(accepted_at[-1:]) and not (out.origins[row] == NO_DRAFT).any()
    predicted = float(theory.expected_tokens(rate, len(accepted_at))) if rate is not None and whole else None
    return {
        "tokens": tokens,
        "rounds": rounds,
        "drafted": int(out.stats.drafted[row]),
        "judged": judged,
        "accepted": accepted,
        "accepted_at": accepted_at,
        "acceptance_rate": rate,
        "tokens_per_round": tokens / rounds,
        "predicted_tokens_per_round": predicted,
    }


def as_json(done: Completion) -> dict[str, Any]:
    """`done` as JSON takes it, origins by name."""
    fields = {"prompt": done.prompt, "text": done.text} | dataclasses.asdict(done)
    del fields["pieces"]
    return fields | {"origins": [NAMES[origin] for origin in done.origins]}


def sentence(done: Completion, seconds: float) -> str:
    """The figures of one request in one line; `seconds` is how long its batch ran."""
    stats, speed = done.stats, f"{len(done.tokens) / seconds:.0f} tokens/s"
    counts = f"{stats['tokens']} tokens ({done.finish_reason}) in {stats['rounds']} rounds"
    if stats["acceptance_rate"] is None:
        return f"{counts}; {speed}"
    predicted = stats["predicted_tokens_per_round"]
    theirs = "" if predicted is None else f"{predicted:.2f} predicted from "
    measured = f"{stats['tokens_per_round']:.2f} a round"
    return f"{counts}: {measured}, {theirs}{stats['acceptance_rate']:.0%} acceptance; {speed}"


def coloured(done: Completion) -> Text:
    """Figure 1 of Leviathan et al. 2023 for terminals and notebooks: the text, coloured by origin."""
    text = Text().append(done.prompt.translate(_VISIBLE), "dim")
    for piece, origin in zip(done.pieces, done.origins, strict=True):
        text.append(piece.translate(_VISIBLE), COLOURS[origin])
    return text


def marked(done: Completion) -> Text:
    """The same where there are no colours: what was not accepted stands between the marks of its origin."""
    text = done.prompt + _PROMPT_ENDS
    for origin, run in itertools.groupby(zip(done.pieces, done.origins, strict=True), lambda pair: pair[1]):
        if new := "".join(piece for piece, _ in run):
            text += new.join(MARKS[origin])
    return Text(text.translate(_VISIBLE))


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
