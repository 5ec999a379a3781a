"""Whether greedy text is that of transformers, for every way to draft: chats with a real model."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jspec
from bench import chats, plots, rivals
from bench.drafters import early_exit
from bench.report import publish
from bench.subject import Subject, ragged
from jspec import text
from pair.corpus import load_corpus

# Two logits that are no further apart may change places by rounding.
CLOSE = 1e-3
CORPUS = 500_000


@dataclasses.dataclass(frozen=True)
class Expected:
    """A text of transformers.

    Attributes:
        question: its kind and number.
        tokens: the text.
        gaps: how far apart the two largest logits were at each token.
    """

    question: str
    tokens: list[int]
    gaps: np.ndarray

    @property
    def tie(self) -> int | None:
        """Where the first near tie is: from there on texts may part."""
        near = np.flatnonzero(self.gaps <= CLOSE)
        return int(near[0]) if near.size else None

    def parts(self, tokens: list[int]) -> int | None:
        """Where `tokens` are first others, before the first near tie; None if they are nowhere."""
        pairs = itertools.islice(itertools.zip_longest(self.tokens, tokens), self.tie)
        return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def expected(subject: Subject, asked: dict[str, np.ndarray], batch: int, new_tokens: int) -> list[Expected]:
    """What transformers answers to each question."""
    import torch

    twin, ends = rivals.twin(subject.target), text.eos_ids(subject.target, subject.tokenizer)
    names, rows, found = list(asked), list(asked.values()), []
    for i in range(0, len(rows), batch):
        answers, out = rivals.greedy(twin, rows[i : i + batch], new_tokens, ends, output_logits=True)
        best = torch.stack([logits.float().topk(2).values for logits in out.logits], 1).cpu().numpy()
        found += [Expected(name, tokens, (first - second)[: len(tokens)]) for name, tokens, (first, second)
                  in zip(names[i : i + batch], answers, best.transpose(0, 2, 1), strict=True)]  # fmt: skip
    return found


def made(subject: Subject, asked: dict[str, np.ndarray]) -> dict[str, Any]:
    """Name -> drafter; retrieval and the table have read the questions and `CORPUS` characters of Python."""
    code = "".join(document.text for document in load_corpus()[0])[:CORPUS]
    corpus = np.concatenate([*asked.values(), subject.tokenizer(code, verbose=False)["input_ids"]])
    size, depth = subject.target.config.vocab_size, len(subject.target.layers)
    lookup, unigram = jspec.NGramDrafter(), jspec.UnigramDrafter.from_tokens(corpus, size)
    retrieval = jspec.RetrievalDrafter.from_tokens(corpus, size)
    skipped = tuple(range(depth // 3, depth - 1, 4))
    exits = early_exit(subject.target) | {
        f"{depth - len(skipped)} of {depth} layers": jspec.EarlyExitDrafter(depth, skipped)
    }
    found = {"plain": None, "lookup": lookup, "retrieval": retrieval, "unigram": unigram} | exits
    found |= {f"lookup, else {name}": jspec.FallbackDrafter(lookup, one) for name, one in exits.items()}
    return found | {"retrieval, else unigram": jspec.FallbackDrafter(retrieval, unigram)}


def run(subject: Subject, count: int, batch: int, k: int, new_tokens: int) -> None:
    """Publish one row a drafter, and list where texts part and where they may."""
    asked = {f"{kind} {i}": ids for kind in chats.KINDS
             for i, ids in enumerate(chats.rows(subject.tokenizer, kind, count), 1)}  # fmt: skip
    theirs = expected(subject, asked, batch, new_tokens)
    whole = ragged(list(asked.values()))  # of one width, so that each drafter is compiled once
    requests = [tuple(part[i : i + batch] for part in whole) for i in range(0, len(asked), batch)]
    rows, parted = [], []
    for name, drafter in made(subject, asked).items():
        outs = chats.decoder(subject, drafter, k, requests, new_tokens)()
        rows.append(_row(name, outs, theirs))
        print(f"{name}: {rows[-1]['identical, %']:.4g} % identical", flush=True)  # all of it takes half an hour
        parted += [f"{name}: {one.question}, token {at}" for one, tokens in zip(theirs, chats.texts(outs), strict=True)
                   if (at := one.parts(tokens)) is not None]  # fmt: skip
    ties = [f"{one.question}, token {one.tie}: {one.gaps[one.tie]:.1e}" for one in theirs if one.tie is not None]
    publish(
        f"agreement-{subject.name}-b{batch}-{jax.default_backend()}",
        f"{subject.name}, greedy: {len(asked)} chats, {new_tokens} new tokens at most, batch {batch}, K = {k}, "
        f"{subject.target.dtype}, against transformers",
        rows,
        plots.bars("drafter", "identical, %"),
        notes=["Texts are compared up to their end, or to a near tie: a token whose two largest logits are at most"
               f" {CLOSE:g} apart in transformers, so that rounding may part them. identical: the share of texts that"
               " are the same so far; to the end: those that are the same as a whole.",
               f"Near ties: {'; '.join(ties) or 'none'}.",
               f"Texts that part elsewhere: {'; '.join(parted) or 'none'}."],
        folder=subject.folder,
    )  # fmt: skip


def _row(name: str, outs: Sequence[jspec.Output], theirs: Sequence[Expected]) -> dict[str, Any]:
    """The table row of one drafter."""
    pairs = list(zip(theirs, chats.texts(outs), strict=True))
    same = sum(one.parts(tokens) is None for one, tokens in pairs)
    tokens, rounds, accepted = (
        sum(int(np.sum(part)) for part in parts)
        for parts in zip(*((out.lengths, out.stats.rounds, out.stats.accepted) for out in outs), strict=True)
    )
    return {
        "drafter": name,
        "texts": len(pairs),
        "tokens": tokens,
        "compared": sum(len(one.tokens[: one.tie]) for one, _ in pairs),
        "accepted": accepted,
        "tokens a round": tokens / rounds,
        "to the end": sum(one.tokens == tokens for one, tokens in pairs),
        "identical, %": 100 * same / len(pairs),
    }
