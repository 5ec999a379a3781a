# pyright: reportIncompatibleVariableOverride=false
"""The base class of acceptance rules, and the adapter for rules that do not derive from it."""

import dataclasses
from typing import ClassVar, Protocol, cast

from jax import Array

from jspec.core.types import Adapter, Draft, Verdict


class Rule:
    """An acceptance rule. Rules are hashable, because they are static arguments of the program.

    A rule defines `exact`, `shares_noise` and `accept`. It need not derive from this class.

    Attributes:
        exact: whether the output follows the target's distribution for every draft.
        shares_noise: whether drafts are sampled with the same noise that the target uses to sample its own tokens.
        branches: whether the rule can verify a tree. By default, a rule verifies only chains.
        independent: whether siblings must be sampled independently of each other, from one distribution. A drafter
            declares with its `replacement` attribute that it samples them so. Trees from other drafters are rejected.
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
        raise NotImplementedError


class _RuleMethods(Protocol):
    """The attributes that a rule must have."""

    @property
    def exact(self) -> bool: ...

    @property
    def shares_noise(self) -> bool: ...

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict: ...


@dataclasses.dataclass(frozen=True)
class _DuckRule(Rule, Adapter):
    """The adapter around a rule that does not derive from `Rule`."""

    rule: _RuleMethods

    @property
    def original(self) -> object:
        return self.rule

    @property
    def exact(self) -> bool:
        return self.rule.exact

    @property
    def shares_noise(self) -> bool:
        return self.rule.shares_noise

    @property
    def branches(self) -> bool:
        return getattr(self.rule, "branches", False)

    @property
    def independent(self) -> bool:
        return getattr(self.rule, "independent", False)

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        return self.rule.accept(keys, start, draft, target_probs)


def as_rule(rule: object) -> Rule:
    """Return `rule` if it is a `Rule`; otherwise return an adapter around it."""
    return rule if isinstance(rule, Rule) else _DuckRule(cast(_RuleMethods, rule))
