"""`JSpecLM` gives the same results as lm-eval's hf class on the same model. bash tests/clients/run runs these tests."""

import numpy as np
import pytest

import jspec
from support import text_pair

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
pytest.importorskip("torch")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from jspec.evaluation.lm_eval import JSpecLM  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.filterwarnings("ignore"),  # of lm-eval and of the packages that it needs
]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and strict %}{{ raise_exception('none') }}{% endif %}"
    "<{{ message.role }}> {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
POSITIONS = 96


@pytest.fixture(scope="module", params=[False, True], ids=["without BOS", "with BOS"])
def folder(request, tmp_path_factory):
    folder = text_pair.write(tmp_path_factory.mktemp("model") / "target", max_position_embeddings=POSITIONS)
    tokenizer = text_pair.tokenizer(bos=request.param)
    if request.param:
        tokenizer.bos_token = text_pair.END
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def hf(folder):
    """Return the oracle, without its cache.

    In lm-eval 0.4.13, the cache scores the wrong positions if equal texts have continuations of different lengths.
    """
    return HFLM(folder, dtype="float32", device="cpu", batch_size=1, logits_cache=False)


@pytest.fixture(scope="module")
def ours(folder):
    return JSpecLM(folder, draft="lookup", batch_size=4)


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in arguments]


def check_same(ours, theirs):
    assert [flag for _, flag in ours] == [flag for _, flag in theirs]
    np.testing.assert_allclose([score for score, _ in ours], [score for score, _ in theirs], atol=2e-4)


def test_log_likelihoods(ours, hf):
    """Empty contexts, spaces at the border, a prefix in the text, one context with several answers, and long texts."""
    asked = requests(
        "loglikelihood",
        ("", "the thing"),
        ("the ", "thing"),
        ("the", " thing"),
        (f"{text_pair.END}the", " thing"),
        *(("Which letter?", f" {letter}") for letter in "ABCD"),
        ("x" * 80, "y" * 17),
        ("in a " * 60, "thing"),
        ("in a " * 60, "y" * (POSITIONS - 1)),
    )
    check_same(ours.loglikelihood(asked), hf.loglikelihood(asked))
    greedy = hf.generate_until(requests("generate_until", ("the thing", {"max_gen_toks": 3})))[0]
    asked = requests("loglikelihood", ("the thing", greedy), ("the thing", f"{greedy}!"))
    found = ours.loglikelihood(asked)
    check_same(found, hf.loglikelihood(asked))


def test_rolling_log_likelihoods(ours, hf):
    """Texts of less than a window, of exactly one, and of several."""
    texts = [("the",), ("y" * POSITIONS,), ("y" * (POSITIONS + 1),), ("the thing in a box " * 30,), ("",)]
    asked = requests("loglikelihood_rolling", *texts)
    np.testing.assert_allclose(ours.loglikelihood_rolling(asked), hf.loglikelihood_rolling(asked), rtol=1e-5)


def test_greedy_texts(ours, hf):
    """Limits under several names, one or several stop strings, and contexts that lose their first tokens."""
    contexts = ["the thing", "in a", "x", "y" * 120]
    options = [
        {"until": ["e", "\n"], "max_gen_toks": 24},
        {"until": "a", "do_sample": False, "temperature": 0.7, "max_gen_toks": 30},
        {"max_new_tokens": 9},
        {"until": [text_pair.END, "zz"], "max_tokens": 20, "temperature": 0.0},
    ]
    asked = requests("generate_until", *((context, one) for one in options for context in contexts))
    found = ours.generate_until(asked)
    assert found == hf.generate_until(asked) and any(found)


def test_sampled_texts_depend_on_seed_and_place(ours, folder):
    asked = requests(
        "generate_until", *[("the thing", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 16})] * 4
    )
    found = ours.generate_until(asked)
    assert found == ours.generate_until(asked) and len({*found}) > 1
    assert found == JSpecLM(folder, draft="lookup", batch_size=3).generate_until(asked)
    assert found != JSpecLM(folder, draft="lookup", seed=1).generate_until(asked)


def test_chats(ours, hf, folder):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(messages) == hf.apply_chat_template(messages)
    assert ours.chat_template(True) == hf.chat_template(True) == TEMPLATE
    messages.append({"role": "assistant", "content": "The answer"})
    assert ours.apply_chat_template(messages, False) == hf.apply_chat_template(messages, False)
    strict = JSpecLM(folder, template={"strict": True}), HFLM(folder, device="cpu", chat_template_args={"strict": True})
    assert strict[0].apply_chat_template(messages[:2]) == strict[1].apply_chat_template(messages[:2])
    assert ours.tokenizer_name == JSpecLM(folder).tokenizer_name != JSpecLM(*jspec.demo_pair()[::2]).tokenizer_name


def test_evaluation_by_name_and_by_object(ours, folder):
    """The registered name takes the same arguments."""
    datasets = pytest.importorskip("datasets")
    rows = [{"text": "the", "answer": answer} for answer in (" thing", " end")]
    task = {
        "task": "endings",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": [" thing", " end"],
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
        "num_fewshot": 0,
    }
    options = {"tasks": [task], "bootstrap_iters": 0}
    by_object = lm_eval.simple_evaluate(ours, **options)
    by_name = lm_eval.simple_evaluate("jspec", f"target={folder},draft=lookup,max_length=64", batch_size=2, **options)
    assert by_object["results"]["endings"]["acc,none"] == by_name["results"]["endings"]["acc,none"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be"),
        ({"batch_size": "many"}, "batch_size must be"),
        ({"device": "npu:0"}, "device is 'npu:0', but JAX uses cpu; leave out device, or set JAX_PLATFORMS"),
    ],
)
def test_invalid_arguments_are_rejected(folder, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        JSpecLM(folder, **arguments)


def test_invalid_requests_are_rejected(ours, folder):
    with pytest.raises(ValueError, match="target is a model, but tokenizer is None; pass the model's tokenizer"):
        JSpecLM(jspec.load(folder))
    for pair in (("the", ""), ("the", "y" * 200)):
        with pytest.raises(ValueError, match=r"A continuation has \d+ tokens; expected from 1 to 96"):
            ours.loglikelihood(requests("loglikelihood", pair))
    with pytest.raises(ValueError, match="max_gen_toks is 96, but max_length is 96; pass a smaller max_gen_toks"):
        ours.generate_until(requests("generate_until", ("the", {"max_gen_toks": 96})))
