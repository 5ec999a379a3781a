"""Drafters with trained heads that read the target's hidden states, and the file formats of these heads."""
