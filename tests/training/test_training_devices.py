"""Training on several devices gives the same curve and weights as on one, even if a run continues on fewer."""

import json

import numpy as np
import pytest

from support import on_devices
from support.trainings import chats


def trained(devices, *options):
    found = json.loads(on_devices.output(devices, "trained_on_devices", *options)[-1])
    assert found["devices"] == devices
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "model"])
def test_training_on_several_devices_equals_one_device(tmp_path, kind, report):
    data = chats(tmp_path / "chats.jsonl")
    alone, divided = (trained(count, tmp_path / str(count), data, 0, kind) for count in (1, 4))
    begun = trained(4, tmp_path / "moved", data, 4, kind)
    moved = trained(1, tmp_path / "moved", data, 0, kind)
    assert len(alone["losses"]) == 6 and begun["losses"] == divided["losses"][:3] and not begun["sums"]
    for name, other in (("divided", divided), ("moved", moved)):
        off = max(np.abs(np.divide(other[part], alone[part]) - 1).max() for part in ("losses", "sums"))
        report(kind=kind, case=name, largest_difference=f"{off:.0e}")
        assert off < 1e-3
