"""Public generation functions for token ids, for text and for streaming."""
