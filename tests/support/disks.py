"""Helpers for the tests of `convert.save` and others."""

import resource
from contextlib import contextmanager


@contextmanager
def small_disk(limit: int):
    """Limit files to `limit` bytes, which looks like a full disk to the writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
