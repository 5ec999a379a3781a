"""The Llama decoder in Flax NNX: layers, attention, KV cache, quantisation and checkpoint loading."""
