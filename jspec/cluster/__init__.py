"""Decoding on more than one device or machine, with Ray."""

from jspec.cluster.batch.ray_data import complete
from jspec.cluster.resources import Resources
from jspec.cluster.serve.app import app

__all__ = ["Resources", "app", "complete"]
