"""Default values for a base class's optional attributes, which do not become defaults of a subclass's fields."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

Value = TypeVar("Value")

# An attribute that a subclass may define as a class attribute, a property or a field. Types cannot express this choice.
Declared: TypeAlias = Any

if TYPE_CHECKING:

    def default(compute: Callable[..., Value]) -> Declared: ...

else:

    class default(Generic[Value]):
        """A method that computes an attribute's default value from the instance.

        A subclass may define the attribute as a class attribute, a property or a dataclass field. If the base class
        declared it with a `property` or a plain class attribute, `dataclasses` would use that as the default of a field
        with the same name, and a required field would become optional. This descriptor therefore exists only on
        instances.
        """

        def __init__(self, compute: Callable[..., Value]) -> None:
            self._compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: object, owner: type) -> Value:
            if instance is None:
                raise AttributeError(f"{owner.__name__}.{self._name} exists only on instances.")
            if hasattr(owner, "__getattr__"):  # a wrapper may forward the attributes that it lacks
                with contextlib.suppress(AttributeError):
                    return owner.__getattr__(instance, self._name)
            return self._compute(instance)
