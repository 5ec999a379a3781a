"""Real models in 4 bits: SmolLM2-135M-Instruct matches transformers, and Qwen2.5-Coder's draft model saves rounds."""

import json

import jax
import numpy as np
import pytest

import convert
import jspec
from bench import chats, coder, llamacpp
from jspec import text
from jspec.bundled.head_data import head_of
from jspec.text import tokenizer_file
from support import real
from support.checkpoints import raw_config
from support.gguf_tokenizer import check_same, splitting_digits
from support.loaded import expected_params
from support.tokenizer_file import strings

pytestmark = pytest.mark.real

CHATS = [
    "Tell me about the city of Paris.",
    "Write a Python function that adds two numbers.",
    "Write a poem about the sea.",
    "Explain step by step how to bake bread, and why each step matters.",
]
NEW = 32
CLOSE = 1e-3  # rounding may swap two logits that are closer than this


@pytest.fixture(scope="module")
def file():
    return real.smollm2()


@pytest.fixture(scope="module")
def theirs(file):
    pytest.importorskip("torch")
    return real.transformers_model(file)


@pytest.fixture(scope="module")
def tokenizer(file):
    return text.load_tokenizer(file)


def test_weights_match_transformers(file, theirs):
    raw = raw_config(tie_word_embeddings=True, num_hidden_layers=30)
    expected = expected_params({name: tensor.numpy() for name, tensor in theirs.state_dict().items()}, raw)
    loaded = convert.load(file)
    assert loaded.params.keys() == expected.keys()
    assert all(loaded.params[name].tobytes() == array.tobytes() for name, array in expected.items())
    assert loaded.config.eos_token_ids == (2, 0) and loaded.config.rope.theta == 100000.0


def random_texts(count):
    """Yield text with arbitrary characters, runs of whitespace, code and special tokens."""
    rng = np.random.default_rng(7)
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", " ", "\n\n", "\t", "12", "e\u0301"]
    for one in strings(count):
        points = rng.integers(1, 0x110000, 8)
        letters = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        yield one + letters + "".join(rng.choice(specials, rng.integers(0, 6)))


def test_ids_texts_and_chats_match_transformers(file, tokenizer, tmp_path, report):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    texts, rng = list(random_texts(10_000)), np.random.default_rng(1)
    rows = rng.integers(0, len(tokenizer), (500, 20)).tolist()
    whole = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    plain = whole(texts, verbose=False)["input_ids"]
    whole = splitting_digits(whole)
    check_same(tokenizer, whole, texts, rows)
    other = sum(one != two for one, two in zip(plain, tokenizer(texts)["input_ids"], strict=True))
    convert.save(convert.load(file, "bfloat16"), tmp_path / "store")
    written = text.load_tokenizer(tmp_path / "store")
    assert isinstance(written, tokenizer_file.TokenizerFile)
    check_same(written, whole, texts[:1000], rows[:100])
    report(texts=len(texts), tokens=len(tokenizer), differing_without_the_split_of_digits=other)


def greedy(model, prompt):
    """Return the tokens that transformers generates and the gap between the two largest logits at each token."""
    import torch

    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=2,
            pad_token_id=2,
        )
    best = torch.cat(out.logits).topk(2).values.numpy()
    return out.sequences[0, len(prompt) :].tolist(), best[:, 0] - best[:, 1]


def test_greedy_texts_match_transformers(file, theirs, tokenizer, report):
    model = jspec.load(file, "float32")
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": one}], add_generation_prompt=True)["input_ids"]
        for one in CHATS
    ]
    lengths = np.array(list(map(len, prompts)))
    tokens = np.array([prompt + [0] * (lengths.max() - len(prompt)) for prompt in prompts])
    options = {"max_new_tokens": NEW, "sampling": jspec.SamplingParams(temperature=0.0), "eos_ids": (2,)}
    batch = tokens, lengths, jax.random.split(jax.random.key(0), len(prompts))
    plain = jspec.generate(model, *batch, **options)
    lookup = jspec.speculative_generate(model, jspec.NGramDrafter(3, 1), *batch, num_draft_tokens=4, **options)
    compared = 0
    for i, prompt in enumerate(prompts):
        expected, apart = greedy(theirs, prompt)
        near = np.flatnonzero(apart <= CLOSE)
        sure = int(near[0]) if near.size else len(expected)  # outputs may differ from a near tie on
        for out in (plain, lookup):
            assert out.tokens[i, : out.lengths[i]].tolist()[:sure] == expected[:sure], CHATS[i]
        compared += sure
    accepted = int(lookup.stats.accepted.sum())
    assert compared > 64 and accepted
    report(tokens=compared, of=int(plain.lengths.sum()), accepted=accepted)


def test_generate_command_answers_question(file, run, tokenizer, quick_compile):
    question, options = "What is the capital of France?", {"max_new_tokens": 32}
    code, out, error = run("generate", "--target", file, "--chat", question, "--plain", "-n", 32, "--temperature", 0)
    assert code == 0 and "Paris" in out and "tokens (eos) in" in error
    chat, greedy = [{"role": "user", "content": question}], jspec.SamplingParams(temperature=0)
    (done,) = jspec.complete(jspec.load(file, "float32"), None, tokenizer, chat, sampling=greedy, **options)
    assert out == f"{done.text}\n" and done.finish_reason == "eos"


def test_bundled_head_saves_rounds(file, run, report):
    """The bundled head saves rounds on questions that it was not trained on; its output equals plain decoding's."""
    asked = "generate", "--target", file, "--chat", *CHATS, "--json", "-n", NEW, "--seed", 1

    def answers(*how):
        return [json.loads(line) for line in run(*asked, *how)[1].splitlines()]

    plain, gained = answers("--plain"), {}
    for draft in (head_of("smollm2"), f"lookup+{head_of('smollm2')}"):
        lines = answers("--draft", draft, "--accept", "coupled")
        assert len(lines) == len(CHATS) and [line["tokens"] for line in lines] == [line["tokens"] for line in plain]
        rounds, drafted = (sum(line["stats"][what] for line in lines) for what in ("rounds", "drafted"))
        gained[draft] = sum(len(line["tokens"]) for line in lines) / rounds, drafted / rounds
    report(tokens_and_drafts_a_round=[f"{tokens:.2f}, {drafts:.2f}" for tokens, drafts in gained.values()])
    (tokens, drafts), (fewer, sure) = gained.values()
    assert tokens > 1.2 and fewer > 1.05 and sure < drafts / 2


def test_coder_pair_drafts_most_tokens_of_plain_text(report, quick_compile):
    """An answer depends neither on the draft model nor on the batch, and begins like llama.cpp's answer."""
    try:
        files = coder.find()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    (target, draft), tokenizer = map(jspec.load, files), text.load_tokenizer(files[0])
    rows = [row for _, row in coder.coding_questions(tokenizer, 2)]
    ((tokens, lengths, keys),) = chats.requests(tokenizer, rows, 2)
    options = {"max_new_tokens": NEW, "sampling": jspec.SamplingParams(temperature=0.0)}
    options["eos_ids"] = ends = text.eos_ids(target, tokenizer)

    def decode(drafter, some):
        request = tokens[some], lengths[some], keys[some]
        if drafter is None:
            return jax.device_get(jspec.generate(target, *request, **options))
        return jax.device_get(jspec.speculative_generate(target, drafter, *request, num_draft_tokens=4, **options))

    each = [slice(0, 1), slice(1, 2)]
    plain, drafted = ([decode(drafter, some) for some in each] for drafter in (None, draft))
    batch = decode(draft, slice(0, 2))
    expected = chats.texts(plain)
    assert chats.texts(drafted) == expected and chats.texts([batch]) == expected
    rounds = sum(int(out.stats.rounds.sum()) for out in drafted)
    per_round = sum(map(len, expected)) / rounds
    report(tokens_a_round=per_round)
    assert per_round > 2.5
    pytest.importorskip("llama_cpp")
    llm = llamacpp.load(files[0], logits_all=False)
    assert [llamacpp.answer(llm, row, 8, ends) for row in rows] == [one[:8] for one in expected]
