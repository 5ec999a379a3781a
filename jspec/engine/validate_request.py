"""Validation of a request against an engine's limits."""

import functools
import numbers
from typing import cast

import jax
import numpy as np
from jax import Array

from jspec.decoding.inputs import PromptBatch
from jspec.decoding.validate_arguments import check_arguments
from jspec.engine.request import Request
from jspec.engine.slots import AnyDrafter, Sizes
from jspec.models.llama import Llama


def check_request(
    request: Request, any_key: Array, target: Llama, drafter: AnyDrafter | None, k: int | None, sizes: Sizes
) -> None:
    """Raise ValueError or TypeError if an engine with these models and `sizes` cannot decode a request.

    Args:
        any_key: a batch of one valid key, for requests without a key.
        k: the number of draft tokens; None for plain decoding.
    """
    tokens, eos_ids = np.array([request.tokens]), np.array(request.eos_ids, np.int32)
    keys = any_key if request.key is None else request.key[None]
    prompt = PromptBatch(tokens, np.array([tokens.size]), keys)
    check_arguments(target, drafter, prompt, request.max_new_tokens, k, request.sampling, eos_ids, 0)
    if len(request.eos_ids) > sizes.eos_ids:
        raise ValueError(f"eos_ids has {len(request.eos_ids)} tokens; expected at most {sizes.eos_ids}.")
    if not isinstance(request.top_logprobs, numbers.Integral):
        raise TypeError(f"top_logprobs is {request.top_logprobs!r}; expected an int.")
    if not (0 <= request.top_logprobs <= sizes.top_logprobs):
        raise ValueError(f"top_logprobs must be between 0 and {sizes.top_logprobs}; got {request.top_logprobs}.")
    if request.constraint is not None and not _has_cpu():
        raise ValueError(
            "Constraints run on the CPU, but JAX has no CPU device here; add cpu to JAX_PLATFORMS, as in cuda,cpu."
        )
    if np.any(request.sampling.max_tokens):
        raise ValueError("sampling.max_tokens applies only to batches; limit a request with max_new_tokens.")
    _check_generated(request, target.config.vocab_size)
    longest = len(request.tokens) + request.max_new_tokens
    if longest > sizes.length:
        raise ValueError(
            f"The prompt has {len(request.tokens)} tokens and may get {request.max_new_tokens} more tokens, but a "
            f"sequence in this engine has at most {sizes.length}; shorten the prompt, request fewer new tokens, or use "
            "a larger max_length."
        )


def _check_generated(request: Request, vocab_size: int) -> None:
    for token in request.generated:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"generated contains {token}, which is outside the vocabulary; expected ids from 0 to {vocab_size - 1}."
            )
        if token in request.eos_ids:
            raise ValueError(
                f"generated contains {token}, which is one of eos_ids, so the output is already complete; remove the "
                "request."
            )
    if len(request.generated) >= request.max_new_tokens:
        raise ValueError(
            f"generated has {len(request.generated)} tokens and max_new_tokens is {request.max_new_tokens}, so the "
            "output is already complete; use a larger max_new_tokens."
        )


@functools.cache
def _has_cpu() -> bool:
    try:
        return bool(cast(list[object], jax.local_devices(backend="cpu")))
    except RuntimeError:
        return False
