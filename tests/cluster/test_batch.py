"""`jspec batch` in one process: its completions, files, resumption and errors."""

import json

import pytest

import jspec
from jspec.cluster.batch import arrow_tables
from jspec.cluster.batch.batch_job import part_size
from support.disks import small_disk
from support.servers import tokenizer

pytestmark = pytest.mark.usefixtures("quick_compile")
PROMPTS = ["in a thing", "a", "the cat in the hat and a thing", "thing", "in", "a hat", "in the hat in the hat", "the"]
SAMPLING = {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2}
HELLO = {"messages": [{"role": "user", "content": "in"}]}


@pytest.fixture
def batch(run, sources, tmp_path):
    """Return ``batch(rows, *options)``: a function that runs `jspec batch`.

    It returns the exit code, standard error and the folder.
    """

    def command(rows, *options, folder="output", target=sources[0], draft=sources[1]):
        file, output = tmp_path / "prompts.jsonl", tmp_path / folder
        content = rows if isinstance(rows, bytes) else "\n".join(map(json.dumps, rows)).encode()
        file.write_bytes(content)
        source = "--target", target, "--draft", draft, "-n", 20, "--slots", 2
        code, out, error = run("batch", file, "--output", output, *source, *options)
        assert out == ""
        return code, error, output

    return command


def rows_of(folder):
    """Return the rows of all parts, in order."""
    return [json.loads(line) for part in sorted(folder.glob("part-*.jsonl")) for line in part.read_text().splitlines()]


def contents(folder):
    """Return the bytes of each part, by name."""
    return {part.name: part.read_bytes() for part in folder.glob("part-*")}


def check(rows, completions, indices):
    """Check that the rows hold these completions."""
    for row, done, index in zip(rows, completions, indices, strict=True):
        found = row["generated_text"], row["generated_tokens"], row["finish_reason"], row["prompt_index"]
        assert found == (done.text, done.tokens, done.finish_reason, index)


OPTIONS = "--temperature", 0.9, "--top-k", 20, "--repetition-penalty", 1.2, "--seed", 3, "--stop", "e"


def test_completions_equal_those_of_complete(batch, sources):
    """Each text is that of `jspec.complete`, and the input's columns remain as they were."""
    rows = [{"id": i, "prompt": prompt, "x": [0.1, None, "é"]} for i, prompt in enumerate(PROMPTS)]
    code, error, folder = batch(rows, *OPTIONS, "--num-draft-tokens", 2)
    assert code == 0 and "8 prompts in 4 files; " in error, error
    target = jspec.load(sources[0])
    options = {"max_new_tokens": 20, "accept": "coupled", "seed": 3, "stop": "e"}
    sampling = jspec.SamplingParams(**SAMPLING)
    done = jspec.complete(target, jspec.load(sources[1]), tokenizer(), PROMPTS, sampling=sampling, **options)
    found = rows_of(folder)
    check(found, done, range(8))
    assert {one.finish_reason for one in done} > {"stop"}
    assert [{name: row[name] for name in ("id", "prompt", "x")} for row in found] == rows


def test_interrupted_job_continues_with_the_same_bytes(batch):
    """Missing parts are written again, even with another draft and other slots. Complete parts are not touched."""
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    code, _, folder = batch(rows, *OPTIONS, "--num-draft-tokens", 2)
    whole, kept = contents(folder), folder / "part-00000.jsonl"
    assert code == 0 and len(whole) == 4
    for number in (1, 3):
        (folder / f"part-0000{number}.jsonl").unlink()
    time = kept.stat().st_mtime_ns
    code, error, _ = batch(rows, *OPTIONS, "--slots", 4, draft="lookup")
    assert code == 0 and "(4 were already complete)" in error
    assert contents(folder) == whole and kept.stat().st_mtime_ns == time
    code, error, _ = batch(rows, *OPTIONS)
    assert code == 0 and error == f"{folder} is already complete\n"


def test_conversations_are_answered(batch, chatty):
    """Rows with messages are always answered, and rows with a prompt only with --chat. Blank lines do not count."""
    content = json.dumps(HELLO).encode() + b'\n\n \n{"prompt": "in"}\n'
    tokens = jspec.text.load_tokenizer(chatty)
    for chat, prompts in (((), [HELLO["messages"], "in"]), (("--chat",), [HELLO["messages"]] * 2)):
        code, error, folder = batch(
            content, "--temperature", 0, *chat, folder=f"out{len(chat)}", target=chatty, draft="none"
        )
        assert code == 0, error
        sampling = jspec.SamplingParams(temperature=0)
        done = jspec.complete(jspec.load(chatty), None, tokens, prompts, max_new_tokens=20, sampling=sampling)
        check(rows_of(folder), done, range(2))


def test_parquet_files_keep_their_columns(batch, run, sources, tmp_path):
    """Parquet rows get the completions of the same rows in JSON Lines, and keep their columns and types."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"prompt": PROMPTS, "x": pyarrow.array(range(8), pyarrow.uint8())})
    parquet.write_table(table, tmp_path / "prompts.parquet")
    source = "--target", sources[0], "--draft", "none", "-n", 20, "--slots", 2
    code, _, error = run("batch", tmp_path / "prompts.parquet", "--output", tmp_path / "parquet", *source)
    assert code == 0, error
    parts = [parquet.read_table(part) for part in sorted((tmp_path / "parquet").glob("part-*.parquet"))]
    found = pyarrow.concat_tables(parts)
    assert found.select(["prompt", "x"]) == table
    _, _, folder = batch([{"prompt": prompt} for prompt in PROMPTS], draft="none")
    assert [{"prompt": row.pop("prompt"), **row} for row in rows_of(folder)] == found.drop(["x"]).to_pylist()


def test_lines_are_repeated_byte_for_byte(batch):
    """Lines keep numbers and escapes that a JSON parser would change. A byte-order mark is ignored."""
    lines = [
        rb'{"x": 1e999, "y": 12345678901234567.25, "z": -0, "prompt": "in"}',
        rb'{ "prompt" : "a", "\ud800": "\ud800" }',
    ]
    code, error, folder = batch(b"\xef\xbb\xbf" + b" \r\n".join(lines) + b"\r\n", draft="none")
    assert code == 0, error
    found = b"".join(contents(folder).values()).splitlines()
    assert [line.startswith(one[:-1].rstrip() + b', "prompt_index": ') for line, one in zip(found, lines, strict=True)]
    assert [json.loads(line)["prompt_index"] for line in found] == [0, 1]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([0, 2**32], "has the value 4294967296; expected integers from 0 to"),
        ([0, -1], "has the value -1; expected"),
        ([0, None], "has the value None; expected"),
        ([3, 3], "has the value 3 more than once; give each row its own"),
        ([0.0, 1.0], "is of type double; expected integers"),
    ],
)
def test_wrong_indices_are_refused(values, reason):
    pyarrow = pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=reason):
        arrow_tables.check_indices(pyarrow.array(values), "x")


def test_messages_in_a_parquet_file_lose_absent_fields():
    pyarrow = pytest.importorskip("pyarrow")
    messages = [[{"role": "user", "content": "a", "name": None}, {"role": "tool", "content": "b", "name": "n"}], None]
    assert arrow_tables.prompt_columns(pyarrow.table({"messages": messages})) == [
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "n"}]},
        {"messages": None},
    ]
    assert arrow_tables.prompt_columns(pyarrow.table({"text": ["a"]})) == [{}]


BAD = (
    b'{"prompt": "a"}\n\nprompt\n{"prompt": "\xff"}\n["a"]\n{"prompt": "in"}\n{"prompt": 3}\n{}\n'
    b'{"prompt": "a", "messages": []}\n{"messages": []}\n{"messages": [{"role": "me", "content": "a"}]}\n'
    b'{"prompt": "a", "prompt": "b"}\n{"prompt": "a", "x": NaN}\n{"prompt": "a", "finish_reason": ""}\n'
    rb'{"prompt": "\ud800"}' + b'\n{"prompt": "' + b"in " * 200 + b'"}\n{"prompt": "the"}\n'
)
REASONS = {
    3: "is not JSON (Expecting value: line 1 column 1 (char 0))",
    4: "is not UTF-8 text (byte 13)",
    5: "is ['a']; expected an object with 'prompt' or 'messages'.",
    7: "has prompt = 3; expected either 'prompt' (text) or 'messages' (a list of messages), not both.",
    8: "has no columns; add a column 'prompt' or 'messages'.",
    9: "has prompt = 'a', messages = []; expected either",
    10: "has no messages",
    11: "message 0 has the role 'me'",
    12: "is not JSON (the key 'prompt' appears twice)",
    13: "is not JSON (NaN is not a JSON number)",
    14: "has a column 'finish_reason', which the output uses; rename it.",
    15: "is not UTF-8 text (character 1)",
    16: "needs 400 + 20 tokens (prompt + completion), but the target supports only 128;",
}


def test_bad_lines_are_named_and_skipped(batch):
    """All bad lines are named by number. With --skip-bad, the other lines get the same completions as without them."""
    code, error, folder = batch(BAD, draft="none")
    *lines, last = error.splitlines()
    assert code == 1 and not folder.exists()
    assert last == "jspec: 13 of 16 prompts are invalid; correct them, or leave them out with --skip-bad."
    for line, (number, reason) in zip(lines, REASONS.items(), strict=True):
        assert f"prompts.jsonl, line {number}" in line and reason in line, line
    code, error, folder = batch(BAD, "--skip-bad", draft="none")
    assert code == 0 and error.count("skipped: ") == 13 and "3 prompts in 3 files" in error
    good = [{"prompt": "a"}] * 4 + [{"prompt": "in"}] + [{"prompt": "a"}] * 10 + [{"prompt": "the"}]
    _, _, whole = batch(good, draft="none", folder="whole")
    assert rows_of(folder) == [rows_of(whole)[i] for i in (0, 4, 15)]
    kept = contents(folder)
    (folder / "part-00003.jsonl").unlink()
    code, error, _ = batch(BAD, "--skip-bad", draft="lookup")  # invalid rows do not change which part a row belongs to
    assert code == 0 and contents(folder) == kept


def test_folder_of_another_job_is_refused(batch):
    rows = [{"prompt": "a"}]
    assert batch(rows, draft="none")[0] == 0
    for options, reason in (
        (("--seed", 1), "whose seed is 0 instead of 1"),
        (("--temperature", 0.5), "whose temperature is 1.0 instead of 0.5"),
        (("--activation-bits", 8), "whose activation_bits is '24' instead of '8'"),
    ):
        code, error, folder = batch(rows, *options, draft="none")
        assert code == 1 and f"{folder} belongs to another job, {reason}; pass another --output" in error, error
    code, error, _ = batch([{"prompt": "b"}], draft="none")
    assert code == 1 and "whose SHA-256 of FILE is '" in error
    (folder / "job.json").write_text("{}")
    code, error, _ = batch(rows, draft="none")
    assert code == 1 and "job.json is not a valid job file; pass another --output." in error
    (folder / "job.json").unlink()
    code, error, _ = batch(rows, draft="none")
    assert code == 1 and f"{folder} contains files, but no job.json; pass a new or an empty folder" in error


def test_full_disk_is_named_and_the_job_can_continue(batch):
    """A part that cannot be written leaves no file behind, and the same command then completes the job."""
    rows = [{"prompt": "a", "x": "x" * (4000 if i == 3 else 1)} for i in range(4)]
    with small_disk(4300):  # the input is smaller
        code, error, folder = batch(rows, draft="none")
    assert code == 1 and "part-00001.jsonl cannot be written (File too large); free disk space" in error
    assert sorted(path.name for path in folder.iterdir()) == ["job.json", "part-00000.jsonl"]
    code, error, folder = batch(rows, draft="none")
    assert code == 0 and "(2 were already complete)" in error and len(rows_of(folder)) == 4


@pytest.mark.parametrize(
    ("content", "options", "code", "reason"),
    [
        (b"\n", (), 1, "prompts.jsonl has no rows; write one row with"),
        (b"{}", ("--skip-bad",), 1, "1 of 1 prompts are invalid; correct at least one of them."),
        (
            b'{"prompt": "a"}',
            ("--template", "x=1"),
            2,
            "--template applies only to conversations, and FILE has none; add --chat.",
        ),
        (b'{"prompt": "a"}', ("--plain", "--num-draft-tokens", 2), 2, "leave out --num-draft-tokens"),
        (json.dumps(HELLO).encode(), (), 1, "has no chat template"),
    ],
)
def test_invalid_input_is_refused(batch, content, options, code, reason):
    found, error, _ = batch(content, *options, draft="none")
    assert found == code and reason in error, error


def test_other_files_are_refused(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("a")
    (tmp_path / "prompts.parquet").write_text("a")
    for name, reason in (
        ("txt", "ends in neither .jsonl nor .parquet"),
        ("parquet", "cannot be read as a Parquet file: "),
    ):
        code, _, error = run("batch", tmp_path / f"prompts.{name}", "--output", tmp_path / "output")
        assert code == 1 and reason in error and error.count("\n") == 1


def test_missing_packages_are_named(run, monkeypatch, tmp_path):
    (tmp_path / "prompts.parquet").write_text("a")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}')
    monkeypatch.setattr(arrow_tables, "find_spec", lambda name: None)
    monkeypatch.setattr(jspec.cluster.resources, "find_spec", lambda name: None)
    code, _, error = run("batch", tmp_path / "prompts.parquet", "--output", tmp_path / "output")
    assert code == 1 and "needs pyarrow; run pip install pyarrow." in error
    code, _, error = run("batch", tmp_path / "prompts.jsonl", "--output", tmp_path / "output", "--workers", 2)
    assert code == 2 and "--workers: jspec.cluster needs Ray; install jspec's ray extra" in error


def test_parts_give_all_workers_work():
    """Parts are small enough for all workers, and large enough for all slots."""
    sizes = {case: part_size(*case) for case in ((20_000, 2, 8), (1000, 2, 8), (10, 2, 8), (10**6, 64, 300))}
    assert sizes == {(20_000, 2, 8): 256, (1000, 2, 8): 125, (10, 2, 8): 8, (10**6, 64, 300): 1200}
