"""Predict memory and speed on a device from published facts, without running anything."""
