# pyright: reportUnknownVariableType=false
"""The XLA programs of a roll-out, which keep the KV caches between turns: begin, take a turn, append tokens.

Between two calls, the target's cache holds every token except the last, as between two rounds. The drafter may not have
read the tokens that the last round committed, and reads them together with the appended ones.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.acceptance import Rule
from jspec.core.row_ops import prefix_mask, slice_rows
from jspec.core.sampling import SamplingParams, count_prompt
from jspec.core.sharding import on_any_mesh, vary_like
from jspec.core.types import Output, PyTree
from jspec.decoding.buffers import cut_to_size, empty_buffers
from jspec.decoding.inputs import ProgramSpec, PromptBatch, TracedParams
from jspec.decoding.program import request_params, run_rounds, start, traced, without_reverse_mode
from jspec.decoding.state import DecodeState
from jspec.drafters.base import Drafter, kind_of, tree_of
from jspec.drafters.capabilities import features_of
from jspec.drafters.chunked_prefill import begin, can_read, leaves_of, prefill_chunk
from jspec.drafters.draft_length import DraftLength
from jspec.drafters.signals import NO_SIGNALS, PromptSignals
from jspec.models.kv_cache import KVCache, whole_tiles
from jspec.models.llama import Llama

AnyDrafter = Drafter[PyTree] | None


@dataclasses.dataclass(frozen=True)
class RolloutSpec:
    """The static settings of a roll-out.

    Attributes:
        max_length: L, the largest number of tokens in a row.
        draft_length: the number of draft tokens per round; 0 without a drafter.
        rule: the acceptance rule.
    """

    max_length: int
    draft_length: DraftLength
    rule: Rule


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["text", "lengths", "keys", "cache", "drafter", "length_state"],
    meta_fields=["spec"],
)
@dataclasses.dataclass(frozen=True)
class RolloutState:
    """The state of a roll-out between turns.

    Attributes:
        text: ``int32[B, L + K + 1]``, all tokens so far; valid up to ``lengths[b]``. Rounds write into spare columns.
        lengths: ``int32[B]``.
        keys: typed keys ``[B]``.
        cache: the target's KV cache. It holds every token except the last.
        drafter: the drafter's own state.
        length_state: the state of ``spec.draft_length``.
        spec: the static settings.
    """

    text: Array
    lengths: Array
    keys: Array
    cache: KVCache
    drafter: PyTree
    length_state: PyTree
    spec: RolloutSpec


@functools.partial(jax.jit, static_argnames="spec")
@on_any_mesh
def begin_turns(target: Llama, drafter: AnyDrafter, prompts: PromptBatch, *, spec: RolloutSpec) -> RolloutState:
    """Prefill the prompts, and return the state before the first turn."""
    lengths = jnp.asarray(prompts.lengths).astype(jnp.int32)
    tokens = jnp.where(prefix_mask(lengths, prompts.tokens.shape[1]), prompts.tokens, 0).astype(jnp.int32)
    room, lengths = spec.max_length - tokens.shape[1], jnp.repeat(lengths, prompts.samples_per_prompt)
    params = request_params(prompts.keys, lengths, traced(SamplingParams(), np.zeros(0, np.int32), 0), room)
    state, _ = vary_like(start(target, drafter, params, tokens, room, spec.draft_length), tokens)
    _check_rows(drafter, state.drafter, lengths.size)
    return RolloutState(state.tokens, lengths, prompts.keys, state.cache, state.drafter, state.draft_length, spec)


def _check_rows(drafter: AnyDrafter, state: PyTree, batch: int) -> None:
    """Raise ValueError if a drafter's state cannot be kept for single rows."""
    if any(np.shape(leaf)[:1] != (batch,) for leaf in jax.tree.leaves(state)):
        raise ValueError(
            f"{kind_of(drafter)} keeps state that does not have one row per text, as a roll-out needs; pass the whole "
            "text to jspec.speculative_generate in every turn."
        )


@functools.partial(jax.jit, static_argnames="max_new_tokens")
@on_any_mesh
def take_turn(
    target: Llama,
    drafter: AnyDrafter,
    rollout: RolloutState,
    settings: TracedParams,
    active: Array | None,
    *,
    max_new_tokens: int,
) -> tuple[RolloutState, Output, Array]:
    """Run rounds until every active row is done or full.

    Returns:
        The new state, the output of this turn, and `OutputBuffers.out_of_vocab`.

    Raises, while the program is traced:
        ValueError: the models differ from those of the roll-out.
    """
    check_same_models(target, drafter, rollout)
    spec, lengths = rollout.spec, rollout.lengths
    params = request_params(rollout.keys, lengths, settings, max_new_tokens)
    params = dataclasses.replace(params, limits=jnp.minimum(params.limits, spec.max_length - lengths))
    done = params.limits <= 0
    counts = None
    if params.transforms.penalised:
        counts = count_prompt(rollout.text, lengths, target.config.vocab_size)
    state = DecodeState(
        tokens=rollout.text,
        lengths=lengths,
        done=done if active is None else done | ~active,
        cache=rollout.cache,
        drafter=rollout.drafter,
        token_counts=counts,
        draft_length=rollout.length_state,
    )
    buffers = empty_buffers(lengths.size, max_new_tokens, spec.draft_length.max_draft_tokens)
    program = ProgramSpec(max_new_tokens, spec.draft_length, spec.rule)
    initial = vary_like((state, buffers), rollout.text)
    state, buffers = run_rounds(target, drafter, program, params, initial, _keep_idle)
    rollout = dataclasses.replace(
        rollout,
        text=state.tokens,
        lengths=state.lengths,
        cache=state.cache,
        drafter=state.drafter,
        length_state=state.draft_length,
    )
    padded = dataclasses.replace(state, tokens=jnp.pad(state.tokens, ((0, 0), (0, max_new_tokens))))
    out = cut_to_size(padded, buffers, lengths, jnp.asarray(settings.pad_id), max_new_tokens)
    return rollout, without_reverse_mode(out), buffers.out_of_vocab


def _keep_idle(before: DecodeState, after: DecodeState, gained: Array) -> DecodeState:
    """Undo a round's changes to the drafter's state in rows that gained no token.

    Such a round has used the noise of the row's own next round, and its outcome would depend on the rest of the batch.
    KV caches need no copy, because the row's next round or `append_tokens` overwrites the slots that the round wrote.
    """

    def pick(old: PyTree, new: PyTree) -> PyTree:
        if isinstance(old, KVCache):
            return new
        return jnp.where((gained > 0).reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    kept = jax.tree.map(pick, before.drafter, after.drafter, is_leaf=lambda node: isinstance(node, KVCache))
    return dataclasses.replace(after, drafter=kept)


@jax.jit
@on_any_mesh
def append_tokens(
    target: Llama, drafter: AnyDrafter, rollout: RolloutState, tokens: Array, counts: Array
) -> RolloutState:
    """Append the first ``counts[b]`` of ``tokens[B, M]`` to each row b, as far as there is room, and read them.

    Raises, while the program is traced:
        ValueError: the models differ from those of the roll-out.
    """
    check_same_models(target, drafter, rollout)
    lengths, width = rollout.lengths, tokens.shape[1]
    counts = jnp.clip(counts.astype(jnp.int32), 0, jnp.minimum(width, rollout.spec.max_length - lengths))
    index = jnp.arange(rollout.text.shape[1])[None] - lengths[:, None]
    placed = jnp.take_along_axis(tokens.astype(jnp.int32), jnp.clip(index, 0, width - 1), axis=1)
    text = jnp.where((index >= 0) & (index < counts[:, None]), placed, rollout.text)

    def piece(unread: int) -> tuple[Array, Array]:
        """Return the tokens from each row's `unread` last ones on, one more than are read, and their position."""
        size = width + unread  # at most the text's columns, because M <= L and unread <= K + 1
        first = jnp.clip(lengths - unread, 0, text.shape[1] - size)
        return slice_rows(text, first, size), first

    features, unread = features_of(drafter), _most_unread(drafter, rollout.spec)
    target_features = None
    with jax.named_scope("prefill"):
        block, first = piece(unread if features else 1)
        if features:
            _, target_features, cache = target.forward_with_features(block[:, :-1], rollout.cache, first, features)
        else:
            _, cache = target.forward(block[:, :-1], rollout.cache, first)
        drafter_state = rollout.drafter
        if drafter is not None:
            block, first = piece(unread)
            num_read = jnp.where(counts > 0, lengths + counts - 1 - first, 0)
            signals = PromptSignals(target_features, None, target) if features else NO_SIGNALS
            drafter_state = prefill_chunk(drafter, drafter_state, block, first, num_read, signals)
    return dataclasses.replace(rollout, text=text, lengths=lengths + counts, cache=cache, drafter=drafter_state)


def _most_unread(drafter: AnyDrafter, spec: RolloutSpec) -> int:
    """Return the largest number of tokens at a row's end that a part of `drafter` may not have read.

    A single drafter that reads the target's states has read what the target has read. In a combined drafter, one part
    may not have read the tokens that the last round committed, because another part drafted them.
    """
    if drafter is None or (features_of(drafter) and len(list(leaves_of(drafter))) == 1):
        return 1
    return spec.draft_length.max_draft_tokens + 1


def check_same_models(target: Llama, drafter: AnyDrafter, rollout: RolloutState) -> None:
    """Raise ValueError unless the models have the types and sizes of those that began the roll-out."""
    batch, k = rollout.lengths.size, rollout.spec.draft_length.max_draft_tokens
    slots = whole_tiles(rollout.spec.max_length + tree_of(drafter, k).size + 1)
    if (drafter is None) != (k == 0):
        had, given = ("without", f"of type {kind_of(drafter)}") if k == 0 else ("with", "None")
        raise ValueError(f"draft is {given}, but the roll-out was started {had} a draft; pass the same draft as there.")
    wrong = None
    if _differ(lambda: target.new_cache(batch, slots), rollout.cache):
        wrong = f"target is of type {type(target).__name__}"
    elif (
        drafter is not None
        and can_read(drafter)
        and _differ(functools.partial(begin, drafter, target, batch, slots), rollout.drafter)
    ):
        wrong = f"draft is of type {kind_of(drafter)}"
    if wrong is not None:
        raise ValueError(
            f"{wrong}, which does not fit the caches of this roll-out; pass a model of the same type and sizes as "
            "to Rollout.start, with any weights."
        )


def _differ(create: Callable[[], PyTree], state: PyTree) -> bool:
    """Return whether the pytree that `create` returns differs from `state` in structure, shapes or dtypes."""
    made = jax.eval_shape(create)
    leaves = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (made, state)]
    return jax.tree.structure(made) != jax.tree.structure(state) or leaves[0] != leaves[1]
