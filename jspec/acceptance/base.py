# pyright: strict, reportUnknownMemberType=false
"""The protocol of acceptance rules."""

from typing import ClassVar, Protocol

from jax import Array

from jspec.core.types import Draft, Verdict


class Rule(Protocol):
    """An acceptance rule. It is hashable, because it is part of the program.

    A rule is exact if its text has the target's distribution for every draft.

    Attributes:
        exact: whether the text has the target's distribution for every draft.
        shares_noise: whether drafts are sampled with the noise that the target samples its own tokens with.
        branches: whether the rule can verify a tree; a rule without this attribute gets chains only.
        independent: whether siblings must be sampled independently of each other, from one distribution. A drafter
            declares that with its attribute `replacement`; a drafter that samples in another way is refused.
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
            draft: tokens ``[B, K]`` and their distributions ``[B, K, V]``.
            target_probs: ``float32[B, K + 1, V]``, the target's distribution at ``start``, ``start + 1``, ...; for a
                tree, the distribution after every node.
        """
        ...
