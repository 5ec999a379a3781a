"""A model's own sampling parameters are read, saved, used by default, and merged field by field with given ones."""

import json
import logging
import types

import numpy as np
import pytest

import convert
import jspec
from convert import CheckpointError
from convert.generation_config import SamplingDefaults, parse_sampling
from jspec.models import sampling_defaults as model_sampling
from jspec.serve import parse_request
from jspec.serve.schemas import CompletionBody
from jspec.serve.validation import validated
from support import gguf_files, text_pair
from support.checkpoints import raw_config

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENIZER = text_pair.tokenizer()
LLAMA = {"bos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096}
QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
READ = [
    ({}, {}),
    (LLAMA, {"temperature": 0.6, "top_p": 0.9}),
    (QWEN, {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}),
    ({"do_sample": True}, {}),
    ({"do_sample": False}, {"temperature": 0}),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}),
    ({"temperature": 0.3}, {"temperature": 0.3}),
    ({"temperature": 0, "do_sample": True}, {"temperature": 0}),
    ({"do_sample": None, "temperature": None, "top_k": None}, {}),
    ({"top_k": -1, "top_p": 1, "min_p": 0}, {"top_k": 0, "top_p": 1, "min_p": 0}),
    ({"top_k": 20.0, "min_p": 0.05}, {"top_k": 20, "min_p": 0.05}),
    ({"presence_penalty": 1.5, "frequency_penalty": -0.5}, {"presence_penalty": 1.5, "frequency_penalty": -0.5}),
]


def written(folder, generation, **changes):
    text_pair.write(folder, **changes)
    if generation is None:
        (folder / "generation_config.json").unlink()
    else:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(("generation", "values"), READ)
def test_generation_config_is_parsed(generation, values):
    found = parse_sampling(generation)
    assert found.values() == values and found.unsupported == ()
    assert parse_sampling(found.fields()).values() == values


def test_config_sampling_fields_are_only_a_fallback(tmp_path):
    """Fields in config.json count only without a generation config, as in transformers, which once wrote them there."""
    (tmp_path / "config.json").write_text(json.dumps(raw_config(temperature=0.3, do_sample=True, pad_token_id=-1)))
    assert convert.read_config(tmp_path).sampling == SamplingDefaults(temperature=0.3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": 3}))
    config = convert.read_config(tmp_path)
    assert config.sampling == SamplingDefaults() and config.pad_token_id == 3 and hash(config)


@pytest.mark.parametrize(
    ("generation", "phrase"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; expected a number of at least 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": True}, "temperature is True"),
        (
            {"top_p": 0},
            r"top_p is 0; expected a number above 0 and at most 1 \(1 is off\): correct the file, or delete",
        ),
        ({"top_p": [0.9]}, r"top_p is \[0.9\]"),
        ({"top_k": 1.5}, "top_k is 1.5; expected a whole number"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"do_sample": "true"}, "do_sample is 'true'; expected true or false"),
    ],
)
def test_invalid_sampling_fields_are_rejected(tmp_path, generation, phrase):
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(CheckpointError, match=f"generation_config.json: {phrase}") as caught:
        convert.read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_unsupported_sampling_fields_are_logged_once(caplog):
    inert = {"num_beams": 1, "typical_p": 1.0, "bad_words_ids": [], "renormalize_logits": True, "eta_cutoff": 0.0}
    assert parse_sampling(inert).unsupported == ()
    found = parse_sampling({"temperature": 0.5, "num_beams": 4, "typical_p": 0.9, "suppress_tokens": [3]})
    assert set(found.unsupported) == {"num_beams", "typical_p", "suppress_tokens"}
    target = types.SimpleNamespace(config=types.SimpleNamespace(sampling=found))
    model_sampling._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "jspec"):
        assert [model_sampling.recommended(target) for _ in range(2)] == [jspec.SamplingParams(temperature=0.5)] * 2
    assert caplog.record_tuples == [
        (
            "jspec",
            logging.WARNING,
            "Sampling defaults recommended by the model: temperature 0.5; "
            "typical_p, num_beams, suppress_tokens ignored because not supported",
        )
    ]


def test_sampling_defaults_survive_conversion(tmp_path):
    folder = written(tmp_path / "model", QWEN)
    loaded = convert.load(folder)
    convert.save(loaded, tmp_path / "store")
    convert.save_hf(convert.load(tmp_path / "store"), tmp_path / "hf")
    jspec.ModelDrafter(jspec.load(folder)).save(tmp_path / "new")
    for name in ("store", "hf", "new"):
        assert convert.read_config(tmp_path / name).sampling == parse_sampling(QWEN), name


def test_gguf_sampling_defaults_are_read(tmp_path):
    keys = {
        "general.sampling.temp": np.float32(0.6),
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": np.float32(1.05),
        "general.sampling.mirostat": 2,
    }
    file = gguf_files.model(tmp_path / "x.gguf", keys)[0]
    found = convert.read_config(file).sampling
    assert found.values() == pytest.approx({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05})
    assert found.unsupported == ("mirostat",)
    convert.save(convert.load(file), tmp_path / "store")
    assert convert.read_config(tmp_path / "store").sampling == found


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Return ``target(generation)``, which loads a model with that generation_config.json."""
    folders = tmp_path_factory.mktemp("models")
    return lambda generation: jspec.load(written(folders / str(len(list(folders.iterdir()))), generation))


SETTINGS = [
    ({"do_sample": False}, jspec.SamplingParams(temperature=0)),
    ({"do_sample": True, "top_k": 1}, jspec.SamplingParams(top_k=1)),
    (QWEN, jspec.SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)),
    ({"presence_penalty": 1.5, "min_p": 0.2}, jspec.SamplingParams(presence_penalty=1.5, min_p=0.2)),
    ({}, jspec.SamplingParams()),
    (None, jspec.SamplingParams()),
]


@pytest.mark.parametrize(("generation", "same"), SETTINGS)
def test_complete_uses_sampling_defaults_of_target(target, generation, same):
    """The target's defaults are used and the draft's are ignored; explicit parameters replace all defaults."""
    model, draft = target(generation), target({"temperature": 0.01, "repetition_penalty": 5})
    words = (model, draft, TOKENIZER, ["the thing", "in a"])
    options = {"max_new_tokens": 12, "seed": 3, "accept": "coupled"}
    found = [done.tokens for done in jspec.complete(*words, **options)]
    assert found == [done.tokens for done in jspec.complete(*words, sampling=same, **options)]
    plain = [done.tokens for done in jspec.complete(*words, sampling=jspec.SamplingParams(), **options)]
    assert (found == plain) == (same == jspec.SamplingParams())


def test_stream_uses_sampling_defaults_of_target(target):
    model, options = target(QWEN), {"max_new_tokens": 12, "seed": 3}
    (whole,) = jspec.complete(model, None, TOKENIZER, "in a", **options)
    streamed = [token for part in jspec.stream(model, None, TOKENIZER, "in a", **options) for token in part.tokens]
    assert streamed == whole.tokens


def test_command_options_override_single_defaults(run, tmp_path):
    folder = written(tmp_path / "model", LLAMA)

    def text(*options):
        code, out, error = run("generate", "in a", "--target", folder, "--plain", "-n", 12, "--json", *options)
        assert code == 0
        lines = [line for line in error.splitlines() if line.startswith("Sampling")]
        return json.loads(out)["tokens"], [line.partition(": ")[2] for line in lines]

    own, said = text()
    assert said == ["temperature 0.6, top_p 0.9"]
    assert text("--temperature", 0.6, "--top-p", 0.9) == (own, [])
    other, said = text("--temperature", 1.3)
    assert said == ["top_p 0.9"] and other == text("--temperature", 1.3, "--top-p", 0.9)[0]
    assert text("--top-p", 1, "--temperature", 1)[0] != own


def test_chat_uses_sampling_defaults_of_model(run, tmp_path):
    folder = written(tmp_path / "model", {"do_sample": False})
    code, out, error = run("chat", folder, "--plain", "-n", 6, "--max-length", 64, stdin=b"in a\n")
    greedy = run(
        "chat", folder, "--plain", "-n", 6, "--max-length", 64, "--temperature", 0, "--seed", 9, stdin=b"in a\n"
    )
    assert code == 0 and out == greedy[1] and "recommended by the model: temperature 0\n" in error
    assert "Sampling" not in greedy[2]


def test_request_fields_override_single_defaults():
    config = types.SimpleNamespace(vocab_size=50, sampling=parse_sampling(QWEN))
    served = types.SimpleNamespace(target=types.SimpleNamespace(config=config))

    def sampling(**fields):
        body = validated(CompletionBody, {"model": "x", "prompt": "a"} | fields)
        return parse_request._sampling(served, body)

    own = dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
    assert sampling() == sampling(temperature=None) == jspec.SamplingParams(**own)
    assert sampling(temperature=1, top_k=-1) == jspec.SamplingParams(**own | {"temperature": 1, "top_k": 0})
    assert sampling(repetition_penalty=1.0, presence_penalty=1) == jspec.SamplingParams(
        **own | {"repetition_penalty": 1, "presence_penalty": 1}
    )
