"""Validation of the arguments of a roll-out. Values are checked if they are known, as in `validate_arguments`.

Outside `jax.jit`, the checks wait for the lengths of the rows, so that a full row is never cut silently.
"""

import jax.numpy as jnp
import numpy as np

from jspec.core.sampling import SamplingParams
from jspec.core.transfers import values, values_if_known
from jspec.core.types import PyTree
from jspec.decoding.inputs import AnyArray, PromptBatch
from jspec.decoding.turns import RolloutState
from jspec.decoding.validate_arguments import check_arguments, check_drafter, check_ids, check_target, check_whole
from jspec.decoding.validate_sampling import check_sampling
from jspec.drafters.base import Drafter, declared, kind_of
from jspec.drafters.chunked_prefill import can_read
from jspec.models.llama import Llama


def check_start(
    target: Llama,
    drafter: Drafter[PyTree] | None,
    prompts: PromptBatch,
    max_length: int,
    num_draft_tokens: object,
) -> None:
    """Raise ValueError or TypeError for the first invalid argument of `Rollout.start`."""
    check_whole("max_length", max_length)
    check_target(target)
    if num_draft_tokens == "auto":
        raise ValueError(
            'num_draft_tokens="auto" is not available in a roll-out; pass a number, such as the one that jspec.tune '
            "measures."
        )
    check_arguments(target, drafter, prompts, 1, num_draft_tokens, SamplingParams(), np.zeros(0, np.int32), 0)
    if drafter is not None and not can_read(drafter):
        raise ValueError(
            f"{kind_of(drafter)} cannot read appended tokens, because it has no `read` method; pass the whole text to "
            "jspec.speculative_generate in every turn."
        )
    if (width := prompts.tokens.shape[1]) > max_length:
        raise ValueError(f"tokens has {width} columns, but max_length is {max_length}; increase max_length.")
    positions = {"target": target.config.max_position_embeddings, "draft": declared(drafter).max_positions}
    for name, limit in positions.items():
        if limit is not None and max_length > limit:
            raise ValueError(
                f"max_length={max_length} is more than the {limit} positions of the {name} model; reduce max_length "
                "(the limit is the model's max_position_embeddings, or its sliding window if that is shorter)."
            )


def check_turn(
    rollout: RolloutState,
    target: Llama,
    drafter: Drafter[PyTree] | None,
    max_new_tokens: int,
    sampling: SamplingParams,
    eos_ids: AnyArray,
    pad_id: object,
    active: AnyArray | None,
) -> None:
    """Raise ValueError or TypeError for the first invalid argument of `Rollout.generate`."""
    batch, vocab_size = rollout.lengths.size, _check_models(target, drafter)
    check_whole("max_new_tokens", max_new_tokens)
    check_sampling(sampling, batch, vocab_size)
    check_ids(eos_ids, pad_id, batch, vocab_size)
    if active is not None and (active.shape != (batch,) or active.dtype != bool):
        raise ValueError(
            f"active must be booleans of shape [{batch}], one for each row; got {active.dtype} of shape {active.shape}."
        )
    lengths, limits = values(rollout.lengths), values_if_known(sampling.max_tokens)
    rows = np.ones(batch, bool) if active is None else values_if_known(active)
    if lengths is None or limits is None or rows is None:
        return
    wanted = np.where(limits > 0, np.minimum(limits, max_new_tokens), max_new_tokens)
    wanted = np.broadcast_to(wanted, (batch,)).astype(np.int64) * rows
    _check_room(rollout, lengths, wanted, "set max_tokens for this row, make it inactive")


def check_appended(
    rollout: RolloutState, target: Llama, drafter: Drafter[PyTree] | None, tokens: AnyArray, lengths: AnyArray
) -> None:
    """Raise ValueError or TypeError for the first invalid argument of `Rollout.append`."""
    batch, vocab_size = rollout.lengths.size, _check_models(target, drafter)
    if tokens.ndim != 2 or len(tokens) != batch or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be integers of shape [{batch}, M], one row for each row of the roll-out, padded on the "
            f"right; got {tokens.dtype} of shape {tokens.shape}."
        )
    width, longest = tokens.shape[1], rollout.spec.max_length
    if not 1 <= width <= longest:
        raise ValueError(f"tokens has {width} columns; expected 1 to {longest}, the max_length of the roll-out.")
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths must be integers of shape [{batch}], one for each row of tokens; got {lengths.dtype} of shape "
            f"{lengths.shape}."
        )
    counts, ids, before = values_if_known(lengths), values_if_known(tokens), values(rollout.lengths)
    if counts is None:
        return
    if (bad := np.flatnonzero((counts < 0) | (counts > width))).size:
        raise ValueError(f"lengths[{bad[0]}] is {counts[bad[0]]}, but tokens has room for 0 to {width} tokens per row.")
    if ids is not None:
        inside = np.arange(width) < counts[:, None]
        if (bad := np.argwhere(inside & ((ids < 0) | (ids >= vocab_size)))).size:
            row, column = bad[0]
            raise ValueError(
                f"tokens[{row}, {column}] is {ids[row, column]}, outside the vocabulary of {vocab_size} tokens; was "
                "the text encoded with another tokenizer?"
            )
    if before is not None:
        _check_room(rollout, before, counts.astype(np.int64), "append fewer tokens")


def _check_models(target: Llama, drafter: Drafter[PyTree] | None) -> int:
    """Raise unless the models can decode, and return the vocabulary size."""
    check_target(target)
    if drafter is not None:
        check_drafter(target, drafter)
    return target.config.vocab_size


def _check_room(rollout: RolloutState, lengths: np.ndarray, wanted: np.ndarray, remedy: str) -> None:
    """Raise ValueError if a row of ``lengths[b]`` tokens has no room for ``wanted[b]`` more."""
    longest = rollout.spec.max_length
    if (bad := np.flatnonzero((wanted > 0) & (lengths + wanted > longest))).size:
        row = bad[0]
        raise ValueError(
            f"Row {row} has {lengths[row]} tokens, and {wanted[row]} more would exceed max_length={longest}; "
            f"{remedy}, or start with a larger max_length."
        )
