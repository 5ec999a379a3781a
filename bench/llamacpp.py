"""The same float32 target in llama.cpp (llama-cpp-python): plain decoding, and a pass over a few rows."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import jspec
from bench import pairs
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.rivals import hf_arrays
from bench.timing import in_turns, ratio, spread

CONTEXT = 64
COUNT = 8


def write_gguf(model: jspec.Llama, file: Path) -> None:
    """`model` as a float32 GGUF file without a vocabulary."""
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
            if projection in name:  # llama.cpp rotates neighbouring pairs, Hugging Face the two halves
                split = array.reshape(count, 2, config.head_dim // 2, -1)
                array = split.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def decoder(llm: Any, rows: int, vocab_size: int) -> Callable[[], Any]:
    """COUNT passes over `rows` tokens each, with all logits, after CONTEXT tokens."""
    tokens = np.random.default_rng(0).integers(1, vocab_size, CONTEXT + rows).tolist()
    llm.reset()
    llm.eval(tokens[:CONTEXT])

    def call() -> Any:
        for _ in range(COUNT):
            llm.n_tokens = CONTEXT  # the next evaluation drops what lies behind
            llm.eval(tokens[CONTEXT:])
        return ()

    return call


def run(pair: str, ks: list[int], repeats: int) -> None:
    """Passes of both programs in turns; also their logits, so that it is the same model."""
    import llama_cpp

    target, _ = pairs.pair(pair)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "target.gguf"
        write_gguf(target, file)
        llm = llama_cpp.Llama(str(file), n_ctx=512, n_threads=2, n_threads_batch=2, logits_all=True, verbose=False,
                              n_batch=128)  # fmt: skip
    difference = compare(target, llm)
    sizes = [1, *(k + 1 for k in ks)]
    passes = {f"{rows}": Pass(target, rows, context=CONTEXT) for rows in sizes}
    others = {f"llama.cpp {rows}": decoder(llm, rows, target.config.vocab_size) for rows in sizes}
    times = in_turns(passes | others, repeats)
    taken = pass_seconds(passes, times)
    rows = []
    for size in sizes:
        ours, theirs = times[f"{size}"] / passes[f"{size}"].count, times[f"llama.cpp {size}"] / COUNT
        rows.append({"rows": size, "jspec, ms": taken[f"{size}"] * 1e3, "llama.cpp, ms": spread(theirs).median * 1e3,
                     "time of jspec / llama.cpp": ratio(ours, theirs).median})  # fmt: skip
    publish(
        f"llamacpp-{pair}",
        f"{pair}: one pass with all logits, float32, 2 threads, {CONTEXT} tokens of context",
        rows,
        notes=[f"llama-cpp-python {llama_cpp.__version__}; largest difference of logits {difference:.2g}."],
    )


def compare(target: jspec.Llama, llm: Any) -> float:
    """Largest difference of the logits after each of ten tokens."""
    tokens = list(range(1, 11))
    llm.reset()
    llm.eval(tokens)
    return float(np.abs(np.asarray(target(np.array([tokens])))[0] - llm.scores[:10]).max())
