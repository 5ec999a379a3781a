"""Hand-written kernels for operations that XLA splits into many kernels, and the limits on their arguments.

A kernel is imported when a program that uses it is lowered, because importing Pallas takes a quarter of a second.
"""

from typing import Any, TypeAlias

# A reference to a part of an array within a kernel, for which Pallas has no public type.
Ref: TypeAlias = Any

# The limits on the arguments of `jspec.models.kernels.decode_attention.decode_attention`.
MAX_TOKENS = 16  # per pass; tensor cores multiply at least this many rows, so tiles are padded to this size
MAX_ROWS = 64  # queries per group; their sums are held in registers
HEAD_SIZES = (64, 128)

# The limit on the arguments of `jspec.models.kernels.cpu.masked_attention.attend`.
MAX_QUERIES = 512  # if every head has its own keys; with more queries, XLA's products are faster

# The limits on the arguments of `jspec.models.kernels.add_norm.project_add_norm`.
MAX_NORMS = 64  # rows; one processor norms each row
