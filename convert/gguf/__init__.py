"""GGUF files: header, configuration, vocabulary, tokenizer and tensors."""
