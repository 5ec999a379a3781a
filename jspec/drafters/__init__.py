"""Ways to guess the next tokens. See `jspec.drafters.base` for the contract."""

from jspec.drafters.base import Context, Drafter
from jspec.drafters.model import ModelDrafter

__all__ = ["Context", "Drafter", "ModelDrafter"]
