"""Batch jobs: complete all prompts of a file or of a Ray dataset."""
