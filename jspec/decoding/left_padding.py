# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""Detection of left-padded prompts, as used with transformers: `generate` would treat the padding as text."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]
_Bools = NDArray[np.bool_]

_REPEATED = 4  # text rarely begins with this many equal tokens


def check_right_padded(tokens: _Ints, lengths: _Ints, config: object) -> None:
    """Raise ValueError if a row looks left-padded. Rows of one repeated id pass, because they only fill up a batch.

    Args:
        tokens: ``int[B, P]``.
        lengths: ``int[B]``, in 1..P.
        config: may provide the ids that usually serve as padding: `pad_token_id`, `eos_token_ids` and `bos_token_id`.
    """
    first = tokens[:, :1]
    run = np.cumprod(tokens == first, axis=1).sum(axis=1)
    pad, bos, ends = (getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_ids"))
    ends = list(ends or ())
    padded = _begins_with_padding(first[:, 0], np.minimum(run, lengths), pad, bos, ends)
    if pad not in (None, bos, *ends):
        padded |= _begins_with_one_pad(tokens, lengths, run, pad)
    padded |= _starts_later(tokens, lengths, run, bos, [pad, *ends])
    padded |= _is_measured_by_mask(tokens, lengths, run, [pad, bos, *ends])
    rows = np.flatnonzero(padded & (run < tokens.shape[1]))
    if rows.size:
        row = rows[0]
        raise ValueError(
            f"tokens[{row}] begins with the id {first[row, 0]} ({run[row]} in a row), which looks like padding on "
            "the left; pad prompts on the right, and pass their lengths without the padding (lists of ids need "
            "no padding)."
        )


def _begins_with_padding(first: _Ints, run: _Ints, pad: int | None, bos: int | None, ends: Sequence[int]) -> _Bools:
    """Return which rows begin with a padding id that is repeated more often than it would be in text.

    Text may begin with EOS. It may begin with BOS twice, if a tokenizer adds BOS to text that already has it. It may
    begin with the pad id if that id is a word, such as "!", which is token 0 in many vocabularies.
    """
    default_ids = [i for i in (pad, *ends) if i is not None]
    return np.isin(first, default_ids) & (run >= np.where(first == bos, 3, 2))


def _begins_with_one_pad(tokens: _Ints, lengths: _Ints, run: _Ints, pad: int | None) -> _Bools:
    """Return which rows begin with a single pad id that must be padding, judging by the lengths.

    In this case, all lengths are equal and another row begins with text, or the length omits one token of text.
    """
    width, starts, last = tokens.shape[1], tokens[:, 0] == pad, tokens[:, -1]
    by_width = (lengths == lengths[0]).all() & ~starts.all()
    by_mask = (lengths == width - 1) & (last > 0) & (last != pad)
    return starts & (run == 1) & (by_width | by_mask)


def _starts_later(
    tokens: _Ints, lengths: _Ints, run: _Ints, bos: int | None, default_ids: Sequence[int | None]
) -> _Bools:
    """Return which rows have BOS after a run of one other id, if all rows have BOS and some row begins with BOS.

    A run of one token counts as padding only if its id usually serves as padding or the length omits one token.
    Otherwise, it may be text, such as a line break before BOS.
    """
    width, starts = tokens.shape[1], tokens[:, 0] == bos
    if bos is None or not starts.any() or starts.all():
        return np.zeros(len(tokens), bool)
    at = np.minimum(run, width - 1)[:, None]
    after = np.take_along_axis(tokens, np.minimum(at + 1, width - 1), axis=1)[:, 0]
    later = ~starts & (np.take_along_axis(tokens, at, axis=1)[:, 0] == bos) & (after != bos)
    alike = np.unique(tokens[~starts, 0]).size == 1
    sure = (run > 1) | (run == width - lengths) | np.isin(tokens[:, 0], [i for i in default_ids if i is not None])
    return later & sure & alike & (starts | later).all()


def _is_measured_by_mask(tokens: _Ints, lengths: _Ints, run: _Ints, default_ids: Sequence[int | None]) -> _Bools:
    """Return which rows have text after their length, and begin with as many equal ids as the length omits.

    Such lengths are sums over the attention mask of left-padded prompts.
    """
    width = tokens.shape[1]
    left_out = width - lengths
    after = np.arange(width) >= lengths[:, None]
    last = tokens[:, -1:]
    is_text = (after & (tokens != last)).any(axis=1) & (tokens >= 0).all(axis=1)
    known = np.isin(tokens[:, 0], [i for i in default_ids if i is not None])
    least = np.where(known, 2, _REPEATED)
    return is_text & (left_out >= least) & (run == left_out)
