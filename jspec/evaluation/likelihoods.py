# pyright: reportUnknownArgumentType=false
"""Log-likelihoods of continuations, in batches with few shapes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.core.sharding import on_any_mesh
from jspec.models.language_model import LanguageModel
from jspec.models.logprobs import raw_logprobs
from jspec.text.prompt_batches import batches

_CHUNK = 128  # positions whose logits are in memory at the same time

Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]  # the token ids of a context and of its continuation
Score: TypeAlias = tuple[float, bool]  # a log-likelihood, and whether greedy decoding gives the continuation


class _Predictions(NamedTuple):
    """A model's predictions of a batch of texts.

    Attributes:
        logprobs: ``float32[B, S]``, the log-probability of the token after each token.
        is_best: ``bool[B, S]``, whether the token after each token has the largest logit.
        last: ``float32[B, V]``, the log-probabilities of the token after each text.
        best: ``int32[B]``, the token with the largest logit after each text.
    """

    logprobs: Array
    is_best: Array
    last: Array
    best: Array


def log_likelihoods(target: LanguageModel, pairs: Sequence[Pair], batch_size: int) -> Iterator[tuple[int, Score]]:
    """Yield the index of each pair with the log-likelihood of its continuation, in the order of computation.

    The model reads each text without its last token. Pairs that differ only in the last token therefore share
    one pass, such as a question with the answers A, B, C and D.

    Args:
        pairs: contexts of at least one token, each with a continuation of at least one token.
        batch_size: the number of texts that the model reads at once.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (context, continuation) in enumerate(pairs):
        groups.setdefault((*context, *continuation[:-1]), []).append(i)
    texts = list(groups)
    for batch in batches(texts, batch_size=min(batch_size, len(texts))) if texts else ():
        predictions = jax.device_get(_predictions(target, None, (batch.tokens, batch.lengths)))
        for row, text in enumerate(batch.indices[: batch.num_distinct].tolist()):
            own = cast(_Predictions, jax.tree.map(lambda part, row=row: part[row], predictions))
            for i in groups[texts[text]]:
                yield i, _score(own, len(texts[text]), pairs[i][1])


def _score(own: _Predictions, length: int, continuation: Sequence[int]) -> Score:
    """Return the score of a continuation. The text of `length` tokens ends with all of its tokens but the last."""
    inner, last = slice(length - len(continuation), length - 1), continuation[-1]
    total = np.sum(own.logprobs[inner], dtype=np.float64) + own.last[last]
    return float(total), bool(own.is_best[inner].all() and own.best == last)


@jax.jit
@on_any_mesh
def _predictions(target: LanguageModel, _: None, batch: tuple[Array, Array]) -> _Predictions:
    """Run the model over the texts, then compute logits one chunk of positions at a time."""
    tokens, lengths = batch
    rows, size = tokens.shape
    hidden = target.forward(tokens, target.new_cache(rows, size), jnp.zeros(rows, jnp.int32))[0]
    chunk = min(_CHUNK, size)  # both are powers of two

    def chunks(array: Array) -> Array:
        return jnp.moveaxis(array.reshape(rows, -1, chunk, *array.shape[2:]), 1, 0)

    def predict(part: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = target.logits(part[0])
        return raw_logprobs(logits, part[1]), logits.argmax(-1) == part[1]

    following = jnp.roll(tokens, -1, axis=1)  # the last column is never read
    parts = cast("tuple[Array, Array]", lax.map(predict, (chunks(hidden), chunks(following))))
    logprobs, is_best = (jnp.moveaxis(part, 0, 1).reshape(rows, size) for part in parts)
    ends = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    logits = target.logits(ends)[:, 0].astype(jnp.float32)
    return _Predictions(logprobs, is_best, jax.nn.log_softmax(logits), logits.argmax(-1))
