# pyright: reportUnknownVariableType=false
"""Results that support forward-mode differentiation only, with a clear error in reverse mode."""

from typing import NoReturn

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_ERROR = (
    "Log-probabilities of generated tokens have no reverse-mode derivative, which jax.grad needs, because the "
    "decoding loop has no fixed number of steps; differentiate jspec.logprobs of the finished texts, which "
    "Output.with_prompts returns."
)


@jax.custom_jvp
def forward_mode_only(x: Array) -> Array:
    """Return `x` unchanged, but raise ValueError if it is differentiated in reverse mode.

    Without this function, the error raised by `jax.grad` would name the decoding loop, which is internal.
    """
    return x


@forward_mode_only.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], _tangent_p.bind(tangents[0])


def _refuse(*_: object) -> NoReturn:
    raise ValueError(_ERROR)


# The identity, applied to tangents only. Reverse mode starts by transposing it.
_tangent_p = Primitive("forward_mode_only")
_tangent_p.def_impl(lambda x: x)
_tangent_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_tangent_p, lambda context, x: [x])
batching.defvectorized(_tangent_p)
ad.deflinear2(_tangent_p, _refuse)
