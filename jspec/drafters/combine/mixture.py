"""A drafter that draws from a weighted mean of two drafters' distributions."""

import numbers
from collections.abc import Iterator
from typing import Protocol, SupportsFloat, TypeGuard, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jspec.core.tree import Level, Tree
from jspec.core.types import PyTree, passed, pytree
from jspec.drafters.base import Context, declared, kind_of
from jspec.drafters.combine.base import Pair, PairDrafter
from jspec.drafters.drafts import fit_vocabulary
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter


class _TokenByToken(Protocol):
    """The methods that a mixture calls on its parts. See `jspec.drafters.AutoregressiveDrafter`."""

    def begin(self, state: PyTree, context: Context, tree: Tree) -> tuple[Array, PyTree]: ...

    def extend(self, carry: PyTree, tokens: Array, level: Level, context: Context) -> tuple[Array, PyTree]: ...

    def end(self, carry: PyTree) -> PyTree: ...

    def keep(self, state: PyTree, start: Array, path: Array) -> PyTree: ...


@pytree
class MixtureDrafter(PairDrafter, AutoregressiveDrafter[Pair, Pair]):
    """A drafter that draws every token from a mixture of two drafters or models: ``w * first + (1 - w) * second``.

    The distributions are mixed at temperature 1, and the sampling transforms then act on the mixture. If one part
    proposes nothing, the other part's distribution is used. Both parts must return their distributions token by token
    (`jspec.drafters.AutoregressiveDrafter`), because each part must continue after a token that the other may have
    preferred.

    Attributes:
        weight: w, a number between 0 and 1. It is traced, so a new value causes no recompilation.
    """

    weight: ArrayLike

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, part in zip(("first", "second"), self.parts, strict=True):
            if declared(part) is part and not part.is_token_by_token:
                raise TypeError(
                    f"{name} is of type {kind_of(part)}, which does not provide its distribution token by "
                    "token, as a mixture needs; use a jspec.drafters.AutoregressiveDrafter, or combine the two "
                    "in a FallbackDrafter."
                )
        if isinstance(self.weight, numbers.Real | str):
            _check_weight(self.weight)
            object.__setattr__(self, "weight", np.float32(self.weight))  # one dtype, so one compiled program

    @property
    def unrolled(self) -> bool:
        """Whether at least one part is unrolled."""
        return any(declared(part).unrolled for part in self.parts)

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary size, as in `PairDrafter`.

        This property also checks the weight, because JAX may store any object in its place during pytree operations.
        """
        _check_weight(self.weight)
        return super().vocab_size

    def begin(self, state: Pair, context: Context, tree: Tree) -> tuple[Array, Pair]:
        """Call `begin` on both parts, and mix their logits."""
        first, second = (part.begin(own, context, tree) for part, own in self._parts(state))
        return self._mix(first[0], second[0], context), (first[1], second[1])

    def extend(self, carry: Pair, tokens: Array, level: Level, context: Context) -> tuple[Array, Pair]:
        """Read the tokens with both parts, regardless of which part proposed them, and mix the parts' logits."""
        first, second = (part.extend(own, tokens, level, context) for part, own in self._parts(carry))
        return self._mix(first[0], second[0], context), (first[1], second[1])

    def end(self, carry: Pair) -> Pair:
        first, second = (part.end(own) for part, own in self._parts(carry))
        return first, second

    def keep(self, state: Pair, start: Array, path: Array) -> Pair:
        first, second = (part.keep(own, start, path) for part, own in self._parts(state))
        return first, second

    def _parts(self, states: Pair) -> Iterator[tuple[_TokenByToken, PyTree]]:
        first, second = (cast(_TokenByToken, passed(part)) for part in self.parts)
        return zip((first, second), states, strict=True)

    def _mix(self, first: Array, second: Array, context: Context) -> Array:
        first, second = (fit_vocabulary(part, context.vocab_size) for part in (first, second))
        weight = jnp.asarray(self.weight, jnp.float32)
        log_probs = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
        mixed = jnp.logaddexp(jnp.log(weight) + log_probs[0], jnp.log1p(-weight) + log_probs[1])
        silent = (~jnp.isfinite(part.max(-1, keepdims=True)) for part in (first, second))
        return jnp.where(next(silent), second, jnp.where(next(silent), first, mixed))


def _check_weight(weight: object) -> None:
    """Raise ValueError unless `weight` is a number between 0 and 1. A traced `weight` only has to be a scalar."""
    if isinstance(weight, jax.core.Tracer):
        is_valid = weight.shape == ()
    else:
        is_valid = _is_numeric(weight) and np.shape(cast(ArrayLike, weight)) == () and 0 <= float(weight) <= 1
    if not is_valid:
        raise ValueError(f"weight must be one number between 0 and 1; got {weight!r}.")


def _is_numeric(value: object) -> TypeGuard[SupportsFloat]:
    return not isinstance(value, bool) and isinstance(value, numbers.Real | np.ndarray | jax.Array)
