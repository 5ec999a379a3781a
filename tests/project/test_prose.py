"""Phrases that the documentation, docstrings, comments and messages no longer contain do not return."""

import ast
import functools
import re
import tokenize

import pytest

from support.places import ROOT

# Pattern -> what to write instead, and a phrase that the pattern must find.
ANYWHERE = {
    r"(?<!there )\b(is|are) no (?!(longer|more|less|better|worse|such)\b)[a-z]": (
        "is not a, or has no",
        "num_attention_heads is no multiple of num_key_value_heads",
    ),
    r"\bwhoever\b": ("the client, the caller", "Whoever listens to a request has failed"),
    r"\b(is|are) wanted\b": ("is required, or requested", "holds out 3 of its questions, and 4 are wanted"),
    r"\bso many (?!that\b)": ("this many", "a model with so many layers"),
    r"\bby which\b.{0,80}\bjudges?\b": (
        "compares with, or verifies against",
        "the law by which the rule judges drafts",
    ),
    r"\bexpected as many\b": ("expected and the number, or one per", "got 3 keys; expected as many as prompts"),
    r"\bnobody (would|will)\b": ("what happens instead", "an error that nobody would tell"),
    r"\bgo(es)? on\b": ("continue", "None if decoding goes on"),
    r"(?<!, )\bbut for\b": ("except for", "tied and equal but for rounding"),
    r"[,;] for (it|they|there|this|the \w+) (is|are|was|were|would|decides?|depends?)\b": (
        "because",
        "left out, for the tree decides",
    ),
    r"\bpays?\b(?! (off|for)\b)": ("pay off", "0 if drafting does not pay"),
    r"\bbehind (it|them|each|those|which|lookup)\b": ("after", "two guesses behind each"),
    r"\b(known|usual) here\b": ("supported, or on this machine", "a way to split texts that is not known here"),
}
# The same for messages of exceptions only. Proofs, identifiers and options may contain these words.
IN_ERRORS = {
    r"\blaws?\b": ("distribution", "would change the law of the text"),
    r"\bguess(es|ed)?\b": ("draft token, or draft", "--tree says what is guessed a round"),
}
CODE = sorted(path for room in ("jspec", "convert", "bench", "pair") for path in (ROOT / room).rglob("*.py"))
PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *(ROOT / "docs").glob("*.md")]


def strings(node):
    return [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]


@functools.cache
def passages():
    """Return ``[(file, text)]`` of everything that is read as prose, and of the messages of exceptions alone."""
    anywhere, in_errors = [(path, path.read_text(encoding="utf-8")) for path in PAGES], []
    for path in CODE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        with path.open("rb") as file:
            comments = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
        anywhere += [(path, text) for text in [*comments, *strings(tree)]]
        raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
        in_errors += [(path, text) for error in raised for text in strings(error)]
    return anywhere, in_errors


def found(pattern, text):
    """Return the matches in `text`, whose line breaks count as spaces."""
    return [match.group() for match in re.finditer(pattern, " ".join(text.split()), re.IGNORECASE)]


@pytest.mark.parametrize("pattern", [*ANYWHERE, *IN_ERRORS])
def test_no_banned_phrase_returns(pattern):
    texts = passages()[pattern in IN_ERRORS]
    instead, _ = (ANYWHERE | IN_ERRORS)[pattern]
    hits = [(str(path.relative_to(ROOT)), phrase) for path, text in texts for phrase in found(pattern, text)]
    assert not hits, f"write instead: {instead}"


@pytest.mark.parametrize(("pattern", "example"), [(one, bad) for one, (_, bad) in (ANYWHERE | IN_ERRORS).items()])
def test_each_pattern_finds_its_example(pattern, example):
    assert found(pattern, f"The message says that {example}.")
    assert found(pattern, example.replace(" ", "\n    "))
