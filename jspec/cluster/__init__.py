"""Decoding on several devices or machines: replicas and batch jobs on Ray, and models across several processes."""

from jspec.cluster.batch.ray_data import complete
from jspec.cluster.mesh.checkpoints import load_on_mesh
from jspec.cluster.mesh.processes import join
from jspec.cluster.resources import Resources
from jspec.cluster.serve.app import app

__all__ = ["Resources", "app", "complete", "join", "load_on_mesh"]
