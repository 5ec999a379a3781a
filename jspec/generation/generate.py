"""`generate` and `speculative_generate`: each is one XLA program, from prompts to tokens."""

from jax import Array
from numpy.typing import ArrayLike

from jspec.acceptance import RULES, Rule
from jspec.core.sampling import SamplingParams
from jspec.core.types import Output
from jspec.decoding.inputs import ProgramSpec
from jspec.decoding.program import run_program
from jspec.decoding.validate_arguments import as_arrays, check_arguments, check_rule
from jspec.decoding.validate_sampling import check_top
from jspec.decoding.validate_tree import number_of_drafts
from jspec.drafters.base import DraftSource
from jspec.drafters.draft_length import DEFAULT, DraftLength, Fixed
from jspec.drafters.duck_length import as_draft_length
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
    eos_ids: ArrayLike = (),
    pad_id: int = 0,
    samples_per_prompt: int = 1,
    top_logprobs: int = 0,
) -> Output:
    """Decode one token per forward pass of `target`.

    This is the speed baseline for `speculative_generate`, and it defines the distribution that the output of
    `speculative_generate` must match. Both functions have the same arguments, results and errors, except that this
    one takes no drafting arguments, and its ``stats.accepted_at`` has no columns.
    """
    prompts, sampling, eos_ids = as_arrays(tokens, lengths, keys, sampling, eos_ids, samples_per_prompt)
    check_arguments(target, None, prompts, max_new_tokens, None, sampling, eos_ids, pad_id)
    check_top(top_logprobs, target.config.vocab_size)
    spec = ProgramSpec(max_new_tokens, Fixed(0), RULES["rejection"], num_top=int(top_logprobs))
    return run_program(target, None, prompts, sampling, eos_ids, pad_id, spec)


def speculative_generate(
    target: Llama,
    draft: DraftSource,
    tokens: ArrayLike,
    lengths: ArrayLike,
    keys: Array,
    *,
    max_new_tokens: int,
    num_draft_tokens: int | str | DraftLength = DEFAULT,
    sampling: SamplingParams = SamplingParams(),
    accept: str | Rule = "rejection",
    eos_ids: ArrayLike = (),
    pad_id: int = 0,
    record: bool = False,
    samples_per_prompt: int = 1,
    top_logprobs: int = 0,
) -> Output:
    """Decode with a draft. Under an exact rule, the output has exactly the distribution of `generate`.

    The algorithm is speculative decoding, as in Leviathan et al. 2023 and Chen et al. 2023. You can call this function
    inside your own `jax.jit`. In that case only shapes are checked, because there are no values yet. The same applies
    to arguments that are still being computed. Arguments may lie on any device mesh. See docs/sharding.md.

    Args:
        target: the model whose distribution the output follows.
        draft: a smaller `Llama` with the same vocabulary, or any drafter (`jspec.drafters.base`).
        tokens: ``int32[B, P]``, the prompts, padded on the right with any values; an array or a list of lists.
        lengths: ``int32[B]`` in 1..P, the prompt lengths.
        keys: typed PRNG keys ``[B]`` (``jax.random.split(jax.random.key(seed), B)``). In float32, a request's output
            depends on its own prompt, key and parameters, not on the rest of the batch.
        max_new_tokens: the maximum number of tokens to add to each prompt. This number determines array shapes, so
            each new value causes one compilation.
        num_draft_tokens: K, the number of draft tokens per round; 4 by default. K also determines array shapes. Omit it
            for a tree drafter. An object such as ``jspec.UpTo(8)`` lets each row choose its own number in every round
            (`jspec.drafters.draft_length`). "auto" uses the K that `tune` measures at the first call, and reuses it for
            similar calls (`jspec.tuning.tune_chain`). Because this K depends on timing, the output for one key may
            differ between processes; its distribution does not. If drafting does not pay off, "auto" decodes as
            `generate` does, and ``stats.accepted_at`` has no columns.
        sampling: temperature, filters and penalties. Each is one number for all requests, or a list or array with one
            number per request.
        accept: the acceptance rule. The exact rules are "rejection"; "block", which accepts at least as many tokens
            as "rejection" in expectation; "traversal", the counterpart of "block" for trees; "k-seq", for trees whose
            children are drawn independently; and "coupled", whose output equals that of `generate` with the same keys,
            except for rounding. An object such as ``jspec.Lenient(0.5)`` is not exact. See `jspec.rules`.
        eos_ids: the tokens that end a row: an id, a sequence of ids, or ``int32[B, n]`` with -1 for "none". By default,
            rows run to their limits. The model's own EOS ids are in ``target.config.eos_token_ids``.
        pad_id: the token id that fills ``out.tokens`` after a row's end.
        record: whether to keep all draft tokens in ``out.record``, for ``out.show(tokenizer)``.
        samples_per_prompt: G, the number of samples of each prompt, which is prefilled only once. Row ``b G + g`` of
            the output is sample g of prompt b. `keys` and other per-request values have B G entries.
        top_logprobs: n, the number of most likely tokens in ``out.top_ids``. Each n needs a separate program.

    Returns:
        The `Output`.

    Raises:
        ValueError: an argument is out of range (the message says what was expected), or a drafter from outside jspec
            drafted invalid token ids. To check the ids, a call with such a drafter waits for its result.
        TypeError: keys are raw, or an argument has the wrong type.
    """
    rule = check_rule(accept)
    drafter = as_drafter(draft)
    prompts, sampling, eos_ids = as_arrays(tokens, lengths, keys, sampling, eos_ids, samples_per_prompt)
    num_draft_tokens = number_of_drafts(target, drafter, num_draft_tokens, rule)
    check_arguments(target, drafter, prompts, max_new_tokens, num_draft_tokens, sampling, eos_ids, pad_id)
    if isinstance(num_draft_tokens, str):
        num_draft_tokens = best_number(target, drafter, prompts.repeat_prompts(), max_new_tokens, sampling, rule)
    check_top(top_logprobs, target.config.vocab_size)
    spec = ProgramSpec(max_new_tokens, as_draft_length(num_draft_tokens), rule, record, int(top_logprobs))
    return run_program(target, drafter, prompts, sampling, eos_ids, pad_id, spec)
