"""Drafters that propose a tree of tokens."""
