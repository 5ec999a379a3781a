"""Host-device transfers that respect JAX's transfer guards and do not wait."""

import contextlib
from collections.abc import Generator
from typing import Any, cast

import jax
import jax.core
import numpy as np


@contextlib.contextmanager
def explicit_transfers() -> Generator[None]:
    """Treat all transfers in the context as explicit.

    The guard "disallow" then permits them, but "disallow_explicit" does not.

    Use this context for numbers that jspec itself transfers, such as a temperature. `jax.device_put` is also explicit,
    but for a handful of numbers it takes twenty times as long as an implicit transfer.
    """
    config: Any = jax.config
    guards = (
        (config.jax_transfer_guard_host_to_device, jax.transfer_guard_host_to_device),
        (config.jax_transfer_guard_device_to_host, jax.transfer_guard_device_to_host),
    )
    with contextlib.ExitStack() as stack:
        for level, guard in guards:
            if level in ("disallow", "log"):
                stack.enter_context(guard("allow"))
        yield


def values_if_known(x: object) -> np.ndarray | None:
    """Return `x` as a NumPy array, or None if it is traced, still being computed, or not fully addressable."""
    on_device: Any = x if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) else None
    return None if on_device is not None and not on_device.is_ready() else values(cast("object", x))


def values(x: object) -> np.ndarray | None:
    """Return the same as `values_if_known`, but wait for values that are still being computed."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(jax.device_get(x) if isinstance(x, jax.Array) else x)
