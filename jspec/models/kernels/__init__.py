"""Hand-written kernels for operations that XLA splits into many kernels, and the limits of their arguments.

The kernels are imported when a program that has one is lowered, because importing Pallas takes a quarter of a second.
"""

# The limits of `jspec.models.kernels.decode_attention.decode_attention`.
MAX_TOKENS = 16  # in a pass; tensor cores multiply at least as many, so tiles are padded to it
MAX_ROWS = 64  # queries of one group, whose sums are held in registers
HEAD_SIZES = (64, 128)

# The limits of `jspec.models.kernels.add_norm.project_add_norm`.
MAX_NORMS = 64  # rows; one processor norms each row
