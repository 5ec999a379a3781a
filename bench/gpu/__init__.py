"""The GPU drill: every question that only a GPU can answer, in one command of a few minutes."""
