"""Check the memory before slots are allocated, and release the memory that compilation no longer needs."""

import contextlib
import ctypes
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax

from jspec.drafters.base import tree_of
from jspec.engine.slots import AnyDrafter, Sizes, Slots, empty_slots
from jspec.models.llama import Llama
from jspec.planning.memory import PROB_ARRAYS

_MIN_LENGTH = 1024  # tokens; the lower bound of `fit_length`
_MEMORY, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")  # on Linux, and in a container


class JaxDevice(Protocol):
    """The part of a `jax.Device` that an engine reads. JAX does not describe it to type checkers."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    def memory_stats(self) -> Mapping[str, int] | None: ...


def check_memory(target: Llama, drafter: AnyDrafter | None, sizes: Sizes) -> None:
    """Raise ValueError if `slots_bytes` is known to exceed the free memory. The message names sizes that would fit."""
    (device,) = jax.tree.leaves(target)[0].devices()
    free, needed = free_bytes(device), slots_bytes(target, drafter, sizes)
    if free is None or needed <= free:
        return
    slots = free * sizes.slots // needed
    shorter = dataclasses.replace(sizes, length=sizes.length // 2)
    bytes_per_token = (needed - slots_bytes(target, drafter, shorter)) / (sizes.length - shorter.length)
    length = sizes.length - math.ceil((needed - free) / bytes_per_token) - sizes.chunks[0] if bytes_per_token else 0
    fits = [f"{slots:,} slots"] * (slots > 0) + [f"a max_length of {length:,}"] * (length > sizes.chunks[-1])
    raise ValueError(
        f"{sizes.slots:,} slots of {sizes.length:,} tokens take {needed / 1e9:,.2f} GB, but only "
        f"{free / 1e9:,.2f} GB of memory is free; {' or '.join(fits) or 'a smaller model'} would fit."
    )


def fit_length(target: Llama, drafter: AnyDrafter | None, sizes: Sizes) -> Sizes:
    """Halve the length until the slots take at most half of the free memory, but not below 1,024 tokens.

    The length is only halved, so that it has few possible values: each new length requires compiling all programs.
    """
    (device,) = jax.tree.leaves(target)[0].devices()
    free = free_bytes(device)
    while free is not None and sizes.length >= 2 * _MIN_LENGTH and 2 * slots_bytes(target, drafter, sizes) > free:
        sizes = dataclasses.replace(sizes, length=sizes.length // 2)
    return sizes


def slots_bytes(target: Llama, drafter: AnyDrafter | None, sizes: Sizes) -> int:
    """Estimate the size of the slots and a round's temporaries, in bytes. See `jspec.planning.memory.PROB_ARRAYS`."""

    def allocate(target: Llama, drafter: AnyDrafter | None) -> Slots:
        return empty_slots(target, drafter, sizes)

    slots = jax.eval_shape(allocate, target, drafter)
    allocated = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots))
    nodes = 0 if drafter is None else tree_of(drafter, sizes.num_draft_tokens[-1]).size
    return allocated + PROB_ARRAYS * 4 * sizes.slots * (nodes + 2) * target.config.vocab_size


def free_bytes(device: JaxDevice) -> int | None:
    """Return a device's free memory in bytes (for a CPU, the machine's or container's), or None if it is unknown."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats["bytes_limit"] - stats["bytes_in_use"] if {"bytes_limit", "bytes_in_use"} <= stats.keys() else None
    available = re.search(r"MemAvailable: +(\d+) kB", _read(_MEMORY))
    group = [_read(_GROUP / name).strip() for name in ("memory.max", "memory.current")]
    limits = [1024 * int(available[1])] if available else []
    if all(map(str.isdecimal, group)):  # the group's cached files can be dropped immediately
        files = re.findall(r"^(?:in)?active_file (\d+)$", _read(_GROUP / "memory.stat"), re.MULTILINE)
        limits.append(int(group[0]) - int(group[1]) + sum(map(int, files)))
    return min(limits, default=None)


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def release_freed_memory() -> None:
    """Return freed memory to the system. After compilation, the allocator on Linux would keep gigabytes of it."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no malloc_trim
        ctypes.CDLL("libc.so.6").malloc_trim(0)
