"""Chats, prompt files, stop strings and drafters on the command line."""

import json

import pytest

import jspec
from jspec.cli.model_args import Sources, exit_name
from support import text_pair

pytestmark = pytest.mark.usefixtures("quick_compile")
HELLO = [{"role": "user", "content": "Hello"}]
LAST = json.dumps(HELLO[0]).encode()


@pytest.fixture
def generate(run, chatty):
    """Return ``generate(*arguments)``: objects and stderr of a successful `jspec generate --json` for 12 tokens."""

    def command(*arguments):
        code, out, error = run("generate", "--target", chatty, "--temperature", 0, "-n", 12, "--json", *arguments)
        assert code == 0, error
        return [json.loads(line) for line in out.splitlines()], error

    return command


def test_each_prompt_is_a_chat_message(generate, chatty):
    (hello, other), error = generate("--chat", "Hello", "in a", "--draft", "none")
    assert error == "" and hello["prompt"] == HELLO and other["prompt"] == [{"role": "user", "content": "in a"}]
    model, tokenizer = jspec.load(chatty), text_pair.tokenizer()
    rendered = tokenizer("[user]Hello\n[assistant]")["input_ids"]
    greedy = jspec.SamplingParams(temperature=0)
    (done,) = jspec.complete(model, None, tokenizer, rendered, max_new_tokens=12, sampling=greedy)
    assert hello["tokens"] == done.tokens


def test_hint_suggests_chat_option_for_chat_models(generate, run, sources):
    assert "add --chat to get an answer" in generate("Hello", "--plain")[1]
    code, _, error = run("generate", "Hello", "--target", sources[0], "--plain", "-n", 2, "--json")
    assert (code, error) == (0, "")


def test_system_message_comes_first(generate, tmp_path):
    system = {"role": "system", "content": "Be brief."}
    (tmp_path / "prompts").write_text(json.dumps({"messages": HELLO}) + "\n\n" + json.dumps({"prompt": "in a"}) + "\n")
    lines, error = generate("--chat", "--system", "Be brief.", "--file", tmp_path / "prompts", "--plain")
    assert [line["prompt"] for line in lines] == [[system, *HELLO], [system, {"role": "user", "content": "in a"}]]
    assert error == "" and lines[0]["tokens"] == generate("--chat", "--system", "Be brief.", "Hello")[0][0]["tokens"]


def test_prompt_file_may_mix_texts_and_conversations(generate, tmp_path):
    (tmp_path / "prompts").write_text(json.dumps({"prompt": "in a"}) + "\n" + json.dumps({"messages": HELLO}))
    (text, chat), error = generate("--file", tmp_path / "prompts")
    assert (text["prompt"], chat["prompt"], error) == ("in a", HELLO, "")
    assert text["tokens"] == generate("in a")[0][0]["tokens"]
    assert chat["tokens"] == generate("--chat", "Hello")[0][0]["tokens"]


@pytest.mark.parametrize("draft", [[], ["lookup"], ["DRAFT"], ["lookup+DRAFT"], ["none"]])
def test_greedy_text_is_same_with_every_drafter(generate, sources, draft):
    prompt = "in a thing, in a thing, in a"
    draft = [name.replace("DRAFT", str(sources[1])) for name in draft]
    ((line,), _) = generate(prompt, *(("--draft", *draft) if draft else ()))
    assert line["num_draft_tokens"] == (0 if draft == ["none"] else 4)
    assert line["tokens"] == generate(prompt, "--plain")[0][0]["tokens"]
    assert (line["stats"]["drafted"] > 0) == (draft != ["none"])


def test_early_exit_option_drafts(run, tmp_path):
    folder = text_pair.write(tmp_path / "two", num_hidden_layers=2)
    command = "generate", "in a", "--target", folder, "-n", 12, "--temperature", 0, "--json"
    plain, early = (json.loads(run(*command, "--draft", draft)[1]) for draft in ("none", "exit:1"))
    assert early["tokens"] == plain["tokens"] and early["stats"]["drafted"] > 0
    for draft in ("exit:2", "exit:3-0"):
        code, out, error = run(*command, "--draft", draft)
        assert (code, out) == (2, "") and f"--draft {draft} leaves out none of the target's 2 layers" in error


def test_tune_command_finds_early_exit(run, tmp_path, monkeypatch):
    folder = str(text_pair.write(tmp_path / "two", num_hidden_layers=2))
    calls, best = [], jspec.EarlyExitDrafter(2, (0,))
    monkeypatch.setattr(jspec, "best_exit", lambda target, *_, **options: calls.append(options) or best, raising=False)
    monkeypatch.setattr(
        jspec,
        "tune",
        lambda target, drafter, *_, **options: (calls.append(drafter), jspec.Tuning(1, 1.5, 1.0, (1.0,), (1.5,)))[1],
        raising=False,
    )
    command = "tune", folder, "exit", "--prompt", "in a", "-n", 100, "--max-draft-tokens", 1
    assert json.loads(run(*command, "--json")[1])["draft"] == "exit:2-0"
    assert calls.pop() == best and (calls[0]["max_new_tokens"], calls[0]["max_draft_tokens"]) == (64, 1)
    assert run(*command)[1].splitlines()[-1] == "exit:2-0: use num_draft_tokens=1 (1.50x plain)"
    assert Sources(folder, "exit:2-0").load()[1] == best and exit_name(jspec.EarlyExitDrafter(1)) == "exit:1"


def test_answers_are_printed_without_prompt_and_stop(run, chatty, generate):
    ((whole,), _) = generate("--chat", "Hello", "--plain")
    command = "generate", "--target", chatty, "--temperature", 0, "-n", 12, "--chat", "Hello", "--plain"
    code, out, error = run(*command)
    assert code == 0 and out.rstrip("\n") == whole["text"].rstrip("\n") and "tokens (eos) in" in error
    stop = whole["text"][3:4]
    ((line,), _) = generate("--chat", "Hello", "--plain", "--stop", stop)
    assert line["text"] == whole["text"][: whole["text"].index(stop)] and line["finish_reason"] == "stop"
    assert line["stats"]["tokens"] == len(whole["tokens"]) > len(line["tokens"])
    assert "tokens (stop) in" in run(*command, "--stop", stop)[2]


FILES = {
    "empty": (b"\n \n", "is empty; write a line such as"),
    "not UTF-8": (b'{"prompt": "a"}\n{"prompt": "\xff"}', "line 2 is not UTF-8 text (byte 13)"),
    "not JSON": (b'{"prompt": "a"}\n\nprompt', "line 3 is not JSON"),
    "no object": (b'["a"]', "line 1 is ['a']; expected an object with"),
    "both": (b'{"prompt": "a", "messages": []}', "and nothing else"),
    "more": (b'{"prompt": "a", "temperature": 0}', "and nothing else"),
    "no text": (b'{"prompt": 3}', "line 1 must be"),
    "half a pair": (rb'{"prompt": "\ud800"}', "line 1 is not UTF-8 text (character 1)"),
    "no messages": (b'{"messages": []}', "line 1 has no messages"),
    "no content": (b'{"messages": [{"role": "user"}]}', "line 1, message 0 is {'role': 'user'}; expected"),
    "a role": (b'{"messages": [{"role": "me", "content": "a"}]}', "line 1, message 0 has the role 'me'"),
    "two systems": (
        b'{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}',
        "--system",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_invalid_prompt_file_is_rejected(run, chatty, tmp_path, monkeypatch, case):
    content, phrase = FILES[case]
    (tmp_path / "prompts.jsonl").write_bytes(content)
    monkeypatch.setattr(jspec.cli.generate, "status_line", lambda: pytest.fail("it went on"))
    code, out, error = run(
        "generate", "--target", chatty, "--file", tmp_path / "prompts.jsonl", "--chat", "--system", "b"
    )
    assert code in (1, 2) and out == "" and error.count("\n") == 1 and phrase in error, error
