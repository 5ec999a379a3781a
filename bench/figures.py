"""Convert results to JSON values."""

import dataclasses
from typing import Any


def plain(value: Any) -> Any:
    """Return `value` in JSON-serializable form. Floats keep six significant digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
