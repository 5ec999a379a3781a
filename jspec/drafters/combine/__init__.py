"""Combined drafters, which are composed of other drafters."""
