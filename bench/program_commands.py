"""Commands that measure jspec inside programs: groups of samples, training, `jax.vmap`, idle room and lm-eval."""

from typing import Annotated

import typer

from bench.options import Batch, Chatty, Draft, NewTokens, Output, Pair, Repeats, Target, measured, need, one_sentence

app = typer.Typer()


@app.command()
def samples(
    pair: Pair = "109m",
    target: Target = None,
    draft: Draft = None,
    output: Output = None,
    count: Annotated[int, typer.Option("--samples", min=2, help="Samples of the prompt.")] = 8,
    width: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 512,
    new_tokens: NewTokens = 32,
    repeats: Repeats = 5,
) -> None:
    """Compare samples_per_prompt, which prefills the prompt once, with a batch of identical prompts."""
    from bench import samples

    samples.run(measured(new_tokens, pair, target, draft, None, output), count, width, new_tokens, repeats)


@app.command()
def rollouts(output: Output = None, steps: Annotated[int, typer.Option("--steps", min=4)] = 40) -> None:
    """Train SmolLM2 with GRPO (examples/grpo.py), and compare drafters that learn from its roll-outs."""
    from bench import rollouts
    from bench.report import RESULTS

    rollouts.run(steps, output or RESULTS)


@app.command()
def vmap(
    pair: Pair = "109m",
    target: Target = None,
    draft: Draft = None,
    output: Output = None,
    batch: Batch = 8,
    width: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 64,
    new_tokens: NewTokens = 32,
    repeats: Repeats = 5,
) -> None:
    """Compare jax.vmap over single prompts with one batch of the same prompts."""
    from bench import vmap

    vmap.run(measured(new_tokens, pair, target, draft, None, output), batch, width, new_tokens, repeats)


@app.command()
def room(
    pair: Pair = "109m",
    target: Target = None,
    draft: Draft = None,
    output: Output = None,
    slots: Annotated[int, typer.Option("--slots", min=1)] = 8,
    width: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 64,
    new_tokens: NewTokens = 64,
    repeats: Repeats = 9,
) -> None:
    """Compare short requests in an engine whose slots have 1,024 tokens with those in one with 8,192."""
    from bench import room

    room.run(measured(new_tokens, pair, target, draft, None, output), slots, width, new_tokens, repeats)


@app.command()
def lm_eval(
    target: Chatty = "smollm2",
    draft: Annotated[str, typer.Option("--draft", metavar="SRC", help="The target's draft, or lookup.")] = "lookup",
    max_length: Annotated[int, typer.Option("--max-length", min=64, help="Tokens that a model reads at once.")] = 512,
    output: Output = None,
) -> None:
    """Compare scores of jspec in lm-eval, in process, with those of lm-eval's hf class. Needs torch and accelerate."""
    for package in ("lm_eval", "torch", "accelerate"):
        need(package, f'This command needs {package}; run pip install -e ".[eval]" torch accelerate.')
    from bench import lm_eval

    with one_sentence():
        lm_eval.run(target, draft, max_length, output)


@app.command()
def batch(
    output: Output = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1)] = 20_000,
    new_tokens: NewTokens = 32,
    workers: Annotated[int, typer.Option("--workers", min=1)] = 2,
    kills: Annotated[int, typer.Option("--kills", min=0, help="How many times to kill a worker.")] = 2,
) -> None:
    """Compare a batch job whose workers are killed with the same job in one process. Needs Ray."""
    need("ray", 'The batch run needs Ray, which is not installed; run pip install -e ".[ray]"')
    from bench import batch
    from bench.report import RESULTS

    batch.run(prompts, new_tokens, workers, kills, output or RESULTS)


@app.command()
def mesh(
    output: Output = None,
    processes: Annotated[list[int], typer.Option("--processes", min=1, help="May be repeated.")] = [1, 2, 4],  # noqa: B006
    layers: Annotated[int, typer.Option("--layers", min=1, help="Size of the random model; 12 make 1 GB.")] = 12,
) -> None:
    """Measure the host memory of processes that load one model together."""
    from bench import mesh
    from bench.report import RESULTS

    mesh.run(processes, layers, output or RESULTS)


@app.command()
def simulate(
    pair: Pair = "bundled",
    target: Target = None,
    draft: Draft = None,
    output: Output = None,
    slots: Annotated[int, typer.Option("--slots", min=1)] = 8,
    replicas: Annotated[list[int], typer.Option("--replicas", min=1, help="May be repeated.")] = [1, 10, 1000],  # noqa: B006
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Requests per replica; at least 4,000 in all.")
    ] = 100,
    load: Annotated[
        float, typer.Option("--load", help="Request rate, as a share of the capacity without caches.")
    ] = 0.9,
    failure: Annotated[float, typer.Option("--failure", help="Mean seconds until a replica fails.")] = 120,
    restart: Annotated[float, typer.Option("--restart", help="Seconds that a replica needs to start.")] = 30,
) -> None:
    """Simulate goodput, queueing and routing of replicas that fail, from measured service times. Needs Ray."""
    need("ray", 'The simulation needs Ray, which is not installed; run pip install -e ".[ray]"')
    from bench import simulate

    subject = measured(96, pair, target, draft, None, output)
    simulate.run(subject, slots, replicas, requests, load, failure, restart)


@app.command()
def chaos(
    output: Output = None,
    streams: Annotated[int, typer.Option("--streams", min=1)] = 500,
    new_tokens: NewTokens = 128,
    replicas: Annotated[int, typer.Option("--replicas", min=1)] = 2,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two signals.")] = 20,
    hang: Annotated[bool, typer.Option("--hang", help="Stop replicas with SIGSTOP instead of killing them.")] = False,
    ingress: Annotated[bool, typer.Option("--ingress", help="Kill the HTTP server instead of a replica.")] = False,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Maximum number of open streams.")] = 50,
) -> None:
    """Compare seeded streams with jspec.generate while replicas are killed. Needs Ray."""
    need("ray", 'The chaos run needs Ray, which is not installed; run pip install -e ".[ray]"')
    import signal

    from bench import chaos
    from bench.report import RESULTS

    number, victim = signal.SIGSTOP if hang else signal.SIGKILL, "ingress" if ingress else "replicas"
    attack = chaos.Attack(replicas, interval, number, victim, concurrency)
    chaos.run(streams, new_tokens, attack, output or RESULTS)
