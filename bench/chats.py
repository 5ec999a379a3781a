"""Chats: questions of four kinds for a chat model, and its answers."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jspec
from bench.subject import Request, Subject
from jspec import text
from jspec.drafters.base import own_tree
from jspec.generation.complete import draft_length_of
from jspec.text.chat_template import encode
from jspec.training.dataset import divide, written
from jspec.training.train import Recipe

FOLDER = Path(__file__).parent / "prompts"  # files in the format of `jspec generate --chat --file`
KINDS, HELD_OUT = ("chat", "summary", "rewriting", "code"), "held out"
CODE_KINDS = "functions", "bugs", "explanations", "tests"  # "tests" includes refactoring
COUNT = 16  # questions of each kind


def questions(kind: str) -> list[str]:
    """Return the questions of one kind."""
    lines = (FOLDER / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def rows(tokenizer: Any, kind: str, count: int) -> list[np.ndarray]:
    """Return the token ids of the first `count` questions of a kind, formatted with the tokenizer's chat template."""
    asked = encode(tokenizer, [[{"role": "user", "content": question}] for question in questions(kind)[:count]])
    return [ids[:length] for ids, length in zip(asked.tokens, asked.lengths, strict=True)]


def by_kind(tokenizer: Any, count: int, folder: Path | None) -> dict[str, list[np.ndarray]]:
    """Return kind -> the token ids of `count` questions.

    If `folder` is given, the only kind is "held out": the questions that the training run in `folder` held out.

    Raises:
        ValueError: the training run holds out fewer than `count` questions, or `folder` has no text.
    """
    if folder is None:
        return {kind: rows(tokenizer, kind, count) for kind in KINDS}
    return {HELD_OUT: _held_out(folder, count)}


def _held_out(folder: Path, count: int) -> list[np.ndarray]:
    """Return evenly spaced held-out questions from a training run with the default sequence length."""
    chats = [row.tokens[: row.learned.argmax()] for row in divide(written(folder, Recipe.length))[1]]
    found = list({ids.tobytes(): ids for ids in chats if ids.size}.values())
    if len(found) < count:
        raise ValueError(f"The training run in {folder} holds out {len(found)} questions, but {count} are needed.")
    return [found[i] for i in np.linspace(0, len(found) - 1, count).astype(int)]


def requests(tokenizer: Any, asked: Sequence[np.ndarray], batch: int) -> list[Request]:
    """Return `asked` as requests of `batch` rows, each padded to the width that `jspec.complete` uses."""
    found = [encode(tokenizer, asked[i : i + batch]) for i in range(0, len(asked), batch)]
    return [(one.tokens, one.lengths, jax.random.split(jax.random.key(0), one.lengths.size)) for one in found]


def asked(subject: Subject, count: int) -> Subject:
    """Return `subject` with `count` questions as prompts, alternating between the kinds."""
    kinds = [rows(subject.tokenizer, kind, -(-count // len(KINDS))) for kind in KINDS]
    prompts = [row.tolist() for one_of_each in zip(*kinds, strict=True) for row in one_of_each]
    return dataclasses.replace(subject, name=f"{subject.name}, chats", prompts=prompts)


def ends(subject: Subject) -> tuple[int, ...]:
    """Return the token ids that end an answer."""
    return text.eos_ids(subject.target, subject.tokenizer)


def decoder(
    subject: Subject, drafter: Any, k: int | None, asked: Sequence[Request], new_tokens: int, temperature: float = 0.0
) -> Callable[[], list[jspec.Output]]:
    """Return a call that answers requests one after another, up to EOS. It uses plain decoding if `drafter` is None.

    For prompt lookup and retrieval, `k` is the maximum draft length. None means the default of `jspec.complete`.
    """
    options = {
        "max_new_tokens": new_tokens,
        "sampling": jspec.SamplingParams(temperature=temperature),
        "eos_ids": ends(subject),
    }
    if drafter is None:
        return lambda: [jax.device_get(jspec.generate(subject.target, *one, **options)) for one in asked]
    options["num_draft_tokens"] = draft_length_of(drafter, k if own_tree(drafter) is None else None)
    return lambda: [
        jax.device_get(jspec.speculative_generate(subject.target, drafter, *one, **options)) for one in asked
    ]


def texts(outs: Sequence[jspec.Output]) -> list[list[int]]:
    """Return the new tokens of every row."""
    return [row[:n].tolist() for out in outs for row, n in zip(out.tokens, out.lengths, strict=True)]
