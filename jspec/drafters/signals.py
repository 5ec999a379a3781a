"""The signals that a drafter receives from the target, and support for methods that take them as separate arguments."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import jax
from jax import Array

from jspec.core.types import pytree
from jspec.drafters.former_names import as_named_by, to_current
from jspec.models.llama import Llama

Result = TypeVar("Result")


@pytree
class PromptSignals:
    """The target's hidden states at the prompts' tokens, for a drafter with `features`; otherwise all fields are None.

    Attributes:
        features: ``[B, P, F, E]``, the requested hidden states.
        lengths: ``int32[B]``, the prompts' lengths; None in `Drafter.read`, which receives `count` instead.
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
        """`lengths`, which is never None in the `init` of a drafter that requests features."""
        assert self.lengths is not None, "init receives the lengths with the features"
        return self.lengths

    def for_part(self, features: tuple[int, ...], wanted: tuple[int, ...]) -> Self:
        """Select the signals for a part that requests the hidden states `wanted`, which are among `features`."""
        if not wanted:
            return dataclasses.replace(self, features=None, lengths=None, target=None)
        return dataclasses.replace(self, features=_columns(self.features, features, wanted))

    @property
    def arguments(self) -> tuple[tuple[Array, ...], dict[str, Array | Llama]]:
        """The signals that are not None, as positional and keyword arguments."""
        return (), _given(features=self.features, lengths=self.lengths, target=self.target)


NO_SIGNALS = PromptSignals()


@pytree
class TargetSignals:
    """The verifying model's output over a draft, at node 0 and every draft token. Fields not requested are None.

    Attributes:
        hidden: ``[B, N + 1, E]``, the hidden states before the final norm.
        features: ``[B, N + 1, F, E]``, the hidden states that a drafter's `features` request.
        top_tokens: ``int32[B, N + 1, n]``, the most likely next tokens in descending order, for a drafter with
            `num_top_tokens`. If the vocabulary has V < n tokens, the last axis has only V entries.
        target: the target, for a drafter with `features`.
    """

    hidden: Array
    features: Array | None = None
    top_tokens: Array | None = None
    target: Llama | None = None

    @property
    def likeliest(self) -> Array | None:
        """The former name of `top_tokens`, for drafters that still use it."""
        return self.top_tokens

    def states(self) -> tuple[Array, Llama]:
        """Return `features` and `target`, for a drafter that requests features."""
        return _requested(self.features, self.target)

    def for_part(self, features: tuple[int, ...], wanted: tuple[int, ...], num_top_tokens: int) -> Self:
        """Select the signals for a part that requests `wanted` and `num_top_tokens`. See `PromptSignals.for_part`."""
        top_tokens = None if self.top_tokens is None or not num_top_tokens else self.top_tokens[..., :num_top_tokens]
        if not wanted:
            return dataclasses.replace(self, features=None, top_tokens=top_tokens, target=None)
        return dataclasses.replace(self, features=_columns(self.features, features, wanted), top_tokens=top_tokens)

    def map(self, select: Callable[[Array], Array]) -> Self:
        """Apply `select`, which picks nodes, to all arrays ``[B, N + 1, ...]``."""
        features, top_tokens, hidden = jax.tree.map(select, (self.features, self.top_tokens, self.hidden))
        return dataclasses.replace(self, hidden=hidden, features=features, top_tokens=top_tokens)

    @property
    def arguments(self) -> tuple[tuple[Array, ...], dict[str, Array | Llama]]:
        """`hidden` as a positional argument, and the other signals that are not None as keyword arguments."""
        return (self.hidden,), _given(features=self.features, top_tokens=self.top_tokens, target=self.target)


def _requested(features: Array | None, target: Llama | None) -> tuple[Array, Llama]:
    assert features is not None and target is not None, "a drafter with features receives both"
    return features, target


def _columns(values: Array | None, features: tuple[int, ...], wanted: tuple[int, ...]) -> Array | None:
    """Return the entries of ``values[B, S, F, E]`` for the layers `wanted`, a subset of the layers `features`."""
    if values is None or wanted == features:
        return values
    return values[:, :, [features.index(i) for i in wanted]]


def _given(**signals: Array | Llama | None) -> dict[str, Array | Llama]:
    return {name: each for name, each in signals.items() if each is not None}


def taking_signals(method: Callable[..., Result], name: str) -> Callable[..., Result]:
    """Wrap `method`, a drafter's `init`, `read` or `commit`, so that it can be called in either form.

    In the first form, the last argument is `signals`. In the second, the method receives what it requests as separate
    arguments: ``hidden``, ``features``, ``lengths``, ``top_tokens`` and ``target``. A method has the first form if it
    has a parameter `signals`, and otherwise the second. A call in the other form is translated. `name` is the method's
    name.
    """
    parameter = inspect.signature(method).parameters.get("signals")

    @functools.wraps(method)
    def in_both_forms(*args: object, **kwargs: object) -> Result:
        if "signals" not in kwargs and not (args and isinstance(args[-1], PromptSignals | TargetSignals)):
            if parameter is None:
                return method(*args, **as_named_by(method, kwargs))
            args, kwargs = _packed(name, args, to_current(kwargs))
        *others, signals = args if "signals" not in kwargs else (*args, kwargs.pop("signals"))
        if parameter is None:
            more, requested = cast(PromptSignals | TargetSignals, signals).arguments
            return method(*others, *more, **kwargs, **as_named_by(method, requested))
        if kwargs or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            return method(*others, **kwargs, signals=signals)
        return method(*others, signals, **kwargs)

    return in_both_forms


def _packed(
    name: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of the method called `name`, with all signals packed into one argument, ``signals``."""
    kind = TargetSignals if name == "commit" else PromptSignals
    fields = [field.name for field in dataclasses.fields(kind)]
    requested: dict[str, Any] = {key: kwargs[key] for key in kwargs if key in fields}
    if kind is TargetSignals and "hidden" not in requested:
        requested["hidden"], args = args[-1], args[:-1]
    others = {key: value for key, value in kwargs.items() if key not in fields}
    return args, others | {"signals": kind(**requested)}


class TakingSignals:
    """A descriptor for a drafter's method, of any kind, that makes it callable in both forms (`taking_signals`).

    Args:
        attribute: a function, or any other object that a class may hold in place of a method. If None, the
            method is looked up in the classes after `owner` in the method resolution order, as ``super`` does.
        owner: the class that holds this object.
        name: the method's name in that class.
    """

    def __init__(self, attribute: Any, owner: type, name: str) -> None:
        self._attribute, self._owner, self._name = attribute, owner, name

    def __get__(self, instance: object, owner: type) -> Any:
        method = self._method(instance, owner)
        # A property is not callable if it is read from the class.
        return taking_signals(method, self._name) if callable(method) else method

    def _method(self, instance: object, owner: type) -> object:
        if self._attribute is None:
            inherited = cast(object, super(self._owner, cast(Any, owner if instance is None else instance)))
            return getattr(inherited, self._name)
        attribute: Any = self._attribute
        return attribute.__get__(instance, owner) if hasattr(attribute, "__get__") else attribute
