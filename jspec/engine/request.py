"""Requests, and what comes of them."""

import dataclasses
import functools
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.core.sampling import LogitsTransforms, SamplingParams, draft_transforms, target_transforms
from jspec.decoding.state import RequestParams
from jspec.engine.constraints import Constraint
from jspec.engine.slots import NEUTRAL, Needs

Likeliest = list[tuple[int, float]]  # tokens and their raw log-probabilities, highest first


@dataclasses.dataclass(frozen=True)
class Request:
    """One text to be continued.

    Attributes:
        tokens: its ids.
        max_new_tokens: most tokens to add.
        sampling: temperature, filters, penalties; numbers. Its `max_tokens` is not looked at.
        key: a typed PRNG key. With one the text is that of `jspec.generate` with this key, whatever else runs, how far
            is drafted, and wherever it is cut and resumed (rule "coupled"). None: any key, and the engine's own rule,
            which accepts more.
        eos_ids: tokens that end it.
        salt: of requests with different ones none reuses what another has read.
        top_logprobs: of how many of the likeliest tokens, at every new one, to tell the raw log-probabilities; at most
            20.
        prompt_logprobs: whether to tell the same of the prompt, all of which is read for that.
        constraint: makes a `jspec.engine.constraints.Matcher`, by which the target's law is masked at every place; such
            as a `jspec.engine.grammars.Grammars` makes.
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

    @functools.cached_property
    def needs(self) -> Needs:
        """What its rounds must be able to do for it."""
        if self.constraint is not None:
            return Needs.CONSTRAINED
        if self.top_logprobs or np.any(self.sampling.min_tokens):
            return Needs.FULL
        parts = (target_transforms(self.sampling), draft_transforms(self.sampling))
        is_lean = all(getattr(part, field) is None for part in parts for field in vars(part) if field != "temperature")
        return Needs.LEAN if is_lean else Needs.FULL

    def row(self, num_eos_ids: int, vocab_size: int) -> RequestParams:
        """It as a batch of one for an engine's slots."""
        eos = np.full((1, num_eos_ids), -1, np.int32)
        eos[0, : len(self.eos_ids)] = self.eos_ids
        key = _any_key() if self.key is None else self.key
        fields: dict[str, Any] = {  # of NumPy: it is copied once, with the call
            "keys": key[None],
            "prompt_lengths": np.array([len(self.tokens)], np.int32),
            "limits": np.array([self.max_new_tokens], np.int32),
            "eos_ids": eos,
            "transforms": _row(target_transforms(self.sampling), vocab_size),
            "draft_transforms": _row(draft_transforms(self.sampling), vocab_size),
            "min_tokens": _entry("min_tokens", self.sampling.min_tokens, (), np.int32),
            "top_logprobs": np.array([self.top_logprobs], np.int32),
            "constraints": np.zeros(1, np.int32),  # the device has its number
            "coupled": np.array([self.key is not None]),
        }
        return RequestParams(**fields)


def _any_key() -> Array:
    """A key that nobody else has: all of its 64 bits, of which a seed would set half."""
    bits = jnp.asarray(np.frombuffer(secrets.token_bytes(8), np.uint32))
    return jax.random.wrap_key_data(bits, impl="threefry2x32")


def _row(transforms: LogitsTransforms, vocab_size: int) -> LogitsTransforms:
    """`transforms` with nothing left out, as a batch of one."""
    neutral = dataclasses.replace(NEUTRAL, bias=np.zeros(vocab_size, np.float32))
    fields: dict[str, Any] = {}
    for name, off in vars(neutral).items():
        value = getattr(transforms, name)
        fields[name] = _entry(name, off if value is None else value, np.shape(off), np.float32)
    return LogitsTransforms(**fields)


def _entry(name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A field of the sampling parameters, for one request, as a batch of one."""
    array = np.asarray(value, dtype)
    if array.shape != shape:
        raise ValueError(f"sampling has {name} of shape {array.shape}; expected {shape}, for one request.")
    return array[None]


@dataclasses.dataclass
class Result:
    """What has come of a request so far.

    Attributes:
        tokens, origins, logprobs, raw_logprobs: of the new tokens, as in `jspec.Output`.
        top_logprobs: of each new token the (id, raw log-probability) of as many tokens as asked for, highest first.
        prompt_logprobs: of each token of the prompt, if they were asked for, raw; NaN of the first.
        prompt_top_logprobs: the same as `top_logprobs` for these; nothing for the first.
        accepted, judged, drafted: of each round, drafts, as counted in `jspec.Stats`.
        distortion: the receipt of a lossy rule, as in `jspec.Stats`.
        finish_reason: "eos", "length", "cancelled" or "error"; None while it goes on.
        error: what has gone wrong.
        error_code: a word for programs if the constraint cannot be kept: "constraint_failed", "constraint_too_complex",
            "constraint_conflict" (with the request's own settings) or "constraint_dead_end" (not the request's fault).
        cached: tokens of the prompt that did not have to be read.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    origins: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    raw_logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[Likeliest] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_top_logprobs: list[Likeliest] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    judged: list[int] = dataclasses.field(default_factory=list)
    drafted: list[int] = dataclasses.field(default_factory=list)
    distortion: float = 0.0
    finish_reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    cached: int = 0

    @property
    def is_refused(self) -> bool:
        """Whether the error is the request's own fault: its constraint cannot be kept."""
        return self.error_code not in (None, "constraint_dead_end")

    @property
    def acceptance_rate(self) -> float:
        """Accepted over judged drafts; NaN where none was judged."""
        return sum(self.accepted) / sum(self.judged) if any(self.judged) else float("nan")
