"""Each sampling parameter alone, with the others left out of the program, as most people use them.

Outputs are compared token by token. With a request's own noise, plain decoding is a function of the target's
distribution, so a float64 oracle generates the same output, and so must "coupled". A distribution that is off by a
total variation of 0.01 changes one token in a hundred or more.
"""

import pytest

from support.alone import ALONE, NEW, PENALTIES, ROWS, differing

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize(
    ("name", "num_draft_tokens"), [*((name, 0) for name in ALONE), *((name, 2) for name in PENALTIES)]
)
def test_single_parameter_matches_its_definition(report, name, num_draft_tokens):
    wrong = differing(name, num_draft_tokens)
    report(tokens=ROWS * NEW, differing=wrong)
    assert wrong == 0
