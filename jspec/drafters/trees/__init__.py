"""Tree drafters, which propose a tree of tokens."""
