"""The cost of following `jspec tune`: its choice against the best of a dozen settings, all measured in turns."""

import time
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.report import publish
from bench.subject import WIDTH, Subject, span
from jspec.core.keys import trial_keys
from jspec.drafters import AutoregressiveDrafter
from jspec.drafters.standalone.model import as_drafter
from jspec.tuning.tune_chain import TRIALS

LENGTHS = 1, 2, 3, 4, 6, 8
TREES = (2,), (4,), (2, 1), (3, 1, 1), (2, 2, 1, 1)
_DRAWS = 2000  # bootstrap samples


def run(subject: Subject, batch: int, new_tokens: int, temperature: float, repeats: int) -> None:
    """Publish one row per setting, mark the choice of `jspec.tune`, and report how much slower it is than the best."""
    request = *prompts, keys = subject.request(batch, WIDTH)
    sampling = jspec.SamplingParams(temperature=temperature)
    began = time.perf_counter()
    found = jspec.tune(subject.target, subject.draft, *request, max_new_tokens=new_tokens, sampling=sampling)
    took = time.perf_counter() - began
    answer = found.tree or found.num_draft_tokens
    settings = [0, *LENGTHS]
    if isinstance(as_drafter(subject.draft), AutoregressiveDrafter):
        settings += [jspec.Tree.branching(children) for children in TREES]
    settings += [] if answer in settings else [answer]

    def decode(setting: Any, trial: int) -> tuple[float, float]:
        """Return the tokens and seconds of a trial. Every trial has its own keys."""
        options = {"max_new_tokens": new_tokens, "sampling": sampling}
        start, own = time.perf_counter(), (*prompts, trial_keys(keys, trial))
        if setting == 0:
            out = jspec.generate(subject.target, *own, **options)
        elif isinstance(setting, int):
            out = jspec.speculative_generate(subject.target, subject.draft, *own, num_draft_tokens=setting, **options)
        else:
            tree = jspec.TreeDrafter(subject.draft, setting)
            out = jspec.speculative_generate(subject.target, tree, *own, **options)
        jax.block_until_ready(out)
        return float(out.lengths.sum()), time.perf_counter() - start

    trials = range(TRIALS, TRIALS + 2 + repeats)  # tune has used the earlier keys; the first two calls compile
    played = np.array([[decode(setting, trial) for setting in settings] for trial in trials])[2:]
    median, high = regret(played, settings.index(answer))
    speeds = played[..., 0].sum(0) / played[..., 1].sum(0)
    rows = [
        {
            "setting": _name(setting),
            "tokens/s": speed,
            "x plain": speed / speeds[0],
            "tune": "<- tune" if setting == answer else "",
        }
        for setting, speed in zip(settings, speeds, strict=True)
    ]
    publish(
        f"regret-{subject.name}-b{batch}-t{temperature:g}-{jax.default_backend()}",
        f"{subject.name}: {batch} prompts of {span(prompts[1])} tokens, {new_tokens} new tokens each, temperature "
        f"{temperature:g}, {subject.target.dtype}",
        rows,
        plots.bars("setting", "tokens/s"),
        notes=[
            f"tune took {took:.0f} s and chose {_name(answer)}, which is {median:.1%} slower than the best of "
            f"these, or {high:.1%} at most (95 %, bootstrap of {repeats} repeats).",
            "Each call includes prefill, which tune excludes.",
        ],
        folder=subject.folder,
        regret=median,
        regret_high=high,
    )


def regret(played: np.ndarray, chosen: int) -> tuple[float, float]:
    """Return how much slower `chosen` is than the best setting (0 to 1), and its 95 % quantile over resampled repeats.

    Args:
        played: ``[repeats, settings, 2]``, tokens and seconds.
    """
    draws = np.random.default_rng(0).integers(0, len(played), (_DRAWS, len(played)))

    def lost(some: np.ndarray) -> float:
        total = some.sum(0)
        speeds = total[:, 0] / total[:, 1]
        return float(1 - speeds[chosen] / speeds.max())

    return lost(played), float(np.quantile([lost(played[draw]) for draw in draws], 0.95))


def _name(setting: Any) -> str:
    if isinstance(setting, int):
        return f"K = {setting}" if setting else "plain"
    return f"tree {','.join(map(str, setting.parents))}"
