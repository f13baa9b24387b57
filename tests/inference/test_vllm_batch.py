"""The proposer's steps on an engine of arrays: who is who, what is reported, what is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from inference.vllm_plugin.batch import BatchDrafter
from schemas.events import NO_DRAFTER, FinishReason, VerificationEvent
from tests.inference.vllm_fakes import (
    END,
    FakeEngine,
    Kept,
    connection,
    member,
    noisy,
    repeating,
)

K = 4


def drafter(kept: Kept, *, num_levels: int = K, **options: Any) -> BatchDrafter:
    return BatchDrafter(connection(kept, **options), num_levels=num_levels, max_positions=512)


def written(events: Sequence[VerificationEvent]) -> list[int]:
    return [int(t) for event in events if event.content for t in event.content.token_ids]


def test_a_text_that_repeats_is_drafted_and_accepted() -> None:
    kept = Kept()
    engine = FakeEngine(drafter(kept).step, repeating())
    engine.add("a", list(range(10, 17)) * 2, 60)
    engine.run()
    assert engine.num_accepted > 0.9 * engine.num_drafted
    assert engine.num_steps < 30


def test_nothing_is_drafted_of_a_text_that_never_repeats() -> None:
    kept = Kept()
    engine = FakeEngine(drafter(kept).step, lambda tokens: 10 + len(tokens))
    engine.add("a", [2, 3, 4, 5], 80)
    engine.run()
    assert engine.num_drafted == 0


def test_without_levels_nothing_is_drafted_and_everything_is_reported() -> None:
    kept = Kept()
    engine = FakeEngine(drafter(kept, num_levels=0).step, repeating())
    engine.add("a", list(range(10, 17)), 30)
    engine.add("b", list(range(10, 17)), 10)
    engine.run()
    engine.add("c", [10, 11], 1)
    engine.run()
    assert engine.num_drafted == 0
    assert sum(event.num_positions for event in kept.of_request("a")) == 30


@pytest.mark.parametrize("tells", [True, False], ids=["ids", "tokens alone"])
def test_every_event_holds_the_tokens_of_its_own_request(tells: bool) -> None:
    kept = Kept()
    batch = drafter(kept, consenting_streams=frozenset({"vllm"}), segment_tokens=16)
    engine = FakeEngine(
        batch.step, noisy(3, vocab_size=12, end_share=0.01), num_rows=5, tells=tells, chunk=6
    )
    rng = np.random.default_rng(0)
    requests = [
        engine.add(f"r-{i}", rng.integers(2, 12, int(rng.integers(1, 20))).tolist(), 40)
        for i in range(60)
    ]
    while engine.rows or engine.waiting:
        engine.step()
        if engine.rows and rng.random() < 0.05:
            engine.abort(engine.rows[int(rng.integers(len(engine.rows)))])
        if engine.rows and rng.random() < 0.05:
            engine.preempt(engine.rows[int(rng.integers(len(engine.rows)))])
    batch.close()
    texts: dict[str, list[VerificationEvent]] = {}
    for event in kept.events:
        texts.setdefault(event.request_id, []).append(event)
    outputs = {tuple(r.tokens[: r.num_prompt_tokens]): r.output for r in requests}
    num_whole = 0
    for events in texts.values():
        events.sort(key=lambda event: event.segment_index)
        first = events[0].content
        assert first is not None
        text = written(events)
        prompt = tuple(first.prompt_token_ids.tolist())
        known = [r for r in requests if tuple(r.tokens[: len(prompt)]) == prompt]
        assert known, "a prompt that nobody sent"
        assert any(
            r.tokens[len(prompt) : len(prompt) + len(text)] == text[: len(r.tokens) - len(prompt)]
            for r in known
        )
        num_whole += prompt in outputs and text[: len(outputs[prompt])] == outputs[prompt]
    assert num_whole > 40
    if tells:
        for request in requests:
            events = kept.of_request(request.request_id)
            if events and events[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert written(events) == request.output


def test_an_event_ends_where_the_request_ended() -> None:
    kept = Kept()
    batch = drafter(kept, consenting_streams=frozenset({"vllm"}))
    script = [10, 11, 12, 13, END, 14, 15, 16, 17, 18]

    def next_token(tokens: Sequence[int]) -> int:
        return script[(len(tokens) - 10) % len(script)]

    engine = FakeEngine(batch.step, next_token)
    engine.add("a", script, 50)
    engine.run()
    batch.close_idle()
    (event,) = kept.of_request("a")
    assert event.finish_reason is FinishReason.STOP
    assert written([event]) == [10, 11, 12, 13, END]


def test_a_request_that_reaches_its_most_tokens_has_ended_by_length() -> None:
    kept = Kept()
    batch = drafter(kept, segment_tokens=8)
    engine = FakeEngine(batch.step, repeating())
    engine.add("a", list(range(10, 17)) * 2, 21)
    engine.run()
    batch.close_idle()
    events = kept.of_request("a")
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert sum(event.num_positions for event in events) == 21
    assert [event.is_final for event in events] == [False] * (len(events) - 1) + [True]


def test_windows_say_what_each_drafter_would_have_had_accepted() -> None:
    kept = Kept()
    batch = drafter(kept)
    engine = FakeEngine(batch.step, repeating())
    engine.add("a", list(range(10, 17)) * 3, 40)
    engine.run()
    batch.close()
    (event,) = kept.of_request("a")
    windows = event.windows
    assert windows.start.tolist() == list(range(22, 60))
    assert not windows.realised_acceptance[..., 0].any(
        where=~np.isnan(windows.realised_acceptance[..., 0])
    )
    assert (windows.realised_acceptance[:-4, :, 2] == 1.0).all()


def test_a_grammar_that_decides_beside_the_target_is_not_scored() -> None:
    kept = Kept()
    batch = drafter(kept)
    engine = FakeEngine(batch.step, repeating())
    engine.add("a", list(range(10, 17)) * 3, 40, is_constrained=True)
    engine.run()
    batch.close()
    (event,) = kept.of_request("a")
    assert event.windows.start.size == 0


def test_an_answer_that_was_written_before_is_drafted_from_the_shared_history() -> None:
    kept = Kept()
    batch = drafter(kept)
    answer = np.random.default_rng(1).permutation(np.arange(2, 90)).tolist()

    def next_token(tokens: Sequence[int]) -> int:
        return int(answer[(len(tokens) - 2) % len(answer)])

    engine = FakeEngine(batch.step, next_token)
    engine.add("a", [95, 96], 60)
    engine.run()
    steps = engine.num_steps
    engine.add("b", [97, 98], 60)
    engine.run()
    assert engine.num_steps - steps < 0.5 * steps


def test_streams_do_not_see_each_others_answers() -> None:
    kept = Kept()
    batch = drafter(kept)
    answer = np.random.default_rng(1).permutation(np.arange(2, 90)).tolist()
    engine = FakeEngine(batch.step, lambda tokens: int(answer[(len(tokens) - 2) % len(answer)]))
    engine.add("a", [95, 96], 60, stream="left")
    engine.run()
    engine.add("b", [97, 98], 60, stream="right")
    engine.run()
    assert engine.num_drafted == 0


def test_content_stays_out_of_the_events_of_streams_that_have_not_consented() -> None:
    kept = Kept()
    batch = drafter(kept, consenting_streams=frozenset({"open"}))
    engine = FakeEngine(batch.step, repeating())
    engine.add("a", [10, 11, 12], 20, stream="open")
    engine.add("b", [10, 11, 12], 20, stream="closed")
    engine.run()
    batch.close()
    assert kept.of_request("a")[0].content is not None
    assert kept.of_request("b")[0].content is None


def test_a_draft_leaves_room_for_the_targets_own_token() -> None:
    kept = Kept()
    batch = BatchDrafter(connection(kept), num_levels=K, max_positions=40)
    engine = FakeEngine(batch.step, repeating(), max_positions=40)
    engine.add("a", list(range(10, 17)) * 3, 100)
    engine.run()
    batch.close()
    assert sum(event.num_positions for event in kept.of_request("a")) <= 40 - 21


def test_a_full_disk_costs_events_and_nothing_else() -> None:
    kept = Kept(fails_to_emit=True)
    batch = drafter(kept, segment_tokens=8)
    engine = FakeEngine(batch.step, repeating())
    engine.add("a", list(range(10, 17)) * 2, 60)
    engine.run()
    batch.close()
    assert engine.num_accepted > 30
    assert kept.counts["failures", "emit"] >= 3
    assert kept.events == []


def test_a_drafter_that_the_pool_lacks_is_never_played() -> None:
    kept = Kept()
    batch = BatchDrafter(
        connection(kept, (member("none", "none"),)), num_levels=K, max_positions=512
    )
    engine = FakeEngine(batch.step, repeating())
    engine.add("a", list(range(10, 17)) * 2, 40)
    engine.run()
    batch.close()
    assert engine.num_drafted == 0
    assert (kept.events[-1].rounds.drafter_index == -1).all()


def test_steps_that_were_not_shown_are_caught_up_with() -> None:
    kept = Kept()
    batch = drafter(kept, consenting_streams=frozenset({"vllm"}))
    shown = 0

    def step(*arguments: Any) -> list[list[int]]:
        nonlocal shown
        shown += 1
        # vLLM asks nobody for drafts while a row is close to the end of the context.
        return [[] for _ in arguments[0]] if 5 < shown < 9 else batch.step(*arguments)

    engine = FakeEngine(step, noisy(5, vocab_size=9))
    request = engine.add("a", [3, 4, 5], 30)
    engine.run()
    batch.close()
    assert written(kept.of_request("a")) == request.output


def test_tokens_that_vllm_drafts_by_itself_are_nobodys() -> None:
    kept = Kept()
    batch = drafter(kept, consenting_streams=frozenset({"vllm"}))
    num_steps = 0

    def step(*arguments: Any) -> list[list[int]]:
        nonlocal num_steps
        num_steps += 1
        # Once a row is close to the end of the context, vLLM drafts token 0 for all of them.
        is_shown = num_steps % 4 != 0
        return batch.step(*arguments) if is_shown else [[0] * 4 for _ in arguments[0]]

    engine = FakeEngine(step, lambda tokens: 0 if len(tokens) % 9 < 6 else len(tokens))
    request = engine.add("a", [3, 4, 5], 60)
    engine.run()
    batch.close()
    assert engine.num_accepted > 8
    events = kept.events
    assert [one for event in events for one in written([event])] == request.output
    for rounds in (event.rounds for event in events):
        assert (rounds.num_draft_tokens[rounds.drafter_index == NO_DRAFTER] == 0).all()
    assert ("failures", "emit") not in kept.counts


def test_a_request_that_is_first_seen_in_the_middle_is_reported_from_its_first_token() -> None:
    kept = Kept()
    batch = drafter(kept, consenting_streams=frozenset({"vllm"}))
    num_steps = 0

    def step(*arguments: Any) -> list[list[int]]:
        nonlocal num_steps
        num_steps += 1
        return batch.step(*arguments) if num_steps > 3 else [[] for _ in arguments[0]]

    engine = FakeEngine(step, noisy(5, vocab_size=9))
    request = engine.add("a", [3, 4, 5], 20)
    engine.run()
    batch.close()
    (event,) = kept.of_request("a")
    assert event.num_prompt_tokens == 3
    assert written([event]) == request.output


def test_after_a_failure_a_request_goes_on_under_another_id() -> None:
    kept = Kept()
    batch = drafter(kept, consenting_streams=frozenset({"vllm"}))
    engine = FakeEngine(batch.step, noisy(5, vocab_size=9))
    request = engine.add("a", [3, 4, 5], 30)
    for _ in range(6):
        engine.step()
    batch.forget()
    engine.run()
    batch.close()
    (event,) = kept.events
    assert event.request_id.startswith("a+")
    assert written([event]) == request.output[-event.num_positions :]


def test_thousands_of_requests_leave_nothing_behind() -> None:
    kept = Kept()
    batch = drafter(kept, history_bytes=1 << 16, segment_tokens=16)
    engine = FakeEngine(batch.step, noisy(3, vocab_size=12), num_rows=8, max_positions=64)
    rng = np.random.default_rng(0)
    for number in range(2000):
        prompt = rng.integers(2, 12, int(rng.integers(1, 8))).tolist()
        engine.add(f"r-{number}", prompt, 6, stream=f"s-{number % 40}")
        while len(engine.waiting) > 4:
            engine.step()
            if engine.rows and rng.random() < 0.02:
                engine.abort(engine.rows[0])
    engine.run()
    batch.close_idle()
    batch.close()
    assert len(batch.book) == 0
    assert batch.histories.num_bytes <= 1 << 16
    assert {event.request_id for event in kept.events} == {f"r-{n}" for n in range(2000)}
