"""The GPU drill: all measurements that require a GPU, in one command that takes a few minutes."""
