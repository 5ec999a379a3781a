"""The devices that programs are compiled for without having one, and the constants that predictions are made with."""

import dataclasses
import os
from importlib import metadata
from typing import Any

import numpy as np

# Seconds that a kernel costs beside its work, on a GPU within a command buffer too. An assumption until it is measured.
LAUNCH = 2e-6

# What XLA must know of a GPU, as in the descriptions that come with it (xla/tools/hlo_opt/gpu_specs).
_TARGET = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: {shared} threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {units}
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth:.0f}
l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory:.0f} shared_memory_per_block_optin: {optin}
cuda_compute_capability {{ major: {major} minor: {minor} }} registers_per_core_limit: 65536
registers_per_block_limit: 65536 }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }} device_description_str: "{title}" """


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of accelerator.

    Attributes:
        platform: "cuda" or "tpu".
        bandwidth: bytes a second of its memory, as published.
        flops: a second, of dense products in `dtype`, as published.
        memory: bytes.
        dtype: what weights have there.
        details: a GPU's description for XLA, or the name of a TPU's topology.
        launch: seconds a kernel costs beside its work.
    """

    title: str
    platform: str
    bandwidth: float
    flops: float
    memory: float
    dtype: str = "bfloat16"
    details: Any = None
    launch: float = LAUNCH


def _gpu(title: str, bandwidth: float, flops: float, memory: float, dtype: str = "bfloat16", **facts: Any) -> Device:
    target = _TARGET.format(title=title, bandwidth=bandwidth, memory=memory, **facts)
    return Device(title, "cuda", bandwidth, flops, memory, dtype, target)


DEVICES = {
    "h100": _gpu("NVIDIA H100 80GB HBM3", 3.35232e12, 989e12, 84_929_347_584, shared=233472, threads=2048, cores=132,
                 units=128, l2=52428800, clock=1.98, optin=232448, major=9, minor=0),
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 2.039e12, 312e12, 84_987_740_160, shared=167936, threads=2048, cores=108,
                 units=64, l2=41943040, clock=1.41, optin=166912, major=8, minor=0),
    "l4": _gpu("NVIDIA L4", 0.300e12, 121e12, 23_669_440_512, shared=102400, threads=1536, cores=58, units=128,
               l2=50331648, clock=2.04, optin=101376, major=8, minor=9),
    "t4": _gpu("Tesla T4", 0.320e12, 65e12, 15_828_320_256, "float16", shared=65536, threads=1024, cores=40, units=64,
               l2=4194304, clock=1.59, optin=65536, major=7, minor=5),
    "v5e": Device("TPU v5e", "tpu", 0.819e12, 197e12, 16 * 2**30, details="v5e", launch=0.0),
    "v6e": Device("TPU v6e", "tpu", 1.640e12, 918e12, 32 * 2**30, details="v6e", launch=0.0),
}  # fmt: skip

_PLUGINS = {"cuda": "jax-cuda12-plugin", "tpu": "libtpu"}
_GRIDS = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4"}  # of TPUs, whose smallest topology has four


def prepare(name: str) -> Device:
    """The device of that name; sets what must be set before JAX starts.

    Raises:
        ValueError: there is none, or JAX cannot compile for it here: with the command that makes it possible.
    """
    if name not in DEVICES:
        raise ValueError(f"There is no device {name!r} to compile for; there are {', '.join(DEVICES)}.")
    device = DEVICES[name]
    _check_plugin(device.platform)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if device.platform == "tpu":
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
                       "TPU_WORKER_HOSTNAMES": "localhost"}  # fmt: skip
    else:  # nothing can be timed without the device, and without its shape no kernel be tuned
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {flags}"
    return device


def _check_plugin(platform: str) -> None:
    """Raise ValueError unless JAX's compiler for `platform` is installed, in JAX's version."""
    make = f"make an environment with it: bash bench/environments.sh {platform} DIR"
    try:
        found = metadata.version(_PLUGINS[platform])
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"JAX cannot compile for {platform} here, for {_PLUGINS[platform]} is not installed; {make}"
        ) from None
    jax = metadata.version("jax")
    if platform == "cuda" and found != jax:
        raise ValueError(f"{_PLUGINS[platform]} is {found} and jax {jax}, which do not go together; {make}")


def topology(device: Device, count: int = 1) -> np.ndarray:
    """`count` devices that XLA can compile for, though none is here."""
    from jax.experimental import topologies

    if device.platform == "tpu":
        grid = _GRIDS.get(count)
        if grid is None:
            raise ValueError(f"There is no topology of {count} TPUs; there are those of {', '.join(map(str, _GRIDS))}.")
        name = f"{device.details}:{grid}"
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    else:
        name, shape = device.title, f"1x1x{count}"
        found = topologies.get_topology_desc(platform="cuda", topology_name=name, topology=shape,
                                             target_config=device.details)  # fmt: skip
    return np.array(found.devices[:count])
