"""Block drafters (DFlash, DSpark and JetSpec)."""
