"""Fields of a block drafter's config.json that are at the top level or in a section."""

from convert.errors import CheckpointError
from convert.json_fields import Fields, integer

SECTION = "dflash_config"
RESTORE = "restore the drafter's own config.json"


def once(raw: Fields, section: Fields, key: str) -> int:
    """Return a positive integer that is in config.json or in its section."""
    found = {integer(place, key) for place in (raw, section) if place.get(key) is not None}
    if len(found) != 1:
        said = f"{raw.get(key)!r} in config.json and {section.get(key)!r} in its {SECTION}"
        raise CheckpointError(f"{key} is {said if found else 'missing'}; expected one number: {RESTORE}.")
    return found.pop()
