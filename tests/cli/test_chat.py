"""`jspec chat`: lines are messages, answers appear as they are decoded, and Ctrl-C stops one answer."""

import contextlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import jspec
from convert import hub_names as names
from jspec.cli import chat, interrupts
from jspec.engine import Engine
from jspec.text import request_keys
from support import text_pair
from support.templates import TEMPLATE

WAITS = "Compiling: this takes minutes the first time, and seconds once the programs are cached\n"
pytestmark = pytest.mark.usefixtures("quick_compile")
LISTENS = """
import os, signal, time
from jspec.cli import interrupts
interrupts.end_at_once()
with interrupts.heard() as stopped:
    os.kill(os.getpid(), signal.SIGINT)
    assert stopped.wait(60)
print("stopped", flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
print("deaf", flush=True)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return the folders of a pair with more positions than usual."""
    folder = tmp_path_factory.mktemp("sources")
    more = {"max_position_embeddings": 512}
    return text_pair.write(folder / "target", **more), text_pair.write(folder / "draft", distance=0.3, **more)


@pytest.fixture(scope="module")
def tokenizer():
    made = text_pair.tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def talk(sources, tokenizer):
    """Return ``talk(**options)``, which starts a conversation with 12 tokens per answer."""
    target, draft = (jspec.load(folder) for folder in sources)

    def begin(system=None, words=tokenizer, length=256):
        engine = Engine(target, draft, slots=1, max_length=length, num_draft_tokens=3, journal=True)
        return chat.Conversation(engine, words, jspec.SamplingParams(), 4, 12, system)

    return begin


def answered(target, tokenizer, prompt, turn):
    """Return plain decoding's answer to `prompt`, as the answer number `turn`."""
    if isinstance(prompt, list):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    key = request_keys(4, turn + 1)[turn]
    out = jspec.generate(target, np.array([ids]), np.array([len(ids)]), key[None], max_new_tokens=12, eos_ids=(0,))
    return tokenizer.decode(out.tokens[0, : int(out.lengths[0])], skip_special_tokens=True)


def test_chat_answers_equal_plain_decoding_of_conversation(talk, tokenizer):
    conversation, said = talk("Be brief."), [{"role": "system", "content": "Be brief."}]
    target = conversation._engine.device.target
    for turn, message in enumerate(("Hello", "in a", "the thing")):
        said.append({"role": "user", "content": message})
        answer = "".join(part.text for part in conversation.answer(message))
        assert answer == answered(target, tokenizer, said, turn)
        said.append({"role": "assistant", "content": answer})
    kept = [of[3] for name, of in conversation._engine.device.commands if name == "assign_slot"]
    assert kept[0] == 0 and 0 < kept[1] < kept[2]  # earlier turns are not prefilled again


def test_chat_without_template_continues_text(talk):
    words = text_pair.tokenizer()
    conversation, text = talk(words=words), ""
    for turn, message in enumerate(("in a", "the")):
        text += message
        answer = "".join(part.text for part in conversation.answer(message))
        assert answer == answered(conversation._engine.device.target, words, text, turn)
        text += f"{answer}\n"


def test_interrupted_answer_stays_in_conversation(talk):
    conversation = talk()
    parts = conversation.answer("Hello")
    shown = next(parts).text
    parts.close()
    assert conversation._messages[-1] == {"role": "assistant", "content": shown}
    assert [*conversation.answer("in a")][-1].finish_reason in ("length", "eos")


def test_message_that_does_not_fit_is_not_recorded(talk):
    conversation = talk(length=64)
    with pytest.raises(Exception, match="leaves no room for an answer within the maximum of 64; shorten the message"):
        [*conversation.answer("x" * 100)]
    assert conversation._messages == [] and [*conversation.answer("Hello")]


def test_chat_command_prints_answers_and_statistics(run, sources, tmp_path):
    pair = (sources[0], "--draft", sources[1], "-n", 9, "--seed", 4)
    code, out, error = run("chat", *pair, stdin=b"in a\n\nthe\n")
    answers = out.splitlines()
    assert code == 0 and error.count(" acceptance; ") == 2 and len(answers) >= 2
    assert (code, out) == run("chat", *pair, stdin=b"in a\nthe")[:2]
    assert out == run("chat", sources[0], "--plain", "-n", 9, "--seed", 4, stdin=b"in a\nthe\n")[1]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("--top-p", 0), b"", "--top-p must be above 0"),
        (("--system", "x"), b"", "has none; leave out --system"),
        (("--plain", "--num-draft-tokens", 3), b"", "leave out --num-draft-tokens"),
        (("--max-length", 10**6), b"", "positions that the models support"),
        (("--max-length", 8), b"0123456789\n", "no room for an answer within the maximum of 8"),
        ((), b"\xff\n", "not UTF-8"),
    ],
)
def test_mistakes_give_one_sentence(run, sources, arguments, stdin, message):
    code, out, error = run("chat", sources[0], *arguments, stdin=stdin)
    assert code == 2 and out == "" and message in error and error.removeprefix(WAITS).count("\n") == 1


def test_ctrl_c_stops_answer_but_not_program(run, sources, monkeypatch):
    @contextlib.contextmanager
    def heard():
        event = threading.Event()
        event.set()
        yield event

    pair = (sources[0], "--draft", sources[1], "-n", 100, "--seed", 4)
    whole = run("chat", *pair, stdin=b"in a\n")[1].rstrip("\n")
    monkeypatch.setattr(interrupts, "heard", heard)
    code, out, error = run("chat", *pair, stdin=b"in a\nthe\n")
    assert code == 0 and error.startswith(f"{WAITS}5 tokens (stopped)") and error.count(" acceptance; ") == 2
    assert whole.startswith(out.split("\n")[0][:4])


def test_ctrl_c_is_caught_inside_block_and_ends_process_outside():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a new program also ignores what is ignored here
    found = subprocess.run([sys.executable, "-c", LISTENS], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (130, "stopped\n"), found.stderr


def test_default_chat_target_is_installed_model(monkeypatch, capsys):
    assert chat._target("other") == "other"
    monkeypatch.setattr(names, "find", lambda name: "here")
    assert chat._target(None) == "smollm2" and capsys.readouterr().err == ""
    monkeypatch.setattr(names, "find", lambda name: None)
    assert chat._target(None) is None and "pip install" in capsys.readouterr().err
