"""Resources of Ray processes, and checks that the cluster has them."""

import dataclasses
from importlib.util import find_spec
from typing import Any, cast

_NEEDED = "ray", "fastapi", "uvicorn", "starlette", "pandas", "pyarrow"


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resources that one process reserves in the Ray cluster.

    Attributes:
        cpus: the number of CPU cores.
        gpus: the number of GPUs. With a fraction, several processes share a GPU, and each may use this share of
            its memory.
        tpus: the number of TPU chips.
    """

    cpus: float = 1
    gpus: float = 0
    tpus: float = 0

    def actor_options(self) -> dict[str, Any]:
        """Return Ray's options for an actor with these resources. Without an accelerator, it sees only the CPU."""
        environment = dict[str, str]()
        if 0 < self.gpus < 1:
            environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 * self.gpus:.2f}"
        if not (self.gpus or self.tpus):
            environment["JAX_PLATFORMS"] = "cpu"  # Ray does not hide accelerators from actors that reserve none
        others = {"resources": {"TPU": self.tpus}} if self.tpus else {}
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "runtime_env": {"env_vars": environment}} | others


def require_ray() -> None:
    """Check that Ray is installed, with Ray Serve and Ray Data.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if any(find_spec(name) is None for name in _NEEDED):
        raise ModuleNotFoundError(
            'jspec.cluster needs Ray; install jspec\'s ray extra by running pip install -e ".[ray]" in its clone.'
        )


def default_resources() -> Resources:
    """Return one GPU or one TPU chip if the running Ray cluster has any, and otherwise one CPU core.

    Raises:
        ValueError: this process is not connected to a cluster.
    """
    total = _total()
    if not total:
        raise ValueError("No Ray cluster is connected; call ray.init() first, or pass resources.")
    return Resources(gpus=1) if total.get("GPU") else Resources(tpus=1 if total.get("TPU") else 0)


def check_resources(count: int, resources: Resources, free_cpus: int = 0) -> None:
    """Check that the running Ray cluster, if any, is large enough for `count` processes.

    Args:
        free_cpus: the number of CPU cores that must stay free.

    Raises:
        ValueError: the cluster is too small.
    """
    total = _total()
    for name, each, free in (
        ("CPU", resources.cpus, free_cpus),
        ("GPU", resources.gpus, 0),
        ("TPU", resources.tpus, 0),
    ):
        if total and count * each + free > total.get(name, 0):
            rest = f" and {free} for reading the dataset" if free else ""
            raise ValueError(
                f"The Ray cluster has {total.get(name, 0):g} {name}s, but {count} x {each:g}{rest} are needed; use "
                "fewer replicas or workers, smaller Resources, or a larger cluster."
            )


def _total() -> dict[str, float]:
    """Return the resources of the Ray cluster, or an empty dict if this process is not connected to a cluster."""
    import ray

    return cast(dict[str, float], ray.cluster_resources()) if ray.is_initialized() else {}
