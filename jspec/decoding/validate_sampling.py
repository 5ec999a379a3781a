# pyright: reportUnnecessaryIsInstance=false
"""Validation of sampling parameters. Values are checked if they are known, as in `validate_arguments`."""

import numbers
import reprlib
from collections.abc import Callable
from typing import cast

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jspec.core.sampling import SamplingParams, by_name
from jspec.core.transfers import values_if_known

# For each name, a description of the allowed values, and a test for a NumPy array of values.
RANGES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "temperature": ("at least 0 and finite (0 is greedy)", lambda x: np.isfinite(x) & (x >= 0)),
    "draft_temperature": ("at least 0 and finite, or None for the target's", lambda x: np.isfinite(x) & (x >= 0)),
    "draft_top_p": ("above 0 and at most 1, or None for the target's", lambda x: (x > 0) & (x <= 1)),
    "top_k": ("a whole number, 0 (off) or more", lambda x: (x >= 0) & (x == np.floor(x))),
    "top_p": ("above 0 and at most 1 (1 is off)", lambda x: (x > 0) & (x <= 1)),
    "min_p": ("between 0 (off) and 1", lambda x: (x >= 0) & (x <= 1)),
    # Outside these bounds a penalised logit could overflow, and the error would blame the model.
    "repetition_penalty": ("between 0.001 and 1000 (1 is off)", lambda x: (x >= 1e-3) & (x <= 1e3)),
    "presence_penalty": ("between -1e6 and 1e6 (0 is off)", lambda x: np.abs(x) <= 1e6),
    "frequency_penalty": ("between -1e6 and 1e6 (0 is off)", lambda x: np.abs(x) <= 1e6),
    "max_tokens": ("a whole number, 0 (off) or more", lambda x: (x >= 0) & (x == np.floor(x)) & (x < 2**31)),
    "min_tokens": ("a whole number, 0 (off) or more", lambda x: (x >= 0) & (x == np.floor(x)) & (x < 2**31)),
}


def check_sampling(sampling: object, batch: int, vocab_size: int) -> None:
    """Raise ValueError or TypeError for the first invalid sampling parameter of a batch."""
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling is of type {type(sampling).__name__}; pass a jspec.SamplingParams.")
    fields = by_name(sampling)
    for name, (allowed, test) in RANGES.items():
        value = fields[name]
        if name.startswith("draft_") and value is None:
            continue
        if not _is_number(value) or np.shape(value) not in ((), (batch,)):
            raise ValueError(
                f"{name} must be a number, or a list or array of shape [{batch}] with one number for each row; "
                f"got {_describe(value)}."
            )
        values = values_if_known(value)
        if values is not None and not (good := np.atleast_1d(test(_rounded(name, values)))).all():
            raise ValueError(f"{name} must be {allowed}; got {np.atleast_1d(values)[~good][0]}.")
    bias = sampling.logit_bias
    if bias is None:
        return
    if not _is_number(bias) or np.shape(bias) not in ((vocab_size,), (batch, vocab_size)):
        raise ValueError(
            f"logit_bias must have shape [{vocab_size}] or [{batch}, {vocab_size}] (V, or B x V), but got "
            f"{_describe(bias)}; to bias a few tokens, set their entries in np.zeros({vocab_size})."
        )
    values = values_if_known(bias)
    if values is not None:
        values = _rounded("logit_bias", values)
    if values is not None and (np.isnan(values).any() or np.isposinf(values).any()):
        raise ValueError("logit_bias must be finite, or -inf to forbid a token; got NaN or +inf.")
    if values is not None and np.isneginf(values).all(axis=-1).any():
        raise ValueError("logit_bias forbids every token (-inf everywhere); allow at least one.")


def _rounded(name: str, values: np.ndarray) -> np.ndarray:
    """Return `values` in the program's dtype, in which 1e39 is infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.int64 if name.endswith("_tokens") and values.dtype.kind in "iu" else np.float32)


def _is_number(value: object) -> bool:
    if value is None:
        return False
    try:
        dtype = jnp.result_type(cast(ArrayLike, value))
    except TypeError:
        return False
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _describe(value: object) -> str:
    return f"shape {np.shape(cast(ArrayLike, value))}" if _is_number(value) else reprlib.repr(value)


def check_top(top_logprobs: int, vocab_size: int) -> None:
    """Raise ValueError unless `top_logprobs` is an int from 0 to the vocabulary size."""
    is_int = isinstance(top_logprobs, numbers.Integral) and not isinstance(top_logprobs, bool)
    if not is_int or not 0 <= top_logprobs <= vocab_size:
        raise ValueError(
            f"top_logprobs must be a Python int from 0 to {vocab_size}, the size of the vocabulary; got "
            f"{top_logprobs!r}."
        )
