"""EAGLE head files, in the layouts of several programs."""
