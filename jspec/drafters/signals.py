"""What a drafter receives from the target, and the older form of methods that take it as separate arguments."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Self, TypeVar, cast

import jax
from jax import Array

from jspec.core.types import pytree
from jspec.models.llama import Llama

Result = TypeVar("Result")


@pytree
class PromptSignals:
    """The target's states over prompts, for a drafter with `features`. All fields are None for other drafters.

    Attributes:
        features: ``[B, P, F, E]``, the requested hidden states at the prompts' tokens.
        lengths: ``int32[B]``, the prompts' lengths; None in `Drafter.read`, which receives them as `count`.
        target: the target.
    """

    features: Array | None = None
    lengths: Array | None = None
    target: Llama | None = None

    def states(self) -> tuple[Array, Llama]:
        """Return `features` and `target`, for a drafter that requests features."""
        return _requested(self.features, self.target)

    @property
    def known_lengths(self) -> Array:
        """`lengths`, in `init` of a drafter that requests features."""
        assert self.lengths is not None, "init receives them with the features"
        return self.lengths

    def for_part(self, features: tuple[int, ...], wanted: tuple[int, ...]) -> Self:
        """Return the signals of a part with features `wanted`, from those of its combined drafter."""
        if not wanted:
            return dataclasses.replace(self, features=None, lengths=None, target=None)
        return dataclasses.replace(self, features=_columns(self.features, features, wanted))

    @property
    def arguments(self) -> tuple[tuple[Array, ...], dict[str, Array | Llama]]:
        """The signals as positional and keyword arguments: only those that are not None."""
        return (), _given(features=self.features, lengths=self.lengths, target=self.target)


NO_SIGNALS = PromptSignals()


@pytree
class TargetSignals:
    """The verifying model's output over a draft, at node 0 and every draft token. None where it was not requested.

    Attributes:
        hidden: ``[B, N + 1, E]``, the hidden states before the final norm.
        features: ``[B, N + 1, F, E]``, the hidden states that a drafter's `features` request.
        likeliest: ``int32[B, N + 1, n]``, the most likely next tokens, the most likely first, if a drafter has
            `num_likeliest`. If the vocabulary has V < n tokens, there are V of them.
        target: the target, for a drafter with `features`.
    """

    hidden: Array
    features: Array | None = None
    likeliest: Array | None = None
    target: Llama | None = None

    def states(self) -> tuple[Array, Llama]:
        """Return `features` and `target`, for a drafter that requests features."""
        return _requested(self.features, self.target)

    def for_part(self, features: tuple[int, ...], wanted: tuple[int, ...], num_likeliest: int) -> Self:
        """Return the signals of a part that requests these, from those of its combined drafter."""
        likeliest = None if self.likeliest is None or not num_likeliest else self.likeliest[..., :num_likeliest]
        if not wanted:
            return dataclasses.replace(self, features=None, likeliest=likeliest, target=None)
        mine = _columns(self.features, features, wanted)
        return dataclasses.replace(self, features=mine, likeliest=likeliest)

    def map(self, select: Callable[[Array], Array]) -> Self:
        """Apply `select`, which picks nodes, to all arrays ``[B, N + 1, ...]``."""
        features, likeliest, hidden = jax.tree.map(select, (self.features, self.likeliest, self.hidden))
        return dataclasses.replace(self, hidden=hidden, features=features, likeliest=likeliest)

    @property
    def arguments(self) -> tuple[tuple[Array, ...], dict[str, Array | Llama]]:
        """The signals as positional and keyword arguments: `hidden`, and those of the others that are not None."""
        return (self.hidden,), _given(features=self.features, likeliest=self.likeliest, target=self.target)


def _requested(features: Array | None, target: Llama | None) -> tuple[Array, Llama]:
    assert features is not None and target is not None, "a drafter with features receives both"
    return features, target


def _columns(values: Array | None, features: tuple[int, ...], wanted: tuple[int, ...]) -> Array | None:
    """Return the entries of ``values[B, S, F, E]`` for the layers `wanted`, out of `features`."""
    if values is None or wanted == features:
        return values
    return values[:, :, [features.index(i) for i in wanted]]


def _given(**signals: Array | Llama | None) -> dict[str, Array | Llama]:
    return {name: each for name, each in signals.items() if each is not None}


def taking_signals(method: Callable[..., Result]) -> Callable[..., Result]:
    """Return a drafter's `init`, `read` or `commit` as a method whose last argument is `signals`.

    A method without a parameter of that name takes what it requests as separate arguments: `hidden` by position,
    ``features``, ``lengths``, ``likeliest`` and ``target`` by name. It can still be called so.
    """
    if "signals" in inspect.signature(method).parameters:
        return method

    @functools.wraps(method)
    def adapted(*args: object, **kwargs: object) -> Result:
        if args and isinstance(args[-1], PromptSignals | TargetSignals):
            more, named = args[-1].arguments
            return method(*args[:-1], *more, **named)
        return method(*args, **kwargs)

    return adapted


def attribute_taking_signals(attribute: object) -> object:
    """Return an attribute of a class: a method, also a static one or one of the class, as `taking_signals` does."""
    if isinstance(attribute, staticmethod | classmethod):
        wrapped = cast("staticmethod[..., object]", attribute)
        return type(wrapped)(taking_signals(wrapped.__func__))
    return taking_signals(attribute) if callable(attribute) else attribute
