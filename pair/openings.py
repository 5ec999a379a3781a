"""Questions that SmolLM2 writes, each starting with the first words of a question that people ask.

`python -m pair.openings COUNT [SEED] > questions.jsonl` samples COUNT user turns. The first words determine the kind
of question. Without them, SmolLM2's questions cover the kinds unevenly (`jspec.training.self_generated`). The questions
of `bench/prompts` are left out, because the result is measured on them.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import jspec
from jspec.text import eos_ids, load_tokenizer
from jspec.training.self_generated import continued, frame_of

BATCH, TOKENS, TEMPERATURE = 128, 160, 0.9
CHATS = r"""
What is the best way to; How does a; Why do people; Can you explain how; I am planning a trip to; My neighbour; What
happens if; Give me ideas for; Is it true that; Who was; How much; When did; What should I cook; I feel; Write a poem
about; Tell me a story about a; Recommend; Compare; Help me write a letter to; Write an email to my; What are the
advantages of; How can I learn; Describe; Make a list of; I need advice about; Write a dialogue between; Where can I;
Create a plan for; Which is better,; Pretend that you are; Explain the difference between; Do you think that; How do I
get rid of; What does the word; Solve this problem:; If a train; Translate; Name three; My daughter; How long does it
take to; Write a speech for; Suggest a name for
"""
SUMMARIES = r"""
Summarize the following article:\n\n; Summarise this in two sentences:\n\nThe; What is the main idea of this
text?\n\nIn; Give me a short summary of this news story:\n\n; Write a title for this text:\n\nA; List the key
points:\n\nOn; In one sentence, what does this passage say?\n\nAccording to; Summarize this email:\n\nHi; Sum up the
text below.\n\nWhen; What did the author want to say?\n\nI; Shorten this:\n\nThe city of; Read this text and tell me
what happened.\n\nLast
"""
REWRITING = r"""
Rewrite this sentence:; Make this email more polite:\n\nHey; Fix the grammar:; Paraphrase: The; Rewrite this paragraph
in a formal tone:\n\nI; Correct the mistakes in this text:\n\nYesterday; Rewrite this text for children:\n\nThe;
Change this to the future tense:\n\nShe; Edit this message to make it shorter:\n\n; Improve this introduction:\n\n;
Turn these notes into a paragraph:\n\n-; Replace every adjective in this text:\n\nThe old
"""
CODE = r"""
Write a Python function that; Write a Python program to; Write a function in JavaScript that; How do I sort; What does
this code do?\n\n```python\n; Find the error in this code:\n\n```python\ndef; Write a SQL query that; Explain this
Python code:\n\n```python\nimport; Add comments to this function:\n\n```python\ndef; Write a class; Write unit tests
for this function:\n\n```python\ndef; How can I read a file; Refactor this:\n\n```python\nfor; Write a bash command
that; Convert this code to Java:\n\n```python\ndef; What is the output of\n\n```python\nx =
"""


def openings() -> list[str]:
    """Return all openings."""
    listed = ";".join((CHATS, SUMMARIES, REWRITING, CODE)).split(";")
    return [" ".join(opening.split()).replace(r"\n", "\n") for opening in listed]


def _measured() -> set[str]:
    """Return the questions of `bench/prompts`."""
    files = (Path(__file__).parents[1] / "bench" / "prompts").glob("*.jsonl")
    return {json.loads(line)["prompt"] for file in files for line in file.read_text(encoding="utf-8").splitlines()}


def questions(count: int, seed: int) -> Iterator[str]:
    """Yield `count` different questions."""
    target, tokenizer = jspec.load("smollm2", dtype="bfloat16"), load_tokenizer("smollm2")
    before, ends = frame_of(tokenizer).before, eos_ids(target, tokenizer)
    starts = [tokenizer(opening, add_special_tokens=False, verbose=False)["input_ids"] for opening in openings()]
    turns, seen = itertools.cycle(starts), _measured()
    most = len(seen) + count
    heat = np.full(BATCH, TEMPERATURE, np.float32)
    for number in itertools.count():
        chosen = list(itertools.islice(turns, BATCH))
        rest = continued(
            target, tokenizer, ends, [before + start for start in chosen], seed * 10_000 + number, TOKENS, heat
        )
        for start, ids in zip(chosen, rest, strict=True):
            text = tokenizer.decode([*start, *ids[:-1]]).strip()
            if ids and ids[-1] in ends and "<|" not in text and text not in seen:
                seen.add(text)
                yield text
                if len(seen) == most:
                    return


def main(count: str, seed: str = "0") -> None:
    """Print the questions as chats that end with the user's turn."""
    for question in questions(int(count), int(seed)):
        print(json.dumps({"messages": [{"role": "user", "content": question}]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
