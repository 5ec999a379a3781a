"""Adapters that let other reinforcement-learning libraries generate their roll-outs with jspec."""
