"""Fields that clients send by default: those without effect are accepted, and the text stays the same."""

import gzip
import json
from types import SimpleNamespace

import httpx
import jax
import numpy as np
import pytest

import jspec
from jspec.serve.conversions import TokenizeBody, tokenize
from jspec.text.chat_template import ids_of
from support import servers, text_pair
from support.servers import HELLO, PROMPT

pytestmark = pytest.mark.usefixtures("quick_compile")
COMMON = [
    {"user": "me"},
    {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"},
    {"prompt_cache_key": "x", "prompt_cache_retention": "24h", "prediction": {"type": "content", "content": "x"}},
    {"stop": "", "suffix": None, "skip_special_tokens": True},
    {"max_tokens": 12.0, "seed": 5.0, "n": 1.0, "top_k": -1.0},
]
CHATS = [
    {
        "reasoning_effort": "low",
        "verbosity": "low",
        "modalities": ["text"],
        "prompt_cache_options": {"mode": "explicit"},
    },
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"tool_choice": "auto", "functions": []},
    {"messages": [{"role": "user", "name": "me", "content": "the thing", "type": "message", "id": "m"}]},
    {"messages": [{"role": "user", "content": "the thing", "parsed": {}}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "the thing", "cache_control": {"type": "x"}}]}
        ]
    },
    {"add_generation_prompt": True, "continue_final_message": False},
    {"logprobs": False, "top_logprobs": 0},
]
ASSISTANTS = [
    {"content": ""},
    {"content": None},
    {},
    {"content": None, "tool_calls": [], "refusal": None, "annotations": [], "audio": None, "function_call": None},
    {"content": "", "reasoning_content": "so", "reasoning": "so", "type": "message", "id": "m", "status": "completed"},
]


def ask(running, path, body):
    body = {"model": servers.NAME, "max_tokens": 12, "seed": 5} | body
    answer = httpx.post(f"{running.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("fields", COMMON)
def test_fields_without_effect_are_ignored_in_completions(running, fields):
    assert ask(running, "completions", {"prompt": PROMPT} | fields) == ask(running, "completions", {"prompt": PROMPT})


@pytest.mark.parametrize("fields", COMMON + CHATS)
def test_fields_without_effect_are_ignored_in_chats(running, fields):
    assert ask(running, "chat/completions", {"messages": HELLO} | fields) == running.chat().choices[0].message.content


def test_completion_logprobs_may_be_false(running):
    assert ask(running, "completions", {"prompt": PROMPT, "logprobs": False}) == running.complete().choices[0].text


@pytest.mark.parametrize("fields", ASSISTANTS)
def test_assistant_message_without_text_is_accepted(running, fields):
    messages = [*HELLO, {"role": "assistant", **fields}, *HELLO]
    expected = ask(running, "completions", {"prompt": "[user]the thing\n[assistant]\n[user]the thing\n[assistant]"})
    assert ask(running, "chat/completions", {"messages": messages}) == expected


def test_developer_message_is_a_system_message(running):
    found = [
        ask(running, "chat/completions", {"messages": [{"role": role, "content": "in a"}, *HELLO]})
        for role in ("system", "developer")
    ]
    assert found[0] == found[1] != running.chat().choices[0].message.content


def test_refusal_is_the_text_of_an_assistant_message(running):
    texts = [{"content": "in a"}, {"refusal": "in a"}, {"content": [{"type": "refusal", "refusal": "in a"}]}]
    found = {
        ask(running, "chat/completions", {"messages": [*HELLO, {"role": "assistant", **text}, *HELLO]})
        for text in texts
    }
    assert len(found) == 1


def test_last_assistant_message_is_answered_or_continued(running):
    messages = [*HELLO, {"role": "assistant", "content": "in a"}]
    new = ask(running, "completions", {"prompt": "[user]the thing\n[assistant]in a\n[assistant]"})
    same = ask(running, "completions", {"prompt": "[user]the thing\n[assistant]in a"})
    bare = ask(running, "completions", {"prompt": "[user]the thing\n[assistant]in a\n"})
    assert ask(running, "chat/completions", {"messages": messages}) == new
    continued = {"messages": messages, "continue_final_message": True}
    assert ask(running, "chat/completions", continued) == same
    assert ask(running, "chat/completions", continued | {"add_generation_prompt": False}) == same
    assert ask(running, "chat/completions", {"messages": messages, "add_generation_prompt": False}) == bare


def test_limit_above_remaining_length_is_reduced(running):
    """A limit that exceeds the remaining length ends the text at the maximum sequence length."""
    options = {"temperature": 0, "logit_bias": {"0": -100}, "extra_body": {"ignore_eos": True}}
    for answer in (running.complete(max_tokens=10**6, **options), running.chat(max_completion_tokens=10**6, **options)):
        assert answer.usage.total_tokens == servers.OPTIONS["max_length"]
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("seed", [2**32 + 5, 2**63 - 1, 2**64 - 1, -5])
def test_seeds_of_64_bits_are_distinct(running, seed):
    """A seed's key consists of the two halves of its 64 bits."""
    words = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), 0)
    ids = running.tokenizer(PROMPT)["input_ids"]
    target = running.engine.device.target
    out = jspec.generate(target, np.array([ids]), np.array([len(ids)]), key[None], max_new_tokens=12, eos_ids=(0,))
    tokens = out.tokens[0, : int(out.lengths[0])].tolist()
    found = running.complete(seed=seed, extra_body={"return_token_ids": True}).choices[0].token_ids
    assert found == tokens != running.complete(extra_body={"return_token_ids": True}).choices[0].token_ids


def test_seed_of_minus_one_is_no_seed(running):
    assert len({running.complete(seed=-1).choices[0].text for _ in range(4)}) > 1


def test_top_p_of_zero_leaves_the_most_likely_token(running):
    assert running.complete(top_p=0).choices[0].text == running.complete(temperature=0).choices[0].text


def test_usage_may_come_with_every_chunk(running):
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    counts = [chunk.usage.completion_tokens for chunk in running.chat(stream=True, stream_options=options)]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 12


def test_first_chunk_has_role_and_text(running):
    chunks = list(running.chat(stream=True, temperature=0))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])


def test_compressed_bodies_are_read(running):
    body = json.dumps({"model": servers.NAME, "prompt": PROMPT, "max_tokens": 12, "seed": 5}).encode()

    def post(content, encoding):
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        return httpx.post(f"{running.url}/v1/completions", content=content, headers=headers)

    assert post(gzip.compress(body), "gzip").json()["choices"][0]["text"] == running.complete().choices[0].text
    assert post(body, "identity").status_code == 200
    for content, encoding, status in (
        (body, "gzip", 400),
        (gzip.compress(body)[:-20], "gzip", 400),
        (gzip.compress(body)[:-8], "gzip", 400),
        (gzip.compress(body) * 2, "gzip", 400),
        (gzip.compress(body) + bytes(10**5), "gzip", 400),
        (gzip.compress(body, 0)[:10] + b"\0\0\0\xff\xff" * 10**6, "gzip", 413),
        (gzip.compress(b" " * 10**8), "gzip", 413),
        (body, "br", 415),
    ):
        answer = post(content, encoding)
        assert answer.status_code == status and answer.json()["error"]["message"].endswith(".")


def test_paths_may_end_with_a_slash(running):
    assert httpx.get(f"{running.url}/v1/models/").json() == httpx.get(f"{running.url}/v1/models").json()
    assert httpx.get(f"{running.url}/v1/models/{servers.NAME}/").json()["id"] == servers.NAME
    body = {"model": servers.NAME, "prompt": PROMPT, "max_tokens": 12, "seed": 5}
    assert httpx.post(f"{running.url}/v1/completions/", json=body).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/version", "/metrics"])
def test_head_is_answered_without_a_body(running, path):
    answer = httpx.head(f"{running.url}{path}")
    assert answer.status_code == 200 and not answer.content


def test_text_is_tokenized_as_for_a_completion(running):
    def post(path, **body):
        answer = httpx.post(f"{running.url}{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    ids = running.tokenizer(PROMPT)["input_ids"]
    found = post("/tokenize", model=servers.NAME, prompt=PROMPT)
    assert found == {"count": len(ids), "max_model_len": servers.OPTIONS["max_length"], "tokens": ids}
    assert post("/tokenize", prompt=PROMPT, return_token_strs=True)["token_strs"]
    assert post("/detokenize", tokens=ids)["prompt"] == PROMPT
    chat = post("/tokenize", messages=HELLO)["tokens"]
    assert chat == running.tokenizer("[user]the thing\n[assistant]", add_special_tokens=False)["input_ids"]
    assert post("/tokenize", prompt="") == {"count": 0, "max_model_len": 128, "tokens": []}


@pytest.mark.parametrize("text", ["a", f"{text_pair.END}a", 2 * text_pair.END, ""])
@pytest.mark.parametrize("adds", [True, False])
def test_text_that_starts_with_bos_gets_no_second_one(text, adds):
    tokenizer = text_pair.tokenizer(bos=True)
    tokenizer.bos_token = text_pair.END
    served = SimpleNamespace(tokenizer=tokenizer, max_length=9, names=SimpleNamespace(longest=9))
    found = tokenize(served, TokenizeBody(prompt=text, add_special_tokens=adds))
    expected = ids_of(tokenizer, [text]) if adds else [tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert [found["tokens"]] == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": HELLO}),
        ("/tokenize", {"prompt": "x" * 10**5}),
        ("/tokenize", {"prompt": ["a"]}),
        ("/tokenize", {"prompt": "x", "continue_final_message": True}),
        ("/tokenize", {"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": False}),
        ("/detokenize", {"tokens": [261]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {}),
    ],
)
def test_invalid_conversions_are_client_errors(running, path, body):
    answer = httpx.post(f"{running.url}{path}", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(".")
