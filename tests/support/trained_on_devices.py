"""Run by test_training_devices.py on N devices: train in FOLDER on DATA until STEP, and print the curve."""

import json
import sys

import jax
import numpy as np

import jspec
from jspec.training.fit import read_log
from support import toys
from support.trainings import chatty


class Stopped(Exception):
    """Raised between two steps, like Ctrl-C."""


def main(folder, data, stop, kind):
    def say(news):
        if news == int(stop):
            raise Stopped

    target = toys.tiny_llama(0, 3, vocab_size=261)
    try:
        drafter = jspec.train_drafter(
            target, chatty(), kind, data, folder=folder, steps=6, depth=2, step_tokens=512, draft_vocab=200, say=say
        )
    except Stopped:
        drafter = None
    sums = [float(np.abs(np.asarray(leaf, np.float64)).sum()) for leaf in jax.tree.leaves(drafter)]
    print(
        json.dumps(
            {
                "devices": jax.device_count(),
                "losses": [evaluation.loss for evaluation in read_log(folder)],
                "sums": sums,
            }
        )
    )


if __name__ == "__main__":
    from pathlib import Path

    main(Path(sys.argv[1]), *sys.argv[2:])
