"""The pair's tokenizer: byte-level BPE whose pre-tokens suit Python source."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pair.corpus import END_OF_TEXT, Document

VOCAB_SIZE = 2048
MAX_LENGTH = 1024

# A line break includes all of the following indentation, so one token ends a line and sets the next depth.
# Digits stay single, because numbers in code are mostly noise to a model this small.
PRE_TOKEN = r"\n+[ \t]*| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn merges from `texts`. Every byte is in the vocabulary, so any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` loads.

    The class is written under the name that both old and new releases of transformers know.
    """
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )
    wrapped.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer saved in `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> np.ndarray:
    """Return all documents as one stream of ids, each document followed by the EOS id: uint16 [tokens]."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch([d.text for d in documents])
    return np.concatenate([np.array([*e.ids, end], dtype=np.uint16) for e in encodings])
