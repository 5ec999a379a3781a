"""The server keeps a few compiled grammars for requests that repeat them."""

import os

import pytest

from support.streams import SEEDED, asking, post, until

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="grammars have no processes to keep"),
]


def test_latest_grammars_are_kept(running, monkeypatch):
    """A repeated constraint is not compiled again. Only a few grammars are kept, and ended ones are not used."""
    pool, kept, compiled = running.server._served.grammars._pool, running.server._constraints._kept, []
    compile_ = pool.compile
    monkeypatch.setattr(pool, "compile", lambda *ask: compiled.append(ask) or compile_(*ask))
    bodies = [SEEDED | {"response_format": {"type": "regex", "regex": f"[a-c]{{{i + 2}}}"}} for i in range(10)]
    first = post(running, bodies[0]).json()["choices"]
    assert post(running, bodies[0]).json()["choices"] == first and len(compiled) == 1
    with asking(running, bodies[0], 3) as answers:
        assert {answer.status_code for answer in answers()} == {200}
    until(lambda: not running.server.open and len(kept) <= 8)
    compiled.clear()
    for body in (*bodies, bodies[9]):
        assert post(running, body).status_code == 200
    assert len(compiled) == 9 and len(kept) == 8
    pool._server._process.kill()
    pool._server._process.wait()
    assert post(running, bodies[9]).status_code == 200 and len(compiled) == 10
