"""The GPU drill: one command that takes all measurements that require a GPU, in a few minutes."""
