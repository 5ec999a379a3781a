"""GGUF tensor types and file types, including those removed from llama.cpp and those newer than the gguf library."""

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from convert.errors import CheckpointError
from convert.json_file import Json

if TYPE_CHECKING:
    import gguf

# Number -> (name, replacement). See https://github.com/ggml-org/ggml/blob/master/include/ggml.h
_GONE = {
    4: ("Q4_2", "Q4_0"),
    5: ("Q4_3", "Q4_1"),
    31: ("Q4_0_4_4", "Q4_0"),
    32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"),
    36: ("IQ4_NL_4_4", "IQ4_NL"),
    37: ("IQ4_NL_4_8", "IQ4_NL"),
    38: ("IQ4_NL_8_8", "IQ4_NL"),
}


def kind(name: str, number: int, file: Path) -> "gguf.GGMLQuantizationType":
    """Return the `gguf.GGMLQuantizationType` of a tensor.

    Args:
        name: the name of the tensor in `file`, for the error message.

    Raises:
        CheckpointError: the type was removed from llama.cpp, or the gguf library does not know it.
    """
    import gguf  # lazily: the import is slow, and only GGUF files need it

    try:
        return gguf.GGMLQuantizationType(number)
    except ValueError as error:
        gone, instead = _GONE.get(number, ("", ""))
        if gone:
            raise CheckpointError(
                f"{name} in {file} is of type {gone} ({number}), which llama.cpp has removed; choose the {instead} "
                "file of the same model."
            ) from error
        raise CheckpointError(
            f"{name} in {file} is of type {number}, which gguf {metadata.version('gguf')} does not know; choose a file "
            "of another quantisation, such as Q8_0 or Q4_K_M."
        ) from error


def file_type(metadata: dict[str, Json]) -> str | None:
    """Return the quantisation of most of a file's tensors, such as "Q4_K_M", or None if the metadata lacks it."""
    import gguf  # lazily: the import is slow, and only GGUF files need it

    try:
        return gguf.LlamaFileType(metadata.get("general.file_type")).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return None
