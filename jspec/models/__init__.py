"""The Llama decoder in Flax NNX: layers, attention, KV cache, quantization and loading."""
