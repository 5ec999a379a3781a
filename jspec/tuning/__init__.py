"""Choose the number of draft tokens, the tree or the exit layer by measuring."""
