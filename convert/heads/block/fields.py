"""Fields of a block drafter's config.json that may be at the top level or in a section."""

from convert.errors import CheckpointError
from convert.json_fields import Fields, integer

SECTION = "dflash_config"
RESTORE = "restore the drafter's own config.json"


def once(raw: Fields, section: Fields, key: str) -> int:
    """Return a positive integer from the top level of config.json or from its section.

    Raises:
        CheckpointError: the field is missing, is not a positive integer, or differs between the two places.
    """
    found = {integer(place, key) for place in (raw, section) if place.get(key) is not None}
    if len(found) != 1:
        said = f"{raw.get(key)!r} in config.json and {section.get(key)!r} in its {SECTION}"
        raise CheckpointError(f"{key} is {said if found else 'missing'}; expected one number: {RESTORE}.")
    return found.pop()
