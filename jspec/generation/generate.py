"""`generate` and `speculative_generate`: one XLA program each, from prompts to tokens."""

from typing import Any

from jax import Array
from numpy.typing import ArrayLike

from jspec.acceptance import RULES, Rule
from jspec.core.sampling import SamplingParams
from jspec.core.types import Output
from jspec.decoding.program import run_program
from jspec.decoding.validate_arguments import as_arrays, check_arguments, check_rule
from jspec.decoding.validate_tree import number_of_drafts
from jspec.drafters.base import AskingDrafter, Drafter
from jspec.drafters.draft_length import DEFAULT, DraftLength, Fixed, as_draft_length
from jspec.drafters.standalone.model import as_drafter
from jspec.models.llama import Llama
from jspec.tuning.tune import best_number


def generate(
    target: Llama,
    tokens: ArrayLike,
    lengths: ArrayLike,
    keys: Array,
    *,
    max_new_tokens: int,
    sampling: SamplingParams = SamplingParams(),
    eos_ids: Any = (),
    pad_id: int = 0,
) -> Output:
    """Decode one token per forward pass of `target`.

    This is the baseline of `speculative_generate` in speed, and the distribution that its output must match.
    Arguments, result and errors are those of `speculative_generate`. ``stats.accepted_at`` has no columns.
    """
    tokens, lengths, eos_ids, sampling = as_arrays(tokens, lengths, eos_ids, sampling)
    check_arguments(target, None, tokens, lengths, keys, max_new_tokens, None, sampling, eos_ids, pad_id)
    return run_program(target, None, tokens, lengths, keys, sampling, eos_ids, pad_id,
                       max_new_tokens=max_new_tokens, draft_length=Fixed(0), rule=RULES["rejection"])  # fmt: skip


def speculative_generate(
    target: Llama,
    draft: Llama | Drafter | AskingDrafter,
    tokens: ArrayLike,
    lengths: ArrayLike,
    keys: Array,
    *,
    max_new_tokens: int,
    num_draft_tokens: int | str | DraftLength = DEFAULT,
    sampling: SamplingParams = SamplingParams(),
    accept: str | Rule = "rejection",
    eos_ids: Any = (),
    pad_id: int = 0,
    record: bool = False,
) -> Output:
    """Decode with a draft. Under an exact rule, the text has exactly the distribution of `generate`.

    This is speculative decoding, after Leviathan et al. 2023 and Chen et al. 2023. You can call it inside your own
    `jax.jit`. Only shapes are checked there, and for arguments that are still being computed, because there are no
    values yet. Arguments may lie on any mesh of devices, see docs/sharding.md.

    Args:
        target: the model whose distribution the text has.
        draft: a smaller `Llama` with the same vocabulary, or any drafter (`jspec.drafters.base`).
        tokens: ``int32[B, P]``, prompts, padded on the right with any values; an array or a list of lists.
        lengths: ``int32[B]`` in 1..P, the lengths of the prompts.
        keys: typed PRNG keys ``[B]`` (``jax.random.split(jax.random.key(seed), B)``). In float32 a request's text
            depends on its own prompt, key and parameters, not on the rest of the batch.
        max_new_tokens: most tokens to add to each prompt; fixes shapes, so each value compiles once.
        num_draft_tokens: K, draft tokens per round, by default 4; fixes shapes. Omit it for a drafter with a tree. An
            object such as ``jspec.UpTo(8)`` lets each row decide, round by round (`jspec.drafters.draft_length`).
            "auto" is the K that `tune` measures at the first call, which takes a while. The process remembers it by
            the models' shapes, whatever their weights, batch size, sampling and bucketed length
            (`jspec.tuning.tune_chain`). K then depends on timing, so with one key the text may differ between
            processes. The distribution does not differ. If drafting does not pay off, "auto" decodes as `generate`
            does, and ``stats.accepted_at`` has no columns.
        sampling: temperature, filters, penalties; values for all or per request, as numbers, lists or arrays.
        accept: the acceptance rule. Exact rules are "rejection"; "block", which accepts as much or more in expectation;
            "traversal", the same for trees; "k-seq", for trees whose children are drawn independently; and "coupled",
            whose text is that of `generate` with the same keys, except for rounding. An object such as
            ``jspec.Lenient(0.5)`` is not exact, see `jspec.rules`.
        eos_ids: tokens that end a row: an id, a sequence of ids, or ``int32[B, n]`` with -1 for "none". By default
            rows run to their limits. A model's own ids are in ``target.config.eos_token_ids``.
        pad_id: fills ``out.tokens`` after a row's end.
        record: keep all draft tokens in ``out.record``, for ``out.show(tokenizer)``. This compiles a different program,
            which is as fast.

    Returns:
        The `Output`.

    Raises:
        ValueError: an argument is out of range, and the message says what was expected. Or a drafter from outside jspec
            drafted ids that are not tokens. A call with such a drafter waits for its result to check that.
        TypeError: keys are raw, or an argument has the wrong type.
    """
    rule = check_rule(accept)
    drafter: Any = as_drafter(draft)
    tokens, lengths, eos_ids, sampling = as_arrays(tokens, lengths, eos_ids, sampling)
    num_draft_tokens = number_of_drafts(target, drafter, num_draft_tokens, rule)
    check_arguments(target, drafter, tokens, lengths, keys, max_new_tokens, num_draft_tokens, sampling, eos_ids, pad_id)
    if isinstance(num_draft_tokens, str):
        num_draft_tokens = best_number(target, drafter, tokens, lengths, keys, max_new_tokens, sampling, rule)
    return run_program(target, drafter, tokens, lengths, keys, sampling, eos_ids, pad_id, max_new_tokens=max_new_tokens,
                       draft_length=as_draft_length(num_draft_tokens), rule=rule, record=record)  # fmt: skip
