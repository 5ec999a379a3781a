"""Standalone drafters, which need neither a second drafter nor a trained head."""
