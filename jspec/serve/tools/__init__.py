"""Formats in which chat models write function calls: reading, detection and grammars."""
