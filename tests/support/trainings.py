"""Helpers for the training tests and others."""

import json

import numpy as np

from jspec.training import dataset as rows
from support import text_pair, toys

TARGET, V = toys.tiny_llama(0, 3), 8


LONG = toys.tiny_llama(0, 3, vocab_size=261)  # the tokenizer's vocabulary size


def some_rows(count, size=12, seed=0):
    tokens = np.random.default_rng(seed).integers(V, size=(count, size))
    return [rows.of_answer(row[:2].tolist(), row[2 : size - i % 3].tolist()) for i, row in enumerate(tokens)]


def chats(file, count=24):
    lines = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "the the " * 4}]}
        for i in range(count)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def chatty():
    tokenizer = text_pair.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer
