"""Text input and output: tokenizers, random keys from a seed, and detokenization.

Modules that accept or return text import this package. Modules that run the decoding loop do not.
"""

import importlib.util
import numbers
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

import convert
from convert import placeholders
from jspec.core.detokenizer import Pieces as Pieces
from jspec.core.detokenizer import pieces as pieces
from jspec.core.tokenizer import Tokenizer
from jspec.text import tokenizer_file
from jspec.text.end_of_turn import end_of_turn
from jspec.text.tokenizer_file import TokenizerFile

if TYPE_CHECKING:
    from jax import Array
    from numpy.typing import ArrayLike

# The default prompts of `jspec tune`: openings of code, which the bundled models and many others can continue.
EXAMPLE_PROMPTS = [
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main():\n",
    "for name in sorted(os.listdir(path)):\n",
]


def load_tokenizer(source: str | os.PathLike[str]) -> TokenizerFile:
    """Return the tokenizer of a checkpoint.

    Args:
        source: a folder, a GGUF file, a model name, a Hugging Face repo id, or a GGUF file in such a repo, written as
            "org/repo:file.gguf". A folder's tokenizer.json is used without changes. A GGUF file contains its
            own tokenizer and chat template.

    Raises:
        convert.CheckpointError: the source is not a checkpoint, or its tokenizer files are missing or unreadable.
    """
    directory = convert.resolve(source if isinstance(source, str) else os.fspath(source))
    if directory.is_file():
        return tokenizer_file.from_gguf(directory)
    files = sorted(directory.glob("tokenizer*"))
    if not files:
        if not (directory / "config.json").exists():
            raise convert.CheckpointError(f"{directory} has no config.json; expected a checkpoint directory.")
        raise convert.CheckpointError(
            f"{directory} has no tokenizer files (tokenizer.json, ...); copy the model's tokenizer files into it."
        )
    for file in files:
        placeholders.check(file)
    try:
        if (tokenizer := tokenizer_file.read(directory)) is not None:
            return tokenizer
        return _without_tokenizer_json(directory)
    except Exception as error:  # the tokenizer libraries raise many types of errors
        reason = " ".join(str(error).split())[:400].rstrip(".")
        raise convert.CheckpointError(f"The tokenizer in {directory} cannot be read: {reason}.") from error


def _without_tokenizer_json(directory: Path) -> TokenizerFile:
    """Return a SentencePiece model's tokenizer, or the one that transformers builds from other files."""
    if (directory / "tokenizer.model").is_file():
        try:
            return tokenizer_file.from_sentencepiece(directory)
        except convert.CheckpointError as error:
            _check_packages(str(error).rstrip("."))
    # The tokenizer from transformers has all methods of TokenizerFile.
    return tokenizer_file.transformers().AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _check_packages(reason: str) -> None:
    """Raise ValueError if a package that transformers needs to read a tokenizer.model is missing."""
    packages = {"tiktoken": "tiktoken"}
    if "is not a SentencePiece" not in reason:
        packages = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
    if missing := [name for name, module in packages.items() if importlib.util.find_spec(module) is None]:
        raise ValueError(
            f"{reason}; transformers needs {' and '.join(missing)} to read such a file: pip install "
            f"{' '.join(missing)}, or add the model's tokenizer.json"
        )


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ValueError unless the draft's token ids stand for the same tokens as the target's.

    Raises:
        ValueError: an id differs. The message names the first such id and its two tokens.
    """
    ours, theirs = ({i: token for token, i in one.get_vocab().items()} for one in (target, draft))
    different = [i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)]
    if different:
        i = min(different)
        raise ValueError(
            f"The draft's tokenizer is not the target's: id {i} is {theirs.get(i)!r} for the draft and "
            f"{ours.get(i)!r} for the target; use a draft that shares the target's tokenizer."
        )


class _Model(Protocol):
    @property
    def config(self) -> "convert.LlamaConfig": ...


def eos_ids(model: _Model, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the EOS ids: those of the model and the tokenizer, and the chat template's end-of-turn token."""
    known = {*model.config.eos_token_ids, tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None}
    return tuple(sorted(i for i in cast("set[int]", known) if 0 <= i < model.config.vocab_size))


def corpus(source: str, files: Sequence[Path]) -> tuple[np.ndarray, int]:
    """Return a datastore's contents: the files encoded with `source`'s tokenizer, and the vocabulary size.

    Returns:
        ``int32[N]``, with an EOS after every file if the tokenizer has one, and V. If `source` has a config.json, V is
        the vocabulary size in that file, because a model's vocabulary may be larger than its tokenizer's.

    Raises:
        ValueError: a file is not UTF-8, or all files are empty.
    """
    tokenizer, place = load_tokenizer(source), convert.resolve(source)
    rows = tokenizer([_read(file) for file in files], add_special_tokens=False, verbose=False)["input_ids"]
    if not any(rows):
        raise ValueError("The files contain no text; add a file that contains some.")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    described = place.is_file() or (place / "config.json").exists()
    vocab_size = convert.read_config(place).vocab_size if described else len(tokenizer)
    return np.concatenate([np.array(row + end, np.int32) for row in rows]), vocab_size


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (byte {error.start}); convert the file, or leave it out."
        ) from error


def repeated(prompts: Sequence[str], count: int | None) -> list[str]:
    """Return `count` prompts, starting over from the first if they run out. None returns all prompts once."""
    return [prompts[i % len(prompts)] for i in range(count or len(prompts))]


def request_keys(seed: int, batch: int, first: int = 0) -> "Array":
    """Return typed keys ``[batch]``, starting at request `first`.

    Each key depends only on the seed and the request number.

    Raises:
        ValueError: the seed is not an unsigned 32-bit int.
    """
    return keys_of_requests(seed, first + np.arange(batch))


def keys_of_requests(seed: int, request_numbers: "ArrayLike") -> "Array":
    """Return the typed keys of the requests with these numbers, which are from 0 to 2**32 - 1.

    Raises:
        ValueError: the seed is not an unsigned 32-bit int.
    """
    import jax

    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an int from 0 to {2**32 - 1}; got {seed!r}.")
    # Always use this implementation, whatever JAX's default is, so that the same seed produces the same text.
    key = jax.random.key(int(seed), impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, np.asarray(request_numbers, np.uint32))
