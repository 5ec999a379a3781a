"""Drafters, which propose tokens for the target model to verify. See `jspec.drafters.base` for the contract."""

from jspec.core.tree import Level, Tree
from jspec.core.types import Draft
from jspec.drafters.base import Context, Drafter, Stateless
from jspec.drafters.combine.cascade import CascadeDrafter
from jspec.drafters.combine.fallback import FallbackDrafter
from jspec.drafters.combine.horizontal import HorizontalDrafter
from jspec.drafters.combine.mixture import MixtureDrafter
from jspec.drafters.combine.multi import MultiDrafter
from jspec.drafters.draft_vocabulary import frequent_tokens
from jspec.drafters.heads.block_drafter import BlockDrafter
from jspec.drafters.heads.blockwise import BlockwiseDrafter
from jspec.drafters.heads.eagle import EagleDrafter
from jspec.drafters.heads.hydra import HydraDrafter
from jspec.drafters.heads.kangaroo import KangarooDrafter
from jspec.drafters.heads.medusa import MedusaDrafter
from jspec.drafters.heads.parallel_sampling import PassDrafter
from jspec.drafters.signals import PromptSignals, TargetSignals
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.drafters.standalone.early_exit import EarlyExitDrafter
from jspec.drafters.standalone.lookahead import LookaheadDrafter
from jspec.drafters.standalone.model import ModelDrafter
from jspec.drafters.standalone.ngram import NGramDrafter
from jspec.drafters.standalone.recycling import TokenRecyclingDrafter
from jspec.drafters.standalone.retrieval import RetrievalDrafter
from jspec.drafters.standalone.tables import BigramDrafter, UnigramDrafter
from jspec.drafters.trees.dynamic import DynamicTreeDrafter
from jspec.drafters.trees.static import TreeDrafter

__all__ = [
    "AutoregressiveDrafter",
    "BigramDrafter",
    "BlockDrafter",
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
    "PromptSignals",
    "RetrievalDrafter",
    "Stateless",
    "TargetSignals",
    "TokenRecyclingDrafter",
    "Tree",
    "TreeDrafter",
    "UnigramDrafter",
    "frequent_tokens",
]
