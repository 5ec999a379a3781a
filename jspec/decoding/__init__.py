"""The program from prompts to tokens: validation, the round, verification and output buffers."""
