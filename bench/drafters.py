"""Tokens per round and per second for drafters, rules and draft lengths, on three kinds of prompt or your own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.acceptance import acceptance_rate
from bench.pairs import weight_bytes, with_idle_neurons
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.subject import WIDTH, Request, Subject, held_out, ragged, span
from bench.timing import in_turns, ratio, spread
from jspec import theory
from pair.corpus import load_corpus

CORPUS = 2_000_000

_REPEATED = """
    def test_{0}(self):
        self.assertEqual(parse("{0}"), {1})
        self.assertEqual(parse("-{0}"), -{1})
"""
_FUNCTION = '''def split_{0}(path, sep="{1}"):
    """Split a {0} at its last separator."""
    head, found, tail = path.rpartition(sep)
    if not found:
        raise ValueError("no separator in " + path)
    return head, tail


'''
_NOUNS = ("name", "path", "line", "key", "url", "word", "field", "label")


def prompts(tokenizer: Any, count: int) -> dict[str, Request]:
    """Return kind -> `count` prompts of `WIDTH` tokens: unseen code, repetitive tests, or a function to rewrite."""
    repeated = ["".join(_REPEATED.format(word, i + j) for j, word in enumerate(_NOUNS)) for i in range(count)]
    edited = [_FUNCTION.format(noun, i) * 2 + "def split_" for i, noun in enumerate(_NOUNS[:count])]
    ends = {
        kind: [row[-WIDTH:] for row in tokenizer(texts, verbose=False)["input_ids"]]
        for kind, texts in (("repetitive code", repeated), ("edit of a function", edited))
    }
    kinds = {"new code": held_out(tokenizer, count)["inside a module"]} | ends
    return {kind: ragged(rows) for kind, rows in kinds.items()}


def early_exit(target: jspec.Llama) -> dict[str, Any]:
    """Return the first two thirds of the target's layers as a drafter, keyed by its name."""
    depth = len(target.layers)
    layers = max(1, 2 * depth // 3)
    return {f"first {layers} of {depth} layers": jspec.EarlyExitDrafter(layers)}


def made(subject: Subject) -> dict[str, Any]:
    """Return name -> drafter. Your own prompts have no corpus, so counting and retrieval drafters are omitted."""
    found = {
        "draft model": subject.draft,
        "lookup": jspec.NGramDrafter(),
        "lookup, else draft model": jspec.FallbackDrafter(jspec.NGramDrafter(3, 2), subject.draft),
    }
    return found | early_exit(subject.target) | ({} if subject.prompts else _of_corpus(subject))


def with_trees(subject: Subject, k: int) -> dict[str, Any]:
    """Return name -> drafter with its own tree. The tree determines how much is drafted."""
    found = {
        "lookup, tree of 12": jspec.NGramDrafter(tree=jspec.Tree.branching((3, 1, 1, 1))),
        "recycling, 32 nodes": jspec.TokenRecyclingDrafter(32),
    }
    if isinstance(subject.draft, jspec.NGramDrafter):
        return found
    return found | {
        f"draft model beside lookup, {k} each": jspec.MultiDrafter([subject.draft, jspec.NGramDrafter()], k)
    }


def _of_corpus(subject: Subject) -> dict[str, Any]:
    """Return name -> drafter built from `CORPUS` characters of the bundled models' Python training text."""
    draft, training = subject.draft, "".join(document.text for document in load_corpus()[0])[:CORPUS]
    corpus, size = np.array(subject.tokenizer(training, verbose=False)["input_ids"]), subject.target.config.vocab_size
    retrieval = jspec.RetrievalDrafter.from_tokens(corpus, size)
    bigram = jspec.BigramDrafter.from_tokens(corpus, size)
    return {
        "retrieval": retrieval,
        "unigram": jspec.UnigramDrafter.from_tokens(corpus, size),
        "bigram": bigram,
        "lookup, else bigram": jspec.FallbackDrafter(jspec.NGramDrafter(), bigram),
        "mixture, 0.8 draft model, 0.2 retrieval": jspec.MixtureDrafter(draft, retrieval, 0.8),
        "draft model, with bigram": jspec.CascadeDrafter(draft, bigram),
    }


def settings(subject: Subject, k: int) -> dict[str, dict[str, Any]]:
    """Return name -> drafter, rule and, except for trees, draft length."""
    drafters, draft = made(subject), subject.draft
    found = {name: {"drafter": drafter} for name, drafter in drafters.items()}
    found |= {f"draft model, {rule}": {"drafter": draft, "accept": rule} for rule in ("block", "coupled")}
    lengths = {
        "while confident": jspec.WhileConfident(2 * k),
        "heuristic": jspec.Heuristic(2 * k),
        "by acceptance": jspec.ByAcceptance(2 * k, cost_ratio=0.4),
    }
    found |= {
        f"draft model, {name}, up to {2 * k}": {"drafter": draft, "num_draft_tokens": length}
        for name, length in lengths.items()
    }
    found |= {
        f"{name}, up to {k}": {"drafter": drafters[name], "num_draft_tokens": jspec.UpTo(k)}
        for name in ("lookup", "retrieval")
        if name in drafters
    }
    found = {name: {"accept": "rejection", "num_draft_tokens": k} | one for name, one in found.items()}
    trees = with_trees(subject, k)
    return found | {name: {"drafter": drafter, "accept": "rejection"} for name, drafter in trees.items()}


def run(subject: Subject, k: int, new_tokens: int, temperature: float, count: int, repeats: int, idle: int) -> None:
    """Publish one row per prompt kind, drafter and rule. Requests are decoded one at a time."""
    subject = dataclasses.replace(subject, target=with_idle_neurons(subject.target, idle))
    target, tried, rows = subject.target, settings(subject, k), []
    kinds = subject.kinds(count) if subject.prompts else prompts(subject.tokenizer, count)
    for kind, request in kinds.items():
        tokens, lengths, _ = request
        size = 1, int(lengths.mean()) + new_tokens // 2, tokens.shape[1] + new_tokens + k + 1
        alone = {f"{n} rows": Pass(target, n, *size) for n in (1, k + 1)}
        options = {"max_new_tokens": new_tokens, "temperature": temperature}
        calls = {"plain": in_batches(jspec.generate, (target,), request, **options)}
        for name, setting in tried.items():
            mine = options | setting
            models = target, mine.pop("drafter")
            calls[name] = in_batches(jspec.speculative_generate, models, request, **mine)
            # The start of the call: its prefill and the first round of each request.
            calls[f"{name}, start"] = in_batches(jspec.speculative_generate, models, request, limit=1, **mine)
        times = in_turns(calls | alone, repeats)
        passes = pass_seconds(alone, times)
        rows += [
            _row(kind, name, calls[name](), times, passes, setting.get("num_draft_tokens"), k)
            for name, setting in tried.items()
        ]
    publish(
        f"drafters-{subject.name}-k{k}-t{temperature:g}{f'-idle{idle}' if idle else ''}-{jax.default_backend()}",
        f"{subject.name}, target of {weight_bytes(target) / 1e6:.0f} MB: K = {k}, {count} requests one at a time, "
        f"{new_tokens} new tokens after {span(lengths)}, temperature {temperature:g}, {target.dtype}",
        rows,
        plots.drafters,
        notes=[
            "cost ratio: a round's time per draft token, without verification and prefill, over the time of a target"
            " pass. acceptance: the share of verified draft tokens that were accepted; a round without a draft counts"
            " as a rejection. predicted: the speed-up of rounds alone by theorem 3.8 of Leviathan et al. 2023, for that"
            " acceptance and cost, with the time to verify K + 1 rows.",
            f"Verifying {k + 1} rows takes {passes[f'{k + 1} rows'] / passes['1 rows']:.2f} times as long as verifying"
            " one.",
        ],
        folder=subject.folder,
    )


def in_batches(
    decode: Callable[..., Any],
    models: tuple,
    request: Request,
    temperature: float,
    limit: int = 0,
    batch: int = 1,
    **options: Any,
) -> Callable[[], list[jspec.Output]]:
    """Return a call that decodes `request` in consecutive batches of `batch` rows.

    Each row gets at most `limit` new tokens, if that is not 0.
    """
    sampling = jspec.SamplingParams(temperature=temperature, max_tokens=limit)

    def call() -> list[jspec.Output]:
        parts = [[part[i : i + batch] for part in request] for i in range(0, len(request[0]), batch)]
        return [decode(*models, *part, sampling=sampling, **options) for part in parts]

    return call


def joined(outs: list[jspec.Output]) -> jspec.Output:
    """Join the rows of all outputs into one output."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *jax.device_get(outs))


def _row(
    kind: str, name: str, outs: list[jspec.Output], times: dict[str, Any], passes: dict[str, float], length: Any, k: int
) -> dict[str, Any]:
    """Return one setting's table row. If the draft length varies, the theory makes no prediction."""
    out = joined(outs)
    tokens, rounds = int(out.lengths.sum()), int(out.stats.rounds.sum())
    gain = ratio(times["plain"], times[name])
    alpha, cost, predicted = "", "", ""
    if length == k:
        alpha = acceptance_rate(out)
        # The start contains one round of each request.
        in_rounds = spread(times[name] - times[f"{name}, start"]).median / (rounds - len(outs))
        cost = (in_rounds - passes[f"{k + 1} rows"]) / k / passes["1 rows"]
        predicted = float(theory.expected_tokens(alpha, k)) / (passes[f"{k + 1} rows"] / passes["1 rows"] + k * cost)
    return {
        "prompt": kind,
        "drafter and rule": name,
        "tokens per round": tokens / rounds,
        "acceptance": alpha,
        "cost ratio": cost,
        "tokens/s": tokens / spread(times[name]).median,
        "predicted": predicted,
        "x own plain": gain.median,
        "from": gain.low,
        "to": gain.high,
    }
