"""Chats that a drafter is trained on: which parts are learned, and which chats are rejected."""

import json

import pytest

import jspec
from jspec.training import dataset as rows
from support import toys
from support.trainings import chats, chatty

TARGET = toys.tiny_llama(0, 1, vocab_size=261)


def test_only_assistant_tokens_are_learned(tmp_path):
    tokenizer = chatty()
    file = tmp_path / "two.jsonl"
    turns = [("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "the end")]
    file.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    (row,) = rows.read(file, tokenizer, 512, 512)
    text = "".join(
        tokenizer.decode([i]) if learned else "." for i, learned in zip(row.tokens, row.learned, strict=True)
    )
    assert text.strip(".").startswith("b<|end|>.") and text.endswith(".the end<|end|>")
    assert tokenizer.decode(row.tokens) == "user:a?<|end|>assistant:b<|end|>user:c?<|end|>assistant:the end<|end|>"


def learned_of_two_answers(template, file):
    """Return the learned parts of the answers "b" and "the end" under a template."""
    tokenizer = chatty()
    tokenizer.chat_template = template
    turns = [("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "the end")]
    file.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    (row,) = rows.read(file, tokenizer, 512, 512)
    return tokenizer.decode(row.tokens[row.learned])


def test_changed_earlier_answers_are_not_learned(tmp_path):
    """The first answer is not learned: only a last answer shows thoughts, so alone it is longer than in the chat."""
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' and loop.last %}(hm){% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert learned_of_two_answers(template, tmp_path / "one.jsonl") == "(hm)the end<|end|>"


def test_text_after_a_turn_is_not_learned(tmp_path):
    """Text that a template puts after a turn, such as ChatML's newline, is not learned, because nobody writes it."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert learned_of_two_answers(template, tmp_path / "one.jsonl") == "b<|end|>the end<|end|>"


def test_chats_may_contain_unicode_line_separators(tmp_path):
    """A chat may contain Unicode line separators, which JSON leaves as they are."""
    file = tmp_path / "one.jsonl"
    turns = [{"role": "user", "content": "a\u2028b\x85?"}, {"role": "assistant", "content": "the cat"}]
    file.write_text(json.dumps({"messages": turns}, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert len(rows.read(file, chatty(), 64, 512)) == 1


def test_question_without_room_for_answer_is_rejected(tmp_path):
    file = tmp_path / "asked.jsonl"
    asked = (json.dumps({"messages": [{"role": "user", "content": "cat " * count}]}) for count in (1, 2000))
    file.write_text("\n".join(asked))
    with pytest.raises(
        ValueError,
        match=r"asked.jsonl, line 2 has a question of \d{4} tokens, .* after at most 3840 tokens; remove or shorten",
    ):
        jspec.train_drafter(TARGET, chatty(), data=file, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def said(asked, answer):
    """Return a line with a question and the assistant's answer."""
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


MALFORMED = {
    "no JSON": ("{", "chats.jsonl, line 2 is not JSON"),
    "no messages": ('{"text": "a"}', 'line 2 has no list "messages"; expected an object like'),
    "an answer to nothing": (
        '{"messages": [{"role": "assistant", "content": "a"}]}',
        "line 2 begins with an assistant message; begin with the user message that it answers",
    ),
    "nothing said": ('{"messages": [{"role": "system", "content": "a"}]}', "line 2 has no assistant message"),
    "a question's role": (
        '{"messages": [{"role": "cat", "content": "a"}, {"role": "user", "content": "b"}]}',
        "line 2, message 0 has the role 'cat'",
    ),
    "a role": (
        '{"messages": [{"role": "cat", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "line 2, message 0 has the role 'cat'",
    ),
    "no text": ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}', "line 2, message 0 is "),
    "no answer": (said("a", None), "line 2, message 1 is .*; expected an object with two strings"),
    "an answer in parts": (said("a", [{"type": "text", "text": "b"}]), "line 2, message 1 is .*; expected an object"),
    "two answers": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, '
        '{"role": "assistant", "content": "c"}]}',
        "line 2 has two assistant messages in a row",
    ),
    "half a character": (said("a", "\ud800"), "line 2 is not UTF-8 text"),
    "no end": ('{"messages":' + "[" * 100_000, "line 2 is not JSON"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_chats_are_rejected(tmp_path, name):
    line, message = MALFORMED[name]
    file = chats(tmp_path / "chats.jsonl", 1)
    file.write_text(file.read_text() + "\n" + line)
    with pytest.raises(ValueError, match=message):
        rows.read(file, chatty(), 64, 512)


def test_chats_rejected_by_template_are_reported(tmp_path):
    file = chats(tmp_path / "chats.jsonl", 1)
    strict = chatty()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"line 1 is rejected by the model's chat template: roles must alternate"):
        rows.read(file, strict, 64, 512)
    mute = chatty()
    mute.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="line 1 has no assistant tokens"):
        rows.read(file, mute, 64, 512)
