"""Compare jspec with llama.cpp (llama-cpp-python) on the same target: greedy decoding, and passes over a few rows."""

import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jspec
from bench import pairs, plots
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.rivals import hf_arrays
from bench.timing import in_turns, ratio, spread
from jspec.models.llama import widened
from jspec.text import load_tokenizer

CONTEXT = 64
_CODE = '''"""Sorting algorithms."""


def bubble_sort(items):
    """Return a sorted copy of a list, by swapping neighbours until nothing changes."""
    items = list(items)
    for end in range(len(items), 1, -1):
        for i in range(end - 1):
            if items[i] > items[i + 1]:
                items[i], items[i + 1] = items[i + 1], items[i]
    return items


def merge_sort(items):
'''
COUNT = 8
NEW_TOKENS = 128
# The logits of the same float32 model differ by about 1e-5 between the two programs. If the query and key rows were in
# another order, the logits would differ by more than 1.
TOLERANCE = 1e-3


def write_gguf(model: jspec.Llama, file: Path) -> None:
    """Write `model` as a float32 GGUF file without a vocabulary."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, array in hf_arrays(model).items():
        for projection, count in heads.items():
            if projection in name:
                array = interleaved(array, count)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(projection: np.ndarray, heads: int) -> np.ndarray:
    """Return ``projection[heads D, in]`` with each head's halves interleaved.

    llama.cpp's rotary embedding rotates adjacent elements. Hugging Face and jspec rotate one half with the other.
    """
    halves = projection.reshape(heads, 2, -1, projection.shape[1])
    return halves.swapaxes(1, 2).reshape(projection.shape)


def load(file: Path, logits_all: bool, context: int = 512, lookup: int = 0) -> Any:
    """Load the model in llama.cpp, with all cores, a float32 cache, and the same attention as in jspec.

    Args:
        lookup: the number of tokens that llama-cpp-python's prompt lookup drafts; 0 for plain decoding.
    """
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    cores = os.cpu_count()
    return llama_cpp.Llama(
        str(file),
        n_ctx=context,
        n_batch=128,
        n_threads=cores,
        n_threads_batch=cores,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        logits_all=logits_all or lookup > 0,  # verification needs the logits of all draft tokens
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
        verbose=False,
    )


def decoder(llm: Any, rows: int, vocab_size: int) -> Callable[[], Any]:
    """Return a call that runs COUNT passes over `rows` tokens each, with all logits, after CONTEXT tokens."""
    tokens = np.random.default_rng(0).integers(1, vocab_size, CONTEXT + rows).tolist()
    llm.reset()
    llm.eval(tokens[:CONTEXT])

    def call() -> Any:
        for _ in range(COUNT):
            llm.n_tokens = CONTEXT  # the next evaluation drops everything after this
            llm.eval(tokens[CONTEXT:])
        return ()

    return call


def greedy(target: jspec.Llama, llm: Any, prompt: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return program -> a call that continues a prompt of CONTEXT tokens by NEW_TOKENS greedy tokens."""
    request = (prompt, np.array([CONTEXT]), jax.random.split(jax.random.key(0), 1))

    def theirs() -> list[int]:
        llm.reset()
        return list(itertools.islice(llm.generate(prompt[0].tolist(), temp=0.0), NEW_TOKENS))

    sampling = jspec.SamplingParams(temperature=0)
    return {
        "jspec": lambda: jspec.generate(target, *request, max_new_tokens=NEW_TOKENS, sampling=sampling),
        "llama.cpp": theirs,
    }


def answer(llm: Any, row: np.ndarray, new_tokens: int, eos_ids: Sequence[int], temperature: float = 0.0) -> list[int]:
    """Return a continuation of `row`, up to EOS or `new_tokens`, which is greedy or sampled from all tokens."""
    llm.reset()
    text: list[int] = []
    whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} if temperature else {}
    for token in itertools.islice(llm.generate(row.tolist(), temp=temperature, **whole), new_tokens):
        text.append(token)
        if token in eos_ids:
            break
    return text


def run(source: str | Path, draft: Path | None, ks: list[int], repeats: int, bits: int = 24) -> None:
    """Measure passes and greedy decoding, alternating between both programs, for a pair's target or a GGUF file.

    Args:
        bits: the `activation_bits` with which `jspec.load` loads the file and its draft.

    Raises:
        ValueError: `draft` or `bits` is given with a pair, or the two programs' logits for a pair's target differ.
    """
    if isinstance(source, Path):
        _run_file(source, draft, ks, repeats, bits)
    elif draft is not None or bits != 24:
        raise ValueError("--draft and --activation-bits work only with --file; name the target's GGUF file, too.")
    else:
        _run_pair(source, ks, repeats)


def _run_pair(pair: str, ks: list[int], repeats: int) -> None:
    """Compare the programs on a pair's target, after checking that their logits agree."""
    target = widened(pairs.pair(pair)[0])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "target.gguf"
        write_gguf(target, file)
        llm, last = load(file, logits_all=True), load(file, logits_all=False)
    prompt = np.random.default_rng(0).integers(1, target.config.vocab_size, (1, CONTEXT))
    check_same(target, llm)
    _compare(pair, target, (llm, last), ks, repeats, prompt)


def _run_file(file: Path, draft: Path | None, ks: list[int], repeats: int, bits: int) -> None:
    """Compare the programs on a GGUF file. With `draft`, also measure speculative decoding for each K.

    llama.cpp always rounds activations to 8 bits, so its logits differ from jspec's.
    """
    llm, last = load(file, logits_all=True), load(file, logits_all=False)
    prompt = np.array([load_tokenizer(file).encode(_CODE)[:CONTEXT]])
    small = None if draft is None else jspec.load(draft, activation_bits=bits)
    name = file.stem if bits == 24 else f"{file.stem}-{bits}-bit-activations"
    _compare(name, jspec.load(file, activation_bits=bits), (llm, last), ks, repeats, prompt, small)


def _compare(
    name: str,
    target: jspec.Llama,
    llms: tuple[Any, Any],
    ks: list[int],
    repeats: int,
    prompt: np.ndarray,
    draft: jspec.Llama | None = None,
) -> None:
    """Compare `target` with the same model in llama.cpp. `llms`: one with all logits, and one with only the last."""
    import llama_cpp

    sizes = [1, *(k + 1 for k in ks)]
    passes = {f"{rows}": Pass(target, rows, context=CONTEXT) for rows in sizes}
    others = {f"llama.cpp {rows}": decoder(llms[0], rows, target.config.vocab_size) for rows in sizes}
    texts = greedy(target, llms[1], prompt) | ({} if draft is None else drafted(target, draft, ks, prompt))
    times = in_turns(passes | others | texts, repeats)
    taken = pass_seconds(passes, times)
    rows = []
    for size in sizes:
        ours, theirs = times[f"{size}"] / passes[f"{size}"].count, times[f"llama.cpp {size}"] / COUNT
        rows.append(
            {
                "rows": size,
                "jspec, ms": taken[f"{size}"] * 1e3,
                "llama.cpp, ms": spread(theirs).median * 1e3,
                "speed of jspec / llama.cpp": ratio(theirs, ours).median,
                "cost over one row": ratio(ours, times["1"] / passes["1"].count).median,
            }
        )
    speeds = {program: spread(NEW_TOKENS / times[program]) for program in texts}
    largest = difference(target, llms[0], prompt)
    same = np.array(texts["llama.cpp"]()) == np.asarray(texts["jspec"]().tokens)[0]
    publish(
        f"llamacpp-{name}",
        f"{name}: one pass with all logits, {os.cpu_count()} threads, {CONTEXT} tokens of context",
        rows,
        plots.llamacpp,
        notes=[
            f"llama-cpp-python {llama_cpp.__version__}; largest logit difference {largest:.2g}.",
            f"Greedy decoding of {NEW_TOKENS} tokens after {CONTEXT}, {same.sum()} of them the same: "
            + ", ".join(f"{program} {speed.median:.1f} tokens/s" for program, speed in speeds.items())
            + "; speed relative to llama.cpp: "
            + ", ".join(f"{program} {ratio(times['llama.cpp'], times[program]).median:.3f}" for program in texts)
            + ".",
        ],
        tokens_per_second=speeds,
    )


def drafted(target: jspec.Llama, draft: jspec.Llama, ks: list[int], prompt: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return program -> a call that continues `prompt` as in `greedy`, but speculatively, for each K."""
    request = (prompt, np.array([CONTEXT]), jax.random.split(jax.random.key(0), 1))
    options = {"max_new_tokens": NEW_TOKENS, "sampling": jspec.SamplingParams(temperature=0)}
    return {
        f"jspec, K = {k}": functools.partial(
            jspec.speculative_generate, target, draft, *request, num_draft_tokens=k, **options
        )
        for k in ks
    }


def difference(target: jspec.Llama, llm: Any, prompt: np.ndarray) -> float:
    """Return the largest logit difference over the first ten tokens of `prompt`."""
    tokens = prompt[0][:10].tolist()
    llm.reset()
    llm.eval(tokens)
    return float(np.abs(np.asarray(target(np.array([tokens])))[0] - llm.scores[:10]).max())


def check_same(target: jspec.Llama, llm: Any) -> float:
    """Return the largest logit difference after each of ten tokens.

    Raises:
        ValueError: the difference is too large to be due to rounding.
    """
    found = difference(target, llm, np.arange(1, 11)[None])
    if not found < TOLERANCE:
        raise ValueError(
            f"logits of jspec and llama.cpp differ by up to {found:.2g}; expected less than {TOLERANCE:g}. This is "
            "not the same model; see write_gguf."
        )
    return found
