# pyright: reportUnnecessaryIsInstance=false
"""Validation of the arguments of `generate` and `speculative_generate`, before any device work.

Values are checked if they are known. Inside a caller's `jax.jit` there are no values yet, and a call must not wait for
arrays that are still being computed on a device. Only the shapes and dtypes of such arrays are checked.
"""

import dataclasses
import numbers
import operator
from collections.abc import Callable
from typing import SupportsIndex, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from convert.config import LlamaConfig
from jspec.acceptance import RULES, Rule
from jspec.acceptance.base import as_rule
from jspec.core.sampling import SamplingParams, by_name
from jspec.core.transfers import values, values_if_known
from jspec.core.types import PyTree, passed, same_but_for_padding
from jspec.decoding.inputs import AnyArray, PromptBatch
from jspec.decoding.left_padding import check_right_padded
from jspec.decoding.validate_positions import check_positions
from jspec.decoding.validate_sampling import check_sampling
from jspec.drafters.base import Drafter, kind_of
from jspec.drafters.capabilities import embeddings_of, features_of, has_confidence
from jspec.drafters.duck_length import as_draft_length
from jspec.models.llama import Llama


def check_arguments(
    target: Llama,
    drafter: Drafter[PyTree] | None,
    prompts: PromptBatch,
    max_new_tokens: int,
    num_draft_tokens: object,
    sampling: SamplingParams,
    eos_ids: AnyArray,
    pad_id: object,
) -> None:
    """Raise ValueError or TypeError for the first invalid argument, with a one-sentence message.

    For plain decoding, `drafter` and `num_draft_tokens` are None.
    """
    check_target(target)
    vocab_size = target.config.vocab_size
    check_whole("max_new_tokens", max_new_tokens)
    if drafter is not None or num_draft_tokens is not None:
        check_drafter(target, drafter)
        _check_draft_length(num_draft_tokens, drafter)
    batch = check_prompts(prompts.tokens, prompts.lengths, target.config)
    check_whole("samples_per_prompt", prompts.samples_per_prompt)
    batch *= prompts.samples_per_prompt
    _check_keys(prompts.keys, batch)
    check_sampling(sampling, batch, vocab_size)
    check_positions(target, drafter, prompts.lengths, max_new_tokens, sampling.max_tokens)
    check_ids(eos_ids, pad_id, batch, vocab_size)


def check_drafter(target: Llama, drafter: Drafter[PyTree] | None) -> None:
    """Raise ValueError or TypeError unless `drafter` is a drafter that can draft for `target`."""
    _check_drafter(drafter, target.config.vocab_size)
    _check_capabilities(target, drafter)


def _check_capabilities(target: Llama, drafter: Drafter[PyTree] | None) -> None:
    """Raise if a drafter needs features that the target does not have, or embeddings that the target cannot read."""
    kind, features, embeddings = kind_of(drafter), features_of(drafter), embeddings_of(drafter)
    if (features or embeddings is not None) and _missing(target, "forward_with_features"):
        wants = "reads hidden states of" if features else "has embeddings for"
        raise TypeError(
            f"{kind} {wants} the target, but {type(target).__name__} has no forward_with_features; use a jspec.Llama."
        )
    for i in features:
        if isinstance(i, bool) or not isinstance(i, numbers.Integral) or not -1 <= i <= len(target.layers):
            raise ValueError(
                f"features of {kind} holds {i!r}; expected whole numbers from 0 to {len(target.layers)} (the "
                "target's number of layers), or -1, which stands for that number."
            )
    if embeddings is not None:
        is_array = isinstance(embeddings, jax.Array | np.ndarray)
        shape, size = list(embeddings.shape) if is_array else [], target.config.hidden_size
        if shape[1:] != [size] or not shape[0]:
            raise ValueError(
                f"embeddings of {kind} are a {type(embeddings).__name__} of shape {shape}; expected an array of "
                f"shape [M, {size}], with M at least 1 and the target's hidden size last."
            )


def check_drafted(drafter: object, out_of_vocab: Array, vocab_size: int) -> None:
    """Raise ValueError if ``out_of_vocab[B]`` is true for a row, because its drafts had ids outside the vocabulary."""
    rows = values(out_of_vocab)
    if rows is not None and rows.any():
        raise ValueError(
            f"{kind_of(drafter)} drafted ids outside the vocabulary of {vocab_size} tokens in row "
            f"{np.argmax(rows)}; draft the target's ids, or return an all-zero distribution to draft no token."
        )


def as_array(name: str, value: object, remedy: str = "pad them on the right to one length") -> AnyArray:
    """Return an array unchanged. Convert a list to a NumPy array, or to a JAX array if it holds traced values."""
    if isinstance(value, np.ndarray | jax.Array):
        return cast(AnyArray, value)
    try:
        return np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        return jnp.asarray(cast(ArrayLike, value))
    except ValueError:
        raise ValueError(f"{name} has rows of different lengths; {remedy}.") from None


def as_arrays(
    tokens: object,
    lengths: object,
    keys: Array,
    sampling: SamplingParams,
    eos_ids: object,
    samples_per_prompt: int = 1,
) -> tuple[PromptBatch, SamplingParams, AnyArray]:
    """Bundle the prompts, and convert the other arguments. See `as_settings`."""
    prompts = PromptBatch(as_array("tokens", tokens), as_array("lengths", lengths), keys, samples_per_prompt)
    return prompts, *as_settings(sampling, eos_ids)


def as_settings(sampling: SamplingParams, eos_ids: object) -> tuple[SamplingParams, AnyArray]:
    """Convert arguments that may be lists to arrays, and a single EOS id to an array of one id."""
    ends = as_array("eos_ids", eos_ids, "pad the shorter rows with -1")
    if ends.ndim == 0 and jnp.issubdtype(ends.dtype, jnp.integer):
        ends = ends[None]
    if isinstance(sampling, SamplingParams):
        fields = by_name(sampling).items()
        lists = {name: cast(object, value) for name, value in fields if isinstance(value, list | tuple)}
        arrays = {name: as_array(name, value, "pass one number for each row") for name, value in lists.items()}
        sampling = cast(Callable[..., SamplingParams], dataclasses.replace)(sampling, **arrays)
    return sampling, ends


def check_rule(accept: object) -> Rule:
    """Return the acceptance rule that `accept` is or names.

    Raises:
        ValueError: `accept` is neither a rule nor a rule's name.
        TypeError: the rule lacks a declaration, or is not hashable and so cannot be part of the compiled program.
    """
    if isinstance(accept, str) and accept in RULES:
        return RULES[accept]
    has_accept = not _missing(accept, "accept")
    if isinstance(accept, type) and has_accept:
        raise TypeError(
            f"accept is the class {accept.__name__}; pass an instance of it, such as {accept.__name__}(...) (see "
            "jspec.rules)."
        )
    if isinstance(accept, str | type) or not has_accept:
        raise ValueError(
            f"accept={accept!r} is not an acceptance rule; choose one of {sorted(RULES)}, or pass an object such "
            "as jspec.Lenient(0.5) (see jspec.rules)."
        )
    declared = {name: getattr(accept, name, None) for name in ("exact", "shares_noise")}
    missing = [name for name, value in declared.items() if not isinstance(value, bool | np.bool_)]
    if missing:
        raise TypeError(
            f"accept is of type {type(accept).__name__}, which does not define {' and '.join(missing)} as a bool; "
            "set each to True or False, as described in jspec.rules.Rule."
        )
    _check_hashable("accept", accept)
    return as_rule(accept)


def _check_hashable(name: str, value: object) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is not hashable, but it is part of the compiled program; make it a frozen "
            "dataclass of plain numbers."
        ) from None


def check_whole(name: str, value: object, or_else: str = "") -> None:
    """Raise ValueError unless `value` is an integer of at least 1. `or_else` names alternatives for the message."""
    try:
        if not isinstance(value, bool) and operator.index(cast(SupportsIndex, value)) >= 1:
            return
    except TypeError:
        pass  # not an integer: the same message applies
    raise ValueError(
        f"{name} must be {or_else}a Python int of at least 1, because it fixes the compiled shapes; got {value!r}."
    )


def _check_draft_length(num_draft_tokens: object, drafter: Drafter[PyTree] | None) -> None:
    if isinstance(num_draft_tokens, type) or _missing(num_draft_tokens, "budget"):
        if not (isinstance(num_draft_tokens, str) and num_draft_tokens == "auto"):
            check_whole("num_draft_tokens", num_draft_tokens, or_else='"auto", an object such as jspec.UpTo(8), or ')
        return
    kind = type(num_draft_tokens).__name__
    if missing := _missing(num_draft_tokens, "max_draft_tokens", "needs_confidence", "init", "continues", "update"):
        raise TypeError(
            f"num_draft_tokens is of type {kind}, which lacks {', '.join(missing)}; see jspec.drafters.draft_length."
        )
    length = as_draft_length(num_draft_tokens)
    check_whole(f"{kind}.max_draft_tokens", length.max_draft_tokens)
    _check_hashable("num_draft_tokens", num_draft_tokens)
    if embeddings_of(drafter) is not None:  # tokens after the longest row's draft are not read
        raise ValueError(
            f"{kind_of(drafter)} has embeddings, which need drafts of one length; use a number instead of "
            f"{kind}, or a tree."
        )
    if length.needs_estimates and not has_confidence(drafter):
        raise ValueError(
            f"{kind} needs the draft's confidence in each token, which {kind_of(drafter)} does not provide; "
            "use it with a model or another jspec.drafters.AutoregressiveDrafter, or use "
            f"num_draft_tokens=jspec.UpTo({length.max_draft_tokens})."
        )


def check_target(target: object) -> None:
    """Raise TypeError if `target` lacks attributes that decoding needs, or ValueError if its vocabulary is reduced."""
    if missing := _missing(target, "config", "new_cache", "forward", "logits"):
        raise TypeError(
            f"target is of type {type(target).__name__}, which lacks {', '.join(missing)}; pass a model, such as "
            "one from jspec.load(...)."
        )
    if isinstance(target, Llama) and (held := target.head.num_tokens) != (size := target.config.vocab_size):
        raise ValueError(f"The target's output head holds {held} of {size} tokens; pass the original model instead.")


def _missing(value: object, *names: str) -> list[str]:
    """Return the attributes among `names` that `value`, an object passed by a caller, does not have."""
    return [name for name in names if not hasattr(value, name)]


def _check_drafter(drafter: Drafter[PyTree] | None, vocab_size: int) -> None:
    given = passed(drafter)
    missing = [name for name in ("init", "propose", "commit", "vocab_size") if not _defines(given, name)]
    if missing:
        raise TypeError(
            f"draft is of type {kind_of(drafter)}, which lacks {', '.join(missing)}; pass a jspec.Llama or "
            "a drafter (see jspec.drafters.base)."
        )
    if jax.tree_util.all_leaves([given]):
        raise TypeError(
            f"draft is of type {kind_of(drafter)}, which is not a pytree; decorate the class with "
            "@jax.tree_util.register_dataclass and @dataclasses.dataclass(frozen=True)."
        )
    size = None if drafter is None else drafter.vocab_size
    if size is not None and not same_but_for_padding(size, vocab_size):
        raise ValueError(
            f"The draft's vocabulary has {size} tokens and the target's {vocab_size}; "
            "use a draft that shares the target's tokenizer."
        )


def _defines(drafter: object, name: str) -> bool:
    """Return whether a drafter has an attribute that is not just inherited from `Drafter`."""
    return hasattr(drafter, name) and vars(Drafter).get(name, drafter) is not getattr(type(drafter), name, None)


def check_prompts(tokens: AnyArray, lengths: AnyArray, config: LlamaConfig, kind: str = "prompt") -> int:
    """Validate prompts or other texts, and return the batch size. Messages call each of them a `kind`."""
    if not all(isinstance(size, int) for size in (*tokens.shape, *lengths.shape)):
        raise ValueError(
            f"tokens has the symbolic shape {tokens.shape}, but a decoding program has one fixed shape; export "
            "one program for each batch size and width."
        )
    if tokens.size == 0:
        raise ValueError(
            f"tokens has shape {tokens.shape}, so there is nothing to continue; "
            "pass at least one prompt of at least one token."
        )
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            "tokens must be integers of shape [B, P], one prompt per row, padded on the right; got "
            f"{tokens.dtype} of shape {tokens.shape}."
        )
    batch, width = tokens.shape
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths must be integers of shape [{batch}], one for each row of tokens; "
            f"got {lengths.dtype} of shape {lengths.shape}."
        )
    counts, ids = values_if_known(lengths), values_if_known(tokens)
    if counts is not None and (bad := np.flatnonzero((counts < 1) | (counts > width))).size:
        raise ValueError(
            f"lengths[{bad[0]}] is {counts[bad[0]]}, but a {kind} has 1 to {width} tokens; "
            f"an empty {kind} needs at least a start-of-text token."
        )
    if counts is not None and ids is not None:
        inside = np.arange(width) < counts[:, None]
        if (bad := np.argwhere(inside & ((ids < 0) | (ids >= config.vocab_size)))).size:
            row, column = bad[0]
            raise ValueError(
                f"tokens[{row}, {column}] is {ids[row, column]}, outside the vocabulary of "
                f"{config.vocab_size} tokens; was the prompt encoded with another tokenizer?"
            )
        if kind == "prompt":  # a finished text may begin with EOS tokens
            check_right_padded(ids, counts, config)
    return batch


def _check_keys(keys: object, batch: int) -> None:
    if not (isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)):
        raise TypeError(
            "keys must be typed PRNG keys, one for each row of the output: "
            f"jax.random.split(jax.random.key(seed), {batch}); raw jax.random.PRNGKey arrays and plain "
            "numbers are not accepted."
        )
    if "rbg" in str(jax.random.key_impl(keys)):
        raise ValueError(
            f"keys are of kind {jax.random.key_impl(keys)}, for which jax.vmap draws all rows from the first "
            "row's key, so a row's output would depend on the batch; use jax.random.key(seed, "
            'impl="threefry2x32").'
        )
    if keys.shape != (batch,):
        raise ValueError(
            f"keys has shape {keys.shape}; expected ({batch},), one key for each row of the output: "
            f"jax.random.split(key, {batch})."
        )


def check_ids(eos_ids: AnyArray, pad_id: object, batch: int, vocab_size: int) -> None:
    """Raise ValueError unless EOS ids and the pad id are valid for a batch."""
    if eos_ids.ndim not in (1, 2) or (eos_ids.ndim == 2 and len(eos_ids) != batch):
        raise ValueError(
            f"eos_ids must be a sequence of token ids, such as (2,), or an array of shape [{batch}, n]; "
            f"got shape {eos_ids.shape}."
        )
    if eos_ids.size and not jnp.issubdtype(eos_ids.dtype, jnp.integer):
        raise ValueError(f"eos_ids must be integer token ids; got {eos_ids.dtype}.")
    values = values_if_known(eos_ids)
    if values is not None:
        bad = values[(values < (0 if values.ndim == 1 else -1)) | (values >= vocab_size)]
        if bad.size:
            raise ValueError(
                f"eos_ids holds {bad.flat[0]}, outside the vocabulary of {vocab_size} tokens; "
                "take the ids from the target's tokenizer."
            )
    pad = values_if_known(pad_id)
    if pad is not None and not (pad.shape == () and pad.dtype.kind in "iu" and -(2**31) <= pad < 2**31):
        raise ValueError(f"pad_id must be one int32; got {pad_id!r}.")
