"""The training text: the Python standard library's sources, split by module into train and held-out.

Training also uses the sources of the packages that jspec is developed with. The split depends only on file paths and
contents, so the same interpreter and packages always give the same corpus.
"""

import hashlib
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PERCENT = 4
LEAK_FRACTION = 0.3
REPEATED_FRACTION = 0.5
# The packages that `pip install -e '.[test,dev,docs]'` installs and whose licence is permissive.
PACKAGES = [
    *("IPython", "absl", "anyio", "attr", "babel", "click", "dateutil", "debugpy", "etils", "flax"),
    *("fontTools", "fsspec", "gguf", "google", "griffe", "httpx2", "huggingface_hub", "jax", "jedi"),
    *("jinja2", "jsonschema", "jupyter_client", "jupyter_core", "markdown", "markdown_it", "matplotlib"),
    *("mkdocs", "mkdocstrings", "mpmath", "mpl_toolkits", "networkx", "nbclient", "nbformat", "numpy"),
    *("opt_einsum", "optax", "orbax", "packaging", "parso", "pexpect", "pip", "pluggy"),
    *("prompt_toolkit", "psutil", "pydantic", "pygments", "pymdownx", "pyparsing", "_pytest"),
    *("requests", "rich", "scipy", "setuptools", "sympy", "torch", "tornado", "traitlets"),
    *("transformers", "treescope", "typer", "urllib3", "virtualenv", "watchdog", "xdist", "yaml", "zmq"),
]
# Files that are not programs: third-party packages, generated text, and tables such as code pages and parser fixtures.
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
    """Return the `Lib` directory of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def looks_like_code(text: str) -> bool:
    """Return False for empty stubs, enormous files, and tables (code pages, key tables) that are mostly numbers."""
    if not MIN_CHARS <= len(text) <= MAX_CHARS or END_OF_TEXT in text:
        return False
    return sum(map(str.isdigit, text)) < DATA_LIKE_DIGITS * len(text)


def read_documents(root: Path | None = None) -> list[Document]:
    """Return every usable UTF-8 source file under `root`, sorted by path."""
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
    """Return whether a path is held out, by a stable pseudo-random choice of about HELD_OUT_PERCENT of all paths."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def long_lines(text: str) -> set[str]:
    """Return the distinct stripped lines of at least 20 characters: a file's fingerprint for near-duplicates."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 20}


def shared_lines(documents: list[Document], held_out: list[Document]) -> tuple[float, float]:
    """Return two shares of the held-out files' long lines.

    The first is the largest share of one file's lines that a single document has. The second is the share of all lines
    that occur in any document.
    """
    fingerprints = [long_lines(d.text) for d in held_out]
    seen, most = set(), 0.0
    wanted = set().union(*fingerprints)
    for document in documents:
        lines = long_lines(document.text) & wanted
        most = max([most, *(len(lines & each) / len(each) for each in fingerprints if each)] if lines else [most])
        seen |= lines
    return most, sum(len(each & seen) for each in fingerprints) / sum(map(len, fingerprints))


def without_leaks(documents: list[Document], held_out: list[Document]) -> list[Document]:
    """Return the documents that share less than LEAK_FRACTION of long lines with every held-out file.

    The fraction refers both to the document's own long lines and to those of the held-out file.
    """
    fingerprints = [long_lines(d.text) for d in held_out]
    owners: dict[str, list[int]] = {}
    for index, lines in enumerate(fingerprints):
        for line in lines:
            owners.setdefault(line, []).append(index)

    def leaks(document: Document) -> bool:
        lines = long_lines(document.text)
        shared = Counter(owner for line in lines for owner in owners.get(line, ()))
        return any(
            count >= LEAK_FRACTION * min(len(lines), len(fingerprints[owner])) for owner, count in shared.items()
        )

    return [d for d in documents if not leaks(d)]


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Return (train, held-out). Training files that nearly duplicate a held-out file are dropped."""
    held_out = [d for d in documents if is_held_out(d.path)]
    return without_leaks([d for d in documents if not is_held_out(d.path)], held_out), held_out


def without_repeats(documents: list[Document]) -> list[Document]:
    """Return the documents with less than REPEATED_FRACTION of their long lines in earlier documents."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        lines = long_lines(document.text)
        if len(lines & seen) < REPEATED_FRACTION * len(lines):
            kept.append(document)
            seen |= lines
    return kept


def load_corpus() -> tuple[list[Document], list[Document]]:
    """Return the (train, held-out) documents of the running interpreter's standard library."""
    return split_documents(read_documents())


def load_packages(held_out: list[Document]) -> list[Document]:
    """Return the sources of PACKAGES, without repeats or near-duplicates of held-out files. All must be installed."""
    root = Path(sysconfig.get_path("purelib"))
    if missing := [name for name in PACKAGES if not (root / name).exists()]:
        raise FileNotFoundError(f"The corpus lacks the packages {missing}; install jspec[test,dev,docs].")
    documents = [Document(f"{name}/{d.path}", d.text) for name in sorted(PACKAGES) for d in read_documents(root / name)]
    return without_leaks(without_repeats(documents), held_out)


def main() -> None:
    """Print the size of each split and the held-out paths."""
    train, held_out = load_corpus()
    packages = load_packages(held_out)
    for name, side in (("train", train), ("packages", packages), ("held-out", held_out)):
        print(f"{name}: {len(side)} files, {sum(len(d.text) for d in side) / 1e6:.2f} M characters")
    most, common = shared_lines(train + packages, held_out)
    print(
        f"a training file has at most {most:.0%} of a held-out file's long lines; {common:.1%} of all such lines "
        "occur in training"
    )
    print("\n".join(d.path for d in held_out))


if __name__ == "__main__":
    main()
