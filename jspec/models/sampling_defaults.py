"""The sampling parameters that a model's files recommend."""

import functools
import logging

from jax.typing import ArrayLike

from convert.generation_config import SamplingDefaults
from jspec.core.sampling import SamplingParams
from jspec.models.language_model import HasConfig

_LOG = logging.getLogger("jspec")


def default_sampling(target: HasConfig, **given: ArrayLike | None) -> SamplingParams:
    """Return the sampling parameters that `target` recommends, with all other fields as in `SamplingParams()`.

    Args:
        given: fields that override the model's own, unless they are None.
    """
    values = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**_defaults(target).values() | values)


def described(target: HasConfig, **given: ArrayLike | None) -> str | None:
    """Return a sentence about the defaults that `default_sampling` takes from the model, or None if there are none."""
    defaults = _defaults(target)
    used = [f"{name} {value:g}" for name, value in defaults.values().items() if given.get(name) is None]
    ignored = f"{', '.join(defaults.unsupported)} ignored because not supported" if defaults.unsupported else ""
    parts = [part for part in (", ".join(used), ignored) if part]
    return f"Sampling defaults recommended by the model: {'; '.join(parts)}" if parts else None


def recommended(target: HasConfig) -> SamplingParams:
    """Return `default_sampling(target)`, and log the model's own defaults once per process."""
    _log_once(described(target), bool(_defaults(target).unsupported))
    return default_sampling(target)


@functools.cache
def _log_once(sentence: str | None, is_warning: bool) -> None:
    if sentence is not None:
        _LOG.log(logging.WARNING if is_warning else logging.INFO, sentence)


def _defaults(target: HasConfig) -> SamplingDefaults:
    """Return the model's defaults. A model that was not loaded by jspec may have none."""
    own: object = getattr(target.config, "sampling", None)
    return own if isinstance(own, SamplingDefaults) else SamplingDefaults()
