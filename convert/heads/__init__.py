"""Reading and writing of trained draft heads."""
