"""The files of EAGLE heads, in the layouts of several programs."""
