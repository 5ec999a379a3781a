# pyright: strict, reportUnknownMemberType=false
"""Ways to guess the next tokens. See `jspec.drafters.base` for the contract."""

from jspec.drafters.autoregressive import AutoregressiveDrafter
from jspec.drafters.base import Context, Drafter, Stateless
from jspec.drafters.blockwise import BlockwiseDrafter
from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.dynamic_tree import DynamicTreeDrafter
from jspec.drafters.eagle import EagleDrafter
from jspec.drafters.early_exit import EarlyExitDrafter
from jspec.drafters.fallback import FallbackDrafter
from jspec.drafters.horizontal import HorizontalDrafter
from jspec.drafters.hydra import HydraDrafter
from jspec.drafters.kangaroo import KangarooDrafter
from jspec.drafters.lookahead import LookaheadDrafter
from jspec.drafters.medusa import MedusaDrafter
from jspec.drafters.mixture import MixtureDrafter
from jspec.drafters.model import ModelDrafter
from jspec.drafters.multi import MultiDrafter
from jspec.drafters.ngram import NGramDrafter
from jspec.drafters.parallel_sampling import PassDrafter
from jspec.drafters.recycling import TokenRecyclingDrafter
from jspec.drafters.retrieval import RetrievalDrafter
from jspec.drafters.tables import BigramDrafter, UnigramDrafter
from jspec.drafters.tree import TreeDrafter
from jspec.tree import Level, Tree
from jspec.types import Draft

__all__ = [
    "AutoregressiveDrafter",
    "BigramDrafter",
    "BlockwiseDrafter",
    "CascadeDrafter",
    "Context",
    "Draft",
    "Drafter",
    "DynamicTreeDrafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "FallbackDrafter",
    "HorizontalDrafter",
    "HydraDrafter",
    "KangarooDrafter",
    "Level",
    "LookaheadDrafter",
    "MedusaDrafter",
    "MixtureDrafter",
    "ModelDrafter",
    "MultiDrafter",
    "NGramDrafter",
    "PassDrafter",
    "RetrievalDrafter",
    "Stateless",
    "TokenRecyclingDrafter",
    "Tree",
    "TreeDrafter",
    "UnigramDrafter",
]
