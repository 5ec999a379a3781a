"""Tokens per second of a real model's answers to four kinds of question, in jspec, transformers and llama.cpp."""

import functools
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jspec
from bench import chats, llamacpp, plots, rivals
from bench.drafters import early_exit
from bench.report import publish
from bench.subject import Subject
from bench.timing import in_turns, ratio, spread
from jspec import text
from jspec.drafters.base import own_tree
from jspec.drafters.combine.fallback import with_lookup_first

DRAFTING = ("tokens per round", "accepted")
RIVALS = ("transformers plain", "transformers lookup", "llama.cpp")
Measurement = tuple[dict[str, Any], dict[str, np.ndarray]]  # each program's outputs, and its seconds in each repeat


def here(subject: Subject, longest: int) -> dict[str, Any]:
    """Return the installed programs that can decode the same weights, keyed by the module that they need.

    Args:
        longest: the maximum sequence length, in tokens.
    """
    found = {}
    if importlib.util.find_spec("torch") is not None:
        found["torch"] = rivals.twin(subject.target)
    if importlib.util.find_spec("llama_cpp") is not None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "target.gguf"
            llamacpp.write_gguf(subject.target, file)
            found["llama_cpp"] = llamacpp.load(file, logits_all=False, context=longest)
    return found


def drafters(subject: Subject, k: int, tree: tuple[int, ...]) -> dict[str, tuple[Any, int | None]]:
    """Return name -> (drafter, draft length): drafters without weights, and one that was trained for the target.

    A length of None means the default of `jspec.complete`.
    """
    found = {"plain": None, "lookup": jspec.NGramDrafter(), "recycling, 8 nodes": jspec.TokenRecyclingDrafter(8)}
    if isinstance(subject.draft, jspec.NGramDrafter):
        found |= early_exit(subject.target)
        return {name: (drafter, k) for name, drafter in found.items()}
    found["head"] = subject.draft
    if tree:
        found["head, tree"] = jspec.TreeDrafter(subject.draft, jspec.Tree(tree))
    far: dict[str, tuple[Any, int | None]] = {name: (drafter, k) for name, drafter in found.items()}
    if own_tree(subject.draft) is None:  # a drafter with its own tree cannot be a fallback
        far |= {"head, one token": (subject.draft, 1), "lookup, else head": (with_lookup_first(subject.draft), None)}
    return far


def programs(
    subject: Subject,
    others: dict[str, Any],
    asked: Sequence[np.ndarray],
    batch: int,
    k: int,
    new_tokens: int,
    temperature: float,
    tree: tuple[int, ...],
) -> dict[str, Callable[[], Any]]:
    """Return name -> a call that answers all of `asked`, `batch` at a time.

    A jspec call returns outputs, and the other calls return token ids.
    """
    ends = text.eos_ids(subject.target, subject.tokenizer)
    requests = chats.requests(subject.tokenizer, asked, batch)
    calls: dict[str, Callable[[], Any]] = {
        name: chats.decoder(subject, drafter, far, requests, new_tokens, temperature)
        for name, (drafter, far) in drafters(subject, k, tree).items()
    }
    if temperature:  # other programs sample different outputs, because their noise differs
        return calls
    groups = [asked[i : i + batch] for i in range(0, len(asked), batch)]
    if "torch" in others:
        options = {"transformers plain": {}}
        if batch == 1:  # transformers' prompt lookup supports only batch 1
            options["transformers lookup"] = {"prompt_lookup_num_tokens": k}
        for name, option in options.items():
            calls[name] = lambda option=option: [
                one for group in groups for one in rivals.greedy(others["torch"], group, new_tokens, ends, **option)[0]
            ]
    if "llama_cpp" in others and batch == 1:
        calls["llama.cpp"] = lambda: [llamacpp.answer(others["llama_cpp"], one, new_tokens, ends) for one in asked]
    return calls


def run(
    subject: Subject,
    questions: dict[str, list[np.ndarray]],
    batches: list[int],
    count: int,
    k: int,
    new_tokens: int,
    repeats: int,
    temperature: float,
    tree: tuple[int, ...],
    with_rivals: bool = True,
) -> None:
    """Publish one row per question kind, batch size and program, and one over all kinds per batch size and program.

    Args:
        questions: the questions, as `chats.by_kind` returns them.
        count: the number of questions of each kind. It is rounded down to full batches, but is at least one batch.
        with_rivals: whether to measure the other programs, too. They decode only greedily.
    """
    longest = max(len(one) for asked in questions.values() for one in asked)
    with_rivals = with_rivals and not temperature
    others, rows = here(subject, longest + new_tokens) if with_rivals else {}, []
    readings: dict[int, list[Measurement]] = {batch: [] for batch in batches}
    for kind, asked in questions.items():
        for batch in batches:
            size = max(count, batch) // batch * batch
            warm_ups, calls = (
                programs(subject, others, group, batch, k, new_tokens, temperature, tree)
                for group in (one_batch_per_width(subject.tokenizer, asked[:size], batch), asked[:size])
            )
            for warm_up in warm_ups.values():
                warm_up()
            outs: dict[str, Any] = {}
            times = in_turns(kept(calls, outs), repeats, warmup=0)
            readings[batch].append((outs, times))
            rows += _rows(kind, batch, outs, times)
    if len(questions) > 1:
        rows += [row for batch in batches for row in _rows("all", batch, *_merged(readings[batch]))]
    wanted = ("torch", "llama_cpp") if with_rivals else ()
    missing = "".join(f" {module} is not installed." for module in wanted if module not in others)
    asked_of = "-held-out" if chats.HELD_OUT in questions else ""
    drawn = f"-t{temperature:g}" if temperature else ""
    publish(
        f"answers-{subject.name}{asked_of}{drawn}-{jax.default_backend()}",
        f"{subject.name}, temperature {temperature:g}: answers to chats, {new_tokens} new tokens at most, K = {k},"
        f" {subject.target.dtype}",
        rows,
        plots.answers,
        notes=[
            f"Medians of {repeats} calls in turns. Times include the prompt, and answers end at EOS. x: speed over that"
            " of another program; from and to: quartiles of x plain. same texts: the number of texts that equal those"
            " of jspec's plain decoding; sampled texts may differ.",
            f"Prompt lookup drafts at most {k} tokens. In transformers, it supports only one row, and llama.cpp is"
            " measured with one row. In 'lookup, else head', prompt lookup matches 3 or 2 tokens, and the head drafts"
            f" while it is confident.{missing}",
        ],
        folder=subject.folder,
    )


def one_batch_per_width(tokenizer: Any, asked: Sequence[np.ndarray], batch: int) -> list[np.ndarray]:
    """Return one batch of questions per padded width, because each width compiles its own program."""
    groups = [asked[i : i + batch] for i in range(0, len(asked), batch)]
    by_width = {chats.requests(tokenizer, group, batch)[0][0].shape[1]: group for group in groups}
    return [row for group in by_width.values() for row in group]


def kept(calls: dict[str, Callable[[], Any]], outs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return `calls`, changed to store their results in `outs`."""

    def keep(name: str) -> None:
        outs[name] = calls[name]()

    return {name: functools.partial(keep, name) for name in calls}


def _merged(readings: Sequence[Measurement]) -> Measurement:
    """Return the outputs and total times over all question kinds, for programs that ran on every kind."""
    names = [name for name in readings[0][0] if all(name in outs for outs, _ in readings)]
    outs = {name: [one for found, _ in readings for one in found[name]] for name in names}
    return outs, {name: np.sum([times[name] for _, times in readings], axis=0) for name in names}


def _rows(kind: str, batch: int, outs: dict[str, Any], times: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return one table row per program, from its times and outputs."""
    found = {name: texts(out) for name, out in outs.items()}
    each = {name: taken / sum(map(len, found[name])) for name, taken in times.items()}  # seconds per token
    rows = []
    for name, out in outs.items():
        row = {"question": kind, "batch": batch, "program": name, "tokens/s": spread(1 / each[name]).median}
        row |= dict(zip(DRAFTING, drafting(out), strict=True))
        gain = ratio(each["plain"], each[name])
        row |= {"x plain": gain.median, "from": gain.low, "to": gain.high}
        row |= {f"x {other}": ratio(each[other], each[name]).median if other in each else "" for other in RIVALS}
        same = sum(one == two for one, two in zip(found[name], found["plain"], strict=True))
        rows.append(row | {"same texts": f"{same} of {len(found[name])}"})
    return rows


def texts(out: Any) -> list[list[int]]:
    """Return the new tokens of every row in `out`, which holds outputs of jspec or token ids of another program."""
    return chats.texts(out) if isinstance(out[0], jspec.Output) else out


def drafting(outs: Any) -> tuple[Any, Any]:
    """Return the tokens per round and the acceptance rate, or empty strings if nothing is drafted."""
    if not isinstance(outs[0], jspec.Output) or not outs[0].stats.accepted_at.shape[1]:
        return "", ""
    counts = [(out.lengths, out.stats.rounds, out.stats.accepted, out.stats.judged) for out in outs]
    tokens, rounds, accepted, judged = (sum(int(part.sum()) for part in parts) for parts in zip(*counts, strict=True))
    return tokens / rounds, accepted / judged if judged else ""
