"""The decoding program: validation, rounds, verification and output buffers."""
