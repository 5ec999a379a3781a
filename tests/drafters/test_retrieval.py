"""Retrieval: the longest corpus matches against brute force, the datastore on disk, and the command that builds it."""

import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import jspec
from jspec import cli
from jspec.drafters import Level, Tree
from jspec.drafters.standalone.retrieval import RetrievalDrafter
from support import drafters, text_pair

pytestmark = pytest.mark.usefixtures("quick_compile")
VOCAB, WIDTH, K = 3, 12, 3


def followed(corpus, text, max_ngram, min_ngram):
    """Return what follows in `corpus` after each of the longest matches of the end of `text`, by brute force."""

    def common(i):
        pairs = zip(corpus[:i][::-1], text[::-1], strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(i, len(text)))

    lengths = [min(common(i), max_ngram) for i in range(len(corpus))]
    return [corpus[i:] for i, n in enumerate(lengths) if n == max(lengths) >= min_ngram]


def law(continuations, drafted):
    """Return the frequencies ``[V]`` of the tokens that follow `drafted` in `continuations`."""
    k = len(drafted)
    nexts = [one[k] for one in continuations if one[:k] == drafted and len(one) > k]
    return np.bincount(nexts, minlength=VOCAB) / max(len(nexts), 1)


@jax.jit
def laws(drafter, tokens, lengths, drafted):
    """Return the distribution ``[B, V]`` at every position of ``drafted[B, K]``, given the tokens before it."""
    logits, carry = drafter.begin((), SimpleNamespace(tokens=tokens, lengths=lengths), Tree.chain(K))
    found = [logits]
    for k in range(1, K):
        logits, carry = drafter.extend(carry, drafted[:, k - 1 : k], Level(k), None)
        found.append(logits[:, 0])
    return jax.numpy.exp(jax.numpy.stack(found))


TOKENS = st.integers(0, VOCAB - 1)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([1, 2, 9, 20]).flatmap(lambda n: st.lists(TOKENS, min_size=n, max_size=n)),
    st.lists(st.lists(TOKENS, min_size=1, max_size=WIDTH), min_size=2, max_size=2),
    st.lists(st.lists(TOKENS, min_size=K, max_size=K), min_size=2, max_size=2),
    st.sampled_from([(1, 1), (3, 1), (5, 2)]),
    st.booleans(),
)
def test_distributions_follow_longest_corpus_matches(corpus, texts, drafted, ngrams, all_of_them):
    """Each row has its own distributions. If not all matches are examined, some of the longest are."""
    num_matches = max(len(corpus), 2) if all_of_them else 2
    drafter = RetrievalDrafter.from_tokens(corpus, VOCAB, *ngrams, num_matches)
    tokens = np.array([[*text, *[0] * (WIDTH - len(text))] for text in texts], np.int32)
    found = np.asarray(laws(drafter, tokens, np.array([len(text) for text in texts]), np.array(drafted)))
    for row, text in enumerate(texts):
        expected = followed(corpus, text, *ngrams)
        assert found[0, row].any() == bool(expected)
        for k in range(K):
            exact = law(expected, drafted[row][:k])
            if all_of_them:
                np.testing.assert_allclose(found[k, row], exact, rtol=1e-6)
            else:
                assert not found[k, row][exact == 0].any() and abs(found[k, row].sum() - found[k, row].any()) < 1e-6


def test_corpus_is_ordered_by_preceding_tokens():
    rng = np.random.default_rng(0)
    for max_ngram in (1, 3, 4, 6):
        corpus = rng.integers(VOCAB, size=200)
        before = [corpus[max(i - max_ngram, 0) : i][::-1].tolist() for i in range(200)]
        order = RetrievalDrafter.from_tokens(corpus, VOCAB, max_ngram, 1).order.tolist()
        assert sorted(order) == list(range(200)) and [before[i] for i in order] == sorted(before)


def test_examined_matches_are_a_fair_sample():
    """The tokens 0 1 are followed by 2 in the first half of the corpus and by 3 in the second."""
    corpus = [0, 1, 2] * 50 + [0, 1, 3] * 50
    drafter = RetrievalDrafter.from_tokens(corpus, 4, max_ngram=2, min_ngram=2)
    matches = np.asarray(drafter._matches(np.array([1, 0])))
    followed = np.asarray(corpus)[matches[matches < len(corpus)]]
    assert set(followed) == {2, 3} and 0.1 < (followed == 2).mean() < 0.9


@pytest.mark.parametrize("x64", [False, True])
def test_output_equals_plain_decoding(report, toy, prompts, x64):
    """This holds for sampling with the target's noise and for greedy decoding; half of the corpus is target output."""
    target, batch = toy(0), prompts([9, 1, 5, 3])
    options = {"max_new_tokens": 48, "sampling": jspec.SamplingParams(temperature=np.array([0.0, 1.0, 0.0, 0.7]))}
    with jax.enable_x64(x64):
        plain = jax.device_get(jspec.generate(target, *batch, **options))
        noise = np.random.default_rng(1).integers(61, size=192)
        drafter = RetrievalDrafter.from_tokens(np.concatenate([plain.tokens.ravel(), noise]), 61)
        out = drafters.generate(target, drafter, batch, num_draft_tokens=3, accept="coupled", **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    rates = out.stats.accepted / np.maximum(out.stats.drafted, 1)
    report(accepted=[f"{rate:.2f}" for rate in rates], rounds=out.stats.rounds.tolist())
    assert rates[[0, 2]].min() > 0.9 and out.stats.rounds[[0, 2]].max() < 20


def test_datastore_is_restored_and_replaced_atomically(tmp_path):
    path = tmp_path / "store.safetensors"
    RetrievalDrafter.from_tokens([0, 1], 2).save(path)
    drafter = RetrievalDrafter.from_tokens(np.random.default_rng(0).integers(50, size=400), 50, 5, 3, 4)
    drafter.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    jax.tree.map(np.testing.assert_array_equal, RetrievalDrafter.load(path), drafter)  # also compares the sizes
    with pytest.raises(FileNotFoundError, match=r"is not a directory; create it"):
        drafter.save(tmp_path / "no" / "store.safetensors")
    with pytest.raises(FileNotFoundError, match=r"is not a file; build a datastore with `jspec index`"):
        RetrievalDrafter.load(tmp_path / "other.safetensors")


TINY = {"tokens": np.array([1, 0], np.int32), "order": np.array([0, 1], np.int32)}
NOTES = {"format": "jspec datastore 1", "vocab_size": "2", "max_ngram": "8", "min_ngram": "2", "num_matches": "16"}
DAMAGE = {
    "nothing wrong": ({}, {}, None),
    "other format": ({}, {"format": "pt"}, "its format is 'pt'"),
    "no tokens": ({"tokens": np.zeros(0, np.int32), "order": np.zeros(0, np.int32)}, {}, "at least 1 token id"),
    "foreign tokens": ({}, {"vocab_size": "1"}, "outside the vocabulary of 1"),
    "no sizes": ({}, {"max_ngram": ""}, "invalid literal"),
    "sizes that contradict": ({}, {"max_ngram": "1"}, "min_ngram=2 is more than max_ngram=1"),
    "wide order": ({"order": np.array([0, 1])}, {}, "int32 and int64, not int32"),
    "short order": ({"order": np.array([0], np.int32)}, {}, "not a permutation"),
    "folded order": ({"order": np.array([[0], [1]], np.int32)}, {}, "not a permutation"),
    "order with gaps": ({"order": np.array([1, 1], np.int32)}, {}, "not a permutation"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_other_files_are_rejected(damage, tmp_path):
    arrays, notes, message = DAMAGE[damage]
    path = tmp_path / "store.safetensors"
    save_file(TINY | arrays, path, NOTES | notes)
    if message is None:
        RetrievalDrafter.load(path)
        whole = path.read_bytes()
        for part in (b"", whole[:-1], b"x" * 100):
            path.write_bytes(part)
            with pytest.raises(ValueError, match=r"store.safetensors is not a datastore \(Error"):
                RetrievalDrafter.load(path)
    else:
        with pytest.raises(
            ValueError, match=rf"(?s)store.safetensors is not a datastore .*{message}.*; build it again"
        ):
            RetrievalDrafter.load(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 4), "at least 1 token id"),
        (([4], 4), "outside the vocabulary of 4"),
        (([1], 0), "vocab_size must be an int of at least 1; got 0"),
        (([1], 4, 0), "max_ngram must be an int of at least 1; got 0"),
        (([1], 4, 3, 1.0), "min_ngram must be an int"),
        (([1], 4, 2, 3), "min_ngram=3 is more than max_ngram=2"),
        (([1], 4, 2, 1, 1), "num_matches=1 covers only one side"),
    ],
)
def test_invalid_sizes_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        RetrievalDrafter.from_tokens(*arguments)


def test_index_command_builds_a_usable_datastore(run, tmp_path, monkeypatch):
    """The corpus is the target's output, so most of the draft is accepted. The vocabulary is the model's."""
    target, store = text_pair.write(tmp_path / "target"), tmp_path / "store.safetensors"
    common = "the thing", "--target", target, "--temperature", 0, "--max-new-tokens", 40, "--json"
    plain = json.loads(run("generate", *common, "--plain")[1])
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    files[0].write_text(plain["prompt"] + plain["text"], encoding="utf-8")
    files[1].write_text("", encoding="utf-8")
    code, out, error = run("index", *files, "--tokenizer", target, "--output", store, "--max-ngram", 5)
    drafter = RetrievalDrafter.load(store)
    assert (code, error) == (0, "") and out.startswith(f"{store}: {drafter.tokens.size} tokens, 0.0 MB, ")
    assert drafter.tokens[-2:].tolist() == [0, 0] and (drafter.vocab_size, drafter.max_ngram) == (261, 5)
    drafted = json.loads(run("generate", *common, "--draft", store)[1])
    assert drafted["tokens"] == plain["tokens"] and drafted["stats"]["rounds"] < 30
    assert run("generate", "x", "--draft", store, "--max-new-tokens", 2)[2].count("vocabulary has 261 tokens") == 1
    monkeypatch.setattr(cli.generate, "_decode", lambda *arguments: pytest.fail(str(arguments[5]["num_draft_tokens"])))
    # A round without a draft costs a plain step.
    with pytest.raises(pytest.fail.Exception, match=r"UpTo\(max_draft_tokens=3\)"):
        run("generate", *common, "--draft", store, "--num-draft-tokens", 3)


@pytest.mark.parametrize(
    ("content", "options", "code", "message"),
    [
        (b"", [], 1, "The files contain no text"),
        (b"a\xff", [], 1, "text is not UTF-8 text (byte 1)"),
        (b"a", ["--output", "store"], 2, "--output must end in .safetensors"),
        (b"a", ["--output", "/no/such/x.safetensors"], 1, "/no/such is not a folder"),
        (b"a", ["--tokenizer", "/no/such"], 1, "/no/such is neither a directory nor a file here"),
        (b"a", ["--max-ngram", 1], 2, "--max-ngram"),
        (b"a", ["nothing"], 2, "'nothing' does not exist"),
    ],
)
def test_mistakes_end_in_one_sentence(run, tmp_path, content, options, code, message):
    (tmp_path / "text").write_bytes(content)
    found = run("index", tmp_path / "text", "--output", tmp_path / "x.safetensors", *options)
    assert found[:2] == (code, "") and message in found[2] and found[2].count("\n") == 1


def test_index_help_imports_nothing_slow():
    code = "import sys, jspec.cli\ntry: jspec.cli.main(['index', '--help'])\nfinally: print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("False\n")
