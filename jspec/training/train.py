# pyright: reportUnnecessaryIsInstance=false
"""`train_drafter`: train a drafter for a target, in a folder from which an interrupted run resumes."""

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.tokenizer import Tokenizer
from jspec.core.types import check_count, check_counts
from jspec.decoding.validate_arguments import check_target
from jspec.drafters import ModelDrafter, MultiDrafter
from jspec.drafters.standalone.model import as_drafter
from jspec.models.llama import Llama
from jspec.training import dataset as texts
from jspec.training.batches import Plan
from jspec.training.boost import left_over
from jspec.training.dataset import Row
from jspec.training.fit import Progress, Schedule, Source, fit
from jspec.training.kinds import KINDS, Trainable, Trainee, check_kind, check_start, trainee_of, unpacked
from jspec.training.losses import LOSSES
from jspec.training.self_generated import frame_of, write_answers, write_chats
from jspec.training.target_states import StoredStates, fingerprint

_log = logging.getLogger("jspec")
_WRITERS, _ANSWER = 192, 256  # the maximum number of chats in a batch, and of tokens in an answer
_FEW_WRITERS, _SHORT = 16, 64  # the minimum number of chats in a batch, and a rough minimum of tokens in an answer
_HEAT = (0.0, 1.0)  # temperatures of the answers; a drafter has to draft at both
_HELD_OUT_ROWS = 64
_ROUNDS = 1_000_000  # generation rounds per seed
_WRITTEN = 500_000  # tokens that the target generates if there is no data
_RECIPE = "recipe.json"
PROMPTS = "prompts.json"  # held-out prompts for measuring the drafter; each fills at most half the target's positions
_PROMPTS, _TEXT_PROMPT = 8, 32
_Row = TypeVar("_Row")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings that determine the trained drafter. A folder belongs to one recipe.

    Attributes:
        kind: the kind of drafter, a key of `KINDS`.
        steps, depth, loss, rate: see `Schedule`.
        step_tokens: the number of tokens per step, including padding.
        length: the maximum sequence length in tokens; longer text is split into parts.
        written_tokens: the number of answer tokens that the target generates for its own questions. None means 500,000
            without data, and 0 with data.
        draft_vocab: the number of most frequent tokens that an EAGLE head or a block drafter can draft; other kinds
            draft every token.
        seed: the seed for the initial weights, the order of the data and the text that the target generates.
        boost: the number of draft models to train, each on the tokens that earlier ones get wrong (kind "model").
    """

    kind: str = "eagle"
    steps: int = 2000
    depth: int = Schedule.depth
    loss: str = Schedule.loss
    rate: float = Schedule.rate
    step_tokens: int = 2048
    length: int = 512
    written_tokens: int | None = None
    draft_vocab: int = 8192
    seed: int = 0
    boost: int = 1

    def check(self) -> None:
        """Raise ValueError for an invalid field."""
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; expected one of {', '.join(KINDS)}.")
        if self.loss not in LOSSES:
            raise ValueError(f"loss is {self.loss!r}; expected one of {', '.join(LOSSES)}.")
        check_counts(steps=self.steps, depth=self.depth, step_tokens=self.step_tokens, length=self.length)
        check_counts(draft_vocab=self.draft_vocab, boost=self.boost)
        if self.length < self.depth + 2:
            raise ValueError(
                f"length is {self.length}; expected at least {self.depth + 2}, two tokens more than a "
                f"draft with depth={self.depth}."
            )
        if self.written_tokens is not None:
            check_count("written_tokens", self.written_tokens)
        if self.boost > 1 and self.kind != "model":
            raise ValueError(f'boost is {self.boost}, but kind is {self.kind!r}; only kind "model" can be boosted.')
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an int from 0 to {2**32 - 1}; got {self.seed!r}.")
        if not 0 < self.rate < 1:
            raise ValueError(f"rate is {self.rate!r}; expected a number above 0 and below 1.")


def train_drafter(
    target: Llama,
    tokenizer: Tokenizer,
    kind: str = "eagle",
    data: str | Path | Sequence[str | Path] | None = None,
    *,
    folder: str | Path,
    start: Trainable | Llama | None = None,
    store_states: bool = True,
    say: Callable[[Progress | int], None] = lambda _: None,
    **recipe: Any,
) -> Trainable | MultiDrafter:
    """Train a drafter for `target`.

    Args:
        target: a `jspec.Llama`; training does not change it.
        tokenizer: the target's tokenizer.
        kind: "eagle", an EAGLE-3 head; "block", a block drafter with DSpark's Markov and confidence heads; "medusa",
            "hydra" or "blockwise" heads; "kangaroo", an adapter after the target's first layers; "pass", look-ahead
            embeddings; or "model", a draft model of some target layers.
        data: a text file; a ``.jsonl`` file of chats, with one object with "messages" per line; an earlier run's
            folder, to reuse the text that the target generated there; or a list of these. The target answers chats
            that end with the user's turn. If `data` is None or ``written_tokens`` is set, the target also generates
            questions and answers them, which requires a chat template.
        folder: the folder for checkpoints, generated text and a log. An interrupted run resumes from this folder.
        start: a drafter of that kind to start from, instead of an untrained one. An EAGLE head or a block drafter
            keeps its set of draftable tokens.
        store_states: whether to compute the target's states once and store them in `folder`. Otherwise, every step
            recomputes the states. Each token has F + 1 states of E numbers, and a stored number takes 2 bytes.
        say: called with the number of every step, and with a `Progress` at every evaluation on held-out text.
        recipe: fields of `jspec.training.train.Recipe`, such as ``steps=2000``.

    Returns:
        The drafter, in the target's dtype. With ``boost=K``, it is a `jspec.MultiDrafter` of K models.

    Raises:
        ValueError: `data` is empty or malformed, the target lacks a chat template that it needs, an argument is out of
            range, `start` has another kind, or `folder` belongs to another recipe, target, data or start.
        OSError, convert.CheckpointError: the disk is full; no file is left half-written.
    """
    check_target(target)
    chosen = Recipe(kind=kind, **recipe)
    chosen.check()
    start = _checked(start, target, chosen)
    if chosen.length > (positions := target.config.max_position_embeddings):
        raise ValueError(f"length is {chosen.length}, but the target has {positions} positions; reduce length.")
    about = _models_of(target, start, store_states)
    dataset = _read_data(files := _files(data), tokenizer, chosen.length, max(0, positions - _ANSWER), about["target"])
    wanted = chosen.written_tokens or (0 if dataset else _WRITTEN)
    if wanted:
        frame_of(tokenizer)  # raises an error before any work begins
    questions = [row.tokens.tolist() for row in dataset if row.is_question]
    if dataset and not (wanted or questions):
        texts.divide(dataset)  # raises an error for too little data, before the folder records that data
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _check_folder(folder, chosen, about | {"data": texts.digest(dataset) if dataset else None})
    write = _Writing(target, tokenizer, chosen, folder, max(map(texts.rounds_in, files), default=0))
    rows = [row for row in dataset if not row.is_question] + write.own_chats(wanted) + write.answers(questions)
    train, held_out = texts.divide(rows)
    _log.info("%d texts (%d tokens), %d held out", len(train), sum(len(row.tokens) for row in train), len(held_out))
    prompts = [prompt for prompt in map(_prompt, held_out) if len(prompt) <= positions // 2]
    texts.write_text(folder / PROMPTS, json.dumps(_some(prompts, _PROMPTS)) + "\n")
    parts, drafters = [train, _some(held_out, _HELD_OUT_ROWS)], list[Trainable]()
    for number in range(chosen.boost):
        if drafters:
            parts = [left_over(target, cast(ModelDrafter, drafters[-1]), part, chosen.step_tokens) for part in parts]
        own = folder / f"boost-{number + 1}" if number else folder
        drafters.append(_fitted(target, start, cast(str, about["target"]), parts, chosen, own, store_states, say))
    return MultiDrafter(drafters, chosen.depth) if chosen.boost > 1 else drafters[0]


def _checked(start: Trainable | Llama | None, target: Llama, recipe: Recipe) -> Trainable | None:
    """Return the drafter to start from, or None for an untrained one. Raise an error if `start` does not fit."""
    if start is None:
        return check_kind(recipe.kind, target)
    start = unpacked(cast(Trainable, as_drafter(start)))
    check_start(start, recipe.kind, target, recipe.depth, recipe.length, recipe.boost)
    return start


def _models_of(target: Llama, start: Trainable | None, store_states: bool) -> dict[str, str | None]:
    """Return a description of a run's models, which the run's folder records."""
    return {
        "target": fingerprint(target),
        "start": None if start is None else fingerprint(start),
        "states": None if store_states else "computed",
    }


def _files(data: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """Return `data` as a list of files, empty for None."""
    files = [] if data is None else [Path(data)] if isinstance(data, str | Path) else [Path(file) for file in data]
    if data is not None and not files:
        raise ValueError("data names no file; pass at least one file, or None to let the target generate the text.")
    return files


def _read_data(files: list[Path], tokenizer: Tokenizer, length: int, room: int, about: str | None) -> list[Row]:
    """Return the text and the questions in all `files`."""
    for file in files:
        recipe = file / _RECIPE
        if recipe.is_file() and json.loads(recipe.read_text(encoding="utf-8"))["target"] != about:
            raise ValueError(
                f"{file} has text generated by another target, or by this one in another dtype; pass text "
                "generated by this target, or let the target generate text."
            )
    return [row for file in files for row in texts.read(file, tokenizer, length, room)]


def _fitted(
    target: Llama,
    start: Trainable | None,
    about: str,
    parts: Sequence[list[Row]],
    recipe: Recipe,
    folder: Path,
    store_states: bool,
    say: Callable[[Progress | int], None],
) -> Trainable:
    """Train a drafter on the first of `parts`, with the second held out. Start from `start` unless it is None."""
    size, few = target.config.vocab_size, None
    if recipe.kind in ("block", "eagle") and recipe.draft_vocab < size:
        few = texts.frequent(parts[0], recipe.draft_vocab, size)
    begun = KINDS[recipe.kind](target, few, recipe.depth, recipe.seed) if start is None else start
    trainee = trainee_of(begun)
    plans = [Plan(part, recipe.step_tokens, recipe.seed, jax.device_count()) for part in parts]
    sources = [
        Source(plan, _stored(target, about, plan, trainee, folder / name) if store_states else None)
        for plan, name in zip(plans, ("states", "held-out"), strict=True)
    ]
    eval_every = max(1, min(Schedule.save_every, recipe.steps // 10))  # at least ten evaluations in a short run
    schedule = Schedule(recipe.steps, recipe.depth, recipe.loss, recipe.rate, eval_every)
    drafter = trainee.drafter(fit(trainee, target, sources[0], sources[1], schedule, folder, say))

    def of_target(leaf: jax.Array) -> jax.Array:
        return leaf.astype(target.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(of_target, drafter)


def _some(rows: list[_Row], count: int) -> list[_Row]:
    """Return up to `count` evenly spaced rows, because the rows are ordered by kind and length."""
    return [rows[i] for i in np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]


def _prompt(row: Row) -> list[int]:
    """Return the tokens of a chat that are not learned, or the first tokens of plain text."""
    count = int(row.learned.argmax()) or min(_TEXT_PROMPT, len(row.tokens))
    return row.tokens[:count].tolist()


def _check_folder(folder: Path, recipe: Recipe, about: dict[str, str | None]) -> None:
    """Record recipe, target and data in a new folder. Raise ValueError if an existing folder records others."""
    file, wanted = folder / _RECIPE, dataclasses.asdict(recipe) | about
    if not file.exists():
        texts.write_text(file, json.dumps(wanted, indent=1) + "\n")
        return
    recorded = json.loads(file.read_text(encoding="utf-8"))
    for name in (name for name in wanted if recorded.get(name) != wanted[name]):
        if name in about:
            raise ValueError(f"{folder} was started with another {name}; choose another folder, or delete this folder.")
        raise ValueError(
            f"{folder} was started with {name}={recorded.get(name)!r}, but now it is {wanted[name]!r}; choose "
            "another folder, or delete this one."
        )


@dataclasses.dataclass
class _Writing:
    """The text that the target generates, with one file per round. A round whose file exists is not generated again.

    Attributes:
        rounds: the number of the next round. This number and the seed determine the round's text. If the data includes
            an earlier run, that run's rounds come first.
    """

    target: Llama
    tokenizer: Tokenizer
    recipe: Recipe
    folder: Path
    rounds: int

    def own_chats(self, wanted: int) -> list[Row]:
        """Return the target's answers to its own questions, with at least `wanted` tokens in total."""
        rows: list[Row] = []
        batch = min(_WRITERS, max(_FEW_WRITERS, -(-wanted // _SHORT)))
        while (done := sum(int(row.learned.sum()) for row in rows)) < wanted:
            _log.info("Generating: %d of %d tokens", done, wanted)
            chats = self._round(
                lambda seed: write_chats(
                    self.target, self.tokenizer, seed, batch=batch, answer_tokens=_ANSWER, temperatures=_HEAT
                )
            )
            if not chats:
                raise ValueError(
                    f"None of the {batch} questions that the target generated came to an end; pass data (text or "
                    "chats) to train on."
                )
            rows += chats
        return rows

    def answers(self, questions: list[list[int]]) -> list[Row]:
        """Return the target's answers to all `questions`, in batches of similar length."""
        rows, questions = list[Row](), sorted(questions, key=len)
        for first in range(0, len(questions), _WRITERS):
            _log.info("Generating: %d of %d answers", first, len(questions))
            batch = questions[first : first + _WRITERS]
            rows += self._round(
                lambda seed, batch=batch: write_answers(self.target, self.tokenizer, batch, seed, _ANSWER, _HEAT)
            )
        return rows

    def _round(self, write: Callable[[int], list[tuple[list[int], list[int]]]]) -> list[Row]:
        (self.folder / texts.TEXTS).mkdir(exist_ok=True)
        file = self.folder / texts.TEXTS / f"{self.rounds:05}.safetensors"
        if not file.exists():
            chats = write((self.recipe.seed * _ROUNDS + self.rounds) % 2**31)
            whole = [texts.of_answer(*chat) for chat in chats]
            texts.save([part for row in whole for part in texts.parts(row, self.recipe.length)], file)
        self.rounds += 1
        return texts.load(file)


def _stored(target: Llama, about: str, plan: Plan, trainee: Trainee, folder: Path) -> StoredStates:
    stored = StoredStates(folder, plan, trainee.features, about, trainee.draft_ids is not None)
    stored.write(target, lambda done, all_: _log.info("Computing hidden states: %d of %d texts", done, all_))
    return stored
