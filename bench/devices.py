"""Devices for which programs can be compiled without the hardware."""

import os
from importlib import metadata

import numpy as np

from jspec.core.devices import DEVICES, Device

# The GPU description that XLA needs, in XLA's own format (xla/tools/hlo_opt/gpu_specs).
_TARGET = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: {shared} threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {units}
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth:.0f}
l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory:.0f} shared_memory_per_block_optin: {optin}
cuda_compute_capability {{ major: {major} minor: {minor} }} registers_per_core_limit: 65536
registers_per_block_limit: 65536 }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }} device_description_str: "{title}" """
_FIELDS = ("shared", "threads", "cores", "units", "l2", "clock", "optin", "major", "minor")
_HOPPER = (233472, 2048, 132, 128, 52428800, 1.98, 232448, 9, 0)
_CHIPS = {
    "NVIDIA H200": _HOPPER,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA A100-SXM4-80GB": (167936, 2048, 108, 64, 41943040, 1.41, 166912, 8, 0),
    "NVIDIA L4": (102400, 1536, 58, 128, 50331648, 2.04, 101376, 8, 9),
    "Tesla T4": (65536, 1024, 40, 64, 4194304, 1.59, 65536, 7, 5),
}
_PLUGINS = {"cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin"), "tpu": ("libtpu",)}  # any of these packages suffices
_TOPOLOGIES = {"TPU v5e": "v5e", "TPU v6e": "v6e"}
_GRIDS = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4"}  # TPU grids; the smallest topology has four chips


def prepare(name: str) -> Device:
    """Return the device with this name, and set the environment variables that JAX needs before it starts.

    Raises:
        ValueError: the device is unknown, or JAX cannot compile for it here. In the second case, the message names the
            command that sets up a compiler.
    """
    if name not in DEVICES:
        raise ValueError(f"There is no device {name!r} to compile for; choose from {', '.join(DEVICES)}.")
    device = DEVICES[name]
    _check_plugin(device.platform)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if device.platform == "tpu":
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
        os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    else:  # without the device, nothing can be timed, so kernels cannot be tuned
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {flags}"
    return device


def _check_plugin(platform: str) -> None:
    """Raise ValueError unless JAX's compiler for `platform` is installed, in JAX's version."""
    make = f"create an environment with it: bash bench/environments.sh {platform} DIR"
    found = {plugin: version for plugin in _PLUGINS[platform] if (version := _version(plugin))}
    if not found:
        raise ValueError(
            f"JAX cannot compile for {platform} here, because {_PLUGINS[platform][0]} is not installed; {make}"
        )
    jax = metadata.version("jax")
    if platform == "cuda" and jax not in found.values():
        plugin, version = next(iter(found.items()))
        raise ValueError(f"{plugin} is {version} and jax is {jax}, which are incompatible; {make}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def topology(device: Device, count: int = 1) -> np.ndarray:
    """Return `count` absent devices that XLA can compile for."""
    from jax.experimental import topologies

    if device.platform == "tpu":
        grid = _GRIDS.get(count)
        if grid is None:
            raise ValueError(f"There is no topology of {count} TPUs; choose from {', '.join(map(str, _GRIDS))}.")
        name = f"{_TOPOLOGIES[device.title]}:{grid}"
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    else:
        chip = dict(zip(_FIELDS, _CHIPS[device.title], strict=True))
        target = _TARGET.format(title=device.title, bandwidth=device.bandwidth, memory=device.memory, **chip)
        found = topologies.get_topology_desc(
            platform="cuda", topology_name=device.title, topology=f"1x1x{count}", target_config=target
        )
    return np.array(found.devices[:count])
