"""The public functions: token ids to token ids, texts to texts, and streams."""
