"""The display of results: text coloured by origin, one-line statistics, tables and JSON."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from rich import box
from rich.table import Table
from rich.text import Text

from jspec.core.origins import ACCEPTED, BONUS, COLOURS, CORRECTED, NAMES, NO_DRAFT
from jspec.drafters.draft_length import doubling
from jspec.generation.complete import Completion
from jspec.planning.memory import Footprint
from jspec.planning.plan import NO_ROOM, QUANTIZE, SPECULATE, Drafting, Plan
from jspec.text.chat_template import Prompt, is_conversation
from jspec.tuning.tune_chain import Tuning

if TYPE_CHECKING:
    from jspec.training.evaluate import Result
    from jspec.training.fit import Progress

# Characters that are rare in text and common in fonts.
MARKS = {ACCEPTED: ("", ""), CORRECTED: ("«", "»"), BONUS: ("°", "°"), NO_DRAFT: ("¦", "¦")}
_PROMPT_ENDS = "►"
_TAKEN = 0.75  # share of a GPU's memory that JAX takes by default
# Control characters in the output could recolour or rewrite the terminal.
_VISIBLE = {i: "\ufffd" for i in [*range(32), *range(127, 160)] if chr(i) not in "\t\n"} | {ord("\r"): ""}


def as_json(done: Completion) -> dict[str, object]:
    """Return `done` in JSON-serialisable form, with origins given by name."""
    fields = cast("dict[str, object]", {"prompt": done.prompt, "text": done.text} | dataclasses.asdict(done))
    del fields["pieces"]
    return fields | {"origins": [NAMES[origin] for origin in done.origins]}


def sentence(done: Completion, seconds: float) -> str:
    """Return one request's statistics in one line. `seconds` is the run time of the request's batch."""
    stats, speed = done.stats, f"{done.stats['tokens'] / seconds:.0f} tokens/s"
    counts = f"{stats['tokens']} tokens ({done.finish_reason}) in {stats['rounds']} rounds"
    if stats["acceptance_rate"] is None:
        return f"{counts}; {speed}"
    predicted = stats["predicted_tokens_per_round"]
    theirs = "" if predicted is None else f"{predicted:.2f} predicted from "
    measured = f"{stats['tokens_per_round']:.2f} per round"
    return f"{counts}: {measured}, {theirs}{stats['acceptance_rate']:.0%} acceptance; {speed}"


def coloured(done: Completion) -> Text:
    """Return the text coloured by origin, as in figure 1 of Leviathan et al. 2023, for terminals and notebooks."""
    return Text().append(visible(_before(done.prompt)), "dim").append_text(by_origin(done))


def by_origin(done: Completion) -> Text:
    """Return the new text, with each token coloured by its origin."""
    text = Text()
    for piece, origin in zip(done.pieces, done.origins, strict=True):
        text.append(visible(piece), COLOURS[origin])
    return text


def marked(done: Completion) -> Text:
    """Return the text for output without colours, with origin marks around tokens that were not accepted."""
    text = _before(done.prompt) + _PROMPT_ENDS
    for origin, run in itertools.groupby(zip(done.pieces, done.origins, strict=True), lambda pair: pair[1]):
        if new := "".join(piece for piece, _ in run):
            text += new.join(MARKS[origin])
    return Text(visible(text))


def _before(prompt: Prompt) -> str:
    """Return the text to show before new text: the prompt, a conversation's last message, or nothing for token ids."""
    if isinstance(prompt, str):
        return prompt
    return cast("str", prompt[-1]["content"]) + "\n\n" if is_conversation(prompt) else ""


def visible(text: str) -> str:
    """Return `text` without control characters, which a terminal would interpret."""
    return text.translate(_VISIBLE)


def legend(marks: bool = False) -> Text:
    """Return a legend for the colours of `coloured`, or for the marks of `marked`."""
    if marks:
        return Text(" ".join(["prompt" + _PROMPT_ENDS, *(NAMES[i].join(MARKS[i]) for i in NAMES)]))
    return Text(" ").join([Text("prompt", "dim"), *(Text(NAMES[i], COLOURS[i]) for i in NAMES)])


def tuning_table(tuning: Tuning, conditions: Mapping[str, object]) -> Table:
    """Return a table of the cost, yield and predicted speed of plain decoding and every K, with the fastest marked."""
    title = ", ".join(f"{name} {value}" for name, value in conditions.items())
    lengths = range(len(tuning.round_seconds) + 1)
    timed = {0, *doubling(len(tuning.round_seconds))}
    notes = ["~ interpolated"] if timed < {*lengths} else []
    table = Table(title=title, caption="; ".join([*notes, "tokens/s of each text"]), box=box.SIMPLE_HEAD)
    for title in ("K", "ms/round", "tokens/round", "tokens/s", "speed-up", ""):
        table.add_column(title, justify="right", no_wrap=True)
    costs, yields = (tuning.plain_seconds, *tuning.round_seconds), (1.0, *tuning.expected_tokens)
    for k, seconds, tokens, speedup in zip(lengths, costs, yields, (1.0, *tuning.speedups), strict=True):
        best = k == tuning.num_draft_tokens and tuning.tree is None
        cost = f"{'' if k in timed else '~'}{seconds * 1e3:.3g}"
        cells = ("plain" if k == 0 else str(k), cost, f"{tokens:.2f}", f"{tokens / seconds:.0f}", f"{speedup:.2f}x")
        table.add_row(*cells, "<- best" if best else "", style="bold green" if best else None)
    if tuning.tree is not None:
        cells = ("tree", "", "", f"{tuning.tree_speedup / tuning.plain_seconds:.0f}", f"{tuning.tree_speedup:.2f}x")
        table.add_row(*cells, "<- best", style="bold green")
    return table


def advice(tuning: Tuning) -> str:
    """Return the recommendation from a tuning run in one sentence."""
    if tuning.tree is not None:
        parents = tuning.tree.parents
        chain = f"num_draft_tokens={tuning.num_draft_tokens}" if tuning.num_draft_tokens else "plain decoding"
        return (
            f"use jspec.Tree({parents}), or --tree {','.join(map(str, parents))} ({tuning.tree_speedup:.2f}x "
            f"plain; {chain} {tuning.speedup:.2f}x)"
        )
    if tuning.num_draft_tokens:
        return f"use num_draft_tokens={tuning.num_draft_tokens} ({tuning.speedup:.2f}x plain)"
    return _against(tuning.speedups)


def _against(speedups: Sequence[float]) -> str:
    best = max(speedups)
    k = speedups.index(best) + 1
    return (
        f"do not speculate: at best, with num_draft_tokens={k}, it would run at {best:.2f}x the speed of plain decoding"
    )


def training_line(evaluation: "Progress") -> str:
    """Return one line about an evaluation on held-out text.

    The predicted tokens per round assume a chain of the maximum depth.
    """
    from jspec.training.fit import predicted  # not imported for every command, because it imports optax

    kept, same = (" ".join(f"{rate:.3f}" for rate in rates) for rates in (evaluation.acceptance, evaluation.agreement))
    rounds = [f"{predicted(rates):.2f}" for rates in (evaluation.acceptance, evaluation.agreement)]
    return (
        f"step {evaluation.step}: loss {evaluation.loss:.4f}; "
        f"accepted by depth {kept} ({rounds[0]} tokens per round), greedily {same} ({rounds[1]})"
    )


def training_table(results: "Sequence[Result]") -> Table:
    """Return a table of a trained drafter's tokens per round and speed."""
    titles = ("tokens drafted", "temperature", "tokens/round, predicted", "measured", "speed")
    caption = "predicted: on the held-out texts themselves; measured: on the target's answers to their prompts"
    table = Table(*titles, box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for result in results:
        table.add_row(
            str(result.num_draft_tokens),
            f"{result.temperature:g}",
            f"{result.foreseen:.2f}",
            f"{result.tokens_per_round:.2f}",
            f"{result.speedup:.2f}x",
        )
    return table


def memory_table(plan: Plan) -> Table:
    """Return a table of the predicted memory use on the device, with and without the draft."""
    device = plan.device
    before, after = (f"{plan.num_devices} x ", ", per device") if plan.num_devices > 1 else ("", "")
    title = (
        f"{before}{device.title}, {device.dtype}{after}: batch {plan.batch}, length {plan.length}\n"
        f"prompt {plan.prompt}, assumed acceptance rate {plan.acceptance:g}"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("GB, predicted", no_wrap=True)
    for column in ("weights", "caches", "besides", "all", f"of {device.memory / 1e9:.1f}"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = {"plain": plan.plain_footprint} | {name: one.footprint for name, one in _drafts(plan).items()}
    for name, held in rows.items():
        parts = *_gigabytes(held), f"{held.total / 1e9:.2f}", f"{held.total / device.memory:.0%}"
        table.add_row(name, *parts)
    most = max(held.total for held in rows.values()) / device.memory
    if device.platform == "cuda" and _TAKEN < most <= 1:
        table.caption = f"JAX takes {_TAKEN:.0%} of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is higher"
    return table


def block_line(plan: Plan) -> str:
    """Return one line with the size of each part of a block drafter, in MB."""
    return "MB of the block drafter: " + ", ".join(f"{name} {size / 1e6:.0f}" for name, size in plan.block.items())


def plan_table(plan: Plan) -> Table:
    """Return a table of the predicted cost, yield and speed for plain decoding and every K, with each draft."""
    notes = ["predicted, not measured; tokens/s of each text"]
    drafts = _drafts(plan)
    if len(drafts) > 1:
        notes.append("a quantised draft is assumed to be accepted as often")
    table = Table(caption="\n".join(notes), box=box.SIMPLE_HEAD)
    for title in ("K", "tokens/round", "ms/round", "tokens/s", *drafts):
        table.add_column(title, justify="right", no_wrap=True)
    for k in range(len(plan.draft.speedups) + 1):
        seconds, tokens = _costs(plan.draft)[k - 1] if k else (plan.plain_seconds, 1.0)
        table.add_row(
            "plain" if k == 0 else str(k),
            f"{tokens:.2f}",
            f"{seconds * 1e3:.3g}",
            f"{tokens / seconds:.0f}",
            *(_speed(one, k) for one in drafts.values()),
            style="bold green" if k == plan.draft.best else None,
        )
    return table


def _drafts(plan: Plan) -> dict[str, Drafting]:
    """Return the drafts to compare: the draft as given and in int8, or only the int8 draft if both are the same."""
    if plan.int8 is None:
        return {"block drafter": plan.draft}
    return ({} if plan.int8 == plan.draft else {"draft": plan.draft}) | {"int8 draft": plan.int8}


def _costs(draft: Drafting) -> list[tuple[float, float]]:
    return list(zip(draft.round_seconds, draft.expected_tokens, strict=True))


def _speed(draft: Drafting, k: int) -> str:
    return f"{'best ' if k == draft.best else ''}{draft.speedups[k - 1] if k else 1:.2f}x"


def _gigabytes(held: Footprint) -> tuple[str, str, str]:
    return f"{held.weights / 1e9:.2f}", f"{held.caches / 1e9:.2f}", f"~{held.temporaries / 1e9:.2f}"


def plan_advice(plan: Plan) -> str:
    """Return the recommendation from a plan in one sentence."""
    draft, int8 = plan.draft, plan.int8
    if plan.verdict == NO_ROOM:
        return _no_room(plan)
    if plan.verdict == QUANTIZE and int8 is not None:
        as_given = f"compared with {draft.speedup:.2f}x as given" if draft.best else "but as given it does not pay off"
        return (
            f"quantise the draft: in int8, with num_draft_tokens={int8.num_draft_tokens}, it would run at "
            f"{int8.speedup:.2f}x the speed of plain decoding, {as_given}"
        )
    if plan.verdict != SPECULATE:
        return _against(draft.speedups)
    best = f"use num_draft_tokens={draft.best} ({draft.speedups[draft.best - 1]:.2f}x plain, predicted)"
    if draft.num_draft_tokens == draft.best:
        return best
    return f"{best}; num_draft_tokens={draft.num_draft_tokens} would run at {draft.speedup:.2f}x"


def _no_room(plan: Plan) -> str:
    weights, caches, besides = _gigabytes(plan.draft.footprint)
    options = {
        f"a batch of {plan.largest_batch}": plan.largest_batch,
        f"a length of {plan.largest_length}": plan.largest_length,
        "a draft in int8": plan.int8 is not None and plan.int8.fits and not plan.draft.fits,
        "decoding without a draft": plan.plain_fits,
    }
    fitting = [name for name, fits in options.items() if fits]
    remedy = f"{' or '.join(fitting)} would fit" if fitting else "no smaller setting of this pair would fit either"
    return (
        f"does not fit: {weights} GB of weights, {caches} GB of caches and {besides} GB of temporaries exceed the "
        f"{plan.device.memory / 1e9:.2f} GB of one {plan.device.title}; {remedy}"
    )
