"""Whether the device computes what is true: kernels, texts and the law of texts. ``ok`` in a row is the answer."""

from bench.gpu import kernel_errors, law, texts
from bench.gpu.record import Record


def run(record: Record, rehearse: bool) -> None:
    """Check what has never run elsewhere first."""
    for name, check in (("kernels", kernel_errors.small), ("texts", texts.check), ("law", law.check),
                        ("kernels at real sizes", kernel_errors.large)):  # fmt: skip
        with record.attempt(name):
            check(record, rehearse)
