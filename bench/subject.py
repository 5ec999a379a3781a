"""The subject of a measurement: a pair included with jspec or your own checkpoints, and the prompts to continue."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jspec
from bench import pairs
from bench.passes import Pass
from bench.report import RESULTS
from jspec import text
from jspec.bundled import PAIR
from jspec.cli.common import UsageError
from jspec.cli.model_args import BESIDE, LOOKUP, NONE, Precision, check_exit, is_model, sources, without_model
from jspec.drafters.combine.fallback import with_lookup_first
from pair.corpus import is_held_out, read_documents

WIDTH = 96
RECYCLING = "recycling"  # in addition to the drafts that `jspec tune` accepts
# Right-padded tokens ``int32[B, P]``, lengths ``int32[B]`` and keys ``[B]``, as in `jspec.generate`.
Request = tuple[np.ndarray, np.ndarray, jax.Array]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A pair with its prompts.

    Attributes:
        name: the name in titles and result files.
        draft: a model, or any drafter.
        tokenizer: the tokenizer, or None for models with random weights, whose prompts are random tokens.
        prompts: the token ids of your own prompts; empty for the prompts included with jspec.
        folder: the folder for the results.
    """

    name: str
    target: jspec.Llama
    draft: Any
    tokenizer: Any = None
    prompts: Sequence[Sequence[int]] = ()
    folder: Path = RESULTS

    def request(self, batch: int, width: int) -> Request:
        """Return `batch` prompts: your own, repeated if there are too few, or else prompts of `width` tokens."""
        if self.prompts:
            return ragged([self.prompts[i % len(self.prompts)] for i in range(batch)])
        if self.tokenizer is None:  # the cost does not depend on the tokens
            vocab_size = self.target.config.vocab_size
            return ragged(np.random.default_rng(0).integers(1, vocab_size, (batch, width)))
        return ragged(held_out(self.tokenizer, batch)["inside a module"][:, -width:])

    def kinds(self, batch: int) -> dict[str, Request]:
        """Return prompt kind -> `batch` requests. They have `WIDTH` tokens, except for your own prompts."""
        if self.prompts:
            return {"own prompts": self.request(batch, WIDTH)}
        return {kind: ragged(rows) for kind, rows in held_out(self.tokenizer, batch).items()}

    def draft_passes(self, rows: Mapping[str, int], batch: int, context: int, slots: int) -> dict[str, Pass]:
        """Return name -> a draft pass over that many rows, to be measured alone; empty if the draft is not a model."""
        if isinstance(self.draft, jspec.EarlyExitDrafter):
            model, layers = self.target, self.draft.layers
        elif isinstance(self.draft, jspec.Llama):
            model, layers = self.draft, None
        else:
            return {}
        return {name: Pass(model, count, batch, context, slots, layers) for name, count in rows.items()}


def ragged(rows: Any) -> Request:
    """Return rows of token ids as one request."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths, jax.random.split(jax.random.key(0), len(rows))


def span(lengths: np.ndarray) -> str:
    """Return `lengths` formatted for a title, such as "32" or "7 to 32"."""
    return f"{lengths.min()}" if lengths.min() == lengths.max() else f"{lengths.min()} to {lengths.max()}"


def held_out(tokenizer: Any, batch: int) -> dict[str, np.ndarray]:
    """Return prompt kind -> ``int32[batch, WIDTH]``, from modules that neither bundled model was trained on."""
    texts = [document.text for document in read_documents() if is_held_out(document.path)]
    rows = [row for row in tokenizer(texts, verbose=False)["input_ids"] if len(row) >= 8 * WIDTH]
    rows = rows[:: max(1, len(rows) // batch)][:batch]
    middles = [row[len(row) // 2 :][:WIDTH] for row in rows]
    return {
        "start of a module": np.array([row[:WIDTH] for row in rows], np.int32),
        "inside a module": np.array(middles, np.int32),
    }


def find(
    new_tokens: int,
    pair: str,
    target: str | None,
    draft: str | None,
    prompts: Path | None,
    folder: Path | None,
    activation_bits: int = 24,
) -> Subject:
    """Return the subject that the options describe.

    Args:
        new_tokens: the number of new tokens that each prompt must leave room for.
        pair: the pair to measure unless `target` or `draft` is given. See `bench.pairs.pair`.
        target: a directory, a name or a Hugging Face repo id. If only `draft` is given, the target is that of `pair`.
        draft: the same forms or, to draft without a model, "recycling", "lookup", "exit:N" or a datastore.
        prompts: a file of prompts. See `read_prompts`.
        folder: the folder for the results, created if missing. None is bench/results.
        activation_bits: the precision of your own models' activations. See `jspec.load`.

    Raises:
        ValueError: options conflict, tokenizers differ, or prompts cannot be used.
        OSError: a file or folder cannot be read or created.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    own = target or draft
    found = _own(pair, target, draft, prompts, activation_bits) if own else _known(pair, prompts)
    found = dataclasses.replace(found, folder=folder or RESULTS)
    if prompts is None:
        return found
    models = [model for model in (found.target, found.draft) if isinstance(model, jspec.Llama)]
    room = min(model.config.max_position_embeddings for model in models) - new_tokens
    rows = read_prompts(prompts, found.tokenizer, room)
    return dataclasses.replace(found, name=f"{found.name}, {prompts.stem}", prompts=rows)


def _known(pair: str, prompts: Path | None) -> Subject:
    """Return a pair included with jspec."""
    if pairs.without_kinds(pair) == "bundled":
        return Subject(pair, *pairs.pair(pair), text.load_tokenizer(PAIR / "target"))
    if prompts is not None:
        raise ValueError(
            f"{pair} has random weights and no tokenizer to read {prompts} with; omit --prompts, or "
            "pass --target and --draft."
        )
    return Subject(pair, *pairs.pair(pair))


def _own(pair: str, target: str | None, draft: str | None, prompts: Path | None, activation_bits: int) -> Subject:
    """Return your own checkpoints. A draft without a model also works for the target of `pair`."""
    if draft in (None, NONE) or (target is None and drafts_by_model(draft)):
        raise ValueError(
            "--target and --draft go together: two models with one tokenizer, or --draft lookup, "
            "recycling or exit:N, which need no model."
        )
    try:
        where = sources(target, LOOKUP if draft == RECYCLING else draft)
        if target is None:
            found = _known(pair, prompts)
            drafter = without_model(where.draft)
            if isinstance(drafter, jspec.EarlyExitDrafter):
                check_exit(where.draft, len(found.target.layers))
            found = dataclasses.replace(found, draft=with_lookup_first(drafter) if where.looks_up else drafter)
        else:
            tokenizer = where.tokenizer()
            found = Subject(
                Path(target).resolve().name, *where.load(Precision(activation_bits=activation_bits)), tokenizer
            )
    except UsageError as error:
        raise ValueError(error) from error
    own = Path(draft.removeprefix(BESIDE)).resolve()
    found = dataclasses.replace(found, name=f"{found.name}+{BESIDE * where.looks_up}{own.name}")
    return dataclasses.replace(found, draft=jspec.TokenRecyclingDrafter()) if draft == RECYCLING else found


def drafts_by_model(draft: str | None) -> bool:
    """Return whether a draft with this name, if any, is a model."""
    return draft is None or (draft != RECYCLING and is_model(draft))


def read_prompts(file: Path, tokenizer: Any, room: int) -> list[list[int]]:
    """Return the lines of a UTF-8 file as token ids, one prompt per line.

    Raises:
        ValueError: the file is empty, or a line is empty, is not UTF-8 or has more than `room` tokens. The message
            gives the line number.
    """
    lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    if not lines:
        raise ValueError(f"{file} is empty; write one prompt per line.")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}, line {number} is not UTF-8 (byte {error.start}); convert the file.") from error
        if not prompt.strip():
            raise ValueError(f"{file}, line {number} is empty; write a prompt there or delete the line.")
        rows.append(tokenizer(prompt, verbose=False)["input_ids"])
        if len(rows[-1]) > room:
            raise ValueError(
                f"{file}, line {number} has {len(rows[-1])} tokens, but the models have positions for "
                f"{room} in addition to the new tokens; shorten the prompt, or reduce --max-new-tokens."
            )
    return rows
