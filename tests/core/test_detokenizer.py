"""Incremental detokenization gives the text of the whole sequence, for every decoder and every end of the prompt."""

import itertools

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import jspec
from jspec.core.detokenizer import Pieces, pieces
from jspec.serve.token_text import Names
from jspec.text.stop_strings import StopAwareDetokenizer
from jspec.text.tokenizer_file import TokenizerFile
from support import tokenizer_kinds
from support.tokenizer_kinds import BYTES, KINDS

pytestmark = pytest.mark.usefixtures("quick_compile")
WITH_BYTES = [name for name in KINDS if tokenizer_kinds.kind(name).token_to_id(BYTES[0]) is not None]
SOME_BYTES = ["80", "85", "E0", "B0", "41", "20", "C3", "F0", "9F"]
TELUGU = "అఆఇ తెలుగు"


def tokenizer_of(name):
    return TokenizerFile(tokenizer_kinds.kind(name), {}, None)


def shared(one, other):
    """Return the length of the longest common prefix, in characters."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


def check_every_split(name, count):
    tokenizer = tokenizer_of(name)
    splits = 0
    for text in tokenizer_kinds.texts(count):
        ids = tokenizer(text)["input_ids"]
        whole = decoded(tokenizer, ids)
        known = [shared(decoded(tokenizer, ids[:end]), whole) for end in range(len(ids) + 1)]
        for start in range(len(ids) + 1):
            # A character left incomplete by the prompt is new. Byte-fallback decoders hide the characters before it.
            new = whole[max(known[max(0, start - 3) : start + 1]) :]
            assert "".join(pieces(tokenizer, ids[:start], ids[start:])) == new, (text, start)
            prompt, rest = Pieces(tokenizer), Pieces(tokenizer, ids[:start], shows_prompt=False)
            shown = [*map(prompt.add, ids[:start]), *map(rest.add, ids[start:]), rest.rest()]
            assert "".join(shown) == whole, (text, start)
            splits += 1
    return splits


@pytest.mark.parametrize("name", KINDS)
def test_split_text_equals_whole_text(name, report):
    report(splits=check_every_split(name, 60))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_split_text_equals_whole_text_for_many_texts(name, report):
    report(splits=check_every_split(name, 2000))


@pytest.mark.parametrize("name", [name for name in KINDS if name not in WITH_BYTES])
def test_random_tokens_give_text_of_whole_sequence(name):
    """Any tokens give the text of the whole sequence, because models also emit bytes that are not characters."""
    tokenizer, rng = tokenizer_of(name), np.random.default_rng(0)
    for _ in range(100):
        ids = rng.integers(0, len(tokenizer), rng.integers(1, 60)).tolist()
        assert "".join(pieces(tokenizer, (), ids)) == decoded(tokenizer, ids), ids


@pytest.mark.parametrize("name", WITH_BYTES)
def test_invalid_byte_run_keeps_its_valid_start(name):
    """The decoder replaces all bytes of a run that contains an invalid one, but shown text is not taken back."""
    tokenizer, rng = tokenizer_of(name), np.random.default_rng(0)
    raw = tokenizer.backend_tokenizer.id_to_token
    letter, *some = (tokenizer.get_vocab()[f"<0x{byte}>"] for byte in ["41", *SOME_BYTES])
    for number in range(100):
        ids = [letter, *rng.choice(some, rng.integers(1, 60)).tolist()]
        if number % 2:
            ids = [i for byte in ids for i in ([byte] if rng.random() < 0.7 else [letter, _word(tokenizer, rng)])]
        assert "".join(pieces(tokenizer, (), ids)) == _expected([raw(i) for i in ids]), [raw(i) for i in ids]


def _word(tokenizer, rng):
    return int(rng.choice([i for token, i in tokenizer.get_vocab().items() if token.isalpha() and i > 2]))


def _expected(tokens):
    """Return the text of byte tokens and words, decoding each run of bytes by itself."""
    text, run = "", b""
    for token in [*tokens, None]:
        if token in BYTES:
            run += bytes([BYTES.index(token)])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError as error:
            text += run[: error.start].decode() + "\ufffd" * (len(run) - error.start)
        text, run = text + (token or "").replace("▁", " "), b""
    return text


@pytest.mark.parametrize("name, token", [("gpt2", "Ģ"), ("llama2", "<0x80>")])
def test_endless_invalid_bytes_are_shown_at_constant_cost(name, token):
    tokenizer, sizes = tokenizer_of(name), []
    detokenizer = Pieces(tokenizer)
    decode, tokenizer.decode = (
        tokenizer.decode,
        lambda ids, **options: (sizes.append(len(ids)), decode(ids, **options))[1],
    )
    shown = [detokenizer.add(tokenizer.get_vocab()[token]) for _ in range(300)]
    assert "".join(shown) in ("\ufffd" * 299, "\ufffd" * 300) and "".join(shown[:10])
    assert max(sizes) <= 10


@pytest.mark.parametrize("name", ["gpt2", "llama2", "mistral", "wordpiece"])
def test_special_tokens_add_no_text_and_no_cost(name):
    tokenizer, sizes = tokenizer_of(name), []
    special = next(i for i, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if token.special)
    ids = tokenizer(f"the {TELUGU}", add_special_tokens=False)["input_ids"]
    detokenizer = Pieces(tokenizer, ids[:1])
    decode, tokenizer.decode = (
        tokenizer.decode,
        lambda ids, **options: (sizes.append(len(ids)), decode(ids, **options))[1],
    )
    between = [i for token in ids[1:] for i in (*[special] * 50, token)]
    text = "".join(map(detokenizer.add, between)) + detokenizer.rest()
    assert text == decode(ids, skip_special_tokens=True)[len(decode(ids[:1], skip_special_tokens=True)) :]
    assert max(sizes) <= 20


def test_run_of_spaces_has_constant_cost():
    """The decoder drops the first space of each window, so a window of one space has no text of its own."""
    tokenizer, sizes = tokenizer_of("llama2"), []
    detokenizer = Pieces(tokenizer, tokenizer("the")["input_ids"])
    decode, tokenizer.decode = (
        tokenizer.decode,
        lambda ids, **options: (sizes.append(len(ids)), decode(ids, **options))[1],
    )
    assert "".join(detokenizer.add(tokenizer.get_vocab()["▁"]) for _ in range(300)) == " " * 300
    assert max(sizes) <= 20


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
@pytest.mark.parametrize("repeats", [1, 50])
def test_special_tokens_after_prompt_keep_partial_character(name, repeats):
    tokenizer = tokenizer_of(name)
    special = next(i for i, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if token.special)
    ids = tokenizer("the 🫠 the", add_special_tokens=False)["input_ids"]
    whole = decoded(tokenizer, ids)
    for end in range(len(ids) + 1):
        prompt = [*ids[:end], *[special] * repeats]
        first, rest = Pieces(tokenizer), Pieces(tokenizer, prompt, shows_prompt=False)
        shown = [*map(first.add, prompt), *map(rest.add, ids[end:]), rest.rest()]
        assert "".join(shown) == whole, end


@pytest.mark.parametrize("name", ["llama2", "mistral", "metaspace, always", "unigram", "wordpiece"])
def test_space_after_special_tokens_is_kept(name):
    tokenizer = tokenizer_of(name)
    special = next(i for i, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if token.special)
    ids = tokenizer("the hi", add_special_tokens=False)["input_ids"]
    (start,) = [end for end in range(len(ids) + 1) if decoded(tokenizer, ids[:end]) in ("the", "the ")][:1]
    prompt = [*ids[:start], *[special] * 100]
    text = decoded(tokenizer, ids[:start]) + "".join(pieces(tokenizer, prompt, ids[start:]))
    assert text == decoded(tokenizer, ids)


@pytest.mark.parametrize("name", WITH_BYTES)
def test_prompt_window_starts_at_character_boundary(name):
    tokenizer = tokenizer_of(name)
    text = "అఆ" * 50
    ids = [tokenizer.get_vocab()[BYTES[byte]] for byte in text.encode()]
    for start in range(100, 112):
        assert "".join(pieces(tokenizer, ids[:start], ids[start:])) == text[start // 3 :]


def repeating(chain, names, folder):
    """Write and load a model that continues the first token of `chain` with the others, and then repeats those."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=len(names),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        for i, (now, then) in enumerate(zip(chain, chain[1:] + chain[1:2], strict=True)):
            model.model.embed_tokens.weight[now, i] = 1
            model.lm_head.weight[then, i] = 5
    model.save_pretrained(folder)
    return jspec.load(folder)


@pytest.fixture(scope="module")
def telugu(tmp_path_factory):
    """Return a model that repeats one three-byte letter, its tokenizer, and its chain of token ids."""
    names = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "▁a"]
    vocab = {token: i for i, token in enumerate(names)}
    inner = Tokenizer(models.BPE(vocab, [("▁", "a")], fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    inner.decoder = decoders.Sequence(parts)
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    chain = [261, *(byte + 3 for byte in "అ".encode())]
    target = repeating(chain, names, tmp_path_factory.mktemp("telugu"))
    return target, TokenizerFile(inner, {"eos_token": "</s>"}, None), chain


GREEDY = jspec.SamplingParams(temperature=0.0)


def test_stop_string_of_byte_tokens_is_found(telugu):
    target, tokenizer, _ = telugu
    options = {"max_new_tokens": 36, "sampling": GREEDY}
    (free,) = jspec.complete(target, None, tokenizer, "a", **options)
    assert free.text == "అ" * 12 == tokenizer.decode(free.tokens) and len(free.tokens) == 36
    (done,) = jspec.complete(target, None, tokenizer, "a", **options, stop="అ" * 6)
    assert (done.text, done.finish_reason) == ("", "stop") and len(done.tokens) == 18
    parts = list(jspec.stream(target, None, tokenizer, "a", **options, stop="అ" * 6))
    assert ("".join(part.text for part in parts), parts[-1].finish_reason) == ("", "stop")
    parts = list(jspec.stream(target, None, tokenizer, "a", **options))
    assert "".join(part.text for part in parts) == "అ" * 12


@pytest.mark.parametrize("known", [1, 2, 4, 5, 25, 26])
def test_character_split_by_prompt_end_is_completed(telugu, known):
    target, tokenizer, chain = telugu
    prompt = [chain[0], *[chain[1 + i % 3] for i in range(known)]]
    options = {"max_new_tokens": 4, "sampling": GREEDY}
    (done,) = jspec.complete(target, None, tokenizer, prompt, **options)
    parts = list(jspec.stream(target, None, tokenizer, prompt, **options))
    expected = "అ" + ("అ" if known % 3 == 2 else "") + "\ufffd" * ((known + 4) % 3)
    assert done.text == "".join(part.text for part in parts) == expected


def test_stop_string_matches_character_started_in_prompt(telugu):
    _, tokenizer, chain = telugu
    writer = StopAwareDetokenizer(tokenizer, chain[:3], stop=("అ",))
    writer.add(chain[3])
    assert writer.stopped == "అ"


@pytest.mark.parametrize("name", [name for name in KINDS if name != "clip"])  # where the previous token adds a space
def test_token_names_join_to_the_text(name):
    tokenizer = tokenizer_of(name)
    names = Names(tokenizer)
    for text in tokenizer_kinds.texts(40):
        ids = tokenizer("a " + text, add_special_tokens=False)["input_ids"]
        if tokenizer.decode(ids).startswith("a") and "\ufffd" not in tokenizer.decode(ids):
            utf8 = b"".join(bytes(names.utf8(token)) for token in ids)
            assert utf8.decode().lstrip(" ").startswith("a") and utf8.decode().endswith(tokenizer.decode(ids)[1:])


def test_space_byte_token_keeps_its_byte():
    tokenizer = tokenizer_of("llama2")
    space = tokenizer.get_vocab()["<0x20>"]
    assert (Names(tokenizer).text(space), Names(tokenizer).utf8(space)) == (" ", [32])
