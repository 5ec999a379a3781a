"""Correctness on the device: kernels, outputs and their distribution. A row's ``ok`` says whether it passed."""

from bench.gpu import kernel_errors, law, texts
from bench.gpu.record import Record


def run(record: Record, rehearse: bool) -> None:
    """Check the kernels first, because they run nowhere else, and the outputs last: they compile for a minute."""
    for name, check in (
        ("kernels", kernel_errors.small),
        ("law", law.check),
        ("kernels at real sizes", kernel_errors.large),
        ("texts", texts.check),
    ):
        with record.attempt(name):
            check(record, rehearse)
