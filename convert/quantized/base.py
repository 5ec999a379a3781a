"""The interface of quantisation formats. Each combines the tensors that store a matrix into one to be read by rows."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from convert.errors import CheckpointError
from convert.safetensors_reader import Tensor

INT8, INT32, INT64, FLOAT8 = "int8", "int32", "int64", "float8_e4m3fn"
FLOATS = ("float32", "bfloat16", "float16")


class Part(NamedTuple):
    """One of the tensors that store a matrix.

    Attributes:
        dtypes: the names of the dtypes that the tensor may have.
        shapes: the shapes that the tensor may have.
        required: whether the tensor must exist.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True


class QuantizedRows(NamedTuple):
    """Some rows of a matrix as they are stored. The weights are ``(values - zeros) * scales``.

    Attributes:
        values: the quantised weights ``[R, I]``.
        scales: the scale of each group ``[R, G]``, or ``[1, G]`` if all rows share their scales.
        zeros: the zero point of each group, shaped like `scales`; None if all are 0.
        groups: the index of each column's group ``[I]``.
    """

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    groups: np.ndarray


@dataclasses.dataclass(frozen=True)
class QuantizedTensor(Tensor, abc.ABC):
    """A matrix ``float32[O, I]`` that several tensors of a checkpoint store together.

    Attributes:
        label: the format's name.
        parts: the stored tensors, keyed by the last component of their names.
    """

    label: str
    parts: Mapping[str, Tensor]

    @abc.abstractmethod
    def read_quantized(self, start: int, stop: int) -> QuantizedRows:
        """Return the rows from `start` up to, but not including, `stop`."""

    @property
    def format(self) -> str:
        return self.label

    def read(self, rows: slice) -> np.ndarray:
        """Return the weights of `rows`, computed in float32.

        Raises:
            CheckpointError: a scale or a weight is not finite.
        """
        start, stop, _ = rows.indices(self.shape[0])
        stored = self.read_quantized(start, stop)
        scales = stored.scales.astype(np.float32)
        if not np.isfinite(scales).all():
            raise self._damaged("scales")
        weights = stored.values.astype(np.float32)
        if stored.zeros is not None:
            weights -= stored.zeros.astype(np.float32)[:, stored.groups]
        with np.errstate(over="ignore", invalid="ignore"):
            weights *= scales[:, stored.groups]
        if not np.isfinite(weights).all():
            raise self._damaged("dequantised values")
        return weights

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name} in {self.file} has {what} that are not finite; download the file again, or choose another "
            "checkpoint."
        )


@dataclasses.dataclass(frozen=True)
class Format(abc.ABC):
    """A quantisation format, with its parameters from config.json.

    Attributes:
        SUFFIXES: the last name components of the tensors that store a matrix. The name of a matrix that is not
            quantised also ends in "weight".
        label: the format's name, for messages.
        ignored: the names of the modules that config.json lists as not quantised.
        unread: the last name components of tensors that are not read, because they concern activations.
        notes: sentences about the parts of config.json that this package does not follow.
    """

    SUFFIXES: ClassVar[frozenset[str]]

    label: str
    ignored: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @abc.abstractmethod
    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Return the tensors that store a matrix ``[rows, columns]``, keyed by the last component of their names.

        Raises:
            CheckpointError: the matrix cannot be divided into groups or packed words.
        """

    @abc.abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the matrix `name` of this shape, given its checked `parts`.

        Raises:
            CheckpointError: a part contradicts the shape.
        """
