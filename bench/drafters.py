"""Tokens a round and tokens a second of every drafter and rule on the bundled pair, for three kinds of prompt."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.acceptance import held_out, measured_rates, overall
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.timing import in_turns, ratio, spread
from pair.corpus import load_corpus

WIDTH, CORPUS = 96, 2_000_000

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


def prompts(tokenizer: Any, count: int) -> dict[str, list[np.ndarray]]:
    """Kind -> `count` prompts of `WIDTH` tokens: unseen code, tests that repeat one another, a function to rewrite."""
    repeated = ["".join(_REPEATED.format(word, i + j) for j, word in enumerate(_NOUNS)) for i in range(count)]
    edited = [_FUNCTION.format(noun, i) * 2 + "def split_" for i, noun in enumerate(_NOUNS[:count])]
    ends = {kind: [tokenizer.encode(text)[-WIDTH:] for text in texts]
            for kind, texts in (("repetitive code", repeated), ("edit of a function", edited))}  # fmt: skip
    kinds = {"new code": list(held_out(tokenizer, count)["inside a module"])} | ends
    return {kind: [np.array(row, np.int32) for row in rows] for kind, rows in kinds.items()}


def settings(draft: jspec.Llama, tokenizer: Any) -> dict[str, tuple[Any, str]]:
    """Name -> (drafter, rule)."""
    training = "".join(document.text for document in load_corpus()[0])[:CORPUS]
    corpus, size = np.array(tokenizer.encode(training)), draft.config.vocab_size
    bigram, ngram = jspec.BigramDrafter.from_tokens(corpus, size), jspec.NGramDrafter()
    found = {
        "draft model": draft,
        "lookup": ngram,
        "unigram": jspec.UnigramDrafter.from_tokens(corpus, size),
        "bigram": bigram,
        "lookup, else draft model": jspec.FallbackDrafter(jspec.NGramDrafter(3, 2), jspec.ModelDrafter(draft)),
        "lookup, else bigram": jspec.FallbackDrafter(ngram, bigram),
        "draft model, with bigram": jspec.CascadeDrafter(draft, bigram),
    }
    rules = {f"draft model, {rule}": (draft, rule) for rule in ("block", "coupled")}
    return {name: (drafter, "rejection") for name, drafter in found.items()} | rules


def run(k: int, new_tokens: int, temperature: float, count: int, repeats: int) -> None:
    """Publish one row a kind of prompt, drafter and rule; requests one at a time."""
    target, draft, tokenizer = jspec.demo_pair()
    rows: list[dict[str, Any]] = []
    slots = WIDTH + new_tokens + k + 1
    alone = {f"{n} rows": Pass(target, n, 1, WIDTH + new_tokens // 2, slots) for n in (1, k + 1)}
    drafters = settings(draft, tokenizer)
    for kind, texts in prompts(tokenizer, count).items():
        assert all(len(text) == WIDTH for text in texts)
        options = {"max_new_tokens": new_tokens, "temperature": temperature}
        calls = {"plain": _call(jspec.generate, (target,), texts, **options)}
        for name, (drafter, rule) in drafters.items():
            mine = options | {"num_draft_tokens": k, "accept": rule}
            calls[name] = _call(jspec.speculative_generate, (target, drafter), texts, **mine)
            # The prompt's share of a call, so that what is left is rounds.
            calls[f"{name}, start"] = _call(jspec.speculative_generate, (target, drafter), texts, limit=1, **mine)
        times = in_turns(calls | alone, repeats)
        passes = pass_seconds(alone, times)
        rows += [_row(kind, name, calls[name](), times, passes, k) for name in drafters]
    publish(
        f"drafters-k{k}-t{temperature:g}-{jax.default_backend()}",
        f"bundled pair: K = {k}, {count} requests one at a time, {new_tokens} new tokens after {WIDTH}, "
        f"temperature {temperature:g}, {target.dtype}",
        rows,
        plots.drafters,
        notes=["cost ratio: what a round takes beside verification, prompt left out, by draft token, over one pass of"
               " the target. acceptance: of judged drafts, a round without a guess being a refusal."],
    )  # fmt: skip


def _call(
    decode: Callable[..., Any],
    models: tuple,
    texts: list[np.ndarray],
    temperature: float,
    limit: int = 0,
    **options: Any,
) -> Callable:
    """All `texts`, one request after another; `limit` new tokens each, if it is not 0."""
    sampling = jspec.SamplingParams(temperature=temperature, max_tokens=limit)

    def call() -> list[Any]:
        keys = jax.random.split(jax.random.key(0), (len(texts), 1))
        return [decode(*models, text[None], np.array([WIDTH]), key, sampling=sampling, **options)
                for text, key in zip(texts, keys, strict=True)]  # fmt: skip

    return call


def _row(
    kind: str, name: str, outs: list[jspec.Output], times: dict[str, Any], passes: dict[str, float], k: int
) -> dict[str, Any]:
    """What the table says of one setting."""
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *jax.device_get(outs))
    tokens, rounds = int(joined.lengths.sum()), int(joined.stats.rounds.sum())
    alpha, gain = overall(measured_rates(joined)), ratio(times["plain"], times[name])
    # The start has one round of each request.
    in_rounds = spread(times[name] - times[f"{name}, start"]).median / (rounds - len(outs))
    cost = (in_rounds - passes[f"{k + 1} rows"]) / k / passes["1 rows"]
    return {"prompt": kind, "drafter and rule": name, "tokens a round": tokens / rounds, "acceptance": alpha,
            "cost ratio": cost, "tokens/s": tokens / spread(times[name]).median,
            "x own plain": gain.median, "from": gain.low, "to": gain.high}  # fmt: skip
