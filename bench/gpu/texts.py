"""The bundled pair's outputs on the device, plain and speculative, and on the CPU in the same process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from bench.gpu.record import Record
from bench.gpu.sizes import sizes
from bench.pairs import random_llama
from bench.subject import Request, held_out, ragged

_TIE = 1e-4  # the difference between two devices' float32 leads
_GREEDY = jspec.SamplingParams(temperature=0.0)


def check(record: Record, rehearse: bool) -> None:
    """Compare outputs token by token: greedily, with a coupled draft and, for reference, in bfloat16."""
    batch, length = (2, 16) if rehearse else (8, 200)
    target, draft, tokenizer = jspec.demo_pair(jnp.float32)
    tokens = held_out(tokenizer, batch)["inside a module"]
    if rehearse:  # these models compile in a third of the time
        shape = sizes(rehearse).target
        target, draft = (random_llama(shape, jnp.float32, seed) for seed in (0, 1))
        tokens = tokens % shape.vocab_size
    request = ragged(tokens)
    with jax.default_matmul_precision("highest"):  # rounding to TF32 would exceed the lead of many tokens
        plain = _plain(target, request, length, _GREEDY)
        _compare(
            record, "speculative = plain", _speculative(target, draft, request, length, _GREEDY), plain, target, request
        )
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu), record.attempt("device = CPU"):
            there = _plain(jax.device_put(target, cpu), jax.device_put(request, cpu), length, _GREEDY)
            _compare(record, "device = CPU", plain, there, jax.device_put(target, cpu), request)
        if rehearse:  # the rest is the same code
            return
        with record.attempt("coupled = plain"):
            sampled = _plain(target, request, length, jspec.SamplingParams())
            coupled = _speculative(target, draft, request, length, jspec.SamplingParams(), "coupled")
            _compare(record, "coupled = plain, temperature 1", coupled, sampled)
    with record.attempt("bfloat16"):
        target, draft, _ = jspec.demo_pair(jnp.bfloat16)
        texts = (_speculative(target, draft, request, length, _GREEDY), _plain(target, request, length, _GREEDY))
        record.add("speculative and plain, bfloat16", **_differences(*texts))


def _plain(target: Any, request: Request, length: int, sampling: jspec.SamplingParams) -> np.ndarray:
    return np.asarray(jspec.generate(target, *request, max_new_tokens=length, sampling=sampling).tokens)


def _speculative(
    target: Any, draft: Any, request: Request, length: int, sampling: jspec.SamplingParams, rule: str = "rejection"
) -> np.ndarray:
    output = jspec.speculative_generate(
        target, draft, *request, max_new_tokens=length, num_draft_tokens=4, sampling=sampling, accept=rule
    )
    return np.asarray(output.tokens)


def _compare(
    record: Record, name: str, texts: np.ndarray, others: np.ndarray, model: Any = None, request: Request | None = None
) -> None:
    """Add a row. An output may diverge from the other where the two most likely tokens of `model` are nearly tied."""
    row, leads = _differences(texts, others), []
    if model is not None and request is not None:
        leads = [_lead(model, request, i, others[i], at) for i, at in row["first"].items()]
    unexplained = len(row["first"]) - sum(lead < _TIE for lead in leads)
    record.add(name, ok=unexplained == 0, **row, leads=leads)


def _differences(texts: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    """Return how many outputs differ, and the first difference in each of them."""
    differs = texts != others
    first = {int(row): int(differs[row].argmax()) for row in np.flatnonzero(differs.any(1))}
    return {"texts": len(texts), "tokens": texts.size, "differing": len(first), "first": first}


def _lead(model: Any, request: Request, row: int, text: np.ndarray, at: int) -> float:
    """Return the lead of the most likely token over the second, after the first `at` tokens of a row's output."""
    tokens, lengths, _ = request
    before = np.concatenate([tokens[row, : lengths[row]], text[:at]])
    best = jax.lax.top_k(model(jnp.asarray(before, jnp.int32)[None])[0, -1], 2)[0]
    return float(best[0] - best[1])
