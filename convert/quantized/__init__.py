"""Hugging Face checkpoints with quantised weights, which are dequantised when read. Each format has a module."""
