# pyright: reportUnnecessaryIsInstance=false
"""The `plan` function, which predicts a pair's memory use, speed and best draft length before the pair is downloaded.

The predictions are computed from configurations and published specifications. Nothing is measured or run on a device.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable
from pathlib import Path

from convert import dtypes
from convert.config import LlamaConfig, read_config
from convert.heads.block import files as block_files
from convert.heads.block.config import BlockConfig, check_target_of
from convert.source import resolve_config
from jspec import theory
from jspec.core.devices import Device, find
from jspec.core.types import check_counts, same_but_for_padding
from jspec.models.llama import Llama
from jspec.models.quantize import check_kind
from jspec.planning.block_costs import BlockWeights
from jspec.planning.memory import Footprint, Weights
from jspec.planning.roofline import Load

MOST = 16  # the largest K to consider
_LENGTH = 4096
_WORTHWHILE = 1.05  # an int8 draft is advised only if it is this many times faster
_ROUNDING = 1e-9  # a gain below this does not count
# The possible verdicts of a plan.
SPECULATE, PLAIN, QUANTIZE, NO_ROOM = "speculate", "do not speculate", "quantise the draft", "does not fit"


@dataclasses.dataclass(frozen=True)
class Drafting:
    """The predicted performance of decoding with one draft.

    Attributes:
        num_draft_tokens: the requested K, or else the fastest K; 0 if drafting does not pay off.
        speedup: the speed with that K, relative to plain decoding.
        best: the fastest K; 0 if drafting does not pay off.
        round_seconds, expected_tokens, speedups: the duration of a round in seconds, the number of tokens per row in a
            round, and the speedup, each for K = 1, 2, ..., 16, or up to a block drafter's maximum if that is lower.
        footprint: the memory needed with `num_draft_tokens`, or with K = 1 if that is 0.
        fits: whether the footprint fits in the device's memory.
    """

    num_draft_tokens: int
    speedup: float
    best: int
    round_seconds: tuple[float, ...]
    expected_tokens: tuple[float, ...]
    speedups: tuple[float, ...]
    footprint: Footprint
    fits: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """The prediction returned by `jspec.plan`.

    Attributes:
        verdict: "speculate", "do not speculate", "quantise the draft" or "does not fit".
        device: the device that the prediction is for.
        num_devices: the number of devices over which both models are sharded. Memory sizes are per device.
        batch, length, prompt, acceptance: the assumptions.
        plain_seconds: the duration of one plain decoding step in seconds. A step yields one token per row.
        plain_footprint, plain_fits: the memory needed to decode without a draft, and whether it fits.
        draft: the prediction for the draft as given.
        int8: the prediction for the draft in int8, which is assumed to have the same acceptance rate. None for a block
            drafter, whose quantisation is not modelled.
        block: the bytes of each part of a block drafter; empty for a draft model. "context cache" is for the keys and
            values of all positions, and "features" for the target's hidden states that the drafter reads in a round.
        largest_batch: the largest batch that fits with the draft as given, at this length; 0 if none fits.
        largest_length: the largest length that fits with the draft as given, at this batch size; 0 if none fits.
    """

    verdict: str
    device: Device
    num_devices: int
    batch: int
    length: int
    prompt: int
    acceptance: float
    plain_seconds: float
    plain_footprint: Footprint
    plain_fits: bool
    draft: Drafting
    int8: Drafting | None
    block: dict[str, int]
    largest_batch: int
    largest_length: int


def plan(
    target: LlamaConfig | Llama | str | Path,
    draft: LlamaConfig | BlockConfig | Llama | str | Path,
    *,
    device: str | Device | None = None,
    batch: int = 1,
    length: int | None = None,
    prompt: int | None = None,
    acceptance: float = 0.8,
    num_draft_tokens: int | None = None,
    quantize: str | None = None,
    num_devices: int = 1,
) -> Plan:
    """Predict from configurations alone what fits on a device, how fast it decodes, and how many tokens to draft.

    A pass takes the longer of its memory time and its compute time, plus its kernel launches and exchanges. Memory time
    is its bytes (weights and the whole cache) over the bandwidth. Compute time is its matrix products over the peak
    rate, excluding attention products. An exchange is assumed to take 10 us plus its bytes over the link bandwidth.
    A round with K draft tokens has one two-row draft pass, K - 1 single-row draft passes and a verification of K + 1
    rows. A block drafter has a single draft pass. A round yields ``(1 - alpha^(K+1)) / (1 - alpha)`` tokens, equation 1
    of Leviathan et al. 2023.

    Real devices do not reach their published bandwidth, so the speedup is more reliable than the times.

    Args:
        target, draft: configurations (`convert.read_config`), models, or model sources (see `load`). Only a source's
            configuration is read or downloaded. A model's quantised matrices and reduced head count as such. `draft`
            may also be a block drafter. If a speculators drafter's weights are missing, its embedding and head count.
        device: a name in ``jspec.core.devices.DEVICES``, a `jspec.core.devices.Device`, or None for the current device.
            Weights and cache have the device's dtype, even if a model's weights are packed in GGUF's blocks.
        batch: the number of sequences decoded at once.
        length: the number of positions in each sequence, prompt included. The default is 4096 or the models' limit.
        prompt: the number of these positions that are prefilled at once. The default is half of `length`.
        acceptance: alpha, the probability that a draft token is accepted, in 0..1.
        num_draft_tokens: K, in 1..16, or up to a block drafter's maximum if that is lower. None chooses the fastest K.
        quantize: "int8" or "int4" to plan for a quantised draft model. `acceptance` stays as given.
        num_devices: the number of devices over which both models are sharded; 1 for block drafters.

    Raises:
        ValueError: an argument is out of range, the models do not fit together or have too few positions, the device is
            unknown, or a model cannot be sharded evenly over `num_devices`.
        TypeError: `device` is not a device, or a source is not a model.
        convert.CheckpointError: a source is not a checkpoint, or is not supported.
    """
    found = find(device)
    target_weights, draft_weights = _both_weights(target, draft, found, quantize, num_devices)
    limit = _check_models(target_weights.config, _layers(draft_weights))
    length = min(_LENGTH, limit) if length is None else length
    load = Load(found, batch, length, max(length // 2, 1) if prompt is None else prompt)
    _check(batch, length, load.prompt, limit, acceptance)
    _check_length(num_draft_tokens, _most(draft_weights))
    light = dataclasses.replace(draft_weights, quantized="int8") if isinstance(draft_weights, Weights) else None
    predict = functools.partial(_drafting, load, target_weights, acceptance=acceptance, wanted=num_draft_tokens)
    given, int8 = predict(draft_weights), None if light is None else predict(light)
    plain_fits, k = load.fits(0, target_weights), given.num_draft_tokens or 1
    fits = functools.partial(_fits, load, k, target_weights, draft_weights)
    return Plan(
        verdict=_verdict(plain_fits, given, int8),
        num_devices=num_devices,
        **vars(load),
        acceptance=acceptance,
        plain_seconds=load.plain_seconds(target_weights),
        plain_footprint=load.footprint(0, target_weights),
        plain_fits=plain_fits,
        draft=given,
        int8=int8,
        block=_parts(draft_weights, load, k),
        largest_batch=_largest(lambda batch: fits(batch=batch), 1 << 20),
        largest_length=_largest(lambda length: fits(length=length, prompt=min(load.prompt, length)), limit),
    )


def _both_weights(
    target: object, draft: object, device: Device, quantize: str | None, num_devices: int
) -> tuple[Weights, Weights | BlockWeights]:
    """Return each device's share of the weights of the target and of the draft."""
    check_counts(num_devices=num_devices)
    whole = _weights(target, device)
    whole_draft = _of_draft(draft, whole, device, quantize)
    if num_devices == 1:
        return whole, whole_draft
    if isinstance(whole_draft, BlockWeights):
        raise ValueError(f"num_devices={num_devices} is not supported for block drafters; use num_devices=1.")
    return _share("target", whole, num_devices), _share("draft", whole_draft, num_devices)


def _share(name: str, model: Weights, num_devices: int) -> Weights:
    heads = model.config.num_key_value_heads
    if heads % num_devices:
        raise ValueError(
            f"num_devices={num_devices} does not divide the {heads} key-value heads of the {name}; use a number that "
            f"divides {heads}."
        )
    share = dataclasses.replace(model, num_devices=num_devices)
    if not share.divides_evenly:
        raise ValueError(
            f"The {name}'s matrices cannot be split into num_devices={num_devices} equal parts of whole quantisation "
            f"groups; use a smaller divisor of {heads}."
        )
    return share


def _most(draft: Weights | BlockWeights) -> int:
    """Return the largest K to consider."""
    return min(MOST, draft.config.num_draft_tokens) if isinstance(draft, BlockWeights) else MOST


def _layers(draft: Weights | BlockWeights) -> LlamaConfig:
    return draft.config.body if isinstance(draft, BlockWeights) else draft.config


def _fits(load: Load, k: int, target: Weights, draft: Weights | BlockWeights, **changes: int) -> bool:
    return dataclasses.replace(load, **changes).fits(k, target, draft)


def _parts(draft: Weights | BlockWeights, load: Load, k: int) -> dict[str, int]:
    return draft.all_parts(load.batch, load.length, k) if isinstance(draft, BlockWeights) else {}


def _drafting(
    load: Load, target: Weights, draft: Weights | BlockWeights, acceptance: float, wanted: int | None
) -> Drafting:
    plain, lengths = load.plain_seconds(target), range(1, _most(draft) + 1)
    seconds = tuple(load.round_seconds(target, draft, k) for k in lengths)
    tokens = tuple(float(theory.expected_tokens(acceptance, k)) for k in lengths)
    speedups = tuple(n * plain / s for n, s in zip(tokens, seconds, strict=True))
    best = 1 + max(range(len(speedups)), key=speedups.__getitem__)  # the first of equals
    best = best if speedups[best - 1] > 1 + _ROUNDING else 0
    k = best if wanted is None else wanted
    held, fits = load.footprint(k or 1, target, draft), load.fits(k or 1, target, draft)
    return Drafting(k, speedups[k - 1] if k else 1.0, best, seconds, tokens, speedups, held, fits)


def _verdict(plain_fits: bool, draft: Drafting, int8: Drafting | None) -> str:
    if not plain_fits or (draft.best and not draft.fits):
        return NO_ROOM
    if int8 is not None and int8.fits and int8.speedup > 1 and int8.speedup >= _WORTHWHILE * draft.speedup:
        return QUANTIZE
    return SPECULATE if draft.best else PLAIN


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number in 1..most for which `fits` is true, or 0 if 1 does not fit.

    If a number fits, all smaller numbers must fit, too.
    """
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _of_draft(source: object, target: Weights, device: Device, quantize: str | None) -> Weights | BlockWeights:
    """Return the weights of a draft model or a block drafter, quantised to `quantize`.

    Raises:
        ValueError: a block drafter is to be quantised, or was made for a target with other sizes.
    """
    if quantize is not None:
        check_kind(quantize)
    block = source
    if isinstance(source, str | Path):
        block = block_files.read_config(source, target.config.num_hidden_layers)
    if not isinstance(block, BlockConfig):
        weights = _weights(source, device)
        return dataclasses.replace(weights, quantized=quantize or weights.quantized)
    if quantize is not None:
        raise ValueError(f"quantize={quantize!r} plans for quantised draft models, not block drafters; leave it out.")
    check_target_of(block, target.config)
    if block.draft_vocab_size is not None:  # rows of the target's head are copied if the files have none
        block = dataclasses.replace(block, own_head=True)
    return BlockWeights(block, target.itemsize)


def _weights(source: object, device: Device) -> Weights:
    itemsize = dtypes.parse(device.dtype).itemsize
    if isinstance(source, Llama):
        num_outputs = None if source.lm_head is None else source.lm_head.num_tokens
        return Weights(source.config, itemsize, source.quantized, num_outputs)
    if isinstance(source, str | Path):
        source = read_config(resolve_config(source))
    if not isinstance(source, LlamaConfig):
        raise TypeError(
            f"Only models and block drafters can be planned, not an object of type {type(source).__name__}; pass a "
            "configuration, a model, or a path or name."
        )
    return Weights(source, itemsize)


def _check_models(target: LlamaConfig, draft: LlamaConfig) -> int:
    """Return the number of positions that both models support; raise ValueError if their vocabularies differ."""
    if not same_but_for_padding(draft.vocab_size, target.vocab_size):
        raise ValueError(
            f"The draft's vocabulary has {draft.vocab_size} tokens and the target's {target.vocab_size}; "
            "use a draft that shares the target's tokenizer."
        )
    return min(target.max_position_embeddings, draft.max_position_embeddings)


def _check(batch: object, length: int, prompt: int, limit: int, acceptance: object) -> None:
    """Raise ValueError if an argument is out of range."""
    check_counts(batch=batch, length=length, prompt=prompt)
    if length > limit:
        raise ValueError(f"length={length} is more than the {limit} positions that both models have; reduce it.")
    if prompt > length:
        raise ValueError(f"prompt={prompt} is more than length={length}, which includes the prompt; reduce it.")
    if isinstance(acceptance, bool) or not isinstance(acceptance, numbers.Real) or not 0 <= float(acceptance) <= 1:
        raise ValueError(f"acceptance must be a probability from 0 to 1; got {acceptance!r}.")


def _check_length(num_draft_tokens: object, most: int) -> None:
    """Raise ValueError unless `num_draft_tokens` is None or in 1..most."""
    whole = isinstance(num_draft_tokens, numbers.Integral) and not isinstance(num_draft_tokens, bool)
    if num_draft_tokens is not None and not (whole and num_draft_tokens in range(1, most + 1)):
        raise ValueError(f"num_draft_tokens must be a whole number from 1 to {most}; got {num_draft_tokens!r}.")
