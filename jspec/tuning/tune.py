"""The `tune` function, which times the programs that decode, and the draft length that "auto" stands for."""

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
    """Measure on this device what to draft per round: the chain or tree with the most tokens per second, or nothing.

    Seconds per round are measured for plain decoding and a few K, and interpolated for other K. Tokens per round are
    ``E(K) = 1 + s_1 + ... + s_K``; s_k is the share of rounds in which the first k drafts were all accepted. This
    assumes nothing about independence; with ``s_k = alpha^k`` it is equation 1 of Leviathan et al. 2023. K = 0 stands
    for `generate`. Rows that end early and wait for the others are not modelled.

    The function compiles plain decoding and K = 1, 2, 4, ..., `max_draft_tokens`. Each program then decodes up to 128
    tokens, in turns, five times or until 20 seconds have passed. Rows do not end at EOS. If `draft` can branch and the
    rule verifies trees, the same follows with 1, 2, 4 and up to 16 draft tokens for one position. These show what rows
    cost, and how often a child of each rank is accepted. The best chain and the three trees that should be fastest come
    last.

    Args:
        target, draft, tokens, lengths, keys, sampling: as for `speculative_generate`, similar to the later requests.
            Limits in `sampling` are ignored. No key is used as it is, so keys may be used again.
        max_new_tokens: of the later generations, because the size of the cache is part of the cost.
        max_draft_tokens: the largest K to consider, and the deepest tree; heads draft no further than they reach.
        max_nodes: the number of draft tokens in the largest tree; 0 for chains alone.
        accept: the rule, as for `speculative_generate`.

    Returns:
        A `Tuning`. Draft its ``tree`` with a `jspec.TreeDrafter`, if it has one. Otherwise pass its
        ``num_draft_tokens`` to `speculative_generate`, if that is not 0.

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
    """Return the K that `tune` finds, or has found before, for a request like this one.

    Return 0 if the models have no room to measure.
    """
    check_measurable(target, drafter, tokens, lengths, keys, sampling)
    room = positions(target, drafter) - int(np.max(lengths))
    new = min(max(int(max_new_tokens), 64), room)  # a shorter text gives too little data
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
