# pyright: reportUnnecessaryIsInstance=false
"""The devices that predictions support, with their published specifications, and detection of the local device."""

import dataclasses
from typing import Protocol, cast

# The assumed fixed overhead of a kernel in seconds, even within a GPU's command buffer. On an H200, it is 2.1 us.
LAUNCH = 2e-6
# The assumed latency of an all-reduce or all-gather between the devices of one machine, in seconds.
COLLECTIVE_LATENCY = 10e-6


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of accelerator.

    Attributes:
        title: the name that JAX or the manufacturer uses.
        platform: "cuda" or "tpu".
        bandwidth: memory bandwidth in bytes per second, as published.
        flops: floating-point operations per second for dense products in `dtype`, as published.
        memory: memory size in bytes.
        dtype: the dtype of weights on this device.
        launch: the fixed overhead of a kernel, in seconds.
        bandwidth_share: the fraction of `bandwidth` that kernels reach; 1 if not measured (`bench.gpu.fit`).
        link_bandwidth: the published bandwidth to a machine's other devices, in bytes per second per direction. The
            default is that of PCIe 4.0 with 16 lanes.
        kinds: other names that JAX uses for the device (``jax.devices()[0].device_kind``).
    """

    title: str
    platform: str
    bandwidth: float
    flops: float
    memory: float
    dtype: str = "bfloat16"
    launch: float = LAUNCH
    bandwidth_share: float = 1.0
    link_bandwidth: float = 32e9
    kinds: tuple[str, ...] = ()

    @property
    def read_bandwidth(self) -> float:
        """The bandwidth that kernels reach, in bytes per second: the published value times `bandwidth_share`."""
        return self.bandwidth * self.bandwidth_share


DEVICES = {
    "h200": Device(
        "NVIDIA H200", "cuda", 4.8e12, 989e12, 141e9, launch=2.1e-6, bandwidth_share=0.96, link_bandwidth=450e9
    ),
    "h100": Device("NVIDIA H100 80GB HBM3", "cuda", 3.35232e12, 989e12, 84_929_347_584, link_bandwidth=450e9),
    "a100": Device("NVIDIA A100-SXM4-80GB", "cuda", 2.039e12, 312e12, 84_987_740_160, link_bandwidth=300e9),
    "l4": Device("NVIDIA L4", "cuda", 0.300e12, 121e12, 23_669_440_512),
    "t4": Device("Tesla T4", "cuda", 0.320e12, 65e12, 15_828_320_256, "float16", link_bandwidth=16e9),
    "v5e": Device(
        "TPU v5e", "tpu", 0.819e12, 197e12, 16 * 2**30, launch=0.0, link_bandwidth=100e9, kinds=("TPU v5 lite",)
    ),
    "v6e": Device(
        "TPU v6e", "tpu", 1.640e12, 918e12, 32 * 2**30, launch=0.0, link_bandwidth=224e9, kinds=("TPU v6 lite",)
    ),
}


def find(device: str | Device | None = None) -> Device:
    """Look up a device by name. A `Device` is returned unchanged, and None means JAX's local device.

    The whole name must match: an H100 PCIe is not an H100, and an L40S is not an L4.

    Raises:
        ValueError: no device has that name, or the local device is unknown.
        TypeError: `device` is neither a name nor a `Device`.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        import jax  # imported here, because `bench.devices` configures JAX before JAX starts

        return _here(cast("_Found", jax.devices()[0]))
    if not isinstance(device, str):
        raise TypeError(f"device is of type {type(device).__name__}; pass a name or a jspec.core.devices.Device.")
    if device not in DEVICES:
        raise ValueError(f"There is no device {device!r}; choose one of {', '.join(DEVICES)}.")
    return DEVICES[device]


class _Found(Protocol):
    """A device as JAX describes it."""

    @property
    def device_kind(self) -> str: ...

    @property
    def compute_capability(self) -> str: ...


def _here(found: _Found) -> Device:
    for device in DEVICES.values():
        if found.device_kind in (device.title, *device.kinds):
            return device
    raise ValueError(
        f"Plans do not support the local device, {found.device_kind}; name one of {', '.join(DEVICES)}, or measure "
        "the local device with `jspec tune`."
    )


def is_before_ampere() -> bool:
    """Return whether a local NVIDIA GPU supports neither bfloat16 nor XLA's Triton, such as a T4."""
    import jax

    try:
        found = cast("list[_Found]", jax.local_devices(backend="cuda"))
    except RuntimeError:  # no NVIDIA GPU
        return False
    return any(float(device.compute_capability) < 8 for device in found)
