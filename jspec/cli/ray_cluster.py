"""The Ray cluster of a command."""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from jspec.cli.common import UsageError


@contextmanager
def ray_cluster(option: str) -> Generator[None]:
    """Connect to the Ray cluster that RAY_ADDRESS names, or start one on this machine until the block ends.

    Args:
        option: the option that needs Ray, for error messages.

    Raises:
        UsageError: Ray is not installed.
    """
    from jspec.cluster.resources import require_ray

    try:
        require_ray()
    except ModuleNotFoundError as error:
        raise UsageError(f"{option}: {error}") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage statistics to its developers
    import ray

    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {} if address else {"include_dashboard": False}
    ray.init(address or "local", logging_level=logging.ERROR, log_to_driver=False, **options)
    try:
        yield
    finally:
        ray.shutdown()
