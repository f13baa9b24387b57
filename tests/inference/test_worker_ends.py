"""However a request ends, its events end at the same token, and the worker serves on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from inference.drafters.nothing import NothingDrafter
from inference.ports import Drafter
from inference.recording import Round
from inference.sampling import SamplingParams
from schemas.events import FinishReason
from tests.inference import fakes
from tests.inference.segments import check_segments, drafters_of
from tests.inference.serving import HiddenStates, Outbox, new_worker, request_of
from tests.inference.tiny import plain_greedy, random_prompts, tiny_llama

GREEDY = SamplingParams(max_tokens=50)


def first_end(output: Sequence[int], place: int) -> int:
    """Return how many tokens stand up to the first that equals the one at ``place``."""
    return list(output).index(output[place]) + 1


@pytest.mark.parametrize("place", range(3, 20))
@pytest.mark.parametrize("by_text", [False, True])
def test_events_end_where_the_output_ends_inside_a_block(place: int, by_text: bool) -> None:
    """A1, A7: nothing behind an end-of-sequence token or a stop string is logged."""
    target, outbox, states = tiny_llama(7), Outbox(), HiddenStates()
    prompt = random_prompts(3, count=1, length=12)[0]
    plain = plain_greedy(target, [prompt], 30)[0]
    expected = plain[: first_end(plain, place)]
    if by_text:
        params = SamplingParams(max_tokens=30, stop=(target.decode([plain[place]]),))
    else:
        params = SamplingParams(max_tokens=30)
        target.eos_token_ids = frozenset({plain[place]})
    drafters: list[Drafter] = [fakes.scripted([*prompt, *plain])]
    worker = new_worker(target, drafters, outbox, states=states, num_speculative_tokens=7)
    completion = worker.serve(request_of(prompt, params))
    assert list(completion.token_ids) == expected
    check_segments(outbox.events)
    assert outbox.events[-1].finish_reason is FinishReason.STOP
    contents = [event.content for event in outbox.events if event.content is not None]
    assert np.concatenate([one.token_ids for one in contents]).tolist() == expected
    assert sum(len(one.target_top_token_ids) for one in contents) == len(expected)
    assert sum(len(rows) for rows in states.uri_to_rows.values()) == len(expected)
    rounds = [event.rounds for event in outbox.events]
    assert sum(int(one.num_emitted_tokens.sum()) for one in rounds) == len(expected)
    assert sum(int(one.num_accepted_tokens.sum()) for one in rounds) < len(expected)


def test_an_aborted_request_says_so_and_stops_working() -> None:
    target, outbox = tiny_llama(1), Outbox()
    worker = new_worker(target, drafters_of(target), outbox)
    rounds: list[Round] = []
    completion = worker.serve(
        request_of([1, 2, 3], SamplingParams(max_tokens=200)),
        is_aborted=lambda: len(rounds) == 9,
        on_round=rounds.append,
    )
    assert completion.finish_reason is FinishReason.ABORTED
    assert completion.rounds == tuple(rounds)
    assert len(rounds) == 9
    assert sum(one.num_emitted_tokens for one in rounds) == len(completion.token_ids)
    check_segments(outbox.events)
    last = outbox.events[-1]
    assert last.finish_reason is FinishReason.ABORTED
    # Nobody knows how the windows that were cut off would have gone on.
    assert (last.windows.num_levels == 4).all()


def test_a_request_whose_target_fails_ends_with_an_error_event_and_the_next_is_served() -> None:
    target, outbox = tiny_llama(1), Outbox()
    worker = new_worker(target, drafters_of(target), outbox)
    rounds: list[Round] = []

    def break_target(one: Round) -> None:
        rounds.append(one)
        if len(rounds) == 5:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        worker.serve(request_of([1, 2, 3], GREEDY), on_round=break_target)
    last = outbox.events[-1]
    assert (last.is_final, last.finish_reason) == (True, FinishReason.ERROR)
    assert sum(len(event.rounds.first_position) for event in outbox.events) == 5
    served = worker.serve(request_of([1, 2, 3], GREEDY, request_id="request-1"))
    assert list(served.token_ids) == plain_greedy(target, [[1, 2, 3]], 50)[0]


def test_an_abort_after_the_end_changes_nothing() -> None:
    target, outbox = tiny_llama(1), Outbox()
    worker = new_worker(target, [NothingDrafter()], outbox)
    completion = worker.serve(
        request_of([1, 2, 3], SamplingParams(max_tokens=1)), is_aborted=lambda: True
    )
    assert completion.finish_reason is FinishReason.LENGTH


def test_a_target_that_gives_nan_ends_the_request_instead_of_emitting_some_token() -> None:
    target, outbox = tiny_llama(1), Outbox()
    worker = new_worker(target, [NothingDrafter()], outbox)
    with torch.no_grad():
        target.model.get_output_embeddings().weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="the target's logits"):
        worker.serve(request_of([1, 2, 3], GREEDY))
    assert outbox.events[-1].finish_reason is FinishReason.ERROR
    assert outbox.events[-1].num_positions == 0
