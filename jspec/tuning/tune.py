"""The `tune` function, which times the decoding programs, and the choice of draft length for "auto"."""

import dataclasses

import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from jspec.acceptance import RULES, Rule
from jspec.core.keys import trial_keys
from jspec.core.sampling import SamplingParams
from jspec.core.transfers import explicit_transfers
from jspec.core.tree import Tree
from jspec.core.types import Output, PyTree
from jspec.decoding.inputs import ProgramSpec, PromptBatch
from jspec.decoding.program import run_program
from jspec.decoding.validate_arguments import as_arrays, check_arguments, check_rule
from jspec.decoding.validate_tree import check_chain
from jspec.drafters.base import Drafter, DraftSource
from jspec.drafters.capabilities import max_chain_length_of
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
    draft: DraftSource,
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
    """Measure which chain or tree yields the most tokens per second on this device, and whether drafting pays off.

    Seconds per round are measured for plain decoding and a few K, and interpolated for other K. Tokens per round are
    ``E(K) = 1 + s_1 + ... + s_K``, in which s_k is the share of rounds that accepted all of the first k draft tokens.
    This does not assume independence; with ``s_k = alpha^k`` it is equation 1 of Leviathan et al. 2023. K = 0 stands
    for `generate`. The estimate ignores rows that end early and wait for other rows.

    The function compiles programs for plain decoding and for K = 1, 2, 4, ..., `max_draft_tokens`. The programs then
    take turns to decode up to 128 tokens each, five times or until 20 seconds have passed. Rows do not end at EOS. If
    `draft` can branch and the rule verifies trees, programs with 1, 2, 4 and up to 16 draft tokens at a single position
    are timed in the same way. These runs measure the cost of rows and the acceptance rate of each child rank. Finally,
    the best chain and the three trees with the highest predicted speed take turns.

    Args:
        target, draft, tokens, lengths, keys, sampling: same as in `speculative_generate`. Pass values that resemble the
            later requests. Limits in `sampling` are ignored. The keys are not used directly, so you can reuse them.
        max_new_tokens: the limit of the later requests, because the size of the cache is part of the cost.
        max_draft_tokens: the largest K to consider, and the depth of the deepest tree. Heads draft no further than
            their `max_chain_length`.
        max_nodes: the number of draft tokens in the largest tree; 0 for chains only.
        accept: the acceptance rule, same as in `speculative_generate`.

    Returns:
        A `Tuning`. If it has a ``tree``, draft that tree with a `jspec.TreeDrafter`. Otherwise, pass its
        ``num_draft_tokens`` to `speculative_generate`, unless that is 0.

    Raises:
        ValueError, TypeError: the same errors as in `speculative_generate`, and a ValueError inside `jax.jit`, where
            nothing can be timed.
    """
    drafter = as_drafter(draft)
    check_chain("jspec.tune", drafter)
    prompts, sampling, eos_ids = as_arrays(tokens, lengths, keys, sampling, ())
    check_tuning(max_new_tokens, max_draft_tokens, max_nodes)
    rule = check_rule(accept)
    max_draft_tokens = int(min(max_draft_tokens, max_chain_length_of(drafter)))
    check_arguments(target, drafter, prompts, max_new_tokens, max_draft_tokens, sampling, eos_ids, 0)
    check_measurable(target, drafter, prompts, sampling)
    trials = [trial_keys(keys, number) for number in range(TRIALS)]

    def drafting(setting: Setting) -> tuple[Drafter[PyTree], int]:
        if isinstance(setting, Tree):
            return TreeDrafter(drafter, setting, bool(rule.independent)), setting.max_depth
        return drafter, setting

    def run(setting: Setting, limit: int, trial: int) -> Output:
        batch = dataclasses.replace(prompts, keys=trials[trial])
        limited = dataclasses.replace(sampling, max_tokens=limit)
        one, k = drafting(setting)
        spec = ProgramSpec(max_new_tokens, Fixed(k), rule if k else RULES["rejection"])
        return run_program(target, one, batch, limited, eos_ids, 0, spec)

    chains = measure(run, int(max_new_tokens), int(max_draft_tokens))
    if max_nodes < 2 or not rule.branches or not isinstance(drafter, AutoregressiveDrafter):
        return chains
    return with_trees(run, chains, int(max_new_tokens), int(max_nodes), target.config.vocab_size)


@explicit_transfers()
def best_number(
    target: Llama,
    drafter: DraftSource,
    prompts: PromptBatch,
    max_new_tokens: int,
    sampling: SamplingParams,
    rule: Rule,
) -> int:
    """Return the K that `tune` finds, or has already found, for a request like this one.

    Return 0 if the models have too few free positions for a measurement.
    """
    check_measurable(target, drafter, prompts, sampling)
    room = positions(target, drafter) - int(np.max(prompts.lengths))
    new = min(max(int(max_new_tokens), 64), room)  # a shorter output does not provide enough data
    most = int(min(8, new // 4 - 1, max_chain_length_of(drafter)))
    if most < 1:
        return 0

    def find() -> Tuning:
        limits = {"max_new_tokens": new, "max_draft_tokens": most, "max_nodes": 0}
        batch = prompts.tokens, prompts.lengths, prompts.keys
        return tune(target, drafter, *batch, sampling=sampling, accept=rule, **limits)

    key = most, rule, tuning_key(prompts.tokens, new, sampling)
    return remembered(models=(target, drafter), key=key, find=find).num_draft_tokens
