"""Log-probabilities of tokens under a model's logits, without sampling transforms."""

import jax.numpy as jnp
from jax import Array, lax

from jspec.core.probs import at_tokens
from jspec.models.kernels import dispatch


def raw_logprobs(logits: Array, tokens: Array) -> Array:
    """Return ``float32[B, S]``, the log-softmax of ``logits[B, S, V]`` at ``tokens[B, S]``."""
    largest, log_sum = _log_sum_exp(logits)
    return at_tokens(logits, tokens).astype(jnp.float32) - largest - log_sum


def top_logprobs(logits: Array, count: int) -> tuple[Array, Array]:
    """Return the top tokens of ``logits[B, S, V]``, ``int32[B, S, count]`` in order, and their `raw_logprobs`."""
    top, ids = lax.top_k(logits, count)
    largest, log_sum = _log_sum_exp(logits)
    return ids, top.astype(jnp.float32) - largest[..., None] - log_sum[..., None]


def _log_sum_exp(logits: Array) -> tuple[Array, Array]:
    """Return ``float32[B, S]`` twice: the largest logit, and the log of the sum of ``exp(logit - largest)``.

    On a CPU with AVX-512, a native kernel makes each row's bits independent of the number of rows.
    """
    rows = logits.astype(jnp.float32).reshape(-1, logits.shape[-1])
    largest, log_sum = dispatch.log_sum_exp(_by_reductions, rows)
    return largest.reshape(logits.shape[:-1]), log_sum.reshape(logits.shape[:-1])


def _by_reductions(x: Array) -> tuple[Array, Array]:
    largest = x.max(-1)
    return largest, jnp.log(jnp.exp(x - largest[:, None]).sum(-1))
