"""Rounds and windows of one request become events, column by column."""

from __future__ import annotations

import numpy as np
import torch

from inference.recording import RequestFacts, Round, SegmentRecorder
from inference.sampling import SamplingParams
from inference.scoring import ScoredBatch
from inference.trajectory import Trajectory
from schemas.events import NO_DRAFTER, DrafterVersion, FinishReason
from tests.inference.tiny import start_trajectory, tiny_llama

DRAFTERS = [
    DrafterVersion(drafter_id="a", weights_version=0),
    DrafterVersion(drafter_id="b", weights_version=3),
]


def recorder_of(trajectory: Trajectory, *, has_content: bool) -> SegmentRecorder:
    """Return a recorder with K = 2 and C = 3."""
    facts = RequestFacts(
        worker_id="worker-0",
        worker_epoch=4,
        stream="stream-a",
        request_id="request-0",
        target_id="tiny",
        target_fingerprint="f",
        tokenizer_hash="t",
        policy_name="hedge",
        policy_version=9,
        prior_probabilities=np.array([0.25, 0.75]),
        policy_table=np.array([0.5, 0.5, 0.25, 0.75]),
        policy_numbers=np.array([0.995]),
        sampling=SamplingParams().rule(draws_drafts=False),
        num_speculative_tokens=2,
        has_content=has_content,
        num_kept_tokens=3,
    )
    return SegmentRecorder(facts, trajectory)


def round_of(first_position: int, drafter_index: int, drafted: int, accepted: int) -> Round:
    """Return a round with times that tell which is which."""
    return Round(
        first_position=first_position,
        drafter_index=drafter_index,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_emitted_tokens=accepted + 1,
        num_scored_windows=0,
        selection_probability=0.5,
        draft_seconds=1.0,
        verify_seconds=2.0,
        score_seconds=3.0,
    )


def windows(start: int, value: float) -> ScoredBatch:
    """Return one scored window."""
    scores = np.full((1, 2, 2), value, np.float16)
    return ScoredBatch(
        starts=np.array([start], np.int32),
        num_levels=np.array([2], np.int16),
        acceptance_probability=scores,
        realised_acceptance=scores,
    )


def extend(trajectory: Trajectory, *token_ids: int) -> torch.Tensor:
    """Verify tokens; return logits for them."""
    hidden = torch.full((len(token_ids), 16), float(token_ids[0]))
    trajectory.extend(token_ids, hidden, None)
    return torch.randn((len(token_ids), 40), generator=torch.Generator().manual_seed(token_ids[0]))


def test_segments_take_what_came_since_the_last_cut() -> None:
    trajectory = start_trajectory(tiny_llama(), [1, 2, 3])
    recorder = recorder_of(trajectory, has_content=True)
    logits = [extend(trajectory, 4)]
    recorder.add_round(round_of(3, NO_DRAFTER, 0, 0), logits[0], None)
    logits.append(extend(trajectory, 5, 6, 7))
    recorder.add_round(round_of(4, 1, 2, 2), logits[1], windows(4, 1.0))
    assert recorder.num_positions == 4
    first, hidden = recorder.cut(DRAFTERS, FinishReason.UNFINISHED, sequence=11)
    assert recorder.num_positions == 0
    logits.append(extend(trajectory, 8))
    recorder.add_round(round_of(7, 0, 1, 0), logits[2], None)
    second, _ = recorder.cut(DRAFTERS, FinishReason.LENGTH, sequence=12)

    assert (first.segment_index, first.sequence, first.is_final) == (0, 11, False)
    assert (second.segment_index, second.sequence, second.is_final) == (1, 12, True)
    assert (first.first_position, first.num_positions) == (3, 4)
    assert (second.first_position, second.num_positions) == (7, 1)
    assert first.rounds.drafter_index.tolist() == [NO_DRAFTER, 1]
    assert first.rounds.num_emitted_tokens.tolist() == [1, 3]
    assert first.rounds.draft_seconds.tolist() == [1.0, 1.0]
    assert first.rounds.verify_seconds.tolist() == [2.0, 2.0]
    assert first.rounds.score_seconds.tolist() == [3.0, 3.0]
    assert first.windows.start.tolist() == [4]
    assert second.windows.acceptance_probability.shape == (0, 2, 2)
    assert first.prior_probabilities.tolist() == [0.25, 0.75]
    assert first.event_id != second.event_id
    assert hidden is not None
    assert hidden[:, 0].tolist() == [4.0, 5.0, 5.0, 5.0]


def test_content_is_the_targets_most_probable_tokens_and_the_rest_of_the_mass() -> None:
    trajectory = start_trajectory(tiny_llama(), [1, 2, 3])
    recorder = recorder_of(trajectory, has_content=True)
    logits = extend(trajectory, 4)
    recorder.add_round(round_of(3, NO_DRAFTER, 0, 0), logits, None)
    event, _ = recorder.cut(DRAFTERS, FinishReason.STOP, sequence=0)
    probs = logits.softmax(-1)
    top = probs.topk(3)
    content = event.content
    assert content is not None
    assert content.prompt_token_ids.tolist() == [1, 2, 3]
    assert content.token_ids.tolist() == [4]
    assert content.target_top_token_ids.tolist() == top.indices.tolist()
    np.testing.assert_allclose(
        content.target_top_log_probabilities, top.values.log().numpy(), atol=2e-3
    )
    np.testing.assert_allclose(content.target_tail_mass, [1.0 - float(top.values.sum())], atol=1e-3)


def test_how_long_each_drafter_was_awake_is_counted_per_segment() -> None:
    trajectory = start_trajectory(tiny_llama(), [1])
    recorder = recorder_of(trajectory, has_content=False)
    counts = []
    for awake in ([[True, True], [True, True], [False, True]], [[True, False]], []):
        for position, one in enumerate(awake, start=len(trajectory)):
            recorder.note_awake(np.array(one))
            logits = extend(trajectory, 4)
            recorder.add_round(round_of(position, NO_DRAFTER, 0, 0), logits, None)
        event, _ = recorder.cut(DRAFTERS, FinishReason.UNFINISHED, sequence=0)
        counts.append(event.num_awake_rounds.tolist())
    assert counts == [[2, 3], [1, 0], [0, 0]]


def test_a_round_that_the_target_did_not_survive_is_none_of_those_awake() -> None:
    trajectory = start_trajectory(tiny_llama(), [1])
    recorder = recorder_of(trajectory, has_content=False)
    recorder.note_awake(np.array([True, True]))
    event, _ = recorder.cut(DRAFTERS, FinishReason.ERROR, sequence=0)
    assert event.num_awake_rounds.tolist() == [0, 0]


def test_the_state_that_a_request_started_from_is_in_its_first_segment_alone() -> None:
    trajectory = start_trajectory(tiny_llama(), [1])
    recorder = recorder_of(trajectory, has_content=False)
    events = []
    for position in (1, 2):
        recorder.add_round(round_of(position, NO_DRAFTER, 0, 0), extend(trajectory, 4), None)
        events.append(recorder.cut(DRAFTERS, FinishReason.UNFINISHED, sequence=0)[0])
    assert events[0].policy_table.tolist() == [0.5, 0.5, 0.25, 0.75]
    assert events[0].policy_numbers.tolist() == [0.995]
    assert events[1].policy_table.size == events[1].policy_numbers.size == 0


def test_tokens_that_were_forbidden_are_recorded_with_no_mass() -> None:
    trajectory = start_trajectory(tiny_llama(), [1])
    recorder = recorder_of(trajectory, has_content=True)
    logits = extend(trajectory, 4)
    logits[0, 2:] = -torch.inf
    recorder.add_round(round_of(1, NO_DRAFTER, 0, 0), logits, None)
    event, _ = recorder.cut(DRAFTERS, FinishReason.STOP, sequence=0)
    assert event.content is not None
    assert event.content.target_top_log_probabilities[0, 2] == -np.inf
    assert event.content.target_tail_mass[0] == 0.0


def test_without_content_neither_tokens_nor_states_are_kept() -> None:
    trajectory = start_trajectory(tiny_llama(), [1, 2, 3])
    recorder = recorder_of(trajectory, has_content=False)
    recorder.add_round(round_of(3, NO_DRAFTER, 0, 0), extend(trajectory, 4), None)
    event, hidden = recorder.cut(DRAFTERS, FinishReason.ABORTED, sequence=0)
    assert event.content is None
    assert hidden is None
    assert event.finish_reason is FinishReason.ABORTED


def test_the_states_that_leave_are_a_copy() -> None:
    trajectory = start_trajectory(tiny_llama(), [1])
    recorder = recorder_of(trajectory, has_content=True)
    recorder.add_round(round_of(1, NO_DRAFTER, 0, 0), extend(trajectory, 4), None)
    _, hidden = recorder.cut(DRAFTERS, FinishReason.UNFINISHED, sequence=0)
    assert hidden is not None
    trajectory.hidden(1, 2).zero_()
    assert (hidden == 4.0).all()
