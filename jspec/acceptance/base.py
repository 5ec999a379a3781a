# pyright: strict, reportUnknownMemberType=false
"""The protocol of acceptance rules."""

from typing import ClassVar, Protocol

from jax import Array

from jspec.core.types import Draft, Verdict


class Rule(Protocol):
    """An acceptance rule. It is hashable, because it is a static argument of the program.

    Attributes:
        exact: whether the output follows the target's distribution for every draft.
        shares_noise: whether drafts are sampled with the same noise that the target uses to sample its own tokens.
        branches: whether the rule can verify a tree. A rule without this attribute gets chains only.
        independent: whether siblings must be sampled independently of each other, from one distribution. A drafter
            declares that with its attribute `replacement`. A drafter that samples in any other way is rejected.
    """

    exact: ClassVar[bool]
    shares_noise: ClassVar[bool]
    branches: ClassVar[bool] = False
    independent: ClassVar[bool] = False

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        """Verify a round's draft.

        Args:
            keys: the requests' typed keys ``[B]``.
            start: ``int32[B]``, the position of the first drafted token.
            draft: draft tokens ``[B, K]`` and their distributions ``[B, K, V]``.
            target_probs: ``float32[B, K + 1, V]``, the target's distribution at ``start``, ``start + 1``, ... For a
                tree, the target's distribution after every node.
        """
        ...
