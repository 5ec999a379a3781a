# pyright: reportUnknownArgumentType=false
"""The pipeline from logits to the distribution that a token is sampled from.

Target and draft use the same pipeline, in both plain and speculative decoding. Transforms apply in the same order as in
transformers: logit bias, repetition penalty, frequency and presence penalties (as in vLLM), temperature, top-k, top-p,
min-p. Ties are also resolved as in transformers, provided that its sort is stable.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jspec.core.filters import UsedFilters, keep_top_k, nucleus, used_filters
from jspec.core.row_ops import prefix_mask, tally
from jspec.core.types import PyTree, pytree

PerRequest: TypeAlias = ArrayLike | Sequence[float]  # one number for all requests, or one for each


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of each request.

    Each field is either one number for all requests, or an array or list with one number per request. A field at its
    default is left out of the program, so setting it for the first time triggers one more compilation. No other change
    of values recompiles, because values are traced. The same holds for parameters passed to a caller's own `jax.jit`:
    their pytree children are the temperature and the fields that differ from their defaults.

    Attributes:
        temperature: scales the logits. 0 means greedy decoding.
        top_k: keep the k most likely tokens, and any that tie with the last of them. 0, V and larger values disable it.
        top_p: keep the most likely tokens whose total probability reaches this value, in (0, 1]. 1 disables it.
        min_p: keep tokens with at least this fraction, in [0, 1], of the highest probability. 0 disables it.
        repetition_penalty: divides the positive logits and multiplies the negative logits of every token in the prompt
            or the generated text. 1 disables it.
        presence_penalty: subtracted from the logit of every token that was already generated. 0 disables it.
        frequency_penalty: subtracted from a token's logit once for each time it was generated. 0 disables it.
        logit_bias: added to the logits, ``float[V]`` or ``float[B, V]``. -inf forbids a token. None disables it.
        max_tokens: each request's maximum number of new tokens. 0 disables it; ``max_new_tokens`` always applies.
        min_tokens: mask EOS tokens (`eos_ids`) for the first `min_tokens` new tokens. 0 disables it.
        draft_temperature: the draft's temperature. None means the target's. It affects speed, never the distribution.
        draft_top_p: the draft's top-p. None means the target's. It affects speed, never the distribution.
    """

    temperature: PerRequest = 1.0
    top_k: PerRequest = 0
    top_p: PerRequest = 1.0
    min_p: PerRequest = 0.0
    repetition_penalty: PerRequest = 1.0
    presence_penalty: PerRequest = 0.0
    frequency_penalty: PerRequest = 0.0
    logit_bias: PerRequest | Sequence[Sequence[float]] | None = None
    max_tokens: PerRequest = 0
    min_tokens: PerRequest = 0
    draft_temperature: PerRequest | None = None
    draft_top_p: PerRequest | None = None

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[object, PyTree], ...], tuple[str, ...]]:
        """Return the temperature and the fields that are not at their defaults.

        Tracing can then leave out the filters that are off. Parameters from `tree_unflatten` keep their children,
        whatever their values are.
        """
        fields = by_name(self)
        children = vars(self).get("_children") or tuple(
            name for name, value in fields.items() if name == "temperature" or not _is_default(name, value)
        )
        return tuple((jax.tree_util.GetAttrKey(name), fields[name]) for name in children), children

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[PyTree]) -> "SamplingParams":
        """Return the parameters that have these children, with all other fields at their defaults."""
        params = cls(**dict(zip(names, values, strict=True)))
        object.__setattr__(params, "_children", names)
        return params


jax.export.register_pytree_node_serialization(
    SamplingParams,
    serialized_name="jspec.SamplingParams",
    serialize_auxdata=lambda names: json.dumps(names).encode(),
    deserialize_auxdata=lambda names: tuple(json.loads(names)),
)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


def by_name(params: SamplingParams) -> dict[str, PyTree]:
    """Return all fields of `params` by name."""
    return {name: value for name, value in vars(params).items() if name in _DEFAULTS}


def _is_default(name: str, value: object) -> bool:
    """Return whether a field holds its default, as a plain number or None.

    Arrays on a device never count as defaults, so that this function does not wait for their values.
    """
    default = _DEFAULTS[name]
    if value is None or default is None:
        return value is default
    return isinstance(value, int | float | np.generic | np.ndarray) and np.ndim(value) == 0 and bool(value == default)


@pytree
class LogitsTransforms:
    """`SamplingParams` in the form that programs accept: numbers or arrays, with None for omitted fields."""

    temperature: Any  # an array in the running program; drafters index its rows
    top_k: float | Array | np.ndarray | None
    tail_mass: float | Array | np.ndarray | None  # 1 - top_p
    min_p: float | Array | np.ndarray | None
    repetition: float | Array | np.ndarray | None
    presence: float | Array | np.ndarray | None
    frequency: float | Array | np.ndarray | None
    bias: Array | np.ndarray | None

    @property
    def penalised(self) -> bool:
        """Whether the distribution depends on the earlier tokens."""
        return any(field is not None for field in (self.repetition, self.presence, self.frequency))


@pytree
class TokenCounts:
    """The tokens that penalties apply to: ``prompt`` bool[B, V], and the ``counts`` int32[B, V] of generated tokens."""

    prompt: Array
    counts: Array


def target_transforms(params: SamplingParams) -> LogitsTransforms:
    """Return the target's transforms, without any device computation.

    A filter is left out if its value is a plain number that disables it.
    """

    def unless(off: float, value: PerRequest) -> Array | np.ndarray | None:
        value = _float32(value)
        return None if isinstance(value, np.ndarray) and value.ndim == 0 and value == off else value

    return LogitsTransforms(
        temperature=_float32(params.temperature),
        top_k=unless(0, params.top_k),
        # A plain number is subtracted in double precision, as in transformers.
        tail_mass=unless(0.0, 1.0 - cast("float | Array", params.top_p)),
        min_p=unless(0.0, params.min_p),
        repetition=unless(1.0, params.repetition_penalty),
        presence=unless(0.0, params.presence_penalty),
        frequency=unless(0.0, params.frequency_penalty),
        bias=None if params.logit_bias is None else _float32(params.logit_bias),
    )


def _float32(value: PerRequest | Sequence[Sequence[float]]) -> Array | np.ndarray:
    """Convert numbers and NumPy arrays to float32, so that changing 0.5 to 0 does not recompile. Keep JAX arrays."""
    return value if isinstance(value, jax.Array) else np.asarray(value, np.float32)


def draft_transforms(params: SamplingParams) -> LogitsTransforms:
    """Return the draft's transforms: those of the target, but with the draft's own temperature and top-p if set."""
    own = {"temperature": params.draft_temperature, "top_p": params.draft_top_p}
    given = {name: value for name, value in own.items() if value is not None}
    return target_transforms(dataclasses.replace(params, **given))


def broadcast_rows(transforms: LogitsTransforms, batch: int) -> LogitsTransforms:
    """Return `transforms` with one float32 entry per row: ``[B]``, and ``[B, V]`` for the bias."""
    fields = dict(vars(transforms))
    bias = fields.pop("bias")
    rows = jax.tree.map(lambda value: jnp.broadcast_to(jnp.asarray(value, jnp.float32), (batch,)), fields)
    if bias is not None:
        bias = jnp.asarray(bias, jnp.float32)
        bias = jnp.broadcast_to(bias, (batch, bias.shape[-1]))
    return LogitsTransforms(**rows, bias=bias)


def count_prompt(tokens: Array, lengths: Array, vocab_size: int) -> TokenCounts:
    """Return the `TokenCounts` before the first new token, for the prompts ``tokens[b, :lengths[b]]``."""
    inside = prefix_mask(lengths, tokens.shape[1])
    prompt = jax.vmap(lambda tokens, inside: jnp.zeros(vocab_size, bool).at[tokens].max(inside))(tokens, inside)
    return TokenCounts(prompt, jnp.zeros(prompt.shape, jnp.int32))


def add_tokens(token_counts: TokenCounts, tokens: Array, keep: Array) -> TokenCounts:
    """Return `token_counts` after adding the tokens of ``tokens[B, S]`` for which ``keep[B, S]`` is true."""
    return TokenCounts(token_counts.prompt, tally(token_counts.counts, tokens, keep.astype(jnp.int32)))


def without_filters(transforms: LogitsTransforms) -> LogitsTransforms:
    """Return `transforms` at temperature 1 without filters, so that only forbidden tokens have probability 0."""
    ones = jnp.ones_like(transforms.temperature)
    return dataclasses.replace(transforms, temperature=ones, top_k=None, tail_mass=None, min_p=None)


def token_probs(
    logits: Array,
    transforms: LogitsTransforms,
    token_counts: TokenCounts | None,
    drafted: Array | None = None,
    seen: Array | np.ndarray | None = None,
) -> Array:
    """Return the distribution that each position's token is sampled from.

    Args:
        logits: ``[B, S, V]``, any float dtype.
        transforms: the transforms, one set per row.
        token_counts: the tokens before the first position, for penalties. Required only if ``transforms.penalised``.
        drafted: ``int32[B, n]``, draft tokens that penalties also count. In a chain, position s counts
            ``drafted[:, :s]``.
        seen: ``bool[S, n]`` or ``bool[B, S, n]``: in a tree, which entries of `drafted` each position counts.

    Returns:
        ``float32[B, S, V]``. Each row sums to 1, or is all 0 if its logits are invalid (NaN, +inf, or all -inf).
    """
    return _map_positions(_law, _biased(logits, transforms, token_counts, drafted, seen), transforms)


def token_log_probs(
    logits: Array,
    transforms: LogitsTransforms,
    token_counts: TokenCounts | None,
    drafted: Array | None = None,
    seen: Array | None = None,
) -> Array:
    """Return the logs of `token_probs`, which are finite and differentiable even if a probability underflows."""
    return _map_positions(_log_law, _biased(logits, transforms, token_counts, drafted, seen), transforms)


def _map_positions(law: Callable[..., Array], logits: Array, transforms: LogitsTransforms) -> Array:
    """Apply `law` at every position of every row."""
    used = used_filters(transforms.temperature, transforms.top_k, transforms.tail_mass)
    rows = dataclasses.replace(transforms, bias=None)
    return jax.vmap(jax.vmap(functools.partial(law, used=used), (0, None)))(logits, rows)


def _biased(
    logits: Array,
    transforms: LogitsTransforms,
    token_counts: TokenCounts | None,
    drafted: Array | None,
    seen: Array | np.ndarray | None,
) -> Array:
    """Return logits in float32 after the bias and the penalties. See `token_probs`."""
    logits = logits.astype(jnp.float32)
    if transforms.bias is not None:
        logits = logits + transforms.bias[:, None, :]
    if transforms.penalised:
        assert token_counts is not None, "penalties need token counts"
        counts = _counts_by_position(token_counts.counts, drafted, seen)
        logits = jax.vmap(jax.vmap(_penalise, (0, 0, None, None)))(logits, counts, token_counts.prompt, transforms)
    return logits


def _counts_by_position(counts: Array, drafted: Array | None, seen: Array | np.ndarray | None) -> Array:
    """Return ``int32[B, S, V]``: `counts` plus the drafted tokens that each position counts."""
    if drafted is None or drafted.shape[1] == 0:
        return counts[:, None, :]
    each = jax.nn.one_hot(drafted, counts.shape[-1], dtype=counts.dtype)
    if seen is not None:
        return counts[:, None, :] + jnp.einsum("...sn,...nv->...sv", jnp.asarray(seen, counts.dtype), each)
    grown = jnp.cumsum(each, axis=1)
    return counts[:, None, :] + jnp.pad(grown, ((0, 0), (1, 0), (0, 0)))


def _penalise(logits: Array, counts: Array, prompt: Array, transforms: LogitsTransforms) -> Array:
    """Apply penalties at one position of one row, without batch axes: ``[V]`` to ``[V]``."""
    if transforms.repetition is not None:
        penalised = jnp.where(logits < 0, logits * transforms.repetition, logits / transforms.repetition)
        logits = jnp.where(prompt | (counts > 0), penalised, logits)
    if transforms.frequency is not None:
        logits = logits - transforms.frequency * counts.astype(jnp.float32)
    if transforms.presence is not None:
        logits = logits - transforms.presence * (counts > 0).astype(jnp.float32)
    return logits


def _law(logits: Array, transforms: LogitsTransforms, used: UsedFilters) -> Array:
    """Apply temperature and filters at one position, without batch axes: logits ``[V]`` to probabilities ``[V]``."""
    largest, greedy, _, probs, keep = _filtered(logits, transforms, used)
    probs = jnp.where(keep, probs, 0)
    probs = jnp.where(transforms.temperature > 0, probs / probs.sum(), greedy)
    return jnp.where(jnp.isfinite(largest), probs, 0)


def _log_law(logits: Array, transforms: LogitsTransforms, used: UsedFilters) -> Array:
    """Return the logs of `_law`."""
    largest, greedy, scaled, _, keep = _filtered(logits, transforms, used)
    sampled = jnp.where(keep, scaled - jnp.log(jnp.where(keep, jnp.exp(scaled), 0).sum()), -jnp.inf)
    log_probs = jnp.where(transforms.temperature > 0, sampled, jnp.where(greedy > 0, 0.0, -jnp.inf))
    return jnp.where(jnp.isfinite(largest), log_probs, -jnp.inf)


def _filtered(
    logits: Array, transforms: LogitsTransforms, used: UsedFilters
) -> tuple[Array, Array, Array, Array, Array]:
    """Return the largest logit, its place as one-hot, the scaled logits, their softmax, and which tokens are kept."""
    largest, index = jnp.max(logits), jnp.arange(logits.size)
    # Find the first maximum without argmax, which takes three times as long on CPU as two plain reductions.
    greedy = (index == jnp.min(jnp.where(logits == largest, index, logits.size))).astype(logits.dtype)
    # Subtract the maximum first, so that a tiny temperature cannot overflow.
    scaled = (logits - largest) / jnp.where(transforms.temperature > 0, transforms.temperature, 1)
    if transforms.top_k is not None:
        scaled = keep_top_k(scaled, transforms.top_k, used)
    probs = jax.nn.softmax(scaled)
    keep = probs >= 0
    if transforms.tail_mass is not None:
        keep = nucleus(probs, transforms.tail_mass, used)
    if transforms.min_p is not None:
        keep &= probs >= transforms.min_p * jnp.max(probs)
    return largest, greedy, scaled, probs, keep
