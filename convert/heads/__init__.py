"""Reading and writing trained draft heads."""
