"""`generate` and `speculative_generate`: one XLA program each, from prompt to tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.accept import RULES, Rule
from jspec.cache import prefill
from jspec.checks import as_array, check_arguments
from jspec.drafters.base import Drafter
from jspec.drafters.model import ModelDrafter
from jspec.llama import Llama
from jspec.round import Record, Request, State, play_round
from jspec.sampling import SamplingParams, Warp, draft_warp, seen_in_prompt, spread, warp
from jspec.types import PADDING, Output, Stats


def generate(
    target: Llama,
    tokens: Array,
    lengths: Array,
    keys: Array,
    *,
    max_new_tokens: int,
    sampling: SamplingParams = SamplingParams(),
    eos_ids: Any = (),
    pad_id: int = 0,
) -> Output:
    """Decode one token per pass of `target`: the law `speculative_generate` must match, and its yardstick.

    Arguments, result and errors are those of `speculative_generate`; ``stats.accepted_at`` has no columns.
    """
    tokens, lengths, eos_ids = _arrays(tokens, lengths, eos_ids)
    check_arguments(target, None, tokens, lengths, keys, max_new_tokens, None, sampling, eos_ids, pad_id)
    return _decode(target, None, tokens, lengths, keys, *_traced(sampling, eos_ids, pad_id),
                   max_new_tokens=max_new_tokens, num_draft_tokens=0, rule=RULES["rejection"])  # fmt: skip


def speculative_generate(
    target: Llama,
    draft: Llama | Drafter,
    tokens: Array,
    lengths: Array,
    keys: Array,
    *,
    max_new_tokens: int,
    num_draft_tokens: int = 4,
    sampling: SamplingParams = SamplingParams(),
    accept: str = "rejection",
    eos_ids: Any = (),
    pad_id: int = 0,
) -> Output:
    """Decode with a draft; the text has exactly the law of `generate` (Leviathan et al. 2023; Chen et al. 2023).

    Can be called inside a caller's own `jax.jit`; then only shapes are checked, for there are no values yet.

    Args:
        target: the model whose law the text has.
        draft: a smaller `Llama` with the same vocabulary, or any drafter (`jspec.drafters.base`).
        tokens: ``int32[B, P]``, prompts, padded on the right with anything; an array or a list of lists.
        lengths: ``int32[B]`` in 1..P, their lengths.
        keys: typed PRNG keys ``[B]`` (``jax.random.split(jax.random.key(seed), B)``). A request's text depends on
            its own key and prompt, not on the rest of the batch.
        max_new_tokens: most tokens to add to each prompt; fixes shapes, so each value compiles once.
        num_draft_tokens: K, tokens guessed a round; fixes shapes.
        sampling: temperature, filters, penalties; values for all or per request.
        accept: the acceptance rule, "rejection".
        eos_ids: tokens that end a row: a sequence of ids, or ``int32[B, n]`` with -1 for "none".
        pad_id: fills ``out.tokens`` after a row's end.

    Returns:
        `Output`.

    Raises:
        ValueError: an argument is out of range; the message says what was expected.
        TypeError: keys are raw, or an argument has the wrong type.
    """
    if not isinstance(accept, str) or accept not in RULES:
        raise ValueError(f"accept={accept!r} is not an acceptance rule; choose one of {sorted(RULES)}.")
    drafter = ModelDrafter(draft) if isinstance(draft, Llama) else draft
    tokens, lengths, eos_ids = _arrays(tokens, lengths, eos_ids)
    check_arguments(target, drafter, tokens, lengths, keys, max_new_tokens, num_draft_tokens, sampling, eos_ids, pad_id)
    return _decode(target, drafter, tokens, lengths, keys, *_traced(sampling, eos_ids, pad_id),
                   max_new_tokens=max_new_tokens, num_draft_tokens=num_draft_tokens, rule=RULES[accept])  # fmt: skip


def _arrays(tokens: Any, lengths: Any, eos_ids: Any) -> tuple[Any, Any, Any]:
    """What users may pass as lists, as arrays."""
    return as_array("tokens", tokens), as_array("lengths", lengths), as_array("eos_ids", eos_ids)


def _traced(sampling: SamplingParams, eos_ids: Any, pad_id: Any) -> tuple[Warp, Warp, Any, Any, Any]:
    """What may change from call to call without compiling again."""

    def int32(value: Any) -> Any:
        return value if isinstance(value, jax.Array) else np.asarray(value, np.int32)

    return warp(sampling), draft_warp(sampling), int32(sampling.max_tokens), int32(eos_ids), int32(pad_id)


@functools.partial(jax.jit, static_argnames=("max_new_tokens", "num_draft_tokens", "rule"))
def _decode(
    target: Llama,
    drafter: Drafter | None,
    tokens: Array,
    lengths: Array,
    keys: Array,
    target_warp: Warp,
    drafter_warp: Warp,
    max_tokens: Array,
    eos_ids: Array,
    pad_id: Array,
    *,
    max_new_tokens: int,
    num_draft_tokens: int,
    rule: Rule,
) -> Output:
    """The program: read the prompts, play rounds until every row is done, cut the result to size."""
    batch = tokens.shape[0]
    lengths = lengths.astype(jnp.int32)
    limits = jnp.where(jnp.asarray(max_tokens) > 0, jnp.minimum(max_tokens, max_new_tokens), max_new_tokens)
    request = Request(
        keys=keys,
        prompt_lengths=lengths,
        limits=jnp.broadcast_to(limits, (batch,)).astype(jnp.int32),
        eos_ids=jnp.broadcast_to(eos_ids, (batch, eos_ids.shape[-1])),
        warp=spread(target_warp, batch),
        draft_warp=spread(drafter_warp, batch),
    )
    inside = jnp.arange(tokens.shape[1]) < lengths[:, None]
    tokens = jnp.where(inside, tokens, 0).astype(jnp.int32)
    state, record = _start(target, drafter, request, tokens, max_new_tokens, num_draft_tokens)
    state, record = lax.while_loop(
        lambda carry: ~jnp.all(carry[0].done),
        lambda carry: play_round(target, drafter, rule, num_draft_tokens, request, *carry),
        (state, record),
    )
    return _finish(state, record, lengths, pad_id, max_new_tokens)


def _start(
    target: Llama, drafter: Drafter | None, request: Request, tokens: Array, max_new_tokens: int, num_draft_tokens: int
) -> tuple[State, Record]:
    """All storage, allocated once, with the prompts read in. No token is drawn here: the first round does that."""
    batch, width = tokens.shape
    spare = num_draft_tokens + 1
    slots = width + max_new_tokens + spare
    with jax.named_scope("prefill"):
        cache = prefill(target, tokens, slots)
        drafter_state = () if drafter is None else drafter.init(tokens, slots)
    seen = None
    if request.warp.penalised:
        seen = seen_in_prompt(tokens, request.prompt_lengths, target.config.vocab_size)
    buffer = jnp.pad(tokens, ((0, 0), (0, max_new_tokens + spare)))
    state = State(buffer, request.prompt_lengths, jnp.zeros(batch, bool), cache, drafter_state, seen)
    zeros = jnp.zeros(batch, jnp.int32)
    stats = Stats(zeros, zeros, zeros, jnp.zeros((batch, num_draft_tokens), jnp.int32), jnp.zeros(batch, bool))
    columns = (batch, max_new_tokens + spare)
    return state, Record(jnp.zeros(columns, jnp.float32), jnp.zeros(columns, jnp.int8), stats)


def _finish(state: State, record: Record, prompt_lengths: Array, pad_id: Array, max_new_tokens: int) -> Output:
    """Cut the new tokens out of the buffers and blank what lies past each row's end."""
    new = jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), (max_new_tokens,)))(state.tokens, prompt_lengths)
    lengths = state.lengths - prompt_lengths
    kept = jnp.arange(max_new_tokens) < lengths[:, None]
    return Output(
        tokens=jnp.where(kept, new, pad_id).astype(jnp.int32),
        lengths=lengths,
        logprobs=jnp.where(kept, record.logprobs[:, :max_new_tokens], 0),
        origins=jnp.where(kept, record.origins[:, :max_new_tokens], PADDING),
        stats=record.stats,
    )
