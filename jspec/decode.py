"""`generate` and `speculative_generate`: one XLA program each, from prompt to tokens; and `tune`, which times them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import ArrayLike

from jspec.accept import RULES, Rule
from jspec.cache import prefill, whole_tiles
from jspec.checks import as_array, check_arguments, check_drafted, check_measurable, check_rule, check_tuning
from jspec.draft_length import DraftLength, Fixed, as_draft_length
from jspec.drafters.base import Drafter, is_foreign
from jspec.drafters.checked import CheckedDrafter
from jspec.drafters.model import as_drafter
from jspec.keys import trial_keys
from jspec.llama import Llama
from jspec.round import Record, RequestParams, State, play_round
from jspec.rows import slice_rows
from jspec.sampling import (
    LogitsTransforms,
    SamplingParams,
    broadcast_rows,
    count_prompt,
    draft_transforms,
    target_transforms,
)
from jspec.sharding import on_any_mesh, vary_like
from jspec.tuning import TRIALS, Tuning, measure, remembered, tuning_key
from jspec.types import PADDING, Output, Stats


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
    """Decode one token per pass of `target`: the law that `speculative_generate` must match, its baseline in speed.

    Arguments, result and errors are those of `speculative_generate`; ``stats.accepted_at`` has no columns.
    """
    tokens, lengths, eos_ids, sampling = _arrays(tokens, lengths, eos_ids, sampling)
    check_arguments(target, None, tokens, lengths, keys, max_new_tokens, None, sampling, eos_ids, pad_id)
    return _decode(target, None, tokens, lengths, keys, *_traced(sampling, eos_ids, pad_id),
                   max_new_tokens=max_new_tokens, draft_length=Fixed(0), rule=RULES["rejection"])[0]  # fmt: skip


def speculative_generate(
    target: Llama,
    draft: Llama | Drafter,
    tokens: ArrayLike,
    lengths: ArrayLike,
    keys: Array,
    *,
    max_new_tokens: int,
    num_draft_tokens: int | str | DraftLength = 4,
    sampling: SamplingParams = SamplingParams(),
    accept: str | Rule = "rejection",
    eos_ids: Any = (),
    pad_id: int = 0,
) -> Output:
    """Decode with a draft; under an exact rule the text has exactly the law of `generate`.

    Speculative decoding, after Leviathan et al. 2023 and Chen et al. 2023.

    Can be called inside a caller's own `jax.jit`; then only shapes are checked, for there are no values yet. Arguments
    may lie on any mesh of devices, see docs/sharding.md.

    Args:
        target: the model whose law the text has.
        draft: a smaller `Llama` with the same vocabulary, or any drafter (`jspec.drafters.base`).
        tokens: ``int32[B, P]``, prompts, padded on the right with anything; an array or a list of lists.
        lengths: ``int32[B]`` in 1..P, their lengths.
        keys: typed PRNG keys ``[B]`` (``jax.random.split(jax.random.key(seed), B)``). A request's text depends on
            its own key and prompt, not on the rest of the batch.
        max_new_tokens: most tokens to add to each prompt; fixes shapes, so each value compiles once.
        num_draft_tokens: K, tokens guessed a round; fixes shapes. An object such as ``jspec.UpTo(8)`` lets each row
            decide, round by round (`jspec.draft_length`). "auto" is the K that `tune` measures at the first call, which
            takes a while; the process remembers it by weights, batch size, sampling and bucketed length
            (`jspec.tuning`). K then depends on timing, so with one key the text may differ between processes; its law
            does not. Where drafting does not pay it decodes as `generate` does; ``stats.accepted_at`` has no columns.
        sampling: temperature, filters, penalties; values for all or per request, as numbers, lists or arrays.
        accept: the acceptance rule. Exact are "rejection"; "block", which keeps as much or more in expectation; and
            "coupled", whose text is that of `generate` with the same keys, but for rounding. An object such as
            ``jspec.Lenient(0.5)`` is not exact, see `jspec.lossy`.
        eos_ids: tokens that end a row: an id, a sequence of ids, or ``int32[B, n]`` with -1 for "none". By default
            rows run to their limits; a model's own ids are in ``target.config.eos_token_ids``.
        pad_id: fills ``out.tokens`` after a row's end.

    Returns:
        `Output`.

    Raises:
        ValueError: an argument is out of range; the message says what was expected. A drafter from outside jspec has
            drafted ids that are no tokens; to see that, such a call waits for its result.
        TypeError: keys are raw, or an argument has the wrong type.
    """
    rule = check_rule(accept)
    drafter: Any = as_drafter(draft)
    tokens, lengths, eos_ids, sampling = _arrays(tokens, lengths, eos_ids, sampling)
    check_arguments(target, drafter, tokens, lengths, keys, max_new_tokens, num_draft_tokens, sampling, eos_ids, pad_id)
    if isinstance(num_draft_tokens, str):
        num_draft_tokens = _auto(target, drafter, tokens, lengths, keys, max_new_tokens, sampling, rule)
    if jax.config.jax_enable_checks:  # pyright: ignore[reportAttributeAccessIssue]
        drafter = CheckedDrafter(drafter)
    draft_length = as_draft_length(num_draft_tokens)
    out, strange = _decode(target, drafter if draft_length.max_draft_tokens else None, tokens, lengths, keys,
                           *_traced(sampling, eos_ids, pad_id),
                           max_new_tokens=max_new_tokens, draft_length=draft_length, rule=rule)  # fmt: skip
    if is_foreign(drafter):
        check_drafted(drafter, strange, target.config.vocab_size)
    return out


def tune(
    target: Llama,
    draft: Llama | Drafter,
    tokens: ArrayLike,
    lengths: ArrayLike,
    keys: Array,
    *,
    max_new_tokens: int = 128,
    sampling: SamplingParams = SamplingParams(),
    max_draft_tokens: int = 8,
    accept: str | Rule = "rejection",
) -> Tuning:
    """Measure on this device how many tokens to draft a round: the K with the most tokens a second, or 0 for none.

    A round's seconds are measured for plain decoding and for a few K, others interpolated; its tokens are
    ``E(K) = 1 + s_1 + ... + s_K``, where s_k is how often the first k drafts were all accepted. That assumes nothing
    about independence; with ``s_k = alpha^k`` it is equation 1 of Leviathan et al. 2023. K = 0 stands for `generate`.
    Rows that end early and wait for the others are not modelled.

    Compiles plain decoding and K = 1, 2, 4, ..., `max_draft_tokens`, then lets each of them decode up to 128 tokens, in
    turns, five times or until 20 seconds have passed. Rows do not end at an end of text.

    Args:
        target, draft, tokens, lengths, keys, sampling: as for `speculative_generate`, like what is to be decoded;
            limits in `sampling` are ignored, and no key is used as it is, so that it may be used again.
        max_new_tokens: of the generations to come, for the size of the cache is part of the cost.
        max_draft_tokens: the largest K to consider.
        accept: the rule, as for `speculative_generate`.

    Returns:
        `Tuning`. Its ``num_draft_tokens``, if it is not 0, is what to pass to `speculative_generate`.

    Raises:
        ValueError, TypeError: as `speculative_generate`; also inside `jax.jit`, where nothing can be timed.
    """
    drafter: Any = as_drafter(draft)
    tokens, lengths, eos_ids, sampling = _arrays(tokens, lengths, (), sampling)
    check_tuning(max_new_tokens, max_draft_tokens)
    rule = check_rule(accept)
    check_arguments(target, drafter, tokens, lengths, keys, max_new_tokens, max_draft_tokens, sampling, eos_ids, 0)
    check_measurable(target, drafter, tokens, lengths, keys, sampling)
    trials = [trial_keys(keys, number) for number in range(TRIALS)]

    def run(num_draft_tokens: int, limit: int, trial: int) -> Output:
        limited = dataclasses.replace(sampling, max_tokens=limit)
        request = tokens, lengths, trials[trial]
        if num_draft_tokens == 0:
            return generate(target, *request, max_new_tokens=max_new_tokens, sampling=limited)
        return speculative_generate(target, drafter, *request, max_new_tokens=max_new_tokens,
                                    num_draft_tokens=num_draft_tokens, sampling=limited, accept=rule)  # fmt: skip

    return measure(run, int(max_new_tokens), int(max_draft_tokens))


def _auto(
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
    limits = target.config.max_position_embeddings, getattr(drafter, "max_positions", None)
    room = min(limit for limit in limits if limit is not None) - int(np.max(lengths))
    new = min(max(int(max_new_tokens), 64), room)  # a shorter text tells too little
    most = min(8, new // 4 - 1)
    if most < 1:
        return 0
    found = remembered(
        models=(target, drafter),
        key=(most, rule, tuning_key(tokens, new, sampling)),
        find=lambda: tune(target, drafter, tokens, lengths, keys, max_new_tokens=new, sampling=sampling,
                          max_draft_tokens=most, accept=rule),
    )  # fmt: skip
    return found.num_draft_tokens


def _arrays(tokens: Any, lengths: Any, eos_ids: Any, sampling: Any) -> tuple[Any, Any, Any, Any]:
    """What users may pass as lists, as arrays; one end of text is a sequence of one."""
    eos_ids = as_array("eos_ids", eos_ids, "fill the shorter ones up with -1")
    if eos_ids.ndim == 0 and jnp.issubdtype(eos_ids.dtype, jnp.integer):
        eos_ids = eos_ids[None]
    if isinstance(sampling, SamplingParams):
        lists = {name: value for name, value in vars(sampling).items() if isinstance(value, list | tuple)}
        arrays = {name: as_array(name, value, "give one number for each row") for name, value in lists.items()}
        sampling = dataclasses.replace(sampling, **arrays)
    return as_array("tokens", tokens), as_array("lengths", lengths), eos_ids, sampling


def _traced(
    sampling: SamplingParams, eos_ids: Any, pad_id: Any
) -> tuple[LogitsTransforms, LogitsTransforms, Any, Any, Any]:
    """What may change from call to call without compiling again."""

    def int32(value: Any) -> Any:
        return value if isinstance(value, jax.Array) else np.asarray(value, np.int32)

    transforms = target_transforms(sampling), draft_transforms(sampling)
    return *transforms, int32(sampling.max_tokens), int32(eos_ids), int32(pad_id)


@functools.partial(jax.jit, static_argnames=("max_new_tokens", "draft_length", "rule"))
@on_any_mesh
def _decode(
    target: Llama,
    drafter: Drafter | None,
    tokens: Array,
    lengths: Array,
    keys: Array,
    target_transforms: LogitsTransforms,
    draft_transforms: LogitsTransforms,
    max_tokens: Array,
    eos_ids: Array,
    pad_id: Array,
    *,
    max_new_tokens: int,
    draft_length: DraftLength,
    rule: Rule,
) -> tuple[Output, Array]:
    """The program: read the prompts, play rounds until every row is done, cut the result to size.

    Returns:
        The result, and `Record.strange`.
    """
    batch = tokens.shape[0]
    lengths = lengths.astype(jnp.int32)
    limits = jnp.where(jnp.asarray(max_tokens) > 0, jnp.minimum(max_tokens, max_new_tokens), max_new_tokens)
    params = RequestParams(
        keys=keys,
        prompt_lengths=lengths,
        limits=jnp.broadcast_to(limits, (batch,)).astype(jnp.int32),
        eos_ids=jnp.broadcast_to(eos_ids, (batch, eos_ids.shape[-1])),
        transforms=broadcast_rows(target_transforms, batch),
        draft_transforms=broadcast_rows(draft_transforms, batch),
    )
    inside = jnp.arange(tokens.shape[1]) < lengths[:, None]
    tokens = jnp.where(inside, tokens, 0).astype(jnp.int32)
    began = _start(target, drafter, params, tokens, max_new_tokens, draft_length)
    state, record = lax.while_loop(
        lambda carry: ~jnp.all(carry[0].done),
        lambda carry: play_round(target, drafter, rule, draft_length, params, *carry),
        vary_like(began, tokens),
    )
    return _finish(state, record, lengths, pad_id, max_new_tokens), record.strange


def _start(
    target: Llama,
    drafter: Drafter | None,
    params: RequestParams,
    tokens: Array,
    max_new_tokens: int,
    draft_length: DraftLength,
) -> tuple[State, Record]:
    """All storage, allocated once, with the prompts read in. No token is drawn here: the first round does that."""
    batch, width = tokens.shape
    k = draft_length.max_draft_tokens
    spare = k + 1
    slots = whole_tiles(width + max_new_tokens + spare)
    with jax.named_scope("prefill"):
        cache = prefill(target, tokens, slots)
        drafter_state = () if drafter is None else drafter.init(tokens, slots)
    token_counts = None
    if params.transforms.penalised:
        token_counts = count_prompt(tokens, params.prompt_lengths, target.config.vocab_size)
    buffer = jnp.pad(tokens, ((0, 0), (0, max_new_tokens + spare)))
    state = State(buffer, params.prompt_lengths, jnp.zeros(batch, bool), cache, drafter_state, token_counts,
                  draft_length.init(batch))  # fmt: skip
    zeros = jnp.zeros(batch, jnp.int32)
    by_depth = jnp.zeros((batch, k), jnp.int32)
    stats = Stats(zeros, zeros, zeros, by_depth, by_depth, jnp.zeros(batch, bool), jnp.zeros(batch, jnp.float32))
    columns = (batch, max_new_tokens + spare)
    record = Record(jnp.zeros(columns, jnp.float32), jnp.zeros(columns, jnp.int8), stats, jnp.zeros(batch, bool))
    return state, record


def _finish(state: State, record: Record, prompt_lengths: Array, pad_id: Array, max_new_tokens: int) -> Output:
    """Cut the new tokens out of the buffers and blank what lies past each row's end."""
    new = slice_rows(state.tokens, prompt_lengths, max_new_tokens)
    lengths = state.lengths - prompt_lengths
    kept = jnp.arange(max_new_tokens) < lengths[:, None]
    return Output(
        tokens=jnp.where(kept, new, pad_id).astype(jnp.int32),
        lengths=lengths,
        logprobs=jnp.where(kept, record.logprobs[:, :max_new_tokens], 0),
        origins=jnp.where(kept, record.origins[:, :max_new_tokens], PADDING),
        stats=record.stats,
    )
