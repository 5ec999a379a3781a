# pyright: strict, reportUnknownMemberType=false
"""What an acceptance rule is."""

from typing import ClassVar, Protocol

from jax import Array

from jspec.core.types import Draft, Verdict


class Rule(Protocol):
    """An acceptance rule: hashable, for it is part of the program.

    It is exact if the text it leads to has the target's law whatever the draft.

    Attributes:
        exact: whether the text has the target's law whatever the draft.
        shares_noise: whether drafts are drawn with the noise that the target draws its own tokens with.
        branches: whether it can judge a tree; one that does not say so is given chains only.
        independent: whether siblings must have been drawn independently of each other, from one law; a drafter says
            that of its own by an attribute `replacement`. One that draws otherwise is refused.
    """

    exact: ClassVar[bool]
    shares_noise: ClassVar[bool]
    branches: ClassVar[bool] = False
    independent: ClassVar[bool] = False

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        """What becomes of a round's draft.

        Args:
            keys: the requests' typed keys ``[B]``.
            start: ``int32[B]``, the position of the first drafted token.
            draft: tokens ``[B, K]`` and their laws ``[B, K, V]``.
            target_probs: ``float32[B, K + 1, V]``, the target's law at ``start``, ``start + 1``, ...; of a tree the law
                behind every node.
        """
        ...
