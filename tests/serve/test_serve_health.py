"""/health: how a heartbeat detects a server that is stuck."""

import threading

import httpx
import pytest

from jspec.engine import heartbeat
from jspec.serve import job as serve_job
from support.streams import SEEDED, asking, until

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("stuck", ["decode_rounds", "parse_request"])
def test_health_reports_stuck_engine_or_parser(running, gate, monkeypatch, stuck):
    """Report an engine that is stuck in a call or a stuck request parser, but neither idle threads nor compilation."""
    healthy = lambda: httpx.get(f"{running.url}/health").status_code == 200  # noqa: E731
    opened, parse_request = threading.Event(), serve_job.parse_request
    if stuck == "parse_request":
        gate.set()
        monkeypatch.setattr(serve_job, "parse_request", lambda *given: (opened.wait(), parse_request(*given))[1])
    assert healthy()
    monkeypatch.setattr(heartbeat, "PATIENCE", 0.2)
    monkeypatch.setattr(heartbeat, "_TIMES", 0)
    assert healthy()
    with asking(running, SEEDED) as answers:
        said = "in one call for" if stuck == "decode_rounds" else "No request has been read completely"
        # On a slow machine an earlier call may be reported first, and end before the next check.
        heard = []
        until(lambda: heard.append(httpx.get(f"{running.url}/health")) or said in heard[-1].text)
        assert (heard[-1].status_code, heard[-1].json()["error"]["code"]) == (503, "stuck")
        if stuck == "decode_rounds":
            monkeypatch.setattr(running.engine.device, "is_compiling", True)
            assert healthy()
            monkeypatch.setattr(running.engine.device, "is_compiling", False)
        monkeypatch.setattr(heartbeat, "PATIENCE", 60.0)
        gate.set()
        opened.set()
        assert answers()[0].status_code == 200
    assert healthy()


def test_heartbeat_reports_overdue_work(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    beats = heartbeat.Heartbeat()
    now[0] += 1000
    assert beats.overdue == 0, "nothing to do"
    with beats.beat():
        now[0] += 59
        assert beats.overdue == 0
        with beats.beat():
            now[0] += 2
            assert beats.overdue == 61
        assert beats.overdue == 0, "another one has ended"
    with beats.beat():
        now[0] += 600
        assert beats.overdue == 0, "one took 61 seconds, so this one may take ten times as long"
        now[0] += 11
        assert beats.overdue == 611
    assert beats.overdue == 0
