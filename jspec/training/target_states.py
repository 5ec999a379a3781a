# pyright: reportUnknownVariableType=false
"""The target's states for a batch, computed on demand or read from disk."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from safetensors import SafetensorError, safe_open

from jspec.core.types import PyTree
from jspec.drafters.heads.block_drafter import BlockDrafter
from jspec.drafters.heads.eagle import EagleDrafter
from jspec.drafters.heads.own_files import InOwnFiles
from jspec.models.llama import Llama, all_parts, widened
from jspec.models.packed import PackedMatrix
from jspec.training.batches import Batch, Plan
from jspec.training.dataset import digest, write_arrays, write_text

_SHARD_BYTES = 256 * 2**20
_DESCRIPTION = "states.json"
_STATS = ".likeliest", ".log_mass"  # the files' suffixes for the fields of `DistributionStats`


class TargetStates(NamedTuple):
    """The target's states for every token in a batch.

    Attributes:
        states: ``[B, S, F, E]``, the states that the drafter reads.
        hidden: ``[B, S, E]``, the output of the last layer.
        stats: the `DistributionStats` of `hidden`, or None if unknown.
    """

    states: Array
    hidden: Array
    stats: "DistributionStats | None" = None


class DistributionStats(NamedTuple):
    """Statistics of the target's distributions over all V tokens, for measuring a drafter that drafts only some tokens.

    Attributes:
        top_token: ``int32[B, S]``, the most likely token.
        log_mass: ``float32[B, S]``, the log of the sum of the exponentials of all logits.
    """

    top_token: Array
    log_mass: Array


def distribution_stats(target: Llama, hidden: Array) -> DistributionStats:
    """Return the `DistributionStats` for the target's states ``[B, S, E]``, in the target's own dtype."""
    logits = target.logits(hidden)
    return DistributionStats(logits.argmax(-1), jax.nn.logsumexp(logits, axis=-1))


@functools.partial(jax.jit, static_argnames="features")
def run_target(target: Llama, tokens: Array, features: tuple[int, ...]) -> TargetStates:
    """Return the target's states for ``tokens[B, S]``."""
    batch, size = tokens.shape
    start = jnp.zeros(batch, jnp.int32)
    hidden, states, _ = target.forward_with_features(tokens, target.new_cache(batch, size), start, features)
    return TargetStates(states, hidden)


def fingerprint(model: PyTree) -> str:
    """Return a hash of the sizes, dtypes and weights of a model or drafter.

    The hash is the same on all devices, regardless of how the weights are sharded or packed.
    """
    if isinstance(model, Llama) and any(isinstance(part, PackedMatrix) for part in all_parts(model)):
        model = widened(model)
    leaves = [leaf.astype(jnp.int8) if leaf.dtype == jnp.int4 else leaf for leaf in jax.tree.leaves(model)]
    known = [
        (leaf.dtype.name, leaf.shape, int(bits))
        for leaf, bits in zip(leaves, cast(list[Array], _bits(leaves)), strict=True)
    ]
    return hashlib.sha256(f"{_settings(_config(model))} {known}".encode()).hexdigest()


def _config(model: PyTree) -> object:
    """Return the model's static settings, which its arrays do not contain."""
    match model:
        case InOwnFiles():
            return model.described()
        case EagleDrafter():
            return model.head.config
        case BlockDrafter():
            return model.block.config
        case Llama():
            return model.config
        case _:
            return None


def _settings(config: object) -> object:
    """Return the fields of a dataclass that differ from their defaults, so that new fields keep old fingerprints."""
    if not dataclasses.is_dataclass(config):
        return config
    values = [(field, cast(object, getattr(config, field.name))) for field in dataclasses.fields(config)]
    return [(field.name, _settings(value)) for field, value in values if value != field.default]


@jax.jit
def _bits(leaves: list[Array]) -> list[Array]:
    """Sum each array's bit patterns as integers. Integer sums are the same in any order."""
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    return [jax.lax.bitcast_convert_type(leaf, kinds[leaf.dtype.itemsize]).sum(dtype=jnp.uint32) for leaf in leaves]


class StoredStates:
    """A folder of safetensors files with the result of `run_target` for every row of a plan, in bfloat16.

    Args:
        folder: created if it is missing; the files of an earlier run are kept.
        plan: the plan whose rows are stored.
        about: a hash of everything else that the states depend on. See `fingerprint`.
        few: whether the drafter drafts only some tokens, so that it needs the `DistributionStats` over all tokens.

    Raises:
        ValueError: the folder holds other states, or is damaged.
    """

    def __init__(self, folder: Path, plan: Plan, features: tuple[int, ...], about: str, few: bool = False):
        self._folder, self._plan, self._features, self._few = folder, plan, features, few
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {"about": about, "features": list(features), "rows": digest(plan.rows), "laws": few}
        file = folder / _DESCRIPTION
        if not file.exists():
            write_text(file, json.dumps(wanted) + "\n")
        elif json.loads(file.read_text(encoding="utf-8")) != wanted:
            raise ValueError(
                f"{folder} holds the hidden states of other text or of another target; choose another folder, or "
                "delete this one."
            )
        self._places = {
            int(name): shard
            for shard in sorted(folder.glob("*.safetensors"))
            for name in _names(shard)
            if name.isdecimal()
        }

    def write(self, target: Llama, say: Callable[[int, int], None]) -> None:
        """Compute the missing states. ``say(done, all)`` reports progress in rows.

        Raises:
            convert.CheckpointError: the disk is full; files written earlier remain.
        """
        pending: dict[str, np.ndarray] = {}
        for batch in self._plan.in_order(self._places.keys()):
            target_states: TargetStates = jax.device_get(run_target(target, jnp.asarray(batch.tokens), self._features))
            whole = np.concatenate([target_states.states, target_states.hidden[:, :, None]], axis=2).astype(
                ml_dtypes.bfloat16
            )
            kept = {"": whole}
            if self._few:  # computed from the states as they will be stored
                stats = cast(
                    DistributionStats,
                    jax.jit(distribution_stats)(target, jnp.asarray(whole[:, :, -1], target.dtype)),
                )
                kept |= {name: np.asarray(part) for name, part in zip(_STATS, stats, strict=True)}
            for place, number in enumerate(batch.numbers):
                if number >= 0:
                    size = len(self._plan.rows[cast(int, number)].tokens)
                    pending |= {f"{number}{name}": part[place, :size].copy() for name, part in kept.items()}
            if sum(part.nbytes for part in pending.values()) > _SHARD_BYTES:
                self._flush(pending)
                say(len(self._places), len(self._plan.rows))
        self._flush(pending)

    def read(self, batch: Batch) -> TargetStates:
        """Return the stored states for the rows of a batch."""
        whole: dict[str, np.ndarray] = {}
        for place, number in enumerate(batch.numbers):
            if number < 0:
                continue
            with safe_open(self._places[int(number)], framework="numpy") as handle:
                for name in ("", *(_STATS if self._few else ())):
                    part = cast(np.ndarray, handle.get_tensor(f"{number}{name}"))
                    whole.setdefault(name, np.zeros((*batch.tokens.shape, *part.shape[1:]), part.dtype))
                    whole[name][place, : len(part)] = part
        states, *stats = map(cast(Callable[[np.ndarray], Array], jnp.asarray), whole.values())
        return TargetStates(states[:, :, :-1], states[:, :, -1], DistributionStats(*stats) if stats else None)

    def _flush(self, pending: dict[str, np.ndarray]) -> None:
        """Write a shard with the pending states."""
        if not pending:
            return
        names = (self._folder / f"states-{number:05}.safetensors" for number in itertools.count())
        shard = next(name for name in names if not name.exists())  # a file in the middle may have been deleted
        write_arrays(shard, pending)
        self._places |= {int(name): shard for name in pending if name.isdecimal()}
        pending.clear()


def _names(shard: Path) -> Sequence[str]:
    try:
        with safe_open(shard, framework="numpy") as handle:
            return list(cast(Iterable[str], handle.keys()))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{shard} is damaged ({error}); delete this file, and it will be written again.") from error
