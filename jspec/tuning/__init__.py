"""Measurements that choose the number of draft tokens, the tree or the exit layer."""
