"""Validation of tree drafters, before any device work."""

from typing import Any

from jspec.acceptance import RULES, Rule
from jspec.core.tree import DynamicTree
from jspec.decoding.validate_arguments import check_target
from jspec.drafters.base import own_tree
from jspec.drafters.draft_length import DEFAULT


def number_of_drafts(target: Any, drafter: Any, num_draft_tokens: Any, rule: Rule) -> Any:
    """Return `num_draft_tokens` unchanged, or the depth of the tree for a tree drafter.

    Raises:
        ValueError: the rule cannot verify the tree, the tree does not fit the target, or K was passed with a tree
            drafter.
    """
    tree, kind = own_tree(drafter), type(drafter).__name__
    if tree is None:
        return num_draft_tokens
    check_target(target)
    if num_draft_tokens is not DEFAULT:
        raise ValueError(
            f"num_draft_tokens={num_draft_tokens!r} conflicts with a {kind}, whose tree defines what is drafted; "
            "leave it out."
        )
    if isinstance(tree, DynamicTree) and not rule.shares_noise:
        raise ValueError(
            f"accept={type(rule).__name__} would bias the output, because the tree of a {kind} depends on the "
            'tokens drawn; use accept="coupled".'
        )
    if not (tree.is_chain or getattr(rule, "branches", False)):
        able = sorted(name for name, known in RULES.items() if known.branches)
        raise ValueError(
            f"accept={type(rule).__name__} verifies chains only, but {kind} drafts a tree; use one of {able}."
        )
    independent = getattr(drafter, "replacement", False)
    if tree.max_children > 1 and getattr(rule, "independent", False) and not independent:
        otherwise = "draws them without replacement; use replacement=True, or"
        otherwise = otherwise if hasattr(drafter, "replacement") else "does not draw them independently; use"
        raise ValueError(
            f"accept={type(rule).__name__} needs children that were drawn independently of each other, but this "
            f'{kind} {otherwise} accept="rejection".'
        )
    if independent and rule.shares_noise:
        raise ValueError(
            f"replacement=True draws children independently, but accept={type(rule).__name__} draws all of them "
            "with the same noise, so they would be the same; use replacement=False."
        )
    vocab_size, positions = target.config.vocab_size, target.config.max_position_embeddings
    if tree.max_children > vocab_size and not independent:
        raise ValueError(
            f"A node of the tree has {tree.max_children} children, but the vocabulary has only {vocab_size} "
            "different tokens; use fewer children."
        )
    if tree.max_depth >= positions:
        raise ValueError(
            f"The tree is {tree.max_depth} tokens deep, but the target model has only {positions} positions; use "
            "a shallower tree."
        )
    return tree.max_depth


def check_chain(name: str, drafter: Any) -> None:
    """Raise TypeError if `drafter` is a tree drafter, which the caller named `name` does not support."""
    if own_tree(drafter) is not None:
        raise TypeError(
            f"{name} supports chain drafters only, but {type(drafter).__name__} drafts a tree; pass the drafter "
            "that draws the tree's tokens."
        )
