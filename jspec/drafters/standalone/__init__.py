"""Drafters that need no second drafter and no trained head."""
