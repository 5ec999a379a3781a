"""The server as clients see it: over a real port, with OpenAI's own client."""

import itertools
import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest

from jspec.engine import Result
from jspec.serve.usage import DraftUsage
from support import servers, text_pair
from support.servers import PROMPT
from support.serving import alone, metrics

pytestmark = pytest.mark.usefixtures("quick_compile")
# Changes to the usual request; each is sent to both APIs.
KINDS = {
    "plain": {},
    "greedy": {"temperature": 0},
    "filters": {"temperature": 0.9, "top_p": 0.9, "extra_body": {"top_k": 40, "min_p": 0.02}},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}},
    "bias": {"logit_bias": {"5": 30, "6": 30, "7": 29}, "extra_body": {"ignore_eos": True}},
    "choices": {"n": 3},
    "stop": {"logit_bias": {"5": 30, "6": 30, "7": 30}, "stop": ["XX"]},
    "ids": {"extra_body": {"return_token_ids": True, "return_origins": True}},
}


def joined(chunks):
    """Return the text, end and ids of each choice in a stream's chunks, and the usage."""
    found, usage = {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            one = found.setdefault(choice.index, {"text": "", "ids": [], "pieces": [], "end": None})
            assert one["end"] is None, "something behind the end"
            one["text"] += text or ""
            one["ids"] += getattr(choice, "token_ids", None) or []
            one["pieces"] += (getattr(choice, "jspec", None) or {"pieces": []})["pieces"]
            one["end"] = choice.finish_reason
    return found, usage.model_dump()


def as_joined(answer):
    """Return the same as `joined` for an answer that is not streamed."""
    found = {
        choice.index: {
            "text": choice.message.content if hasattr(choice, "message") else choice.text,
            "ids": getattr(choice, "token_ids", None) or [],
            "pieces": (getattr(choice, "jspec", None) or {"pieces": []})["pieces"],
            "end": choice.finish_reason,
        }
        for choice in answer.choices
    }
    return found, answer.usage.model_dump()


def without_cache(usage):
    """Return the token counts of `usage` that do not depend on earlier requests."""
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("api", ["complete", "chat"])
def test_streamed_answer_equals_whole_answer(api, kind, request):
    ask = request.getfixturevalue(api)
    whole, usage = as_joined(ask(**KINDS[kind]))
    stream, streamed_usage = joined(ask(**KINDS[kind], stream=True, stream_options={"include_usage": True}))
    for one in (*whole.values(), *stream.values()):
        assert not one["pieces"] or "".join(one.pop("pieces")) == one["text"]
    drop = lambda found: {i: {k: v for k, v in one.items() if k != "pieces"} for i, one in found.items()}  # noqa: E731
    assert drop(whole) == drop(stream) and len(whole) == KINDS[kind].get("n", 1)
    assert without_cache(usage) == without_cache(streamed_usage)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert all(one["end"] in ("stop", "length") for one in whole.values())
    if kind == "ids":
        assert len(whole[0]["ids"]) == usage["completion_tokens"]


def test_seeded_texts_equal_generate(running, complete):
    """Every choice of every prompt equals `jspec.generate`'s output, also when it is sent again while others run."""
    prompts = [PROMPT, "the", running.tokenizer("x then")["input_ids"]]
    expected = []
    for i, (prompt, _) in enumerate(itertools.product(prompts, range(2))):
        expected.append(alone(running, prompt, 9, i)[1])

    def ask(n):
        if n % 2:
            return [choice.text for choice in complete(prompt=prompts[:2], seed=9, n=2).choices]
        return [choice.text for choice in complete(prompt=prompts[0], seed=9, n=2, temperature=1.0).choices]

    with ThreadPoolExecutor(2) as pool:
        texts = [*pool.map(ask, range(8))]
    assert texts == [expected[:2], expected[:4]] * 4
    ids = [running.tokenizer(prompt)["input_ids"] for prompt in prompts[:2]] + [prompts[2]]
    assert [choice.text for choice in complete(prompt=ids, seed=9, n=2).choices] == expected


def test_single_list_of_ids_is_one_prompt(running, complete):
    ids = running.tokenizer(PROMPT)["input_ids"]
    assert complete(prompt=ids).choices[0].text == complete().choices[0].text == alone(running, PROMPT, 5, 0)[1]


def test_chat_answer_equals_completion_of_rendered_template(chat, complete):
    answer = chat()
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    text = "[user]the thing\n[assistant]"
    assert answer.choices[0].message.content == complete(prompt=text).choices[0].text
    parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "thing"}]}]
    assert chat(messages=parts).choices[0].message.content == answer.choices[0].message.content
    first = next(iter(chat(stream=True)))
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content


def test_texts_without_seed_differ(complete):
    assert len({complete(seed=None).choices[0].text for _ in range(4)}) > 1


def test_answer_without_limit_fills_context(chat):
    answer = chat(max_completion_tokens=None, extra_body={"ignore_eos": True}, logit_bias={"0": -100})
    assert answer.usage.total_tokens == servers.OPTIONS["max_length"] and answer.choices[0].finish_reason == "length"


def test_echo_prepends_prompt(complete):
    plain, echo = complete(n=2), complete(n=2, echo=True)
    assert [choice.text for choice in echo.choices] == [PROMPT + choice.text for choice in plain.choices]
    (stream, _) = joined(complete(n=2, echo=True, stream=True, stream_options={"include_usage": True}))
    assert [stream[i]["text"] for i in range(2)] == [choice.text for choice in echo.choices]


def test_character_split_by_prompt_end_is_completed(running, complete):
    """The token that completes the character yields its text, and an echo contains the whole character."""
    ids = running.tokenizer("a🙂")["input_ids"]
    options = {"prompt": [ids[:-1]], "max_tokens": 1, "temperature": 0, "logit_bias": {str(ids[-1]): 100}}
    assert complete(**options).choices[0].text == "🙂"
    for more in ({}, {"logprobs": 1}):
        assert complete(**options, **more, echo=True).choices[0].text == "a🙂"
    (streamed, _) = joined(complete(**options, echo=True, stream=True, stream_options={"include_usage": True}))
    assert streamed[0]["text"] == "a🙂"
    only = complete(prompt=[ids[:-1]], max_tokens=0, echo=True).choices[0]
    assert only.text == "a\ufffd"


def test_stop_strings_end_answers(running, complete):
    biased = {
        "logit_bias": {str(i): 25 for i in running.tokenizer("abc")["input_ids"]},
        "temperature": 2,
        "max_tokens": 60,
    }
    text = complete(**biased).choices[0].text
    assert set(text) == set("abc") and len(text) == 60
    for stop in (text[7:9], [text[20:24], "nowhere"], [text[30:36]]):
        string = stop if isinstance(stop, str) else stop[0]
        place = text.index(string)
        answer = complete(**biased, stop=stop)
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[:place], "stop", string)
        assert answer.usage.completion_tokens == place + len(string)
        kept = complete(**biased, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
        assert kept.text == text[: place + len(string)]


def test_min_tokens_prevents_early_eos(running, complete):
    biased = {"logit_bias": {"0": 100}, "temperature": 0}
    assert complete(**biased).usage.completion_tokens == 1
    assert complete(**biased, extra_body={"min_tokens": 5}).usage.completion_tokens == 6


def test_stop_token_ids_and_eos_end_answers(running, complete):
    (letter,) = running.tokenizer("a")["input_ids"]
    biased = {"logit_bias": {str(letter): 100}, "temperature": 0}
    assert complete(**biased).choices[0].text == "a" * 12
    ended = complete(**biased, extra_body={"stop_token_ids": [letter]})
    assert (ended.choices[0].text, ended.usage.completion_tokens) == ("", 1)
    assert (ended.choices[0].finish_reason, ended.choices[0].stop_reason) == ("stop", letter)
    shown = complete(**biased, extra_body={"stop_token_ids": [letter], "include_stop_str_in_output": True})
    assert shown.choices[0].text == "a"
    model_s_own = {"logit_bias": {"0": 100}, "temperature": 0}
    own = complete(**model_s_own)
    assert (own.choices[0].text, own.choices[0].finish_reason, own.choices[0].stop_reason) == ("", "stop", None)
    ignored = complete(**model_s_own, extra_body={"ignore_eos": True})
    assert (ignored.usage.completion_tokens, ignored.choices[0].finish_reason) == (12, "length")
    special = complete(**model_s_own, stop=[text_pair.END], extra_body={"ignore_eos": True})
    assert (special.usage.completion_tokens, special.choices[0].stop_reason) == (1, text_pair.END)


def test_cached_prefix_is_reused_within_salt(complete):
    prompt = "a prompt that nobody else has"
    salted = {"prompt": prompt, "extra_body": {"cache_salt": "mine"}}
    cold, warm, other = complete(**salted), complete(**salted), complete(prompt=prompt)
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (cold, warm, other)]
    assert cached[0] == cached[2] == 0 and cached[1] > 10
    assert cold.choices[0].text == warm.choices[0].text == other.choices[0].text


def test_usage_reports_speculation_statistics(complete):
    figures = complete(temperature=0, max_tokens=40).usage.jspec
    assert 0 < figures["accepted"] <= figures["judged"] <= figures["drafted"]
    assert figures["acceptance_rate"] == figures["accepted"] / figures["judged"]
    histogram = figures["acceptance_histogram"]
    assert len(histogram) == 4 and sum(i * count for i, count in enumerate(histogram)) == figures["accepted"]
    assert figures["mean_acceptance_length"] == 1 + figures["accepted"] / sum(histogram)
    assert sum(histogram) <= figures["rounds"] <= 40


def test_rounds_after_end_are_not_counted():
    result = Result(accepted=[0, 2, 3, 1], judged=[0, 3, 3, 2], drafted=[0, 3, 3, 3])
    found = [DraftUsage.of(result, delivered) for delivered in range(11)]
    assert [one.rounds for one in found] == [0, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    assert (found[4].drafted, found[4].judged, found[4].accepted) == (3, 3, 2)
    assert found[9].as_json(3)["acceptance_histogram"] == [0, 1, 1, 1]
    assert found[1].as_json(3)["acceptance_rate"] is None and found[1].drafts == 0


def test_metrics_equal_sums_over_answers(running, complete, chat):
    """Metrics equal the sums over the answers exactly, for requests of many kinds."""
    before, answers = metrics(running), []
    for kind, api in itertools.product(KINDS.values(), (complete, chat)):
        answers.append(as_joined(api(**kind)))
        answers.append(joined(api(**kind, stream=True, stream_options={"include_usage": True})))
    answers.append(as_joined(complete(prompt=[PROMPT, "the"], n=2)))
    after = metrics(running)
    after.subtract(before)
    usages = [usage for _, usage in answers]
    ends = Counter(one["end"] for found, _ in answers for one in found.values())
    assert after["jspec_prompt_tokens_total",] == sum(usage["prompt_tokens"] for usage in usages)
    assert after["jspec_generation_tokens_total",] == sum(usage["completion_tokens"] for usage in usages)
    assert after["jspec_request_generation_tokens_sum",] == after["jspec_generation_tokens_total",]
    assert {end: after["jspec_request_success_total", end] for end in ends} == ends
    assert after["jspec_request_generation_tokens_count",] == ends.total()
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert (after["jspec_prefix_cache_hits_total",], after["jspec_prefix_cache_queries_total",]) == (
        cached,
        after["jspec_prompt_tokens_total",],
    )
    figures = [usage["jspec"] for usage in usages]
    assert after["jspec_spec_decode_num_accepted_tokens_total",] == sum(one["accepted"] for one in figures)
    assert after["jspec_spec_decode_num_draft_tokens_total",] == sum(one["drafted"] for one in figures)
    histogram = np.sum([one["acceptance_histogram"] for one in figures], axis=0)
    assert after["jspec_spec_decode_num_drafts_total",] == histogram.sum()
    by_place = [after["jspec_spec_decode_num_accepted_tokens_per_pos_total", str(place)] for place in range(3)]
    assert by_place == [histogram[place + 1 :].sum() for place in range(3)]
    assert after["jspec_time_to_first_token_seconds_count",] == ends.total()
    assert metrics(running)["jspec_num_requests_running",] == metrics(running)["jspec_num_requests_waiting",] == 0


def test_other_routes_respond(running):
    client = running.usual
    assert [model.id for model in client.models.list()] == [servers.NAME]
    assert client.models.retrieve(servers.NAME).max_model_len == servers.OPTIONS["max_length"]
    with pytest.raises(openai.NotFoundError, match="There is no model 'other' here"):
        client.models.retrieve("other")
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{running.url}/version").json() == {"version": "1.2"}
    page = httpx.get(running.url)
    assert page.headers["content-type"].startswith("text/html") and "return_origins" in page.text
    assert "http://" not in page.text and "https://" not in page.text, "the page fetches something"


def test_stream_has_openai_framing(running):
    body = {"model": servers.NAME, "prompt": PROMPT, "max_tokens": 4, "stream": True}
    answer = httpx.post(f"{running.url}/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        assert json.loads(event.removeprefix("data: "))["object"] == "text_completion"


def test_response_format_beyond_parser_limits_is_a_client_error(running):
    """A format that reaches the parser's limits when decoding starts is a client error."""
    alternatives = [{"type": "array", "items": [{"const": i}], "minItems": 2} for i in range(3000)]
    body = {"model": servers.NAME, "prompt": "a", "max_tokens": 9, "seed": 1}
    body["response_format"] = {"type": "json_schema", "json_schema": {"schema": {"anyOf": alternatives}}}
    whole = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
    assert whole.status_code == 400 and whole.json()["error"]["param"] == "response_format", whole.text
    stream = httpx.post(f"{running.url}/v1/completions", json=body | {"stream": True})
    assert stream.status_code == 200 and '"response_format"' in stream.text and stream.text.strip().endswith("[DONE]")
    assert running.complete().choices[0].finish_reason == "length"


def test_origins_are_returned_on_request(complete):
    choice = complete(temperature=0, max_tokens=40, extra_body={"return_origins": True}).choices[0]
    assert "".join(choice.jspec["pieces"]) == choice.text
    assert set(choice.jspec["origins"]) <= {"accepted", "corrected", "bonus", "no draft"}
    assert "accepted" in choice.jspec["origins"] and len(choice.jspec["origins"]) == len(choice.jspec["pieces"])


def test_response_formats_are_enforced(complete, chat):
    """Answers are valid in every choice, streamed or not; the format "text" changes no output."""
    properties = {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "th"]}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    for each in (
        chat(n=3, max_completion_tokens=60, response_format=asked),
        complete(n=3, max_tokens=60, extra_body={"response_format": asked}),
    ):
        for choice in each.choices:
            found = json.loads(choice.message.content if hasattr(choice, "message") else choice.text)
            assert choice.finish_reason == "stop" and set(found) == {"a", "b"} and 0 <= found["a"] <= 99
    whole = chat(max_completion_tokens=60, response_format=asked).choices[0].message.content
    stream = chat(max_completion_tokens=60, response_format=asked, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == whole
    regex = {"response_format": {"type": "regex", "regex": "(the|in) [a-c]{2}"}}
    assert re.fullmatch("(the|in) [a-c]{2}", complete(extra_body=regex).choices[0].text)
    anything = {"response_format": {"type": "text"}}
    assert complete(extra_body=anything).choices[0].text == complete().choices[0].text
