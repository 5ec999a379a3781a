"""What the default run takes of many cases: some of each kind. The others are under -m slow."""

import pytest


def by_default(cases, kept):
    """`cases` as parameters, those that are not `kept` marked slow."""
    assert all(case in cases for case in kept)
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case in kept]) for case in cases]
