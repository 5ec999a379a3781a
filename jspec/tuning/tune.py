"""`tune`, which times the programs that decode, and the number that "auto" stands for."""

import dataclasses
from typing import Any

import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from jspec.acceptance import RULES, Rule
from jspec.core.keys import trial_keys
from jspec.core.sampling import SamplingParams
from jspec.core.transfers import explicit_transfers
from jspec.core.tree import Tree
from jspec.core.types import Output
from jspec.decoding.program import run_program
from jspec.decoding.validate_arguments import as_arrays, check_arguments, check_rule
from jspec.decoding.validate_tree import check_chain
from jspec.drafters.base import AskingDrafter, Drafter
from jspec.drafters.capabilities import reach_of
from jspec.drafters.draft_length import Fixed
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.drafters.standalone.model import as_drafter, positions
from jspec.drafters.trees.static import TreeDrafter
from jspec.models.llama import Llama
from jspec.tuning.tune_chain import TRIALS, Setting, Tuning, measure, remembered, tuning_key
from jspec.tuning.tune_tree import with_trees
from jspec.tuning.validate_tuning import check_measurable, check_tuning


@explicit_transfers()
def tune(
    target: Llama,
    draft: Llama | Drafter | AskingDrafter,
    tokens: ArrayLike,
    lengths: ArrayLike,
    keys: Array,
    *,
    max_new_tokens: int = 128,
    sampling: SamplingParams = SamplingParams(),
    max_draft_tokens: int = 8,
    max_nodes: int = 16,
    accept: str | Rule = "rejection",
) -> Tuning:
    """Measure on this device what to draft a round: the chain or the tree with the most tokens a second, or nothing.

    A round's seconds are measured for plain decoding and for a few K, others interpolated; its tokens are
    ``E(K) = 1 + s_1 + ... + s_K``, where s_k is how often the first k drafts were all accepted. That assumes nothing
    about independence; with ``s_k = alpha^k`` it is equation 1 of Leviathan et al. 2023. K = 0 stands for `generate`.
    Rows that end early and wait for the others are not modelled.

    Compiles plain decoding and K = 1, 2, 4, ..., `max_draft_tokens`, then lets each of them decode up to 128 tokens, in
    turns, five times or until 20 seconds have passed. Rows do not end at an end of text. Where `draft` can branch and
    the rule judges trees, the same is done with 1, 2, 4 and up to 16 guesses for one token, which say how often a child
    of each rank is accepted and what rows cost, and with the best chain and the three trees that should be fastest.

    Args:
        target, draft, tokens, lengths, keys, sampling: as for `speculative_generate`, like what is to be decoded;
            limits in `sampling` are ignored, and no key is used as it is, so that it may be used again.
        max_new_tokens: of the generations to come, for the size of the cache is part of the cost.
        max_draft_tokens: the largest K to consider, and the deepest tree; heads guess no further than they reach.
        max_nodes: guesses of the largest tree; 0 for chains alone.
        accept: the rule, as for `speculative_generate`.

    Returns:
        `Tuning`. Its ``tree``, if it has one, is what a `jspec.TreeDrafter` should draft; else its
        ``num_draft_tokens``, if it is not 0, is what to pass to `speculative_generate`.

    Raises:
        ValueError, TypeError: as `speculative_generate`; also inside `jax.jit`, where nothing can be timed.
    """
    drafter: Any = as_drafter(draft)
    check_chain("jspec.tune", drafter)
    tokens, lengths, eos_ids, sampling = as_arrays(tokens, lengths, (), sampling)
    check_tuning(max_new_tokens, max_draft_tokens, max_nodes)
    rule = check_rule(accept)
    max_draft_tokens = int(min(max_draft_tokens, reach_of(drafter)))
    check_arguments(target, drafter, tokens, lengths, keys, max_new_tokens, max_draft_tokens, sampling, eos_ids, 0)
    check_measurable(target, drafter, tokens, lengths, keys, sampling)
    trials = [trial_keys(keys, number) for number in range(TRIALS)]

    def drafting(setting: Setting) -> tuple[Any, int]:
        if isinstance(setting, Tree):
            return TreeDrafter(drafter, setting, bool(getattr(rule, "independent", False))), setting.max_depth
        return drafter, setting

    def run(setting: Setting, limit: int, trial: int) -> Output:
        limited, (one, k) = dataclasses.replace(sampling, max_tokens=limit), drafting(setting)
        return run_program(
            target, one, tokens, lengths, trials[trial], limited, eos_ids, 0, max_new_tokens=max_new_tokens,
            draft_length=Fixed(k), rule=rule if k else RULES["rejection"])  # fmt: skip

    chains = measure(run, int(max_new_tokens), int(max_draft_tokens))
    if max_nodes < 2 or not getattr(rule, "branches", False) or not isinstance(drafter, AutoregressiveDrafter):
        return chains
    return with_trees(run, chains, int(max_new_tokens), int(max_nodes), target.config.vocab_size)


@explicit_transfers()
def best_number(
    target: Llama,
    drafter: Drafter,
    tokens: Any,
    lengths: Any,
    keys: Array,
    max_new_tokens: int,
    sampling: Any,
    rule: Rule,
) -> int:
    """The K that `tune` finds for a request, or found for one like it; 0 where the models have no room to measure."""
    check_measurable(target, drafter, tokens, lengths, keys, sampling)
    room = positions(target, drafter) - int(np.max(lengths))
    new = min(max(int(max_new_tokens), 64), room)  # a shorter text tells too little
    most = int(min(8, new // 4 - 1, reach_of(drafter)))
    if most < 1:
        return 0
    found = remembered(
        models=(target, drafter),
        key=(most, rule, tuning_key(tokens, new, sampling)),
        find=lambda: tune(target, drafter, tokens, lengths, keys, max_new_tokens=new, sampling=sampling,
                          max_draft_tokens=most, max_nodes=0, accept=rule),
    )  # fmt: skip
    return found.num_draft_tokens
