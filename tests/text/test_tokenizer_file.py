"""tokenizer.json is followed exactly; the files beside it name special tokens and the chat template."""

import json

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

import convert
from jspec import text
from jspec.bundled import PAIR
from jspec.text import tokenizer_file
from support import text_pair, tokenizer_kinds
from support.tokenizer_file import strings


@pytest.fixture(params=["target", "draft", "plain", "with a start", "with an added token"])
def folder(request, tmp_path):
    if request.param in ("target", "draft"):
        return PAIR / request.param
    tokenizer = text_pair.tokenizer(bos=request.param == "with a start")
    if request.param == "with an added token":
        tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_ids_and_text_match_transformers(folder, report):
    light, whole = text.load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(light, tokenizer_file.TokenizerFile) and not isinstance(whole, tokenizer_file.TokenizerFile)
    texts = list(strings(2000))
    for special in (True, False):
        ids = light(texts, add_special_tokens=special)["input_ids"]
        assert ids == whole(texts, add_special_tokens=special, verbose=False)["input_ids"]
    ids = light(texts)["input_ids"]
    assert [light(one)["input_ids"] for one in texts[:200]] == ids[:200]
    rng = np.random.default_rng(1)
    ids = [*ids, *(rng.integers(0, len(whole), 20).tolist() for _ in range(1000))]  # models emit what nobody writes
    for skip in (True, False):
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        assert [light.decode(row, **options) for row in ids] == [whole.decode(row, **options) for row in ids]
    assert light.get_vocab() == whole.get_vocab() and len(light) == len(whole)
    assert light.eos_token_id == whole.eos_token_id
    report(texts=len(texts), token_rows=len(ids))


def change(folder, name, **fields):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


CLASSES = [
    *("PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"),
    *("GemmaTokenizer", "BertTokenizer", "T5Tokenizer", "CodeLlamaTokenizer", "NoSuchTokenizer", None),
]


def write(folder, tokenizer, config=None):
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def check_obeyed(name, count, folder):
    library, texts = tokenizer_kinds.kind(name), tokenizer_kinds.texts(count)
    for number, class_name in enumerate(CLASSES):
        config = None if class_name is None else {"tokenizer_class": class_name, "legacy": False, "add_bos_token": True}
        ours = text.load_tokenizer(write(folder / str(number), library, config))
        for special in (True, False):
            ids = [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=special)]
            assert ours(texts, add_special_tokens=special)["input_ids"] == ids, class_name
            for skip in (True, False):
                decoded = library.decode_batch(ids, skip_special_tokens=skip)
                assert [ours.decode(row, skip_special_tokens=skip) for row in ids] == decoded
        assert ours.get_vocab() == library.get_vocab() and len(ours) == library.get_vocab_size()


@pytest.mark.parametrize("name", tokenizer_kinds.KINDS)
def test_tokenizer_json_is_followed_for_any_class_name(name, tmp_path):
    check_obeyed(name, 60, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", tokenizer_kinds.KINDS)
def test_tokenizer_json_is_followed_for_many_texts(name, tmp_path):
    check_obeyed(name, 2000, tmp_path)


NAMED = {
    "a text": {"eos_token": "<|stop|>"},
    "an object": {"eos_token": {"__type": "AddedToken", "content": "<|stop|>", "lstrip": True}},
}


@pytest.fixture
def stops():
    """Return a tokenizer with a token in its vocabulary that tokenizer.json does not mark as special."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<|stop|>": 256}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


@pytest.mark.parametrize("fields", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("place", ["tokenizer_config.json", "special_tokens_map.json"])
def test_named_tokens_are_special(tmp_path, stops, fields, place):
    write(tmp_path, stops, {})
    (tmp_path / place).write_text(json.dumps(fields))
    ours = text.load_tokenizer(tmp_path)
    assert ours.eos_token_id == 256 and ours.bos_token_id is None
    assert ours("a<|stop|>")["input_ids"][1:] == [256]
    assert ours.decode([*ours("a")["input_ids"], 256], skip_special_tokens=True) == "a"
    assert ours.special_tokens_map == {"eos_token": "<|stop|>"}


def test_special_tokens_map_precedence_depends_on_format(tmp_path, stops):
    write(tmp_path, stops, {"eos_token": "a"})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|stop|>"}')
    assert text.load_tokenizer(tmp_path).eos_token_id == 256
    change(tmp_path, "tokenizer_config.json", added_tokens_decoder={})
    assert text.load_tokenizer(tmp_path).special_tokens_map == {"eos_token": "a"}


def test_name_of_missing_token_is_ignored(tmp_path, stops):
    ours = text.load_tokenizer(write(tmp_path, stops, {"eos_token": "<|nowhere|>", "pad_token": None}))
    assert ours.eos_token_id is None and len(ours) == 257


def test_config_ids_name_tokens_that_no_other_file_names(tmp_path, stops):
    write(tmp_path, stops, {"bos_token": None})
    (tmp_path / "config.json").write_text('{"bos_token_id": 3, "eos_token_id": 256}')
    ours = text.load_tokenizer(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id) == (None, 256)


def test_unknown_token_is_decoded(tmp_path):
    ours = text.load_tokenizer(write(tmp_path, tokenizer_kinds.kind("wordlevel"), {"unk_token": "<unk>"}))
    library = tokenizer_kinds.kind("wordlevel")
    ids = library.encode("the \u2603").ids
    assert ours.decode(ids, skip_special_tokens=True) == library.decode(ids)


@pytest.mark.parametrize("place", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_from_other_files_are_added(tmp_path, stops, place):
    write(tmp_path, stops, {"eos_token": "<|end|>"})
    if place == "added_tokens.json":
        (tmp_path / place).write_text('{"<tool>": 258, "<|end|>": 257}')
    else:
        flags = {257: {"content": "<|end|>", "special": True}, 258: {"content": "<tool>", "special": False}}
        change(tmp_path, place, added_tokens_decoder=flags)
    ours = text.load_tokenizer(tmp_path)
    ids = ours("a<tool><|end|>")["input_ids"]
    assert ids[1:] == [258, 257] and ours.eos_token_id == 257
    assert ours.decode(ids, skip_special_tokens=True) == "a<tool>"


def test_conflicting_added_token_ids_are_rejected(tmp_path, stops):
    write(tmp_path, stops, {})
    (tmp_path / "added_tokens.json").write_text('{"<|end|>": 300}')
    with pytest.raises(convert.CheckpointError, match=r"'<\|end\|>' has the id 300, but the next free id .* is 257"):
        text.load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_damaged_config_is_named(tmp_path, stops, content):
    write(tmp_path, stops)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(convert.CheckpointError, match=r"tokenizer_config.json is not (JSON|a JSON object)"):
        text.load_tokenizer(tmp_path)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_rendered_chats_match_transformers(tmp_path, place):
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    text_pair.tokenizer(bos=True).save_pretrained(tmp_path)
    if place == "chat_template.jinja":
        (tmp_path / place).write_text(template)
    else:
        change(tmp_path, place, chat_template=template)
    light, whole = text.load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(light, tokenizer_file.TokenizerFile) and light.chat_template == whole.chat_template == template
    chat = [{"role": "user", "content": " the\n "}, {"role": "assistant", "content": "a"}]
    for start in (False, True):
        options = {"add_generation_prompt": start}
        written = [one.apply_chat_template(chat, tokenize=False, **options) for one in (light, whole)]
        assert written[0] == written[1] and written[0].endswith("<assistant>") == start
        ids = [one.apply_chat_template(chat, **options)["input_ids"] for one in (light, whole)]
        assert ids[0] == ids[1]


NAMED_TEMPLATES = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
TEMPLATES = {
    "several": ({"chat_template": NAMED_TEMPLATES}, {}, "D"),
    "one with a name": ({"chat_template": NAMED_TEMPLATES[1:]}, {}, "T"),
    "a file before the config": ({"chat_template": "C"}, {"chat_template.jinja": "F"}, "F"),
    "files": ({}, {"chat_template.jinja": "F", "additional_chat_templates/rag.jinja": "R"}, "F"),
    "none": ({}, {}, None),
}


@pytest.mark.parametrize("config, files, expected", TEMPLATES.values(), ids=TEMPLATES)
def test_default_chat_template_is_selected(tmp_path, stops, config, files, expected):
    write(tmp_path, stops, config | {"tokenizer_class": "TokenizersBackend"})
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert text.load_tokenizer(tmp_path).chat_template == expected


def test_error_lists_templates_without_a_default(tmp_path, stops):
    templates = [{"name": "a", "template": "A"}, {"name": "b", "template": "B"}]
    ours = text.load_tokenizer(write(tmp_path, stops, {"chat_template": templates}))
    with pytest.raises(jinja2.TemplateError, match="has the chat templates a, b, but none is the default"):
        ours.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)


def test_template_variables_match_transformers(tmp_path):
    template = "{{ eos_token }}{{ thinking }}{{ messages[0].content }}"
    text_pair.tokenizer().save_pretrained(tmp_path)
    change(tmp_path, "tokenizer_config.json", chat_template=template)
    chat = [{"role": "user", "content": "x"}]
    ours, theirs = text.load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for variables in ({"thinking": True}, {"thinking": [1], "eos_token": "other"}, {}):
        rendered = ours.apply_chat_template(chat, tokenize=False, **variables)
        assert rendered == theirs.apply_chat_template(chat, tokenize=False, **variables)


def test_missing_tokenizer_json_is_not_read(tmp_path):
    text_pair.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert tokenizer_file.read(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
def test_git_lfs_pointers_are_reported(tmp_path, stops, name):
    write(tmp_path, stops, {})
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 272123144\n")
    with pytest.raises(
        convert.CheckpointError, match=rf"{name} is a git-lfs pointer and not the file itself; run `git lfs pull` in"
    ):
        text.load_tokenizer(tmp_path)


def test_truncation_and_padding_settings_are_ignored(tmp_path):
    tokenizer = text_pair.tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    light = text.load_tokenizer(tmp_path)
    assert list(map(len, light(["abc", "x"])["input_ids"])) == [3, 1] and light.eos_token_id is None
