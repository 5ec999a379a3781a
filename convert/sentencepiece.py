"""Read the BPE model in a SentencePiece file, `tokenizer.model`, without the sentencepiece package.

The file is a protocol buffer. Field numbers are those of sentencepiece_model.proto.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from convert.errors import CheckpointError
from convert.gguf.vocabulary import Vocabulary

_BPE, _USER_DEFINED = 2, 4
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_IDS = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}  # field of the trainer, default
_Field = int | float | bytes


def read(file: Path, add: dict[str, bool]) -> Vocabulary:
    """Return the vocabulary in `file`.

    Args:
        file: a SentencePiece model such as those of Llama 2, TinyLlama, Mistral and Gemma.
        add: whether to add BOS and EOS to every text, under the keys "bos" and "eos".

    Raises:
        CheckpointError: the file is not such a model, replaces characters, or has user-defined tokens.
    """
    try:
        fields = list(_fields(file.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in fields if number == _PIECES and isinstance(value, bytes)]
        trainer, normalizer = (dict(_fields(_message(dict(fields), number))) for number in (_TRAINER, _NORMALIZER))
        tokens = [str(_message(piece, 1), "utf-8") for piece in pieces]
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"{file} is not a SentencePiece model.") from error
    if not tokens:
        raise CheckpointError(f"{file} is not a SentencePiece model.")
    if trainer.get(3, 1) != _BPE:
        raise CheckpointError(f"{file} is a SentencePiece model, but not of type BPE.")
    if normalizer.get(2):  # a table of replacements
        raise CheckpointError(f"{file} replaces characters before it splits text.")
    types = [int(piece.get(3, 1)) for piece in pieces]
    if _USER_DEFINED in types:  # SentencePiece and tokenizers treat the spaces around them differently
        raise CheckpointError(f"{file} has user-defined tokens.")
    ids = {name: _signed(trainer.get(number, default)) for name, (number, default) in _IDS.items()}
    return Vocabulary(
        kind="llama",
        pre=None,
        tokens=tokens,
        types=types,
        scores=[float(piece.get(2, 0.0)) for piece in pieces],
        merges=None,
        ids={name: i for name, i in ids.items() if 0 <= i < len(tokens)},
        add=add,
        chat_template=None,
        add_space_prefix=bool(normalizer.get(3, 1)),
        removes_spaces=bool(normalizer.get(4, 1)),
    )


def _message(fields: dict[int, _Field], number: int) -> bytes:
    value = fields.get(number, b"")
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is not a message")
    return value


def _signed(value: _Field) -> int:
    """Return the int32 that the file stores as an unsigned 64-bit number."""
    return int(value) - (1 << 64) * (int(value) >= 1 << 63)


def _fields(data: bytes) -> Iterator[tuple[int, _Field]]:
    """Yield the number and value of each field of a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 5:
            (value,), at = struct.unpack_from("<f", data, at), at + 4
        elif kind == 1:
            (value,), at = struct.unpack_from("<d", data, at), at + 8
        elif kind == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError("a field extends beyond the end")
        else:
            raise ValueError(f"field type {kind} does not exist")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")
