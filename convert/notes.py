"""Log messages about the parts of a checkpoint that are ignored, written once, when its weights are read.

A field that other programs may read gets a warning that says what to do. Everything else gets an info message.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from convert import rope_notes, weight_files
from convert.gguf import config as gguf_config
from convert.gguf.header import Header
from convert.json_fields import Fields
from convert.json_file import read_object
from convert.quantized import methods

_LOG = logging.getLogger("jspec.convert")


def log_directory(directory: Path) -> None:
    """Log what is ignored in a Hugging Face directory.

    Raises:
        CheckpointError: config.json, the index or a weight file is missing.
    """
    config = directory / "config.json"
    for warning in warnings(read_object(config)):
        _LOG.warning("%s: %s.", config, warning)
    if unread := rope_notes.unread(read_object(config)):
        _LOG.info("%s: ignoring %s of the rope section, as transformers does.", config, ", ".join(unread))
    form = methods.parse(read_object(config))
    for note in () if form is None else form.notes:
        _LOG.info("%s: %s.", config, note)
    chosen = weight_files.find(directory)
    if note := chosen.note:
        _LOG.log(logging.WARNING if chosen.is_ambiguous else logging.INFO, "%s: %s.", directory, note)


def log_gguf(header: Header) -> None:
    """Log which keys of a GGUF file are ignored."""
    if ignored := gguf_config.ignored_keys(header):
        _LOG.info("%s: ignoring %s, which do not change what this model computes.", header.file, ", ".join(ignored))


def warnings(raw: Fields) -> Iterator[str]:
    """Yield a sentence for each field of a parsed config.json that is ignored here and may be read elsewhere."""
    if raw.get("auto_map") is not None:
        yield (
            "auto_map names code in the checkpoint, which is not run; the model is computed as transformers does "
            "without trust_remote_code"
        )
    yield from rope_notes.warnings(raw)
