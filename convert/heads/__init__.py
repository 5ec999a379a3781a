"""The files of trained draft heads."""
