"""Invalid input is rejected with one clear sentence before anything is compiled or run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.decoding import program

B, P, V = 3, 5, 61
KEYS = jax.random.split(jax.random.key(0), B)
TOKENS = np.arange(B * P, dtype=np.int32).reshape(B, P)
GOOD = {
    "tokens": TOKENS,
    "lengths": np.array([5, 2, 1], np.int32),
    "keys": KEYS,
    "max_new_tokens": 8,
    "num_draft_tokens": 2,
}
PROMPTS = GOOD["tokens"], GOOD["lengths"], KEYS


class Undeclared:
    """A rule that declares only `declared` of the attributes that every rule must declare."""

    def __init__(self, **declared):
        vars(self).update(declared)

    def accept(self, keys, start, draft, target_probs):
        raise AssertionError("never asked")


def _with(array, at, value):
    array = np.array(array)
    array[at] = value
    return array


# Argument, bad values, and the pattern that the message must match.
CASES = [
    # prompts
    ("tokens", [np.zeros((0, 5), int), np.zeros((3, 0), int), [], [[], [], []]], "there is nothing to continue"),
    ("tokens", [np.zeros(5, int), [1, 2, 3], 7], r"integers of shape \[B, P\]"),
    ("tokens", [np.zeros((3, 5), np.float32), [[1.5]], np.ones((3, 5), bool)], r"integers of shape \[B, P\]"),
    ("tokens", [["def f(x):"], "text", None], r"integers of shape \[B, P\]"),
    ("tokens", [[[1, 2, 3], [4]]], "rows of different lengths; pad them on the right"),
    ("tokens", [_with(TOKENS, (0, 4), V), _with(TOKENS, (0, 4), 10**6)], r"tokens\[0, 4\] is \d+, outside"),
    ("tokens", [_with(TOKENS, (1, 1), -1)], r"tokens\[1, 1\] is -1, outside the vocabulary of 61 tokens"),
    ("tokens", [TOKENS[:2]], r"lengths must be integers of shape \[2\]"),
    ("lengths", [_with(GOOD["lengths"], 1, 0), [5, 0, 1]], r"lengths\[1\] is 0, but a prompt has 1 to 5 tokens"),
    ("lengths", [_with(GOOD["lengths"], 2, -4)], r"lengths\[2\] is -4, but a prompt has 1 to 5 tokens"),
    ("lengths", [_with(GOOD["lengths"], 0, 6)], r"lengths\[0\] is 6, but a prompt has 1 to 5 tokens"),
    ("lengths", [np.array([5, 2]), np.array([[5], [2], [1]]), 5, None, []], r"lengths must be integers of shape \[3\]"),
    ("lengths", [np.array([5.0, 2.0, 1.0]), np.array([True] * 3)], r"lengths must be integers of shape \[3\]"),
    # keys
    ("keys", [jax.random.PRNGKey(0), jax.random.key_data(KEYS), np.zeros((3, 2), np.uint32)], "be typed PRNG keys"),
    ("keys", [0, [0, 1, 2], None, np.arange(3), list(KEYS)], "must be typed PRNG keys"),
    ("keys", [KEYS[:2], KEYS[0], KEYS[None], jax.random.split(KEYS[0], (3, 2))], r"expected \(3,\), one key for each"),
    ("keys", [jax.random.split(jax.random.key(0, impl="rbg"), B)], "draws all rows from the first row's key"),
    # numbers that determine shapes
    ("max_new_tokens", [0, -3, 2.0, "8", None, True, np.float32(4), np.arange(2)], "Python int of at least 1"),
    ("num_draft_tokens", [0, -1, 1.5, "4", None, True, jnp.arange(2)], "Python int of at least 1"),
    ("num_draft_tokens", ["", "Auto", "auto ", b"auto"], '"auto", an object such as .*, or a Python int of at least 1'),
    ("max_new_tokens", [252, 10**9], r"positions, but the target model has 256; shorten the prompt"),
    # models
    ("target", [None, "model", {}], "pass a model, such as one from jspec.load"),
    ("draft", [None, "model", lambda *_: None], "pass a jspec.Llama or a drafter"),
    # sampling
    ("sampling", [None, {"temperature": 1.0}, 0.7], "sampling is of type .*; pass a jspec.SamplingParams"),
    ("temperature", [-1.0, -1e-9, np.nan, np.inf, 1e39, _with(np.ones(3), 1, -0.5)], "temperature must be at least 0"),
    ("draft_temperature", [-1.0, np.nan, np.inf], "draft_temperature must be at least 0 and finite, or None"),
    ("top_k", [-1, 2.5, np.nan, np.array([1, 2, -3])], "top_k must be a whole number, 0"),
    ("top_p", [0, 0.0, -0.1, 1.01, np.nan, 50, np.array([0.5, 1, 0])], "top_p must be above 0 and at most 1"),
    ("draft_top_p", [0, 1.01, np.nan], "draft_top_p must be above 0 and at most 1, or None"),
    ("min_p", [-0.1, 1.5, np.nan], "min_p must be between 0"),
    ("repetition_penalty", [0, -1.0, 1e-30, np.nan, np.inf], "repetition_penalty must be between 0.001 and 1000"),
    ("presence_penalty", [np.nan, np.inf, 1e39], "presence_penalty must be between -1e6 and 1e6"),
    ("frequency_penalty", [np.nan, -np.inf, -3e38], "frequency_penalty must be between -1e6 and 1e6"),
    ("max_tokens", [-1, 1.5, 2**31, np.array([1, 2, -1])], "max_tokens must be a whole number, 0"),
    ("min_tokens", [-1, 1.5, 2**31, np.array([1, 2, -1])], "min_tokens must be a whole number, 0"),
    *[
        (
            name,
            [np.ones(2), np.ones((3, 1)), [1, 1], [[1], [1], [1]], "1", ["1"] * 3, True, object()],
            rf"{name} must be a number, or .*\[3\]",
        )
        for name in (
            "temperature",
            "draft_temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "max_tokens",
            "min_tokens",
        )
    ],
    ("temperature", [None], "temperature must be a number"),
    (
        "logit_bias",
        [np.zeros(V - 1), np.zeros((2, V)), 0.5, {3: -1.0}],
        r"must have shape \[61\] or \[3, 61\] .*set their entries in np.zeros\(61\)",
    ),
    (
        "logit_bias",
        [np.full(V, np.nan), _with(np.zeros((3, V)), (1, 2), np.inf), np.full(V, 1e39)],
        "finite, or -inf to forbid",
    ),
    ("logit_bias", [np.full(V, -np.inf), _with(np.zeros((3, V)), 1, -np.inf)], "allow at least one"),
    # the rest
    ("accept", ["typical", "", None, ["rejection"], int], r"is not an acceptance rule; choose one of \["),
    ("accept", [jspec.Lenient], r"accept is the class Lenient; pass an instance of it, such as Lenient\(\.\.\.\)"),
    (
        "accept",
        [Undeclared()],
        "type Undeclared, which does not define exact and shares_noise as a bool; set each to True",
    ),
    ("accept", [Undeclared(exact=True)], "type Undeclared, which does not define shares_noise as a bool; set"),
    (
        "accept",
        [Undeclared(exact="yes", shares_noise=False)],
        "type Undeclared, which does not define exact as a bool; set",
    ),
    ("eos_ids", [[V], (-1,), [3, 10**6], _with(np.zeros((3, 2), int), (0, 0), -2)], "outside the vocabulary"),
    ("eos_ids", [V, -1, np.int64(V)], "outside the vocabulary"),
    (
        "eos_ids",
        [None, True, 2.0, "2", np.zeros((2, 1), int), np.zeros((3, 1, 1), int)],
        "eos_ids must be a sequence of token ids",
    ),
    ("eos_ids", [[2.0], [True], ["</s>"]], "eos_ids must be integer token ids"),
    ("eos_ids", [[[1, 2], [3], []]], "rows of different lengths; pad the shorter rows with -1"),
    ("temperature", [[[1.0], [1.0, 2.0], [1.0]]], "rows of different lengths; pass one number for each row"),
    ("pad_id", [None, 1.5, "0", [0], True, 2**40], "pad_id must be one int32"),
]
SAMPLING = set(jspec.SamplingParams.__dataclass_fields__)
FLAT = [(name, value, message) for name, values, message in CASES for value in values]


@pytest.fixture(scope="module")
def models(toy):
    return {"target": toy(0), "draft": toy(1)}


@pytest.fixture(scope="module")
def narrow(toy):
    """Return a model that is made before compilations are counted, because loading its new shapes compiles."""
    return toy(1, vocab_size=60)


@pytest.fixture
def no_device_work(monkeypatch, compilations):
    """Fail if anything reaches the compiled program."""

    def refuse(*_, **__):
        raise AssertionError("bad input reached the device")

    monkeypatch.setattr(program, "decode_program", refuse)
    yield
    assert compilations() == 0


def _call(function, **arguments):
    chosen = {name: arguments.pop(name) for name in SAMPLING & arguments.keys()}
    if chosen:
        arguments["sampling"] = jspec.SamplingParams(**chosen)
    return function(**arguments)


def _is_one_sentence(error):
    text = str(error)
    return text.endswith((".", "?")) and ". " not in text and "\n" not in text and 20 < len(text) < 300


@pytest.mark.parametrize(("name", "value", "message"), FLAT, ids=[f"{i}-{name}" for i, (name, *_) in enumerate(FLAT)])
def test_bad_input_is_rejected_in_one_sentence(models, no_device_work, name, value, message):
    arguments = {**models, **GOOD, name: value}
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        _call(jspec.speculative_generate, **arguments)
    assert _is_one_sentence(caught.value), str(caught.value)
    if name in ("draft", "num_draft_tokens", "accept"):
        return
    for only_speculative in ("draft", "num_draft_tokens"):
        arguments.pop(only_speculative)
    with pytest.raises(type(caught.value)) as plain:
        _call(jspec.generate, **arguments)
    assert str(plain.value) == str(caught.value)


TUNING = [
    ("max_draft_tokens", [0, -1, 1.5, "auto", None, True], "max_draft_tokens must be a Python int of at least 1"),
    ("max_new_tokens", [0, "64", None], "max_new_tokens must be a Python int of at least 1"),
    ("max_new_tokens", [1, 35], "too small to measure 8 draft tokens per round; use at least 36"),
    ("max_new_tokens", [252], "positions, but the target model has 256"),
    ("draft", [None, "model"], "pass a jspec.Llama or a drafter"),
    ("lengths", [[5, 0, 1]], "a prompt has 1 to 5 tokens"),
    ("keys", [0, KEYS[:2]], "typed PRNG keys|one key for each"),
    ("sampling", [{"temperature": 0}], "sampling is of type dict; pass a jspec.SamplingParams"),
]


@pytest.mark.parametrize(("name", "value", "message"), [(n, v, m) for n, values, m in TUNING for v in values])
def test_bad_input_to_tune_is_rejected_in_one_sentence(models, no_device_work, name, value, message):
    good = {name: GOOD[name] for name in ("tokens", "lengths", "keys")}
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        jspec.tune(**{**models, **good, name: value})
    assert _is_one_sentence(caught.value), str(caught.value)


@pytest.mark.parametrize("dtype", ["fp16", "float8", "int32", np.int8, object()])
def test_unsupported_dtype_is_rejected(dtype):
    with pytest.raises(ValueError, match="is not supported; expected one of float32, bfloat16, float16") as caught:
        jspec.load("no/such/model", dtype=dtype)
    assert _is_one_sentence(caught.value)


def test_number_of_bad_values_is_large_enough(report):
    report(bad_values=len(FLAT), arguments=len({name for name, *_ in FLAT}))
    assert len(FLAT) >= 120


def test_vocabularies_must_match(models, narrow, no_device_work):
    with pytest.raises(ValueError, match="draft's vocabulary has 60 tokens and the target's 61; use a draft") as caught:
        jspec.speculative_generate(**{**models, "draft": narrow}, **GOOD)
    assert _is_one_sentence(caught.value)


def test_draft_with_too_short_context_is_rejected(models, toy, no_device_work):
    draft = toy(1, max_position_embeddings=12)
    with pytest.raises(ValueError, match="13 positions, but the draft model has 12") as caught:
        jspec.speculative_generate(**{**models, "draft": draft}, **GOOD)
    assert _is_one_sentence(caught.value)


@pytest.mark.parametrize("function", [jspec.generate, jspec.speculative_generate])
def test_misspelt_options_are_rejected(models, no_device_work, function):
    arguments = {**models, **GOOD}
    if function is jspec.generate:
        del arguments["draft"], arguments["num_draft_tokens"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        function(**arguments, temperature=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'topk'"):
        jspec.SamplingParams(topk=3)


def test_lists_and_numpy_integers_are_accepted(models, quick_compile):
    """Lists work like arrays and NumPy integers like Python's. A rejected call leaves nothing behind."""
    with pytest.raises(ValueError, match="lengths"):
        jspec.speculative_generate(**models, **{**GOOD, "lengths": [5, 0, 1]}, eos_ids=np.array([3]))
    expected = jspec.speculative_generate(**models, **GOOD, eos_ids=np.array([3]))
    lists = {"tokens": GOOD["tokens"].tolist(), "lengths": GOOD["lengths"].tolist(), "max_new_tokens": np.int64(8)}
    for ends in ([3], (3,), 3, np.int64(3), np.array(3)):
        out = jspec.speculative_generate(**models, **{**GOOD, **lists}, eos_ids=ends)
        np.testing.assert_array_equal(out.tokens, expected.tokens)


def test_sampling_parameters_may_be_lists(models, quick_compile):
    """Parameters may be lists of numbers and, inside `jax.jit`, lists of traced values."""
    arrays = {"temperature": [0.0, 0.5, 1.0], "max_tokens": [3, 0, 5], "logit_bias": np.linspace(0, 1, V).tolist()}
    expected = jspec.generate(
        models["target"],
        *PROMPTS,
        max_new_tokens=8,
        sampling=jspec.SamplingParams(**{name: np.array(value) for name, value in arrays.items()}),
    )
    out = jspec.generate(models["target"], *PROMPTS, max_new_tokens=8, sampling=jspec.SamplingParams(**arrays))
    np.testing.assert_array_equal(out.tokens, expected.tokens)

    def traced(model, warm):
        sampling = jspec.SamplingParams(**arrays | {"temperature": [0.0, warm, 1.0]})
        return jspec.generate(model, *PROMPTS, max_new_tokens=8, sampling=sampling)

    np.testing.assert_array_equal(jax.jit(traced)(models["target"], 0.5).tokens, expected.tokens)


def test_traced_shapes_are_still_checked(models):
    def traced(**changes):
        arguments = {**GOOD, **changes}
        arrays = {name: arguments.pop(name) for name in ("tokens", "lengths", "keys")}
        jax.eval_shape(lambda arrays: jspec.speculative_generate(**models, **arrays, **arguments), arrays)

    traced()
    for changes, message in (
        ({"tokens": np.zeros((3, 5), np.float32)}, r"integers of shape \[B, P\]"),
        ({"lengths": np.ones(4, np.int32)}, r"lengths must be integers of shape \[3\]"),
        ({"keys": KEYS[:2]}, r"expected \(3,\)"),
        ({"keys": np.zeros((3, 2), np.uint32)}, "typed PRNG keys"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            traced(**changes)


def test_row_with_invalid_logits_is_marked_and_stops_alone(models, prompts, quick_compile):
    """A row with NaN or all -inf logits, which only the program can find, emits no token and is marked `invalid`.

    Other rows are unaffected.
    """

    def decode(models, batch, bias):
        return jspec.speculative_generate(
            **models,
            **dict(zip(("tokens", "lengths", "keys"), batch, strict=True)),
            max_new_tokens=8,
            num_draft_tokens=2,
            pad_id=7,
            sampling=jspec.SamplingParams(logit_bias=bias),
        )

    decode, batch, bias = jax.jit(decode), prompts([4, 2, 3]), np.zeros((B, V), np.float32)
    healthy = decode(models, batch, bias)
    for sick in (np.nan, np.inf, -np.inf):
        out = decode(models, batch, _with(bias, 1, sick))
        np.testing.assert_array_equal(out.stats.invalid, [False, True, False])
        np.testing.assert_array_equal(out.lengths, [8, 0, 8])
        assert (out.tokens[1] == 7).all()
        np.testing.assert_array_equal(out.tokens[::2], healthy.tokens[::2])
    broken = jax.tree.map(lambda leaf: leaf * np.nan, models["target"])
    out = decode({**models, "target": broken}, batch, bias)
    assert out.stats.invalid.all()
    assert (out.lengths == 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jspec.Lenient(0.0), "leniency must be a number above 0 and at most 1; got 0.0"),
        (lambda: jspec.Lenient(1.5), "leniency must be"),
        (lambda: jspec.Lenient("1"), "leniency must be"),
        (lambda: jspec.Typical(0.3, float("nan")), "delta must be"),
        (lambda: jspec.Typical(2, 0.3), "epsilon must be"),
        (lambda: jspec.TopK(0), "k must be an int of at least 1; got 0"),
        (lambda: jspec.TopK(1.5), "k must be an int"),
        (lambda: jspec.Threshold(-0.1), "probability must be"),
        (lambda: jspec.Threshold(True), "probability must be"),
        (lambda: jspec.TopK(True), "k must be an int"),
        (lambda: jspec.Relaxed(0, 1.0), "beta must be an int of at least 1; got 0"),
        (lambda: jspec.Relaxed(3, 0), "tau must be a number above 0"),
        (lambda: jspec.Relaxed(3, float("nan")), "tau must be a number above 0"),
    ],
)
def test_invalid_rule_parameters_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_rule_parameters_may_be_numpy_numbers():
    assert jspec.Lenient(np.float32(0.5)) == jspec.Lenient(0.5) and jspec.TopK(np.int64(2)) == jspec.TopK(2)
