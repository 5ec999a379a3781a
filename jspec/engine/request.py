"""Requests and their results."""

import dataclasses
import functools
import secrets
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import DTypeLike

from jspec.core.sampling import LogitsTransforms, PerRequest, SamplingParams, draft_transforms, target_transforms
from jspec.core.types import PyTree
from jspec.decoding.state import RequestParams
from jspec.engine.constraints import Constraint
from jspec.engine.slots import NEUTRAL, Variant

TopTokens = list[tuple[int, float]]  # token ids and their raw log-probabilities, highest first


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to continue a prompt.

    Attributes:
        tokens: the token ids of the prompt.
        max_new_tokens: the maximum number of tokens to add.
        sampling: temperature, filters and penalties, as numbers. The engine rejects a `max_tokens` set here.
        key: a typed PRNG key. With a key, the output equals that of `jspec.generate` with this key (rule "coupled"). It
            does not depend on other requests, on draft lengths, or on where decoding was interrupted and resumed. If
            None, the engine uses a random key and its own rule, which accepts more draft tokens.
        eos_ids: the tokens that end the output.
        salt: requests with different salts share no prefilled tokens.
        top_logprobs: the number of most likely tokens to report for each new token, with their raw log-probabilities;
            at most 20.
        prompt_logprobs: whether to report the same for the prompt tokens. If so, the whole prompt is prefilled.
        constraint: a function that returns a `jspec.engine.constraints.Matcher`, which masks the target's distribution
            at every position. `jspec.engine.grammars.Grammars` creates such functions.
        generated: new tokens that another engine has already generated for this request. Decoding continues after them,
            and the result has only the later tokens. They count as new tokens for `max_new_tokens`, penalties and the
            constraint. With the same key, `generated` plus the result equals an uninterrupted output. Such a request
            cannot restart with new weights: `Engine.update(running="restart")` cancels it.
    """

    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    key: Array | None = None
    eos_ids: tuple[int, ...] = ()
    salt: str = ""
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    constraint: Constraint | None = None
    generated: tuple[int, ...] = ()

    @functools.cached_property
    def variant(self) -> Variant:
        """The features that the rounds of this request must support."""
        if self.constraint is not None:
            return Variant.CONSTRAINED
        if self.top_logprobs or np.any(self.sampling.min_tokens):
            return Variant.FULL
        parts = (target_transforms(self.sampling), draft_transforms(self.sampling))
        temperature_only = all(
            value is None for part in parts for name, value in vars(part).items() if name != "temperature"
        )
        return Variant.TEMPERATURE_ONLY if temperature_only else Variant.FULL

    def row(self, num_eos_ids: int, vocab_size: int) -> RequestParams:
        """Return the request's parameters as a batch of one for an engine's slots."""
        eos = np.full((1, num_eos_ids), -1, np.int32)
        eos[0, : len(self.eos_ids)] = self.eos_ids
        key = _any_key() if self.key is None else self.key
        fields: dict[str, PyTree] = {  # NumPy arrays, which the call copies at once
            "keys": key[None],
            "prompt_lengths": np.array([len(self.tokens)], np.int32),
            "limits": np.array([self.max_new_tokens], np.int32),
            "eos_ids": eos,
            "transforms": _row(target_transforms(self.sampling), vocab_size),
            "draft_transforms": _row(draft_transforms(self.sampling), vocab_size),
            "min_tokens": _entry("min_tokens", self.sampling.min_tokens, (), np.int32),
            "top_logprobs": np.array([self.top_logprobs], np.int32),
            "constraints": np.zeros(1, np.int32),  # the device fills in the number
            "coupled": np.array([self.key is not None]),
        }
        return RequestParams(**fields)


def _any_key() -> Array:
    """Return a unique key. All of its 64 bits are random; a seed would set only half of them."""
    bits = jnp.asarray(np.frombuffer(secrets.token_bytes(8), np.uint32))
    return cast(Array, jax.random.wrap_key_data(bits, impl="threefry2x32"))


def _row(transforms: LogitsTransforms, vocab_size: int) -> LogitsTransforms:
    """Return `transforms` as a batch of one, with every field filled in."""
    neutral = dataclasses.replace(NEUTRAL, bias=np.zeros(vocab_size, np.float32))
    fields: dict[str, PyTree] = {}
    given = vars(transforms)
    for name, off in vars(neutral).items():
        value = given[name]
        fields[name] = _entry(name, off if value is None else value, np.shape(off), np.float32)
    return LogitsTransforms(**fields)


def _entry(name: str, value: PerRequest, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return one request's value for a sampling field as a batch of one."""
    array = np.asarray(value, dtype)
    if array.shape != shape:
        raise ValueError(f"sampling has {name} of shape {array.shape}; expected {shape} for one request.")
    return array[None]


@dataclasses.dataclass
class Result:
    """A request's result so far.

    Attributes:
        tokens, origins, logprobs, raw_logprobs: values for each new token after `Request.generated`, as in
            `jspec.Output`.
        top_logprobs: the requested number of (id, raw log-probability) pairs for each new token, highest first.
        prompt_logprobs: the raw log-probability of each prompt token, if requested; NaN for the first token.
        prompt_top_logprobs: like `top_logprobs`, but for the prompt tokens; empty for the first token.
        accepted, judged, drafted: the number of accepted, verified and drafted tokens in each round, as in
            `jspec.Stats`.
        distortion: the distortion that a lossy rule reports, as in `jspec.Stats`.
        finish_reason: "eos", "length", "cancelled" or "error"; None until the request ends.
        error: the error message.
        error_code: a machine-readable code if the constraint cannot be met: "constraint_failed",
            "constraint_too_complex", "constraint_conflict" (with the request's own settings) or "constraint_dead_end"
            (not the request's fault).
        cached: the number of prompt tokens that were reused and not prefilled.
        restarts: the number of times that `jspec.engine.Engine.update` discarded all output and restarted the request.
    """

    tokens: list[int] = dataclasses.field(default_factory=list[int])
    origins: list[int] = dataclasses.field(default_factory=list[int])
    logprobs: list[float] = dataclasses.field(default_factory=list[float])
    raw_logprobs: list[float] = dataclasses.field(default_factory=list[float])
    top_logprobs: list[TopTokens] = dataclasses.field(default_factory=list[TopTokens])
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list[float])
    prompt_top_logprobs: list[TopTokens] = dataclasses.field(default_factory=list[TopTokens])
    accepted: list[int] = dataclasses.field(default_factory=list[int])
    judged: list[int] = dataclasses.field(default_factory=list[int])
    drafted: list[int] = dataclasses.field(default_factory=list[int])
    distortion: float = 0.0
    finish_reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    cached: int = 0
    restarts: int = 0

    @property
    def is_refused(self) -> bool:
        """Whether the error is the request's own fault: its constraint cannot be met."""
        return self.error_code not in (None, "constraint_dead_end")

    @property
    def acceptance_rate(self) -> float:
        """The fraction of verified draft tokens (`judged`) that were accepted; NaN if none were verified."""
        return sum(self.accepted) / sum(self.judged) if any(self.judged) else float("nan")
