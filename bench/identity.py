"""Check that outputs do not depend on the batch, its padded width, or speculation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from bench import plots
from bench.report import publish
from bench.subject import Request, held_out, ragged

RULES = ("rejection", "coupled")


def run(batch: int, new_tokens: int) -> None:
    """Publish one row per dtype and rule, for the bundled pair."""
    rows: list[dict[str, Any]] = []
    for dtype in (jnp.float32, jnp.bfloat16):
        target, draft, tokenizer = jspec.demo_pair(dtype)
        request = ragged(held_out(tokenizer, batch)["inside a module"])
        plain = jspec.generate(target, *request, max_new_tokens=new_tokens).tokens
        for rule in RULES:
            texts = [_text(target, draft, part, new_tokens, rule) for part in (request, _wider(request))]
            alone = [_text(target, draft, one, new_tokens, rule) for one in _singles(request)]
            rows.append(
                {
                    "decoded in": f"{np.dtype(dtype).name}, {rule}",
                    "texts": batch,
                    "tokens": batch * new_tokens,
                    "differ alone": _differing(texts[0], np.concatenate(alone)),
                    "differ if wider": _differing(*texts),
                    "differ from plain": _differing(texts[0], plain) if rule == "coupled" else "-",
                }
            )
    publish(
        f"identity-bundled-b{batch}-{jax.default_backend()}",
        f"bundled pair at temperature 1: {batch} outputs of {new_tokens} tokens, K = 4",
        rows,
        plots.bars("decoded in", "differ alone"),
        notes=[
            "The number of texts, from the same prompts and keys, that differ if they are decoded alone instead of in"
            " the batch, that differ if prompts are padded to twice the width, and that differ from plain decoding,"
            " which coupled reproduces."
        ],
    )


def _text(target: jspec.Llama, draft: jspec.Llama, request: Request, new_tokens: int, rule: str) -> np.ndarray:
    return np.asarray(
        jspec.speculative_generate(target, draft, *request, max_new_tokens=new_tokens, accept=rule).tokens
    )


def _singles(request: Request) -> list[Request]:
    """Return each row as a separate batch."""
    tokens, lengths, keys = request
    return [(tokens[i : i + 1], lengths[i : i + 1], keys[i : i + 1]) for i in range(len(lengths))]


def _wider(request: Request) -> Request:
    """Return the same prompts, padded to twice the width."""
    tokens, lengths, keys = request
    return np.pad(tokens, ((0, 0), (0, tokens.shape[1]))), lengths, keys


def _differing(texts: Any, others: Any) -> int:
    """Return the number of rows that differ."""
    return int((np.asarray(texts) != np.asarray(others)).any(1).sum())
