"""Validation of a request against an engine's limits."""

import functools
import numbers
from typing import cast

import jax
import numpy as np

from jspec.engine.request import Request
from jspec.engine.slots import Sizes


def check_request(request: Request, sizes: Sizes) -> None:
    """Raise ValueError or TypeError if an engine with these `sizes` cannot decode a request."""
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
    longest = len(request.tokens) + request.max_new_tokens
    if longest > sizes.length:
        raise ValueError(
            f"The prompt has {len(request.tokens)} tokens and may get {request.max_new_tokens} more tokens, but a "
            f"sequence in this engine has at most {sizes.length}; shorten the prompt, request fewer new tokens, or use "
            "a larger max_length."
        )


@functools.cache
def _has_cpu() -> bool:
    try:
        return bool(cast(list[object], jax.local_devices(backend="cpu")))
    except RuntimeError:
        return False
