"""Drafters with trained heads on the target's hidden states, and their files."""
