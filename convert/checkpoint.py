"""A checkpoint in memory."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from convert.config import LlamaConfig

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model's configuration and weights.

    Attributes:
        config: the configuration of the forward pass.
        params: the arrays, keyed by flat dotted name. Names and shapes are exactly those of `shapes(config)`, and all
            arrays have the same dtype.
        directory: the path that the checkpoint was read from: a directory with config.json and the tokenizer files,
            or a GGUF file.
    """

    config: LlamaConfig
    params: "Mapping[str, np.ndarray | jax.Array]"
    directory: Path
