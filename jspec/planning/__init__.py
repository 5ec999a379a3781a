"""Prediction of memory and speed on a device from published specifications, without running anything."""
