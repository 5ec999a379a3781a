"""The training text: the Python standard library's own sources, split by module into train and held-out.

The split depends only on file paths and contents, so one interpreter version always gives one corpus.
"""

import hashlib
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PERCENT = 4
LEAK_FRACTION = 0.3
# Not programs: other people's packages, generated text, and tables such as code pages and parser fixtures.
SKIPPED_PARTS = {
    "site-packages",
    "__pycache__",
    "lib-dynload",
    "pydoc_data",
    "idle_test",
    "encodings",
    "data",
}
MIN_CHARS = 200
MAX_CHARS = 400_000
DATA_LIKE_DIGITS = 0.12


@dataclass(frozen=True)
class Document:
    """One source file: its path relative to the standard library, with forward slashes, and its text."""

    path: str
    text: str


def standard_library() -> Path:
    """The `Lib` directory of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def looks_like_code(text: str) -> bool:
    """False for empty stubs, enormous files and tables (code pages, key tables) that are mostly numbers."""
    if not MIN_CHARS <= len(text) <= MAX_CHARS or END_OF_TEXT in text:
        return False
    return sum(map(str.isdigit, text)) < DATA_LIKE_DIGITS * len(text)


def read_documents(root: Path | None = None) -> list[Document]:
    """Every usable UTF-8 source file under `root`, sorted by path."""
    root = root or standard_library()
    documents = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if SKIPPED_PARTS & set(relative.parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if looks_like_code(text):
            documents.append(Document(relative.as_posix(), text))
    return documents


def is_held_out(path: str) -> bool:
    """A stable pseudo-random choice of about HELD_OUT_PERCENT of the paths."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def long_lines(text: str) -> set[str]:
    """The distinct stripped lines of at least 20 characters: a file's fingerprint for near-duplicates."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 20}


def leaks(document: Document, owners: dict[str, list[int]], sizes: list[int]) -> bool:
    """True if `document` shares LEAK_FRACTION of its own, or of one held-out file's, long lines.

    `owners` maps a line to the held-out files (indices into `sizes`) that contain it.
    """
    lines = long_lines(document.text)
    shared = Counter(owner for line in lines for owner in owners.get(line, ()))
    return any(count >= LEAK_FRACTION * min(len(lines), sizes[owner]) for owner, count in shared.items())


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(train, held-out); training files that nearly duplicate a held-out file are dropped."""
    held_out = [d for d in documents if is_held_out(d.path)]
    fingerprints = [long_lines(d.text) for d in held_out]
    owners: dict[str, list[int]] = {}
    for index, lines in enumerate(fingerprints):
        for line in lines:
            owners.setdefault(line, []).append(index)
    sizes = [len(lines) for lines in fingerprints]
    train = [d for d in documents if not is_held_out(d.path) and not leaks(d, owners, sizes)]
    return train, held_out


def load_corpus() -> tuple[list[Document], list[Document]]:
    """(train, held-out) documents of the running interpreter's standard library."""
    return split_documents(read_documents())


def main() -> None:
    """Print the size of each side and the held-out paths."""
    train, held_out = load_corpus()
    for name, side in (("train", train), ("held-out", held_out)):
        print(f"{name}: {len(side)} files, {sum(len(d.text) for d in side) / 1e6:.2f} M characters")
    print("\n".join(d.path for d in held_out))


if __name__ == "__main__":
    main()
