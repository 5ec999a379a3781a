"""A checkpoint in memory."""

import dataclasses
from pathlib import Path
from typing import Any

from convert.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model's configuration and weights.

    Attributes:
        config: the configuration of the forward pass.
        params: the arrays by flat dotted name. Names and shapes are exactly those of `shapes(config)`, and all arrays
            have the same dtype.
        directory: the path that the checkpoint was read from: a directory with config.json and the tokenizer files,
            or a GGUF file.
    """

    config: LlamaConfig
    params: dict[str, Any]
    directory: Path
