"""A checkpoint in memory."""

import dataclasses
from pathlib import Path
from typing import Any

from convert.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model's numbers.

    Attributes:
        config: what the forward pass needs.
        params: flat dotted name -> array, exactly the names and shapes of `shapes(config)`, all of one dtype.
        directory: where it was read from; config.json and the tokenizer's files are there, or in the GGUF file
            that it is.
    """

    config: LlamaConfig
    params: dict[str, Any]
    directory: Path
