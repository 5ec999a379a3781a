"""The cases that run by default: some of each kind. The others run with -m slow."""

import pytest


def by_default(cases, kept):
    """Return `cases` as parameters, with those that are not `kept` marked slow."""
    assert all(case in cases for case in kept)
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case in kept]) for case in cases]
