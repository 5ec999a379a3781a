"""Chat-template variables: visible to the template, rejected if not allowed, and bounded in the server."""

import json

import pytest

import jspec
from jspec.cli.common import UsageError, template_variables
from jspec.text.chat_template import encode
from jspec.text.tokenizer_file import TokenizerFile
from support import servers, text_pair
from support.templates import HELLO

pytestmark = pytest.mark.usefixtures("quick_compile")
THINKS = (
    "{{ date }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking is false %}<none>{% endif %}"
    "{% for d in documents or [] %}({{ d.text }}){% endfor %}{{ more | tojson }}"
)
SETS = [
    {"more": None},
    {"more": 1, "enable_thinking": False},
    {"more": [1, {"a": "é"}], "enable_thinking": True, "date": "26 Jul"},
    {"more": "x", "documents": [{"text": "one"}, {"text": "two"}], "unused": 3},
    {"more": 0.5, "tools": [{"type": "function", "function": {"name": "f"}}]},
]


@pytest.fixture
def words():
    """Return transformers' tokenizer and jspec's own, with a template that reads variables."""
    whole = text_pair.tokenizer()
    whole.chat_template = THINKS
    return whole, TokenizerFile(whole.backend_tokenizer, {"eos_token": text_pair.END}, THINKS)


@pytest.mark.parametrize("variables", SETS, ids=json.dumps)
def test_template_receives_variables(words, variables):
    expected = words[0].apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True, **variables)
    for tokenizer in words:
        batch = encode(tokenizer, [HELLO, "a"], variables)
        assert tokenizer.decode(batch.tokens[0, : batch.lengths[0]].tolist()) == expected
        assert batch.lengths[1] == 1


def test_unused_variables_do_not_change_prompt(words):
    for tokenizer in words:
        tokenizer.chat_template = THINKS.replace("{{ more | tojson }}", "")
        plain, same = (encode(tokenizer, [HELLO], variables) for variables in (None, {}))
        assert plain.tokens.tolist() == same.tokens.tolist() == encode(tokenizer, [HELLO], {"x": 1}).tokens.tolist()


@pytest.mark.parametrize(
    ("variables", "phrase"),
    [
        ({"self": 1}, "template holds 'self', which is not a variable that callers may set; leave it out"),
        ({"messages": []}, "template holds 'messages', which is not a variable that callers may set; leave it out"),
        ({"chat_template": "x"}, "template holds 'chat_template'"),
        ({"add_generation_prompt": False}, "template holds 'add_generation_prompt'"),
        ({"tokenize": True}, "template holds 'tokenize'"),
        ({"continue_final_message": True}, "template holds 'continue_final_message'"),
        ({"enable-thinking": False}, "template holds 'enable-thinking'; expected a name that a template can use"),
        ({3: False}, "template holds 3; expected a name"),
        ({"": False}, "template holds ''; expected a name"),
        ("enable_thinking", "template is 'enable_thinking'; expected chat-template variables by name"),
        (["enable_thinking"], r"template is \['enable_thinking'\]; expected chat-template variables"),
    ],
)
def test_invalid_variables_are_rejected(words, variables, phrase):
    for tokenizer in words:
        with pytest.raises(ValueError, match=phrase):
            encode(tokenizer, [HELLO], variables)


def test_variables_without_conversation_are_rejected(words):
    with pytest.raises(ValueError, match="template sets chat-template variables, but no prompt is a conversation"):
        encode(words[0], ["a", [1, 2]], {"enable_thinking": False})


FAULTS = {
    "a refusal": ("{{ raise_exception('only\nshort ones') }}", "only short ones"),
    "a refusal without a reason": ("{{ raise_exception('') }}", "TemplateError"),
    "a syntax error": ("{% if %}", "Expected an expression, got 'end of statement block'"),
    "an attribute of nothing": ("{{ messages[0].a.b }}", "'dict object' has no attribute 'a'"),
    "a type": ("{{ messages + 1 }}", "TypeError can only concatenate list"),
    "a division": ("{{ 1 / 0 }}", "ZeroDivisionError division by zero"),
    "a key": ("{{ '%(a)s' % {} }}", "KeyError 'a'"),
    "an index": ("{{ '{}'.format() }}", "IndexError"),
    "a call of a text": ("{{ messages[0].content() }}", "TypeError 'str' object is not callable"),
    "an endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "a large range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    "an unknown filter": ("{{ messages | f }}", "No filter named 'f'"),
    "another file": ("{% include 'a' %}", "TypeError no loader for this environment"),
    "an unsafe attribute": ("{{ messages.__class__.mro() }}", "unsafe"),
    "what is not JSON": ("{{ range | tojson }}", "TypeError|is not JSON"),
    "a long refusal": ("{{ raise_exception('a' * 10000) }}", r"a{300}\.\.\."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_template_error_is_one_sentence(words, fault):
    template, reason = FAULTS[fault]
    for tokenizer in words:
        tokenizer.chat_template = template
        with pytest.raises(
            ValueError, match=f"^Prompt 2 is rejected by the model's chat template: .*({reason})"
        ) as caught:
            encode(tokenizer, ["a", HELLO])
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_complete_and_stream_accept_variables(words, tmp_path):
    target = jspec.load(text_pair.write(tmp_path / "model", max_position_embeddings=512))
    options = {"template": {"more": 1, "enable_thinking": False}, "max_new_tokens": 8, "seed": 2}
    shown = words[0].apply_chat_template(HELLO, tokenize=False, **options["template"])
    (text,) = jspec.complete(target, None, words[0], shown, max_new_tokens=8, seed=2)
    (chat,) = jspec.complete(target, None, words[1], [HELLO], **options)
    streamed = [token for part in jspec.stream(target, None, words[0], HELLO, **options) for token in part.tokens]
    assert text.tokens == chat.tokens == streamed
    for call in (jspec.complete, jspec.stream):
        with pytest.raises(ValueError, match="template holds 'messages'"):
            call(target, None, words[0], HELLO, template={"messages": 1})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("false", False),
        ("null", None),
        ("3", 3),
        ("0.5", 0.5),
        ('"false"', "false"),
        ('{"a": [1]}', {"a": [1]}),
        ("", ""),
        ("26 Jul 2024", "26 Jul 2024"),
        ("a=b", "a=b"),
        ("False", "False"),
        ("007", "007"),
        ("NaN", "NaN"),
        ("[NaN]", "[NaN]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_command_line_values_are_parsed(text, value):
    assert template_variables(["x=" + text, "y=1"]) == {"x": value, "y": 1}
    assert type(template_variables(["x=" + text])["x"]) is type(value)


@pytest.mark.parametrize(
    ("assignments", "phrase"),
    [
        (["enable_thinking"], "--template 'enable_thinking' has no value; write NAME=VALUE"),
        (["a=1", "a=2"], "--template sets 'a' twice"),
        (["=1"], "--template holds ''"),
        (["messages=[]"], "--template holds 'messages'"),
        (["a=\udcff"], "--template is not UTF-8 text"),
    ],
)
def test_invalid_template_options_are_rejected(assignments, phrase):
    with pytest.raises(UsageError, match=phrase):
        template_variables(assignments)


@pytest.fixture
def thinking(sources):
    """Yield the folder of a model whose template reads variables."""
    file = sources[0] / "chat_template.jinja"
    file.write_text("{{ raise_exception('no such date') if date == 'never' }}" + THINKS)
    yield sources[0]
    file.unlink()


def test_commands_accept_template_variables(run, thinking):
    options = ("--plain", "-n", 8, "--template", "more=1", "--template", "enable_thinking=false")
    shown = "[user]Hello[assistant]<none>1"
    code, out, _ = run("generate", "--target", thinking, "--chat", "Hello", *options, "--json")
    assert code == 0
    told = json.loads(run("generate", "--target", thinking, shown, "--plain", "-n", 8, "--json")[1])
    assert json.loads(out)["tokens"] == told["tokens"]
    code, out, _ = run("chat", thinking, *options, "--max-length", 100, stdin=b"Hello\n")
    assert code == 0 and out.rstrip("\n") == told["text"].rstrip("\n")


def test_command_mistakes_are_reported(run, thinking):
    target = ("--target", thinking, "--plain")
    code, _, error = run("generate", *target, "a", "--template", "more=1")
    assert code == 2 and "--template applies only to conversations; add --chat." in error
    code, _, error = run("generate", *target, "--chat", "a", "--template", "date=never")
    assert code == 2 and "rejected by the model's chat template: no such date" in error and error.count("\n") == 1
    code, _, error = run("chat", thinking, "--plain", "--max-length", 100, "--template", "date=never", stdin=b"a\n")
    assert code == 2 and "rejected by the model's chat template: no such date" in error and "Traceback" not in error


@pytest.fixture
def served(running, monkeypatch):
    """Return ``served(**fields)``, which chats with a server whose template reads variables."""
    monkeypatch.setattr(running.tokenizer, "chat_template", THINKS)

    def chat(**fields):
        return running.chat(messages=servers.HELLO, extra_body={"return_token_ids": True} | fields)

    return chat


@pytest.mark.parametrize("variables", [None, {}, *SETS[:4]], ids=json.dumps)
def test_clients_may_set_variables(running, served, variables):
    if not variables:
        running.tokenizer.chat_template = THINKS.replace("{{ more | tojson }}", "")
    answer = served(chat_template_kwargs=variables)
    shown = running.tokenizer.apply_chat_template(
        servers.HELLO, tokenize=False, add_generation_prompt=True, **variables or {}
    )
    assert running.tokenizer.decode(answer.choices[0].prompt_token_ids) == shown


@pytest.mark.parametrize(
    ("variables", "phrase"),
    [
        ([], "chat_template_kwargs is []; expected an object"),
        ("a", "chat_template_kwargs is 'a'; expected an object"),
        ({"messages": []}, "chat_template_kwargs holds 'messages'"),
        ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs holds 'chat_template'"),
        ({"tools": []}, "chat_template_kwargs holds 'tools'"),
        ({"a-b": 1}, "chat_template_kwargs holds 'a-b'"),
        ({f"a{i}": 1 for i in range(65)}, "An object in the body has 65 fields"),
        ({"more": "x" * 100_000}, "characters in chat_template_kwargs, too many for"),
        ({"more": "x" * 500}, "tokens in messages"),
    ],
)
def test_disallowed_client_variables_are_rejected(served, variables, phrase):
    with pytest.raises(servers.openai.BadRequestError) as caught:
        served(chat_template_kwargs=variables)
    assert phrase in caught.value.body["message"]


def test_deep_variables_and_template_errors_are_client_errors(running, served):
    deep = "[" * 900 + "]" * 900
    running.tokenizer.chat_template = "{{ messages[0].content / 0 }}"
    with pytest.raises(servers.openai.BadRequestError, match="is rejected by the model's chat template: TypeError"):
        served()
    running.tokenizer.chat_template = "{{ more | tojson }}"
    with pytest.raises(servers.openai.BadRequestError):
        served(chat_template_kwargs={"more": json.loads(deep)})
    running.tokenizer.chat_template = THINKS
    assert served(chat_template_kwargs={"more": 1}).choices[0].message


def test_completions_reject_template_variables(running):
    with pytest.raises(servers.openai.BadRequestError, match="chat_template_kwargs is not a field"):
        running.complete(extra_body={"chat_template_kwargs": {"a": 1}})
