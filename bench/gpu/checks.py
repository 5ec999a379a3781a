"""The project's own tests of rounds and rules, run on the device. Its kernel tests use interpreted kernels."""

import os
from typing import Any

import pytest

from bench.gpu.record import Record

_FILES = ("tests/decoding/test_round.py", "tests/acceptance/test_rules.py")
_FEW = ("tests/acceptance/test_rules.py", "-k", "receipts and TopK")
# Programs are compiled as shipped, no files are written to the tree, and a library's warning is not an error.
_OPTIONS = ("-p", "no:cacheprovider", "--as-shipped", "-o", "filterwarnings=default")
_WORKERS = 14  # processes that share the device, because a test spends most of its time compiling, on one core


class _Outcomes:
    """A pytest plugin that records each test after it has run."""

    def __init__(self, record: Record):
        self._record = record

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a row for a test, or for a fixture that failed."""
        if report.when == "call" or report.failed or report.skipped:
            failed = {"error": report.longreprtext[-4000:]} if report.failed else {}
            self._record.add(
                report.nodeid, ok=not report.failed, outcome=report.outcome, seconds=report.duration, **failed
            )

    def pytest_collectreport(self, report: Any) -> None:
        """Add a row for a file that cannot be imported."""
        if report.failed:
            self._record.add(report.nodeid, ok=False, outcome="not collected", error=report.longreprtext[-4000:])


def run(record: Record, rehearse: bool) -> None:
    """Run the tests until they finish or time runs out. A rehearsal runs only one of them."""
    workers, chosen = (1, _FEW) if rehearse else (min(_WORKERS, os.cpu_count() or 1), _FILES)
    code = pytest.main(["-n", str(workers), *_OPTIONS, *chosen], plugins=[_Outcomes(record)])
    record.add("pytest", ok=code == pytest.ExitCode.OK, exit_code=int(code), workers=workers)
