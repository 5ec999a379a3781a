"""Validation of an engine's arguments, and their defaults: sequence lengths, draft lengths and slots."""

import numbers

import jax

from jspec.acceptance import Rule
from jspec.core.types import PyTree, check_count
from jspec.decoding.validate_tree import number_of_drafts
from jspec.drafters.base import kind_of, own_tree
from jspec.drafters.capabilities import features_of, max_chain_length_of
from jspec.drafters.chunked_prefill import can_read, needs_prefill
from jspec.drafters.draft_length import DEFAULT
from jspec.drafters.standalone.model import positions
from jspec.engine.memory_budget import JaxDevice
from jspec.engine.slots import AnyDrafter
from jspec.models.language_model import LanguageModel

_LENGTHS, _USUAL_LENGTH, _LONGEST = (0, 1, 2, 4, 8), 1024, 8192


def small_batches(target: LanguageModel, slots: int) -> tuple[int, ...]:
    """Return the reduced slot counts that a call may use: one slot, and half the slots if there are at least four.

    There are none on devices other than CPUs, because only on CPUs do idle slots cost as much as used ones.
    """
    if slots == 1 or any(device.platform != "cpu" for device in _devices(target)):
        return ()
    return tuple(sorted({1, slots // 2}))


def _devices(models: PyTree) -> set[JaxDevice]:
    return {device for leaf in jax.tree.leaves(models) if isinstance(leaf, jax.Array) for device in leaf.devices()}


def length(target: LanguageModel, draft: object, wanted: int | str | None) -> int:
    """Return the maximum sequence length; for "auto", the largest that `fit_length` may choose."""
    longest = positions(target, draft)
    if wanted is None or wanted == "auto":
        return min(_USUAL_LENGTH if wanted is None else _LONGEST, longest)
    if isinstance(wanted, str):
        raise TypeError(f'max_length={wanted!r} is not supported; pass an int or "auto".')
    check_count("max_length", wanted)
    if wanted > longest:
        raise ValueError(
            f"max_length is {wanted}, which is more than the {longest} positions that the models support; use a "
            "smaller max_length."
        )
    return wanted


def lengths(target: LanguageModel, drafter: AnyDrafter, num_draft_tokens: object, rule: Rule) -> tuple[int, ...]:
    """Return the possible numbers of draft tokens, ascending."""
    is_auto = isinstance(num_draft_tokens, str) and num_draft_tokens == "auto"
    number = number_of_drafts(target, drafter, DEFAULT if is_auto else num_draft_tokens, rule)
    # A drafter that cannot read tokens from rounds without drafts must always draft.
    can_pause = bool(features_of(drafter)) or can_read(drafter) or not needs_prefill(drafter)
    if (tree := own_tree(drafter)) is not None:
        return (0, tree.max_depth) if can_pause else (tree.max_depth,)
    if is_auto and can_pause:
        return tuple(k for k in _LENGTHS if k <= max_chain_length_of(drafter))
    if is_auto:
        return (int(min(DEFAULT.max_draft_tokens, max_chain_length_of(drafter))),)
    if isinstance(number, bool) or not isinstance(number, numbers.Integral):
        raise TypeError(f'num_draft_tokens={number!r} is not supported by an engine; pass an int or "auto".')
    check_count("num_draft_tokens", number)
    return (int(number),)


def check_readable(drafter: AnyDrafter) -> None:
    if features_of(drafter) and not can_read(drafter):
        raise TypeError(
            f"{kind_of(drafter)} reads the target's hidden states but has no `read`, which an engine calls "
            "with the hidden states of each chunk of a prompt; implement `read` as described in "
            "jspec.drafters.chunked_prefill."
        )


def check_one_device(models: PyTree) -> None:
    if (count := len(_devices(models))) > 1:
        raise ValueError(
            f"The weights are on {count} devices, but an engine decodes on one; load them on one device, or use "
            "jspec.speculative_generate."
        )
