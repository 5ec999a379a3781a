# pyright: reportUnnecessaryIsInstance=false
"""Self-drafting: some of the target's own layers draft for the full target."""

import dataclasses
import functools
import numbers
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from jspec.core.tree import Branches, Level, Tree
from jspec.core.types import check_count
from jspec.drafters.base import Context
from jspec.drafters.drafts import last_tokens
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.models.kv_cache import KVCache


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["num_layers", "skipped"])
@dataclasses.dataclass(frozen=True)
class EarlyExitDrafter(AutoregressiveDrafter[tuple[()], tuple[KVCache, Array]]):
    """A drafter that runs the target's first layers and its head, and has no weights or cache of its own.

    It reads the target's cache of the sequence. The draft's own keys and values are stored separately until the round
    ends. Early exit follows Elhoushi et al. 2024, LayerSkip; `skipped` follows Zhang et al. 2024, Draft & Verify. If a
    model was not trained for early exit, its draft agrees with the full model only if few layers are left out.

    Attributes:
        num_layers: the number of initial layers to run; at most the target's number of layers.
        skipped: the indices of the initial layers to skip.
    """

    num_layers: int
    skipped: tuple[int, ...] = ()
    vocab_size = None

    def __post_init__(self) -> None:
        check_count("num_layers", self.num_layers)
        if not isinstance(self.skipped, Iterable):
            raise ValueError(f"skipped must be layer indices, such as (3, 5); got {self.skipped!r}.")
        object.__setattr__(self, "skipped", tuple(self.skipped))
        for i in self.skipped:
            if isinstance(i, bool) or not isinstance(i, numbers.Integral) or not 0 <= i < self.num_layers:
                raise ValueError(f"skipped holds {i!r}; expected layer indices from 0 to {self.num_layers - 1}.")
        if not self.layers:
            raise ValueError(f"skipped leaves none of the {self.num_layers} layers; skip fewer layers.")

    @property
    def layers(self) -> tuple[int, ...]:
        """The indices of the layers to run."""
        return tuple(i for i in range(self.num_layers) if i not in self.skipped)

    def begin(self, state: tuple[()], context: Context, tree: Tree) -> tuple[Array, tuple[KVCache, Array]]:
        """Read the tokens that the target has not read yet.

        The carry is a small cache and the position of its first slot.
        """
        view = context.target
        check_layers(view.model, type(self).__name__)
        depth = len(view.model.layers)
        if self.num_layers > depth:
            raise ValueError(
                f"EarlyExitDrafter has num_layers={self.num_layers}, but its target, a "
                f"{type(view.model).__name__}, has only {depth} layers; use at most that many."
            )
        block, start, last = last_tokens(context.tokens, context.lengths, view.unread)
        own = view.model.new_cache(context.lengths.size, view.unread + tree.size - 1)
        hidden, own = run_layers(self.layers, block, own, start, start, context)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        return view.model.logits(hidden)[:, 0], (own, start)

    def extend(
        self, carry: tuple[KVCache, Array], tokens: Array, level: Level, context: Context
    ) -> tuple[Array, tuple[KVCache, Array]]:
        own, start = carry
        at = level.start(context.lengths)
        hidden, own = run_layers(self.layers, tokens, own, at, start, context, level.branches)
        return context.target.model.logits(hidden), (own, start)


def run_layers(
    layers: Sequence[int],
    tokens: Array,
    own: KVCache,
    at: Array,
    start: Array,
    context: Context,
    branches: Branches | None = None,
) -> tuple[Array, KVCache]:
    """Run some of the target's layers. Return the last layer's output ``[B, S, E]``, and the updated `own`.

    `own` is a cache that holds only tokens that the target has not read.

    Args:
        tokens: ``int32[B, S]``, which start at position ``at[B]`` (`jspec.Llama.forward`).
        start: ``int32[B]``, the position of the first slot of `own`. The target's cache holds all earlier positions.
    """
    view = context.target
    return view.model.forward(tokens, own, at, layers=layers, past=(view.cache, start), **Branches.argument(branches))


def check_layers(model: object, user: str) -> None:
    """Raise TypeError unless `model` has layers that can be run one by one, as `user` requires."""
    if not hasattr(model, "layers"):
        raise TypeError(
            f"{user} runs the layers of a jspec.Llama, but {type(model).__name__} has no `layers`; use another drafter."
        )
