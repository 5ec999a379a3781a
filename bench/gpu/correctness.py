"""Whether the device computes what is true: kernels, texts and the law of texts. ``ok`` in a row is the answer."""

from bench.gpu import kernel_errors, law, texts
from bench.gpu.record import Record


def run(record: Record, rehearse: bool) -> None:
    """Check what has never run elsewhere first."""
    for name, check in (("attention", kernel_errors.attention), ("norm", kernel_errors.norm), ("texts", texts.check),
                        ("law", law.check)):  # fmt: skip
        with record.attempt(name):
            check(record, rehearse)
