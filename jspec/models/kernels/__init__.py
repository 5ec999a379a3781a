"""Hand-written kernels for operations that XLA splits into many kernels, and the limits on their arguments.

A kernel is imported when a program that uses it is lowered, because importing Pallas takes a quarter of a second.
"""

from typing import Any, NamedTuple, TypeAlias

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


class AttentionForm(NamedTuple):
    """The constants of `jspec.models.kernels.decode_attention.decode_attention`.

    Attributes:
        heads, groups, size: H, G and D. D is 64 or 128, and ``R H / G`` is at most 64.
        eps: the constant of the norms of queries and keys.
        causal: whether each new token attends only to itself and the tokens before it, instead of to all new tokens.
    """

    heads: int
    groups: int
    size: int
    eps: float = 0.0
    causal: bool = True

    @classmethod
    def of(cls, form: "AttentionForm | tuple[int, int, int]") -> "AttentionForm":
        """Return `form`, or the form with these sizes and the default constants."""
        return form if isinstance(form, AttentionForm) else cls(*form)
