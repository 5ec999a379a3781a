"""Hugging Face checkpoints with quantised weights, dequantised while they are read: one module for each format."""
