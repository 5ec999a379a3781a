"""Helpers for the engine's device tests and others."""

import math
import re


def copies_of_a_cache(program, config, rows):
    """Return how many of a program's arrays have the size of a layer's keys for `rows` rows, and which are copies."""
    size = config.num_key_value_heads * config.head_dim * rows
    shapes = re.findall(r"= (\w+\[[\d,]*\])\S* ([\w\-]+)\(", program)
    dims = [[*map(int, re.findall(r"\d+", shape[shape.index("[") :]))] for shape, _ in shapes]
    of_cache = [one for one, its in zip(shapes, dims, strict=True) if math.prod(its) == size and len(its) == 4]
    return len(of_cache), [one for one in of_cache if one[1] in ("copy", "copy-start", "transpose", "concatenate")]
