"""Acceptance rules, which map a draft and the target's distributions to a verdict. All rules in `RULES` are exact."""

from jspec.acceptance.base import Rule
from jspec.acceptance.block import Block
from jspec.acceptance.coupled import Coupled
from jspec.acceptance.k_seq import KSeq
from jspec.acceptance.rejection import Rejection
from jspec.acceptance.traversal import Traversal

RULES: dict[str, Rule] = {
    "rejection": Rejection(),
    "block": Block(),
    "coupled": Coupled(),
    "traversal": Traversal(),
    "k-seq": KSeq(),
}
