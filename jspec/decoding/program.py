# pyright: reportUnknownVariableType=false
"""The XLA decoding program, which runs rounds until every row is done."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jspec.acceptance import Rule
from jspec.core.derivatives import forward_mode_only
from jspec.core.row_ops import prefix_mask
from jspec.core.sampling import (
    PerRequest,
    SamplingParams,
    broadcast_rows,
    count_prompt,
    draft_transforms,
    target_transforms,
)
from jspec.core.sharding import on_any_mesh, vary_like
from jspec.core.transfers import explicit_transfers
from jspec.core.types import Output, PyTree
from jspec.core.vmap import fold_vmap
from jspec.decoding.buffers import OutputBuffers, collect, cut_to_size, empty_buffers
from jspec.decoding.inputs import AnyArray, ProgramSpec, PromptBatch, TracedParams
from jspec.decoding.round import decode_round
from jspec.decoding.state import DecodeState, RequestParams
from jspec.decoding.validate_arguments import check_drafted
from jspec.drafters.base import Drafter, is_user_defined, kind_of, tree_of
from jspec.drafters.capabilities import features_of
from jspec.drafters.draft_length import DraftLength
from jspec.drafters.signals import NO_SIGNALS, PromptSignals
from jspec.drafters.validate_draft import CheckedDrafter
from jspec.models.kv_cache import prefill, prefill_with_features, whole_tiles
from jspec.models.llama import Llama


def run_program(
    target: Llama,
    drafter: Drafter[PyTree] | None,
    prompts: PromptBatch,
    sampling: SamplingParams,
    eos_ids: ArrayLike,
    pad_id: ArrayLike,
    spec: ProgramSpec,
) -> Output:
    """Run the program on validated arguments. Check the drafter's contract if `jax_enable_checks` is set.

    Raises:
        ValueError: a drafter from outside jspec drafted invalid token ids.
    """
    drafter = checked(drafter)
    with guards(spec.rule, prompts.tokens, prompts.lengths):
        used = drafter if spec.draft_length.max_draft_tokens else None
        out, out_of_vocab = decode_program(target, used, prompts, traced(sampling, eos_ids, pad_id), spec=spec)
    if is_user_defined(drafter):
        check_drafted(drafter, cast(Array, out_of_vocab), target.config.vocab_size)
    return out


def checked(drafter: Drafter[PyTree] | None) -> Drafter[PyTree] | None:
    """Return `drafter`, in a wrapper that checks its contract if `jax_enable_checks` is set."""
    if jax.config.jax_enable_checks and drafter is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return CheckedDrafter(drafter)
    return drafter


@contextlib.contextmanager
def guards(rule: Rule, *arrays: AnyArray) -> Generator[None]:
    """Set JAX's transfer guard and NaN checks for a program that runs `rule` and takes the caller's `arrays`."""
    with contextlib.ExitStack() as stack:
        # Arguments of other types are transferred implicitly, so JAX's transfer guard must still apply to them.
        if all(isinstance(array, jax.Array) for array in arrays):
            stack.enter_context(explicit_transfers())
        if not rule.exact:  # a lossy rule that reports no distortion yields NaN
            stack.enter_context(jax.debug_nans(False))
        yield


def traced(sampling: SamplingParams, eos_ids: ArrayLike, pad_id: ArrayLike) -> TracedParams:
    """Return the parameters in the form that the program accepts, without any device computation."""

    def int32(value: PerRequest) -> AnyArray:
        return value if isinstance(value, jax.Array) else np.asarray(value, np.int32)

    fewest = int32(sampling.min_tokens)
    return TracedParams(
        transforms=target_transforms(sampling),
        draft_transforms=draft_transforms(sampling),
        max_tokens=int32(sampling.max_tokens),
        min_tokens=None if isinstance(fewest, np.ndarray) and not fewest.any() else fewest,
        eos_ids=int32(eos_ids),
        pad_id=int32(pad_id),
    )


@functools.partial(jax.jit, static_argnames="spec")
@on_any_mesh
def decode_program(
    target: Llama, drafter: Drafter[PyTree] | None, prompts: PromptBatch, settings: TracedParams, *, spec: ProgramSpec
) -> tuple[Output, Array]:
    """Prefill the prompts, run rounds until every row is done, and cut the result to size.

    Returns:
        The result, and `OutputBuffers.out_of_vocab`.
    """
    width, limit = prompts.tokens.shape[1], spec.max_new_tokens
    lengths = jnp.asarray(prompts.lengths).astype(jnp.int32)
    tokens = jnp.where(prefix_mask(lengths, width), prompts.tokens, 0).astype(jnp.int32)
    params = request_params(prompts.keys, jnp.repeat(lengths, prompts.samples_per_prompt), settings, limit)
    if spec.num_top:
        params = dataclasses.replace(params, top_logprobs=jnp.full_like(params.limits, spec.num_top))
    rows = params, jnp.full((params.prompt_lengths.size, 1), settings.pad_id, jnp.int32)
    out, out_of_vocab = fold_vmap(functools.partial(_decode_rows, spec))((target, drafter), tokens, rows)
    return without_reverse_mode(out), out_of_vocab


def _decode_rows(
    spec: ProgramSpec,
    models: tuple[Llama, Drafter[PyTree] | None],
    tokens: Array,
    rows: tuple[RequestParams, Array],
) -> tuple[Output, Array]:
    """Decode the prompts ``tokens[B, P]``. `rows` holds the parameters and pad ids of B G rows."""
    (target, drafter), (params, pad_ids) = models, rows
    size = spec.max_new_tokens
    initial = start(target, drafter, params, tokens, size, spec.draft_length, spec.record, spec.num_top)
    state, buffers = run_rounds(target, drafter, spec, params, vary_like(initial, tokens))
    return cut_to_size(state, buffers, params.prompt_lengths, pad_ids, size), buffers.out_of_vocab


def without_reverse_mode(out: Output) -> Output:
    """Return `out` with log-probabilities that raise a clear error in reverse-mode differentiation."""
    fields = {name: getattr(out, name) for name in ("logprobs", "raw_logprobs", "top_logprobs")}
    return dataclasses.replace(
        out, **{name: forward_mode_only(part) for name, part in fields.items() if part is not None}
    )


def request_params(keys: Array, lengths: Array, settings: TracedParams, max_new_tokens: int) -> RequestParams:
    """Return the parameters of a generation that adds up to `max_new_tokens` tokens to texts of ``lengths[B]``."""
    batch = lengths.size
    limits = jnp.minimum(settings.max_tokens, max_new_tokens)
    limits = jnp.where(jnp.asarray(settings.max_tokens) > 0, limits, max_new_tokens)
    return RequestParams(
        keys=keys,
        prompt_lengths=lengths,
        limits=jnp.broadcast_to(limits, (batch,)).astype(jnp.int32),
        eos_ids=jnp.broadcast_to(settings.eos_ids, (batch, settings.eos_ids.shape[-1])),
        transforms=broadcast_rows(settings.transforms, batch),
        draft_transforms=broadcast_rows(settings.draft_transforms, batch),
        min_tokens=None if settings.min_tokens is None else jnp.broadcast_to(settings.min_tokens, (batch,)),
    )


def run_rounds(
    target: Llama,
    drafter: Drafter[PyTree] | None,
    spec: ProgramSpec,
    params: RequestParams,
    initial: tuple[DecodeState, OutputBuffers],
    after_round: Callable[[DecodeState, DecodeState, Array], DecodeState] | None = None,
) -> tuple[DecodeState, OutputBuffers]:
    """Run rounds until every row is done.

    After each round, `after_round` may correct the state. It receives the states before and after the round, and the
    number of tokens that each row gained, ``int32[B]``.
    """

    def decode(carry: tuple[DecodeState, OutputBuffers]) -> tuple[DecodeState, OutputBuffers]:
        state, buffers = carry
        after, new = decode_round(target, drafter, spec.rule, spec.draft_length, params, state, spec.num_top)
        with jax.named_scope("commit"):
            after = after if after_round is None else after_round(state, after, new.count)
            return after, collect(buffers, new, state.lengths - params.prompt_lengths, state.done)

    return lax.while_loop(lambda carry: ~jnp.all(carry[0].done), decode, initial)


def start(
    target: Llama,
    drafter: Drafter[PyTree] | None,
    params: RequestParams,
    tokens: Array,
    max_new_tokens: int,
    draft_length: DraftLength,
    record: bool = False,
    num_top: int = 0,
) -> tuple[DecodeState, OutputBuffers]:
    """Allocate all buffers, and prefill the prompts. The first round samples the first token.

    Args:
        tokens: ``int32[B, P]``, the prompts. If `params` has B G rows, each prompt is prefilled once, for G rows.
    """
    batch, samples = params.prompt_lengths.size, params.prompt_lengths.size // len(tokens)
    k = draft_length.max_draft_tokens
    spare, size = k + 1, tree_of(drafter, k).size
    slots = whole_tiles(tokens.shape[1] + max_new_tokens + size + 1)
    with jax.named_scope("prefill"):
        signals = NO_SIGNALS
        if features := features_of(drafter):
            cache, target_features = prefill_with_features(target, tokens, slots, features)
            signals = PromptSignals(target_features, params.prompt_lengths[::samples], target)
        else:
            cache = prefill(target, tokens, slots)
        drafter_state = () if drafter is None else drafter.init(tokens, slots, signals)
        _check_rows(drafter, drafter_state, len(tokens), samples)
        tokens, cache, drafter_state = _repeat_rows((tokens, cache, drafter_state), samples)
    token_counts = None
    if params.transforms.penalised:
        token_counts = count_prompt(tokens, params.prompt_lengths, target.config.vocab_size)
    state = DecodeState(
        tokens=jnp.pad(tokens, ((0, 0), (0, max_new_tokens + spare))),
        lengths=params.prompt_lengths,
        done=jnp.zeros(batch, bool),
        cache=cache,
        drafter=drafter_state,
        token_counts=token_counts,
        draft_length=draft_length.init(batch),
    )
    return state, empty_buffers(batch, max_new_tokens, k, size if record else None, num_top)


def _check_rows(drafter: Drafter[PyTree] | None, state: PyTree, batch: int, samples: int) -> None:
    """Raise ValueError if a drafter's state cannot be repeated for the samples of each prompt."""
    shapes = [np.shape(leaf) for leaf in cast(list[Array], jax.tree.leaves(state))]
    if samples > 1 and any(shape[:1] != (batch,) for shape in shapes):
        raise ValueError(
            f"{kind_of(drafter)} keeps state that does not have one row per prompt, so samples_per_prompt must be 1, "
            f"and jax.vmap must map the prompts, too; pass every prompt {samples} times instead."
        )


def _repeat_rows(state: PyTree, samples: int) -> PyTree:
    """Return `state` with each row repeated `samples` times."""

    def repeat(leaf: Array) -> Array:
        return jnp.repeat(leaf, samples, axis=0)

    return state if samples == 1 else jax.tree.map(repeat, state)
