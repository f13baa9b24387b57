"""The official client's conversation with the server, and what it is told when it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest
import torch

from inference.server.options import KeyRing, ServerOptions
from inference.target import Target
from schemas.events import FinishReason
from tests.inference.http import MODEL, Running, serving
from tests.inference.tiny import FIRST_BYTE, plain_greedy, tiny_llama

PROMPT = "abcabcab"
GREEDY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(tiny_llama(1)) as run:
        yield run


def streamed(run: Running, **asked: Any) -> tuple[str, list[Any]]:
    """Return the joined text of a stream, and its chunks."""
    chunks = list(run.client().completions.create(**asked, stream=True))
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks


def plain(target: Target, prompt: str, num_tokens: int) -> str:
    token_ids = target.tokenizer(prompt)["input_ids"]
    return target.decode(plain_greedy(target, [token_ids], num_tokens)[0])


def test_a_completion_is_the_targets_own_text_and_its_usage_counts_tokens(running: Running) -> None:
    answer = running.client().completions.create(**GREEDY, max_tokens=24)
    assert answer.choices[0].text == plain(running.target, PROMPT, 24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 8
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == 32


@pytest.mark.parametrize("stop", [None, "m", ["qqs", "zz"], "iFy"])
def test_a_stream_says_what_the_whole_answer_says(running: Running, stop: Any) -> None:
    asked = {**GREEDY, "max_tokens": 24, "stop": stop}
    whole = running.client().completions.create(**asked)
    text, chunks = streamed(running, **asked, stream_options={"include_usage": True})
    assert text == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    for one in [stop] if isinstance(stop, str) else stop or ():
        assert one not in text


def test_a_conversation_goes_through_both_ways(running: Running) -> None:
    client = running.client()
    messages: list[Any] = [
        {"role": "system", "content": "abc"},
        {"role": "user", "content": [{"type": "text", "text": "def"}]},
    ]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=12
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=12, stream=True
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]


def test_a_conversation_of_the_official_client_counts_its_tokens_in_both_modes(
    running: Running,
) -> None:
    client = running.client()
    messages: list[Any] = [{"role": "user", "content": "abcabc"}]
    for stop in (None, "q", ["zz", "m"]):
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0}
        asked |= {"max_tokens": 16, "stop": stop}
        whole = client.chat.completions.create(**asked)
        chunks = list(
            client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        )
        texts = [one.choices[0].delta.content or "" for one in chunks if one.choices]
        assert "".join(texts) == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert whole.usage is not None
        assert whole.usage.completion_tokens <= 16
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        messages = [
            *messages,
            {"role": "assistant", "content": whole.choices[0].message.content},
            {"role": "user", "content": "abc"},
        ]


def test_closing_a_stream_of_the_official_client_ends_its_work() -> None:
    with serving(tiny_llama(1, context_length=8192)) as run:
        asked = {**GREEDY, "max_tokens": 4000, "stream": True}
        with run.client().completions.create(**asked) as stream:
            next(iter(stream))
        run.wait_until_idle()
        assert run.outbox.events[-1].finish_reason is FinishReason.ABORTED
        # And the slot is free again.
        assert run.client().completions.create(**GREEDY, max_tokens=2).usage is not None


def test_no_stream_shows_half_a_character(running: Running) -> None:
    """H3: the output ends after the first byte of a character, in every mode."""
    target = running.target
    favoured = target.model.lm_head.weight.detach().clone()
    with torch.no_grad():
        target.model.lm_head.weight[FIRST_BYTE] *= 3.0
    try:
        token_ids = target.tokenizer(PROMPT)["input_ids"]
        emitted = plain_greedy(target, [token_ids], 29)[0]
        assert FIRST_BYTE in emitted, "the case does not occur any more"
        for num_tokens in range(1, 30):
            asked = {**GREEDY, "max_tokens": num_tokens}
            text, chunks = streamed(running, **asked)
            assert text == target.decode(emitted[:num_tokens]).rstrip("\ufffd")
            assert not any(chunk.choices[0].text.endswith("\ufffd") for chunk in chunks)
            assert running.client().completions.create(**asked).choices[0].text == text
    finally:
        with torch.no_grad():
            target.model.lm_head.weight.copy_(favoured)


def test_logprobs_are_the_targets_own_with_and_without_a_stream(running: Running) -> None:
    """A8: equal to a plain forward of the target, whatever was drafted."""
    asked = {**GREEDY, "max_tokens": 16, "logprobs": 3}
    whole = running.client().completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.token_logprobs is not None
    prompt = running.target.tokenizer(PROMPT)["input_ids"]
    emitted = plain_greedy(running.target, [prompt], 16)[0]
    with torch.inference_mode():
        logits = running.target.model(torch.tensor([[*prompt, *emitted]])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    chosen = expected.gather(1, torch.tensor(emitted)[:, None])[:, 0].tolist()
    assert whole.token_logprobs == pytest.approx(chosen, abs=1e-4)
    assert whole.top_logprobs is not None
    for row, top in zip(expected, whole.top_logprobs, strict=True):
        assert sorted(top.values()) == pytest.approx(sorted(row.topk(3).values.tolist()), abs=1e-4)
    _, chunks = streamed(running, **asked)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [value for part in parts for value in part.token_logprobs] == pytest.approx(
        whole.token_logprobs, abs=1e-5
    )


def test_a_stop_string_ends_text_tokens_probabilities_and_event_together(running: Running) -> None:
    """A7."""
    running.wait_until_idle()  # the last event of the request before may still be on its way
    running.outbox.events.clear()
    asked = {**GREEDY, "max_tokens": 40, "stop": "yq", "logprobs": 0}
    answer = running.client().completions.create(**asked)
    running.wait_until_idle()
    events = running.outbox.events
    assert answer.usage is not None
    assert answer.choices[0].logprobs is not None
    num_tokens = sum(event.num_positions for event in events)
    assert answer.usage.completion_tokens == num_tokens
    assert len(answer.choices[0].logprobs.token_logprobs or ()) == num_tokens
    assert events[-1].finish_reason is FinishReason.STOP
    assert answer.choices[0].finish_reason == "stop"
    assert plain(running.target, PROMPT, num_tokens) == answer.choices[0].text + "yq"


def test_a_seed_repeats_alone_and_in_company(running: Running) -> None:
    """A11."""
    asked = {**GREEDY, "max_tokens": 20, "temperature": 0.9, "seed": 7}
    alone = running.client().completions.create(**asked).choices[0].text
    company = [
        running.client().completions.create(**{**asked, "seed": None}, stream=True)
        for _ in range(3)
    ]
    together = running.client().completions.create(**asked).choices[0].text
    texts = {"".join(chunk.choices[0].text for chunk in stream) for stream in company}
    assert together == alone
    assert len(texts) == 3


def test_the_acceptance_record_keeps_its_sums(running: Running) -> None:
    asked = {**GREEDY, "max_tokens": 30, "stream": False}
    whole = running.client().completions.create(
        **asked, extra_body={"speculative_decoding_metrics": "detailed"}
    )
    record = whole.model_dump()["metrics"]["speculative_decoding"]
    histogram = {int(key): count for key, count in record["acceptance_histogram"].items()}
    assert sum(histogram.values()) == record["num_spec_steps"]
    accepted = sum(key * count for key, count in histogram.items())
    assert accepted == record["num_accepted_draft_tokens"] == sum(record["per_step_accepted"])
    assert sum(record["per_step_drafted"]) == record["num_draft_tokens"]
    assert accepted <= record["num_draft_tokens"]
    assert record["completion_tokens"] == 30
    assert "metrics" not in running.client().completions.create(**asked).model_dump()


def test_a_request_of_one_token_has_no_rate(running: Running) -> None:
    """A19."""
    status, body = running.post(
        "/v1/completions", {**GREEDY, "max_tokens": 1, "speculative_decoding_metrics": "summary"}
    )
    assert status == 200
    record = body["metrics"]["speculative_decoding"]
    assert record["mean_acceptance_length"] is None
    assert record["draft_acceptance_rate"] is None
    assert record["num_spec_steps"] == 0


def test_streams_and_consent_come_from_name_header_and_settings() -> None:
    options = ServerOptions(model_name=MODEL, consenting_streams=frozenset({"open"}))
    with serving(tiny_llama(1), options=options) as run:
        asked = {**GREEDY, "max_tokens": 2}
        run.post("/v1/completions", asked)
        run.post("/v1/completions", {**asked, "model": f"{MODEL}:open"})
        run.post("/v1/completions", asked, x_draftloop_stream="open", x_draftloop_consent="no")
        run.post("/v1/completions", asked, x_draftloop_consent="yes")
        run.wait_until_idle()
        found = [(event.stream, event.content is not None) for event in run.outbox.events]
    assert found == [("default", False), ("open", True), ("open", False), ("default", True)]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -186}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"prompt": "a" * 256}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 99]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"frequency_penalty": 2}, "frequency_penalty"),
        ({"presence_penalty": -2}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokns": 5}, "max_tokns"),
        ({"model": "tiny:../x"}, "model"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_invalid_fields_are_named(running: Running, change: dict[str, Any], param: str) -> None:
    status, body = running.post("/v1/completions", {**GREEDY, **change})
    assert status == 400
    assert body["error"]["param"] == param
    assert body["error"]["type"] == "invalid_request_error"
    assert param in body["error"]["message"]


def test_invalid_prompts_are_refused_with_both_numbers(running: Running) -> None:
    """H6."""
    with pytest.raises(openai.BadRequestError, match=r"256 tokens.*context is 256"):
        running.client().completions.create(model=MODEL, prompt="a" * 256)


@pytest.mark.parametrize("field", ["max_tokens", "stop", "temperature", "seed", "n", "logit_bias"])
def test_null_means_the_default(running: Running, field: str) -> None:
    status, _ = running.post("/v1/completions", {**GREEDY, "max_tokens": 2, field: None})
    assert status == 200


@pytest.mark.parametrize(
    "model", ["", "../x", "/etc/passwd", "%2e%2e%2f", "a" * 300, "x\0", "TINY"]
)
def test_invalid_models_are_not_found_and_nothing_is_loaded(running: Running, model: str) -> None:
    """H9, I7."""
    status, body = running.post("/v1/completions", {**GREEDY, "model": model})
    assert (status, body["error"]["param"]) == (404, "model")
    assert model == "" or model not in body["error"]["message"]


def test_models_are_listed(running: Running) -> None:
    client = running.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


def test_invalid_conversations_are_refused(running: Running) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    for change, param in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ):
        status, body = running.post("/v1/chat/completions", {**asked, **change})
        assert (status, body["error"]["param"]) == (400, param)


def test_invalid_bodies_and_routes_are_refused_with_the_cure(running: Running) -> None:
    status, body = running.send("POST", "/v1/completions", b"{" * 100_000)
    assert (status, body["error"]["code"]) == (400, "invalid_json")
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        status, body = running.send("POST", "/v1/completions", b"a=1", [("content-type", kind)])
        assert (status, body["error"]["code"]) == (400, "invalid_json")
        assert "content-type: application/json" in body["error"]["message"]
    status, body = running.send("POST", "/v1/nothing")
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    assert "/openapi.json" in body["error"]["message"]
    head = [("content-type", "application/json")]
    status, body = running.send("POST", "/v1/completions", b" " * (50 * 2**20), head)
    assert (status, body["error"]["code"]) == (413, "body_too_long")
    with closing(running.connect()) as connection:  # and one that does not say how long it is
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
            b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(50):
            connection.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_invalid_keys_are_refused_and_valid_ones_served() -> None:
    options = ServerOptions(model_name=MODEL, api_keys=KeyRing(["k" * 20, "l" * 20]))
    with serving(tiny_llama(1), options=options) as run:
        with pytest.raises(openai.AuthenticationError):
            run.client("k" * 19).completions.create(**GREEDY, max_tokens=1)
        for key in ("k" * 20, "l" * 20):
            run.client(key).completions.create(**GREEDY, max_tokens=1)
        status, body = run.send("GET", "/v1/models")
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert run.send("GET", "/healthz")[0] == 200
