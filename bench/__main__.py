"""`python -m bench COMMAND`: one command per question."""

from pathlib import Path
from typing import Annotated

import typer

from bench import chat_commands, guesses, program_commands
from bench.gpu import command as gpu
from bench.options import (
    Acceptance,
    Batch,
    Draft,
    Length,
    Lengths,
    NewTokens,
    Output,
    Pair,
    Prompts,
    Repeats,
    Target,
    Temperature,
    measured,
    need,
    one_sentence,
    without_draft,
)

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.callback()
def need_matplotlib() -> None:
    """Exit before measuring anything if the results could not be plotted afterwards."""
    need("matplotlib", 'Every command needs matplotlib, which is not installed; run pip install -e ".[bench]"')


@app.command()
def latency(
    pair: Pair = "bundled",
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    output: Output = None,
    batch: Annotated[list[int], typer.Option("--batch", help="May be repeated.")] = [1, 8],  # noqa: B006
    k: Lengths = [1, 2, 3, 4, 6, 8],  # noqa: B006
    new_tokens: NewTokens = 128,
    width: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 32,
    temperature: Temperature = 0.0,
    repeats: Repeats = 10,
    acceptance: Acceptance = None,
    rivals: Annotated[bool, typer.Option(help="Also measure transformers, if torch is installed.")] = True,
) -> None:
    """Measure tokens per second of whole calls: plain, speculative for each K, and transformers, plain and assisted."""
    from bench import latency

    subject = measured(new_tokens, pair, target, draft, prompts, output)
    latency.run(subject, batch, k, new_tokens, width, temperature, repeats, rivals, acceptance)


@app.command()
def roofline(
    pair: Pair = "109m",
    batch: Batch = 1,
    k: Lengths = [1, 4, 7],  # noqa: B006
    context: Annotated[int, typer.Option("--context", min=1)] = 64,
    repeats: Repeats = 15,
) -> None:
    """Measure the share of the read bandwidth that plain decoding, draft steps and verification use."""
    from bench import roofline

    roofline.run(pair, batch, k, context, repeats)


@app.command()
def gap(
    pair: Pair = "109m",
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    output: Output = None,
    k: Length = 4,
    batch: Batch = 1,
    temperature: Temperature = 1.0,
    repeats: Repeats = 9,
    new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=16)] = 128,
    acceptance: Acceptance = None,
) -> None:
    """Explain, step by step, how the measured speed-up differs from the one that theory predicts."""
    from bench import gap

    subject = measured(new_tokens, pair, target, draft, prompts, output)
    gap.run(subject, k, batch, temperature, repeats, new_tokens, acceptance)


@app.command()
def trace(
    pair: Pair = "bundled",
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    output: Output = None,
    k: Annotated[int, typer.Option("--num-draft-tokens", min=0, help="0 is plain decoding.")] = 4,
    batch: Batch = 1,
    new_tokens: NewTokens = 64,
    temperature: Temperature = 1.0,
    keep: Annotated[Path | None, typer.Option("--keep", help="Folder for the trace and a Perfetto file.")] = None,
) -> None:
    """Show where a round's time goes: draft, verify, accept, commit, idle."""
    from bench import trace

    trace.run(measured(new_tokens, pair, target, draft, prompts, output), k, batch, new_tokens, temperature, keep)


@app.command()
def scaling(pair: Pair = "bundled", repeats: Repeats = 7) -> None:
    """Measure the cost of one pass as a function of context, batch and rows."""
    from bench import scaling

    scaling.run(pair, repeats)


@app.command()
def llamacpp(
    pair: Pair = "109m",
    file: Annotated[Path | None, typer.Option("--file", help="GGUF file to use instead of a pair.")] = None,
    draft: Annotated[Path | None, typer.Option("--draft", help="GGUF file of a draft model.")] = None,
    bits: Annotated[int, typer.Option("--activation-bits", help="Bits per activation, with --file: 8, 16 or 24.")] = 24,
    k: Lengths = [1, 4, 7],  # noqa: B006
    repeats: Repeats = 15,
) -> None:
    """Compare the target's passes and greedy decoding with those of llama.cpp. Needs llama-cpp-python."""
    from bench import llamacpp

    llamacpp.run(pair if file is None else file, draft, k, repeats, bits)


@app.command()
def against(
    base: Annotated[
        Path,
        typer.Argument(metavar="CHECKOUT", exists=True, file_okay=False, help="Other checkout, such as a worktree."),
    ],
    pair: Pair = "bundled",
    batch: Annotated[list[int], typer.Option("--batch", min=1, help="May be repeated.")] = [1, 8],  # noqa: B006
    repeats: Repeats = 20,
) -> None:
    """Compare this checkout's speed and output with another's: plain decoding, a draft model and prompt lookup."""
    from bench import against

    against.run(base, pair, batch, repeats)


@app.command()
def startup(
    pair: Pair = "bundled",
    target: Target = None,
    server: Annotated[bool, typer.Option("--server", help="Measure only two starts of `jspec serve`.")] = False,
) -> None:
    """Time the first call and the first token, with and without the cache. With --target, draft by prompt lookup."""
    from bench import startup

    if server:
        typer.echo("\n".join(map(str, startup.served(target))))
    else:
        startup.run(pair, target)


@app.command()
def first_answer() -> None:
    """Measure the seconds from a clone to SmolLM2's answer in a fresh environment, and the downloads' share of them."""
    from bench import first_answer

    first_answer.run()


@app.command()
def identity(batch: Batch = 8, new_tokens: NewTokens = 256) -> None:
    """Count the outputs that depend on batch size, padded width or speculation, in float32 and bfloat16."""
    from bench import identity

    identity.run(batch, new_tokens)


@app.command()
def compiled(
    device: Annotated[str, typer.Option("--device", help="h200, h100, a100, l4, t4, v5e or v6e; it may be absent.")],
    pair: Annotated[
        str, typer.Option("--pair", help="109m, two Llama shapes as TARGET/DRAFT, as in roofline, or TARGET/dspark.")
    ] = ("llama-3.2-3b/llama-3.2-1b"),
    batch: Batch = 1,
    k: Length = 4,
    width: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 128,
    new_tokens: NewTokens = 384,
    count: Annotated[int, typer.Option("--devices", min=1, help="Number of devices to shard over.")] = 1,
    output: Output = None,
) -> None:
    """Compile a program for an absent device, and show its kernels, bytes, memory and predicted time."""
    from bench import devices

    with one_sentence():
        devices.prepare(device)  # before JAX starts
        from bench import abstract, compiled
        from bench.report import RESULTS

        setting = abstract.Setting(batch, width, new_tokens, k)
        compiled.run(device, pair, setting, count, output or RESULTS)


@app.command()
def engine(
    pair: Pair = "bundled",
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    output: Output = None,
    slots: Annotated[int, typer.Option("--slots", min=1)] = 8,
    new_tokens: NewTokens = 128,
    width: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 32,
    temperature: Temperature = 1.0,
    repeats: Repeats = 5,
) -> None:
    """Compare an engine's choice of draft length with fixed lengths and with one program, by number of requests."""
    from bench import engine

    subject = measured(new_tokens, pair, target, draft, prompts, output)
    engine.run(subject, slots, new_tokens, width, temperature, repeats)


@app.command()
def serve(
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    output: Output = None,
    slots: Annotated[int, typer.Option("--slots", min=1)] = 8,
    k: Annotated[str, typer.Option("--num-draft-tokens", help="Same as in `jspec serve`.")] = "auto",
    at_once: Annotated[list[int], typer.Option("--clients", min=1, help="May be repeated.")] = [1, 2, 4, 8, 16],  # noqa: B006
    new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    first: Annotated[float, typer.Option("--first-ms", min=1, help="Limit for a good answer's first token.")] = 500.0,
    each: Annotated[float, typer.Option("--token-ms", min=0.1, help="Limit for each later token.")] = 50.0,
    cost_ratio: Annotated[
        float, typer.Option("--cost-ratio", min=0, help="As printed by `gap`; the default is the bundled pair's.")
    ] = 0.21,
    repeats: Repeats = 3,
) -> None:
    """Measure the latency and throughput of `jspec serve`, with and without the draft, by number of clients."""
    need("openai", "The clients need openai, which is not installed; run pip install openai")
    from bench import serve

    if target and not prompts:
        raise typer.BadParameter("--target requires --prompts, a file with one prompt per line.")
    traffic = serve.Traffic(serve.prompts(prompts), new_tokens, temperature, at_once, first / 1e3, each / 1e3)
    common = [*([target] if target else []), "--slots", str(slots)]
    drafted = ["--num-draft-tokens", k, *(["--draft", draft] if draft else [])]
    name = "+".join(Path(part).name for part in (target or "bundled", draft) if part) + f"-k{k}-s{slots}"
    with one_sentence(RuntimeError):  # a server does not start
        serve.run(common, drafted, name, traffic, cost_ratio, repeats, output)


@app.command()
def waits(
    pair: Pair = "bundled",
    target: Target = None,
    draft: Draft = None,
    output: Output = None,
    long: Annotated[int, typer.Option("--prompt-tokens", min=16, help="Length of the long prompt.")] = 900,
    repeats: Repeats = 7,
) -> None:
    """Measure first-token latency with and without a draft, and the mutual delay of three streams and a long prompt."""
    from bench import waits

    waits.run(measured(long, pair, target, draft, None, output), long, repeats)


@app.command()
def quantization(
    target: Target = None,
    output: Output = None,
    windows: Annotated[int, typer.Option("--texts", min=1, help="Held-out texts of each of two kinds.")] = 16,
    repeats: Repeats = 15,
) -> None:
    """Measure how far int8 and int4 change a model's distribution on held-out Python, and what they save."""
    from bench import quantization

    with one_sentence():
        quantization.run(without_draft(quantization.NEW_TOKENS, target, output), windows, repeats)


@app.command()
def grammars(minutes: Annotated[float, typer.Option("--minutes", min=0.1)] = 20.0, output: Output = None) -> None:
    """Send valid and hostile random grammars to `jspec serve` beside four streams. Report crashes, waits and memory."""
    from bench import grammars

    grammars.run(minutes, output)


@app.command()
def constraints(
    pair: Pair = "bundled",
    target: Target = None,
    draft: Draft = None,
    output: Output = None,
    slots: Annotated[int, typer.Option("--slots", min=1)] = 1,
    new_tokens: NewTokens = 200,
    temperature: Temperature = 0.7,
    repeats: Repeats = 5,
) -> None:
    """Compare the draft lengths that an engine chooses under a JSON schema with a fixed length and plain decoding."""
    need("llguidance", "Constraints need llguidance, which is not installed; run pip install llguidance")
    from bench import constraints

    subject = measured(new_tokens, pair, target, draft, None, output)
    constraints.run(subject, slots, new_tokens, temperature, repeats)


@app.command()
def interrupts(
    count: Annotated[int, typer.Option("--count", min=1, help="Number of signals; they cycle through phases.")] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Seed for the random moments.")] = 0,
) -> None:
    """Press Ctrl-C while the command loads, compiles, decodes or tunes, and report its exit status and exit time."""
    from bench import interrupts

    interrupts.run(count, seed)


app.add_typer(chat_commands.app)
app.add_typer(program_commands.app)
app.add_typer(guesses.app)
app.add_typer(gpu.app)

if __name__ == "__main__":
    app()
