"""From logits to the law a token is drawn from: one pipeline for target and draft, plain and speculative.

The order is that of transformers, and so are the ties where it sorts stably: logit bias, repetition penalty,
frequency and presence penalties (as in vLLM), temperature, top-k, top-p, min-p. Thresholds are found by bisection over
the bits of a float: exact, and without sorting the vocabulary.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.core.probs import at_tokens
from jspec.core.row_ops import prefix_mask, tally
from jspec.core.sharding import vary_like
from jspec.core.types import pytree


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How each request is sampled. Every field is one number for all requests, or an array or list of one a request.

    A field left at its default is left out of the program, so using it for the first time compiles once more. Beyond
    that values are traced: changing them never recompiles. The same holds for parameters passed to a caller's own
    `jax.jit`: as a pytree they have the temperature and the fields that differ from their defaults as children.

    Attributes:
        temperature: 0 is greedy decoding.
        top_k: keep the k most likely tokens (and ties with the last of them); 0 is off, and so is V or more.
        top_p: keep the most likely tokens whose mass reaches this; in (0, 1]; 1 is off.
        min_p: keep tokens at least this times as likely as the likeliest; in [0, 1]; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of every token in prompt or text; 1 is off.
        presence_penalty: subtracted from the logit of every token already generated; 0 is off.
        frequency_penalty: subtracted from a token's logit as often as it was generated; 0 is off.
        logit_bias: added to the logits, ``float[V]`` or ``float[B, V]``; -inf forbids a token; None is off.
        max_tokens: a limit of new tokens for each request; 0 is off. ``max_new_tokens`` stays the limit of all.
        min_tokens: no end of text (`eos_ids`) among so many new tokens: their laws forbid it; 0 is off.
        draft_temperature: the draft's own; None means the target's. It changes speed, never the law.
        draft_top_p: the same.
    """

    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0
    presence_penalty: Any = 0.0
    frequency_penalty: Any = 0.0
    logit_bias: Any = None
    max_tokens: Any = 0
    min_tokens: Any = 0
    draft_temperature: Any = None
    draft_top_p: Any = None

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], tuple[str, ...]]:
        """Return the temperature and the fields that are not at their defaults: a trace knows which filters are off.

        Parameters that `tree_unflatten` has made keep their children, whatever the values are.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        children = vars(self).get("_children") or tuple(
            name for name, value in fields.items() if name == "temperature" or not _is_default(name, value)
        )
        return tuple((jax.tree_util.GetAttrKey(name), fields[name]) for name in children), children

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[Any]) -> "SamplingParams":
        """Return the parameters of which these are the children; all others have their defaults."""
        params = cls(**dict(zip(names, values, strict=True)))
        object.__setattr__(params, "_children", names)
        return params


jax.export.register_pytree_node_serialization(
    SamplingParams,
    serialized_name="jspec.SamplingParams",
    serialize_auxdata=lambda names: json.dumps(names).encode(),
    deserialize_auxdata=lambda names: tuple(json.loads(names)),
)


def _is_default(name: str, value: Any) -> bool:
    """Return whether a field holds its default, as a plain number or None: an array on a device is not looked at."""
    default = getattr(SamplingParams, name)
    if value is None or default is None:
        return value is default
    return isinstance(value, int | float | np.generic | np.ndarray) and np.ndim(value) == 0 and bool(value == default)


@pytree
class LogitsTransforms:
    """`SamplingParams` as the program takes them: None for what is left out, else numbers or arrays."""

    temperature: Any
    top_k: Any
    tail_mass: Any  # 1 - top_p
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    bias: Any

    @property
    def penalised(self) -> bool:
        """Whether the law depends on which tokens came before."""
        return any(field is not None for field in (self.repetition, self.presence, self.frequency))


@pytree
class TokenCounts:
    """The tokens a penalty looks at: ``prompt`` bool[B, V], ``counts`` int32[B, V] of generated tokens."""

    prompt: Array
    counts: Array


def target_transforms(params: SamplingParams) -> LogitsTransforms:
    """The target's transforms. A filter left at its off value, as a plain number, is left out. No device work."""

    def unless(off: float, value: Any) -> Any:
        value = _float32(value)
        return None if isinstance(value, np.ndarray) and value.ndim == 0 and value == off else value

    return LogitsTransforms(
        temperature=_float32(params.temperature),
        top_k=unless(0, params.top_k),
        # A plain number is subtracted in double precision, as transformers does.
        tail_mass=unless(0.0, 1.0 - params.top_p),
        min_p=unless(0.0, params.min_p),
        repetition=unless(1.0, params.repetition_penalty),
        presence=unless(0.0, params.presence_penalty),
        frequency=unless(0.0, params.frequency_penalty),
        bias=None if params.logit_bias is None else _float32(params.logit_bias),
    )


def _float32(value: Any) -> Any:
    """Numbers and NumPy arrays in one dtype, so that 0 after 0.5 does not compile again; JAX arrays as they are."""
    return value if isinstance(value, jax.Array) else np.asarray(value, np.float32)


def draft_transforms(params: SamplingParams) -> LogitsTransforms:
    """The draft's transforms: the target's, with the draft's own temperature and top-p where it has them."""
    own = {"temperature": params.draft_temperature, "top_p": params.draft_top_p}
    given = {name: value for name, value in own.items() if value is not None}
    return target_transforms(dataclasses.replace(params, **given))


def broadcast_rows(transforms: LogitsTransforms, batch: int) -> LogitsTransforms:
    """`transforms` with one float32 entry a row: ``[B]``, and ``[B, V]`` for the bias."""
    fields = {field.name: getattr(transforms, field.name) for field in dataclasses.fields(transforms)}
    bias = fields.pop("bias")
    rows = jax.tree.map(lambda value: jnp.broadcast_to(jnp.asarray(value, jnp.float32), (batch,)), fields)
    if bias is not None:
        bias = jnp.asarray(bias, jnp.float32)
        bias = jnp.broadcast_to(bias, (batch, bias.shape[-1]))
    return LogitsTransforms(**rows, bias=bias)


def count_prompt(tokens: Array, lengths: Array, vocab_size: int) -> TokenCounts:
    """`TokenCounts` before the first new token: ``tokens[b, :lengths[b]]`` is the prompt."""
    inside = prefix_mask(lengths, tokens.shape[1])
    prompt = jax.vmap(lambda tokens, inside: jnp.zeros(vocab_size, bool).at[tokens].max(inside))(tokens, inside)
    return TokenCounts(prompt, jnp.zeros(prompt.shape, jnp.int32))


def add_tokens(token_counts: TokenCounts, tokens: Array, keep: Array) -> TokenCounts:
    """`token_counts` after ``tokens[B, S]`` were generated, those where ``keep[B, S]``."""
    return TokenCounts(token_counts.prompt, tally(token_counts.counts, tokens, keep.astype(jnp.int32)))


def without_filters(transforms: LogitsTransforms) -> LogitsTransforms:
    """`transforms` at temperature 1 and without filters: for every token that is not forbidden a probability."""
    ones = jnp.ones_like(transforms.temperature)
    return dataclasses.replace(transforms, temperature=ones, top_k=None, tail_mass=None, min_p=None)


def token_probs(
    logits: Array,
    transforms: LogitsTransforms,
    token_counts: TokenCounts | None,
    drafted: Array | None = None,
    seen: Array | np.ndarray | None = None,
) -> Array:
    """The law each position is sampled from.

    Args:
        logits: ``[B, S, V]``, any float dtype.
        transforms: the transforms, one set a row.
        token_counts: what penalties look at before the first position; needed only where ``transforms.penalised``.
        drafted: ``int32[B, n]``, tokens that some positions count as well: position s of a chain ``drafted[:, :s]``.
        seen: ``bool[S, n]`` or ``bool[B, S, n]``, which of them in a tree.

    Returns:
        ``float32[B, S, V]``; rows sum to 1, or are all 0 where the logits are no law (NaN, +inf, or all -inf).
    """
    logits = logits.astype(jnp.float32)
    if transforms.bias is not None:
        logits = logits + transforms.bias[:, None, :]
    if transforms.penalised:
        assert token_counts is not None, "penalties need the tokens they look at"
        counts = _counts_by_position(token_counts.counts, drafted, seen)
        logits = jax.vmap(jax.vmap(_penalise, (0, 0, None, None)))(logits, counts, token_counts.prompt, transforms)
    return jax.vmap(jax.vmap(_law, (0, None)))(logits, dataclasses.replace(transforms, bias=None))


def raw_logprobs(logits: Array, tokens: Array) -> Array:
    """``float32[B, S]``, log-softmax of ``logits[B, S, V]`` at ``tokens[B, S]``: without transforms."""
    logits = logits.astype(jnp.float32)
    largest = logits.max(-1)
    return at_tokens(logits, tokens) - largest - jnp.log(jnp.exp(logits - largest[..., None]).sum(-1))


def top_logprobs(logits: Array, count: int) -> tuple[Array, Array]:
    """The likeliest of ``logits[B, S, V]``, highest first: ids ``int32[B, S, count]`` and their `raw_logprobs`."""
    ids = lax.top_k(logits, count)[1]
    each = jax.vmap(raw_logprobs, in_axes=(None, 2), out_axes=2)
    return ids, each(logits, ids)


def _counts_by_position(counts: Array, drafted: Array | None, seen: Array | np.ndarray | None) -> Array:
    """``int32[B, S, V]``: `counts` and the drafted tokens that a position counts as well."""
    if drafted is None or drafted.shape[1] == 0:
        return counts[:, None, :]
    each = jax.nn.one_hot(drafted, counts.shape[-1], dtype=counts.dtype)
    if seen is not None:
        return counts[:, None, :] + jnp.einsum("...sn,...nv->...sv", jnp.asarray(seen, counts.dtype), each)
    grown = jnp.cumsum(each, axis=1)
    return counts[:, None, :] + jnp.pad(grown, ((0, 0), (1, 0), (0, 0)))


def _penalise(logits: Array, counts: Array, prompt: Array, transforms: LogitsTransforms) -> Array:
    """Penalties for one position of one row, unbatched: ``[V]`` to ``[V]``."""
    if transforms.repetition is not None:
        penalised = jnp.where(logits < 0, logits * transforms.repetition, logits / transforms.repetition)
        logits = jnp.where(prompt | (counts > 0), penalised, logits)
    if transforms.frequency is not None:
        logits = logits - transforms.frequency * counts.astype(jnp.float32)
    if transforms.presence is not None:
        logits = logits - transforms.presence * (counts > 0).astype(jnp.float32)
    return logits


def _law(logits: Array, transforms: LogitsTransforms) -> Array:
    """Temperature and filters for one position of one row, unbatched: logits ``[V]`` to probabilities ``[V]``."""
    largest, index = jnp.max(logits), jnp.arange(logits.size)
    # The first of the largest, without argmax: on CPU that takes three times as long as two plain reductions.
    greedy = (index == jnp.min(jnp.where(logits == largest, index, logits.size))).astype(logits.dtype)
    # The maximum is taken off first, so that a tiny temperature cannot overflow.
    scaled = (logits - largest) / jnp.where(transforms.temperature > 0, transforms.temperature, 1)
    if transforms.top_k is not None:
        scaled = jnp.where(scaled >= _kth_largest(scaled, transforms.top_k), scaled, -jnp.inf)
    probs = jax.nn.softmax(scaled)
    keep = jnp.ones(probs.shape, bool)
    if transforms.tail_mass is not None:
        keep &= _nucleus(probs, transforms.tail_mass)
    if transforms.min_p is not None:
        keep &= probs >= transforms.min_p * jnp.max(probs)
    probs = jnp.where(keep, probs, 0)
    probs = jnp.where(transforms.temperature > 0, probs / probs.sum(), greedy)
    return jnp.where(jnp.isfinite(largest), probs, 0)


def _kth_largest(values: Array, k: Array) -> Array:
    """The k-th largest of ``values[V]``; -inf where k is 0 or above V."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    # Flip negative floats entirely and positive ones in the sign, so that unsigned order is float order.
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    threshold = _largest_where(lambda candidate: jnp.sum(order >= candidate).astype(jnp.float32) >= k, order)
    kth = jnp.min(jnp.where(order >= threshold, values, jnp.inf))
    return jnp.where((k > 0) & (k <= values.size), kth, -jnp.inf)


def _nucleus(probs: Array, tail_mass: Array) -> Array:
    """The tokens top-p keeps: those left when the least likely ones, ties by index, up to `tail_mass` are dropped."""
    bits = lax.bitcast_convert_type(probs, jnp.uint32)  # ordered as the floats are, for none is negative
    below = lambda candidate: jnp.sum(jnp.where(bits < candidate, probs, 0))  # noqa: E731
    threshold = _largest_where(lambda candidate: below(candidate) <= tail_mass, bits)
    tied = bits == threshold
    dropped_with_ties = below(threshold) + jnp.cumsum(jnp.where(tied, probs, 0))
    keep = (bits > threshold) | (tied & (dropped_with_ties > tail_mass))
    last_largest = probs.size - 1 - jnp.argmax(probs[::-1])
    return keep | (~jnp.any(keep) & (jnp.arange(probs.size) == last_largest))


def _largest_where(holds: Any, values: Array) -> Array:
    """The largest uint32 for which `holds`, a test of `values`, is true; true up to some number and false after."""

    def try_bit(i: Array, found: Array) -> Array:
        # With jax.disable_jit the loop counts in Python.
        candidate = found | (jnp.uint32(1 << 31) >> jnp.asarray(i).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    return lax.fori_loop(0, 32, try_bit, vary_like(jnp.uint32(0), values))
