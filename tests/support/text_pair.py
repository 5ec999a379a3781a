"""A tiny pair on disk with a byte-level tokenizer, like a download from Hugging Face."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from support import checkpoints

END = "<|end|>"
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a")]
RAW = checkpoints.raw_config(vocab_size=257 + len(MERGES), bos_token_id=None, eos_token_id=0, num_hidden_layers=1)


def tokenizer(swapped: int | None = None, bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with end of text, 256 bytes and a few merges.

    Args:
        swapped: an id that exchanges its token with the next id.
        bos: start every text with the end-of-text token, as Llama tokenizers do with theirs.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [END, *letters, *(first + second for first, second in MERGES)]
    if swapped is not None:
        names[swapped : swapped + 2] = names[swapped + 1], names[swapped]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, clean_up_tokenization_spaces=False)


def write(folder: Path, distance: float = 0.0, **changes) -> Path:
    """Write a checkpoint with its tokenizer; `distance` is how far its weights are from the target's (0).

    Args:
        changes: changes to the config.json.
    """
    near, far = (checkpoints.tensors(RAW | changes, seed=seed) for seed in (0, 1))
    weights = {name: near[name] + np.float32(distance) * far[name] for name in near}
    weights["lm_head.weight"] *= 8  # distributions as peaked as a trained model's
    checkpoints.write(folder, RAW | changes, weights)
    (folder / "tokenizer.model").unlink()
    tokenizer().save_pretrained(folder)
    return folder
