"""Prompts that are padded on the left, as for transformers: `generate` would read the padding as text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_REPEATED = 4  # tokens: text seldom begins with so many that are alike


def check_right_padded(tokens: np.ndarray, lengths: np.ndarray, config: Any) -> None:
    """Raise ValueError if a row seems to be padded on the left; rows without text, as fillers of a batch, pass.

    Args:
        tokens: ``int[B, P]``.
        lengths: ``int[B]``, in 1..P.
        config: names the ids that usually pad: `pad_token_id`, `eos_token_ids` and `bos_token_id`, where it has them.
    """
    first = tokens[:, :1]
    run = np.cumprod(tokens == first, axis=1).sum(axis=1)
    pad, bos = getattr(config, "pad_token_id", None), getattr(config, "bos_token_id", None)
    ends = list(getattr(config, "eos_token_ids", ()))
    padded = _begins_with_padding(first[:, 0], run, pad, bos, ends)
    padded |= _starts_later(tokens, run, bos) | _is_measured_by_mask(tokens, lengths, run, [pad, bos, 0, *ends])
    rows = np.flatnonzero(padded & (run < tokens.shape[1]))
    if rows.size:
        row = rows[0]
        raise ValueError(
            f"tokens[{row}] begins with the id {first[row, 0]} ({run[row]} in a row), which looks like padding on the "
            "left; pad prompts on the right, and give their lengths without the padding."
        )


def _begins_with_padding(
    first: np.ndarray, run: np.ndarray, pad: int | None, bos: int | None, ends: Sequence[int]
) -> np.ndarray:
    """Which rows begin with an id that pads: once if nothing else is meant by it, else more often than text does.

    A text may begin with EOS, and with BOS twice, where a tokenizer adds it to a text that has it.
    """
    usual = [i for i in (pad, *ends) if i is not None]
    least = np.where(first == bos, 3, np.where(np.isin(first, ends), 2, 1))
    return np.isin(first, usual) & (run >= least)


def _starts_later(tokens: np.ndarray, run: np.ndarray, bos: int | None) -> np.ndarray:
    """Which rows have BOS after a run of one other id, if all rows have BOS and one of them begins with it."""
    width, starts = tokens.shape[1], tokens[:, 0] == bos
    if bos is None or not starts.any() or starts.all():
        return np.zeros(len(tokens), bool)
    at = np.minimum(run, width - 1)[:, None]
    after = np.take_along_axis(tokens, np.minimum(at + 1, width - 1), axis=1)[:, 0]
    later = ~starts & (np.take_along_axis(tokens, at, axis=1)[:, 0] == bos) & (after != bos)
    alike = np.unique(tokens[~starts, 0]).size == 1
    return later & alike & (starts | later).all()


def _is_measured_by_mask(
    tokens: np.ndarray, lengths: np.ndarray, run: np.ndarray, usual: Sequence[int | None]
) -> np.ndarray:
    """Which rows have text behind their length, and before it as many equal ids as that length leaves out.

    Lengths are such if they are sums of an attention mask of prompts that are padded on the left.
    """
    width = tokens.shape[1]
    left_out = width - lengths
    behind = np.arange(width) >= lengths[:, None]
    last = tokens[:, -1:]
    is_text = (behind & (tokens != last)).any(axis=1) & (tokens >= 0).all(axis=1)
    known = np.isin(tokens[:, 0], [i for i in usual if i is not None])
    least = np.where(known, 2, _REPEATED)
    return is_text & (left_out >= least) & (run == left_out)
