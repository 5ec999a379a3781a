"""The cost of one forward pass as the context, the batch and the number of rows grow."""

import jax

from bench import pairs, plots
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.timing import in_turns


def run(pair: str, repeats: int) -> None:
    """Publish target and draft passes along each of the three axes, from a common base."""
    models = dict(zip(("target", "draft"), pairs.pair(pair), strict=True))
    base = {"rows": 1, "batch": 1, "context": 64}
    steps = {"rows": (1, 2, 3, 5, 9, 17), "batch": (1, 2, 4, 8, 16), "context": (64, 256, 1007)}
    settings = [base | {axis: value} for axis, values in steps.items() for value in values if value != base[axis]]
    passes = {
        (name, *setting.values()): Pass(model, **setting)
        for name, model in models.items()
        for setting in (base, *settings)
    }
    keyed = {str(key): item for key, item in passes.items()}
    taken = pass_seconds(keyed, in_turns(keyed, repeats))
    first = {name: taken[str((name, *base.values()))] for name in models}
    rows = []
    for name, rows_, batch, context in passes:
        spent = taken[str((name, rows_, batch, context))]
        rows.append(
            {
                "model": name,
                "rows": rows_,
                "batch": batch,
                "context": context,
                "ms": spent * 1e3,
                "x its base": spent / first[name],
                "us per row": spent * 1e6 / (rows_ * batch),
            }
        )
    publish(
        f"scaling-{pair}-{jax.default_backend()}",
        f"{pair}: one pass with logits, {models['target'].dtype}",
        rows,
        plots.scaling,
    )
