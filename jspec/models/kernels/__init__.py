"""Kernels written by hand for what XLA leaves in many pieces, and the arguments that they are made for.

They are imported where a program is lowered that has one: Pallas takes a quarter of a second to import.
"""

# Of `jspec.models.kernels.decode_attention.decode_attention`.
MAX_TOKENS = 16  # in a pass; tensor cores multiply no fewer, so tiles are filled up to it
MAX_ROWS = 64  # queries of one group, whose sums are held in registers
HEAD_SIZES = (64, 128)

# Of `jspec.models.kernels.add_norm.project_add_norm`.
MAX_NORMS = 64  # rows, each of which one processor norms
