"""The data that a drafter is trained on: files, and chats that the target writes itself."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert
import jspec
from jspec.training import dataset as rows
from jspec.training import self_generated as writing
from jspec.training import target_states
from support import text_pair, toys
from support.trainings import chats, chatty

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 1, vocab_size=261)


def test_text_file_is_split_into_parts(tmp_path):
    file = tmp_path / "plain.txt"
    file.write_text("the cat sat in a tree " * 20)
    found = rows.read(file, text := chatty(), 50, 512)
    assert [len(row.tokens) for row in found[:-1]] == [50] * (len(found) - 1)
    assert text.decode(np.concatenate([row.tokens for row in found])) == file.read_text()
    train, held = rows.divide(found)
    assert len(train) + len(held) == len(found) and held


def test_held_out_questions_are_not_learned():
    """Held-out questions are not learned, whoever answers them, and as many of the answers are greedy as not."""
    found = [rows.of_answer([i % 64, 7], [i, i]) for i in range(640)]
    train, held = rows.divide(found)
    questions, known = ({int(row.tokens[0]) for row in part} for part in (held, train))
    assert len(train) + len(held) == 640 and questions and not questions & known and len(questions) < 10
    again = {int(row.tokens[0]) for row in rows.divide([*found[100:], rows.of_answer([70, 7], [1])])[1]}
    assert again - {70} == questions  # for any other rows
    with pytest.raises(ValueError, match="There is 1 text to learn from"):
        rows.divide(found[::64])


def test_every_part_starts_with_bos(tmp_path):
    """Every part starts with the tokenizer's start token, if it has one, and some parts are held out."""
    file = tmp_path / "plain.txt"
    file.write_text("the cat sat in a tree " * 20)
    found = rows.read(file, text_pair.tokenizer(bos=True), 50, 512)
    assert all(row.tokens[0] == 0 and row.learned.all() for row in found)
    assert max(len(row.tokens) for row in found) == 50
    train, held = rows.divide(found)
    assert len(train) + len(held) == len(found) > 2 and train and held


def test_rows_are_saved_and_loaded(tmp_path):
    rows.save([], tmp_path / "none.safetensors")  # answers that teach nothing
    assert rows.load(tmp_path / "none.safetensors") == []
    some = [rows.of_answer([1, 2], [3]), rows.of_answer([], [4, 5])]
    rows.save(some, tmp_path / "rows.safetensors")
    for found, expected in zip(rows.load(tmp_path / "rows.safetensors"), some, strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.learned, expected.learned)
    assert not list(tmp_path.glob("*.partial"))


def test_most_frequent_answer_tokens_are_found():
    some = [rows.of_answer([9, 9, 9], [3, 3, 5]), rows.of_answer([], [5, 5, 1])]
    assert rows.frequent(some, 2, 10).tolist() == [3, 5]


def test_target_generates_chats(tmp_path):
    """Questions come after the template's text before them, and answers after the text that it puts after questions."""
    tokenizer = chatty()
    frame = writing.frame_of(tokenizer)
    assert (tokenizer.decode(frame.before), tokenizer.decode(frame.after)) == ("user:", "<|end|>assistant:")
    found = writing.write_chats(TARGET, tokenizer, 3, batch=6, answer_tokens=12, temperatures=(0.0, 1.0))
    assert 0 < len(found) <= 6 and all(one not in found[:i] for i, one in enumerate(found))
    for prompt, answer in found:
        text = tokenizer.decode(prompt)
        assert text.startswith("user:") and text.endswith("<|end|>assistant:") and 0 < len(answer) <= 12
        assert 0 not in answer[:-1]
    again = writing.write_chats(TARGET, tokenizer, 3, batch=6, answer_tokens=12, temperatures=(0.0, 1.0))
    assert found == again
    tokens, keys = np.array([found[0][0]]), jspec.text.request_keys(0, 1)
    options = {"max_new_tokens": 12, "sampling": jspec.SamplingParams(temperature=0.0), "eos_ids": 0}
    greedy = jspec.generate(TARGET, tokens, [tokens.shape[1]], keys, **options)
    assert np.asarray(greedy.tokens)[0, : len(found[0][1])].tolist() == found[0][1]


@pytest.mark.parametrize("ended", [4, 5, 6])
def test_repeated_question_is_answered_at_different_temperature(monkeypatch, ended):
    """A question that is asked twice is answered at another temperature; a second greedy answer would be the same."""
    asked = []

    def answer(target, tokenizer, ends, prompts, seed, most, heat):
        asked.append([(tuple(prompt), float(one)) for prompt, one in zip(prompts, heat, strict=True)])
        return [[2 + i, ends[0] if i < ended else 1] for i in range(len(prompts))]

    monkeypatch.setattr(writing, "continued", answer)
    found = writing.write_chats(TARGET, chatty(), 0, batch=6, answer_tokens=4, temperatures=(0.0, 1.0))
    assert len(asked[1]) == 6 and len({*asked[1]}) == 6 == len(found)
    assert len({prompt for prompt, _ in asked[1]}) == ended


def test_generated_chats_are_reused(tmp_path, monkeypatch):
    monkeypatch.setattr("jspec.training.train._WRITERS", 6)
    monkeypatch.setattr("jspec.training.train._ANSWER", 12)
    options = {"folder": tmp_path, "steps": 1, "depth": 1, "step_tokens": 4096, "written_tokens": 40, "length": 128}
    jspec.train_drafter(TARGET, chatty(), **options)
    before = {file.name: file.read_bytes() for file in (tmp_path / "texts").iterdir()}
    monkeypatch.setattr("jspec.training.train.write_chats", None)
    jspec.train_drafter(TARGET, chatty(), **options)
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "texts").iterdir()}
    with pytest.raises(ValueError, match="was started with steps=1, but now it is 2; choose another folder"):
        jspec.train_drafter(TARGET, chatty(), **options | {"steps": 2})
    for target, data in ((toys.tiny_llama(1, 1, vocab_size=261), None), (TARGET, chats(tmp_path / "chats.jsonl"))):
        with pytest.raises(ValueError, match="was started with another " + ("data" if data else "target")):
            jspec.train_drafter(target, chatty(), data=data, **options)


def questions(file, count):
    """Write chats that end with the user's turn and one that does not, and return the file."""
    asked = [[{"role": "user", "content": f"the {'cat ' * (i % 3)}{i}?"}] for i in range(count)]
    asked.append([*asked[0], {"role": "assistant", "content": "the tree"}])
    asked[1] = [*asked[-1], *asked[1]]
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in asked))
    return file


def test_target_answers_questions_from_data(tmp_path, monkeypatch):
    """Each question is answered once, a round at a time, every other one greedily.

    Earlier answers in a chat are learned separately.
    """
    monkeypatch.setattr("jspec.training.train._WRITERS", 4)
    monkeypatch.setattr("jspec.training.train._ANSWER", 12)
    options = {"folder": tmp_path / "run", "steps": 1, "depth": 1, "step_tokens": 512, "length": 128}
    options |= {"data": questions(tmp_path / "asked.jsonl", 6)}
    jspec.train_drafter(TARGET, tokenizer := chatty(), **options)
    files = sorted((tmp_path / "run" / "texts").iterdir())
    found = [row for file in files for row in rows.load(file)]
    asked = [row for row in rows.read(options["data"], tokenizer, 128, 512) if row.is_question]
    assert len(files) == 2 and len(found) == len(asked) == 6
    said = [row for row in rows.read(options["data"], tokenizer, 128, 512) if not row.is_question]
    assert [tokenizer.decode(row.tokens[row.learned]) for row in said] == ["the tree<|end|>"] * 2
    given = [row.tokens[: row.learned.argmax()].tolist() for row in found]
    assert sorted(given) == sorted(row.tokens.tolist() for row in asked) and sorted(map(len, given)) == [
        *map(len, given)
    ]
    text = tokenizer.decode(max(given, key=len))
    assert text == "user:the 0?<|end|>assistant:the tree<|end|>user:the cat 1?<|end|>assistant:"
    greedy = jspec.generate(
        TARGET,
        np.array([prompt + [0] * (max(map(len, given)) - len(prompt)) for prompt in given]),
        [*map(len, given)],
        jspec.text.request_keys(0, 6),
        max_new_tokens=12,
        sampling=jspec.SamplingParams(temperature=0.0),
        eos_ids=0,
    )
    for i, (row, tokens) in enumerate(zip(found, np.asarray(greedy.tokens), strict=True)):
        answer = row.tokens[row.learned].tolist()
        assert (tokens[: len(answer)].tolist() == answer) == (i % 4 in (0, 2))
    monkeypatch.setattr("jspec.training.train.write_answers", None)
    jspec.train_drafter(TARGET, tokenizer, **options)


def test_own_chats_and_answers_may_be_combined(tmp_path, monkeypatch):
    """The target's own chats come first, so a folder with only those is the beginning of one with both."""
    monkeypatch.setattr("jspec.training.train._WRITERS", 6)
    monkeypatch.setattr("jspec.training.train._ANSWER", 12)
    options = {"steps": 1, "depth": 1, "step_tokens": 512, "length": 128, "written_tokens": 40}
    jspec.train_drafter(TARGET, chatty(), folder=tmp_path / "own", **options)
    asked = questions(tmp_path / "asked.jsonl", 6)
    jspec.train_drafter(TARGET, chatty(), data=asked, folder=tmp_path / "both", **options)
    files = [sorted((tmp_path / name / "texts").iterdir()) for name in ("own", "both")]
    own, both = ([file.read_bytes() for file in part] for part in files)
    assert both[: len(own)] == own and len(both) == len(own) + 1


def test_texts_of_earlier_run_are_usable_as_data(tmp_path, monkeypatch):
    monkeypatch.setattr("jspec.training.train._WRITERS", 6)
    monkeypatch.setattr("jspec.training.train._ANSWER", 12)
    options = {"steps": 1, "depth": 1, "step_tokens": 512, "length": 128}
    first, both, file = tmp_path / "first", tmp_path / "both", chats(tmp_path / "chats.jsonl")
    jspec.train_drafter(TARGET, chatty(), folder=first, written_tokens=40, **options)
    kept = rows.read(first, chatty(), 128, 512)
    assert rows.digest(kept) == rows.digest(
        [row for part in sorted((first / "texts").iterdir()) for row in rows.load(part)]
    )
    assert max(len(row.tokens) for row in rows.read(first, chatty(), 8, 512)) <= 8
    jspec.train_drafter(TARGET, chatty(), data=[file, first], folder=both, **options)
    known = json.loads((both / "recipe.json").read_text())["data"]
    assert known == rows.digest([*rows.read(file, chatty(), 128, 512), *kept]) and not (both / "texts").exists()
    jspec.train_drafter(TARGET, chatty(), data=first, folder=tmp_path / "more", written_tokens=20, **options)
    names = [sorted(part.name for part in (folder / "texts").iterdir()) for folder in (first, tmp_path / "more")]
    assert names[0][0] == "00000.safetensors" and max(names[0]) < min(names[1])  # another seed, so no text twice
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), TARGET)
    with pytest.raises(ValueError, match="first has text generated by another target, or by this one in another dtype"):
        jspec.train_drafter(half, chatty(), data=first, folder=tmp_path / "half", **options)
    with pytest.raises(ValueError, match="both has no text generated by a target"):
        jspec.train_drafter(TARGET, chatty(), data=both, folder=tmp_path / "none", **options)
    assert not (tmp_path / "half").exists() and not (tmp_path / "none").exists()


def test_digests_and_fingerprints_are_distinct():
    some = [rows.of_answer([1], [2, 3]), rows.of_answer([4], [5])]
    others = [
        some[:1],
        some[::-1],
        [rows.of_answer([1, 2], [3]), some[1]],
        [rows.of_answer([1], [2]), rows.of_answer([3, 4], [5])],
    ]
    assert len({rows.digest(one) for one in [some, *others]}) == 5
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), TARGET)
    merged = toys.tiny_llama(0, 1, vocab_size=261)
    weight = merged.layers[0].mlp.down_proj.weight
    weight.set_value(weight[...].at[0, 0].add(1e-6))  # like a merged adapter, which leaves all norms unchanged
    found = {target_states.fingerprint(one) for one in (TARGET, half, merged, jspec.quantize(TARGET))}
    assert len(found) == 4 and target_states.fingerprint(toys.tiny_llama(0, 1, vocab_size=261)) in found


def test_invalid_data_is_rejected(tmp_path):
    empty, strange = tmp_path / "empty.txt", tmp_path / "strange.txt"
    empty.write_text("")
    strange.write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"empty\.txt has no text to learn from"):
        rows.read(empty, chatty(), 64, 512)
    with pytest.raises(ValueError, match=r"is not UTF-8 text \(byte 3\)"):
        rows.read(strange, chatty(), 64, 512)
    with pytest.raises(ValueError, match="There is 1 text to learn from, but one must be held out"):
        rows.divide([rows.of_answer([], [1, 2, 3])])
    plain = chatty()
    plain.chat_template = None
    with pytest.raises(ValueError, match="is a chat, but the target has no chat template"):
        rows.read(chats(tmp_path / "chats.jsonl"), plain, 64, 512)
    with pytest.raises(ValueError, match="The target has no chat template, so it cannot generate chats"):
        jspec.train_drafter(TARGET, plain, folder=tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "owl"}, "kind is 'owl'; expected one of eagle, block, med"),
        ({"loss": "l2"}, "loss is 'l2'; expected one of"),
        ({"steps": 0}, "steps must be"),
        ({"length": 5000}, "length is 5000, but the target has 4096 positions"),
        ({"length": 2}, "length is 2; expected at least 6, two tokens more than"),
        ({"rate": 2}, "rate is 2; expected a number above 0"),
        ({"seed": 2**32}, "seed must be an int from 0 to "),
        ({"data": []}, "data names no file; pass at least one"),
    ],
)
def test_invalid_recipes_are_rejected(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        jspec.train_drafter(TARGET, chatty(), folder=tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


def test_untrainable_model_is_rejected_before_writing(tmp_path):
    with pytest.raises(ValueError, match="the target's layers are int8; load it without quantising"):
        jspec.train_drafter(jspec.quantize(TARGET), chatty(), "model", folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_full_disk_leaves_no_files(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("convert.to_hf.save_file", full)
    with pytest.raises(convert.CheckpointError, match=r"could not be written .*No space left"):
        rows.save([rows.of_answer([1], [2, 3])], tmp_path / "rows.safetensors")
    assert not list(tmp_path.iterdir())
