"""Validation of tree drafters, before any device work."""

from typing import TypeVar

from jspec.acceptance import RULES, Rule
from jspec.core.tree import DynamicTree
from jspec.core.types import passed
from jspec.decoding.validate_arguments import check_target
from jspec.drafters.base import declared, kind_of, own_tree
from jspec.drafters.draft_length import DEFAULT
from jspec.models.language_model import LanguageModel

Number = TypeVar("Number")


def number_of_drafts(target: LanguageModel, drafter: object, num_draft_tokens: Number, rule: Rule) -> Number | int:
    """Return `num_draft_tokens` unchanged, or the depth of the tree for a tree drafter.

    Raises:
        ValueError: the rule cannot verify the tree, the tree does not fit the target, or K was passed with a tree
            drafter.
    """
    tree, kind, rule_kind = own_tree(drafter), kind_of(drafter), type(passed(rule)).__name__
    if tree is None:
        return num_draft_tokens
    check_target(target)
    if num_draft_tokens is not DEFAULT:
        raise ValueError(
            f"num_draft_tokens={num_draft_tokens!r} conflicts with a {kind}, whose tree defines what is drafted; "
            "omit num_draft_tokens."
        )
    if isinstance(tree, DynamicTree) and not rule.shares_noise:
        raise ValueError(
            f"accept={rule_kind} would bias the output, because the tree of a {kind} depends on the "
            'tokens drawn; use accept="coupled".'
        )
    if not (tree.is_chain or rule.branches):
        able = sorted(name for name, known in RULES.items() if known.branches)
        raise ValueError(f"accept={rule_kind} verifies chains only, but {kind} drafts a tree; use one of {able}.")
    replacement = declared(drafter).replacement
    independent = bool(replacement)
    if tree.max_children > 1 and rule.independent and not independent:
        otherwise = "draws them without replacement; use replacement=True, or"
        otherwise = otherwise if replacement is not None else "does not draw them independently; use"
        raise ValueError(
            f"accept={rule_kind} needs children that were drawn independently of each other, but this "
            f'{kind} {otherwise} accept="rejection".'
        )
    if independent and rule.shares_noise:
        raise ValueError(
            f"replacement=True draws children independently, but accept={rule_kind} draws all of them "
            "with the same noise, so they would be equal; use replacement=False."
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


def check_chain(name: str, drafter: object) -> None:
    """Raise TypeError if `drafter` is a tree drafter. The error message calls the caller `name`."""
    if own_tree(drafter) is not None:
        raise TypeError(
            f"{name} supports chain drafters only, but {kind_of(drafter)} drafts a tree; pass the drafter "
            "that draws the tree's tokens."
        )
