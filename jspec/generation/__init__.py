"""The public calls: token ids in and out, texts in and out, and streams."""
