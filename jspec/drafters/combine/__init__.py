"""Drafters made of other drafters."""
