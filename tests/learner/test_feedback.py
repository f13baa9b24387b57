"""Which events are new, which windows count, and whose losses they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner import feedback
from learner.feedback import (
    Contained,
    Standing,
    drafter_positions,
    event_losses,
)
from learner.measures import acceptance_length_loss, expected_acceptance_length
from learner.selection.base import Loss
from schemas.codec import decode_policy_published, encode
from schemas.events import AcceptanceRule, FinishReason, ScoredWindows, VerificationEvent
from tests.learner.fakes import PlacedEvent
from tests.schemas.builders import make_drafters, make_event, make_policy

NAN = float("nan")


def placed(
    offset: int, *, sequence: int, worker_id: str = "worker-0", epoch: int = 1, partition: int = 0
) -> PlacedEvent:
    event = make_event(
        worker_id=worker_id, worker_epoch=epoch, sequence=sequence, num_windows=1, num_drafters=1
    )
    return PlacedEvent(partition=partition, offset=offset, event=event)


def test_an_event_is_new_until_it_is_contained() -> None:
    first, second = placed(0, sequence=0), placed(1, sequence=1)
    contained = Contained().with_event(first)
    assert contained.standing(first) is Standing.CONTAINED
    assert contained.standing(second) is Standing.NEW


def test_a_copy_at_a_later_offset_and_a_straggler_are_late() -> None:
    contained = Contained().with_event(placed(0, sequence=5))
    assert contained.standing(placed(1, sequence=5)) is Standing.LATE
    assert contained.standing(placed(1, sequence=4)) is Standing.LATE
    assert contained.standing(placed(1, sequence=4, worker_id="worker-1")) is Standing.NEW


def test_a_restarted_worker_counts_from_zero_and_its_former_epoch_is_over() -> None:
    contained = Contained().with_event(placed(0, sequence=5, epoch=1))
    restarted = placed(1, sequence=0, epoch=2)
    assert contained.standing(restarted) is Standing.NEW
    assert contained.with_event(restarted).standing(placed(2, sequence=6)) is Standing.LATE


def test_partitions_have_their_own_offsets() -> None:
    contained = Contained().with_event(placed(7, sequence=0, partition=0))
    assert contained.standing(placed(3, sequence=1, partition=1)) is Standing.NEW


def test_the_watermark_survives_publication_with_its_order() -> None:
    contained = Contained()
    for offset, worker in enumerate(["worker-b", "worker-a", "worker-c", "worker-b"]):
        contained = contained.with_event(placed(offset, sequence=offset, worker_id=worker))
    policy = make_policy(watermark=contained.watermark())
    again = Contained.from_watermark(decode_policy_published(encode(policy)).watermark)
    assert again == contained
    assert list(again.worker_to_latest) == ["worker-a", "worker-c", "worker-b"]


def test_remembered_workers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "MAX_REMEMBERED_WORKERS", 2)
    contained = Contained()
    for offset, worker in enumerate(["worker-a", "worker-b", "worker-a", "worker-c"]):
        contained = contained.with_event(placed(offset, sequence=offset, worker_id=worker))
    assert list(contained.worker_to_latest) == ["worker-a", "worker-c"]


def cut(windows: ScoredWindows, num_levels: list[int]) -> ScoredWindows:
    """Cut windows down to the levels that exist."""
    counts = np.array(num_levels, np.int16)
    exists = np.arange(windows.acceptance_probability.shape[1])[:, None] < counts[:, None, None]
    nan = np.float16(NAN)
    return replace(
        windows,
        num_levels=counts,
        acceptance_probability=np.where(exists, windows.acceptance_probability, nan),
        realised_acceptance=np.where(exists, windows.realised_acceptance, nan),
    )


def ending_with(
    num_levels: list[int], *, finish_reason: FinishReason = FinishReason.STOP
) -> VerificationEvent:
    """Build the end of a request whose every draft would be accepted in full."""
    event = make_event(
        num_windows=len(num_levels), acceptance_probability=1.0, finish_reason=finish_reason
    )
    end = event.first_position + event.num_positions
    start = (end - np.array(num_levels)).astype(np.int32)
    return replace(event, windows=replace(cut(event.windows, num_levels), start=start))


def test_losses_come_in_order_of_start_and_favour_long_drafts() -> None:
    acceptance = np.zeros((2, 4, 3))
    acceptance[0, :, 1] = 1.0
    acceptance[1, :2, 2] = 1.0
    event = make_event(num_windows=2, acceptance_probability=acceptance)
    np.testing.assert_allclose(event_losses(event).evidence, [[0.8, 0.0, 0.8], [0.8, 0.8, 0.4]])


def test_the_loss_at_level_one_can_be_mixed_in() -> None:
    acceptance = np.zeros((1, 4, 1))
    acceptance[0, 0] = 1.0
    event = make_event(num_windows=1, num_drafters=1, acceptance_probability=acceptance)
    losses = event_losses(event, length_weight=0.25).evidence
    np.testing.assert_allclose(losses, [[0.25 * 0.6]])


def test_windows_shortened_by_the_end_of_a_request_count_alike_for_all() -> None:
    losses = event_losses(ending_with([4, 3, 1])).evidence
    np.testing.assert_allclose(losses, np.tile([[0.0], [0.2], [0.6]], 3))


@pytest.mark.parametrize("reason", [FinishReason.ABORTED, FinishReason.ERROR])
def test_windows_cut_off_by_an_abort_are_censored(reason: FinishReason) -> None:
    losses = event_losses(ending_with([4, 3, 1], finish_reason=reason)).evidence
    np.testing.assert_allclose(losses, np.zeros((1, 3)))


def test_truncated_windows_hide_the_better_drafter() -> None:
    """The guard against censored windows: who drafts far looks like who drafts one token."""
    generator = np.random.default_rng(0)
    hits = np.zeros((4000, 4, 2))
    hits[:, :1, 0] = generator.random((4000, 1)) < 0.75
    hits[:, :, 1] = generator.random((4000, 1)) < 0.7
    event = make_event(num_windows=4000, num_drafters=2, acceptance_probability=hits)
    honest = event_losses(event).evidence.mean(axis=0)
    shortened = cut(event.windows, [1] * 4000)
    lengths = expected_acceptance_length(
        shortened.acceptance_probability,
        shortened.realised_acceptance,
        num_levels=shortened.num_levels,
    )
    truncated = acceptance_length_loss(lengths, 4).mean(axis=0)
    assert honest[1] < honest[0] - 0.1
    assert truncated[1] > truncated[0]


def test_without_levels_there_is_nothing_to_tell_drafters_apart() -> None:
    event = make_event(num_windows=0, num_speculative_tokens=0, num_drafters=2)
    assert event_losses(event).evidence.shape == (0, 2)


def test_losses_are_aligned_by_drafter_id_and_orphans_left_out() -> None:
    known = make_drafters(4)
    drafters = (known[3], make_drafters(6)[5], known[1])
    places = drafter_positions(drafters, known)
    np.testing.assert_array_equal(places, [3, -1, 1])
    event = make_event(
        num_windows=1,
        drafters=drafters,
        num_speculative_tokens=1,
        acceptance_rule=AcceptanceRule.SPECULATIVE_SAMPLING,
        acceptance_probability=np.array([0.75, 0.5, 0.25]),
    )
    losses = event_losses(event, places=places, num_drafters=4, policy_loss="first")
    np.testing.assert_array_equal(losses.evidence, [[NAN, 0.375, NAN, 0.125]])
    np.testing.assert_array_equal(losses.of_policy, [[NAN, 0.75, NAN, 0.25]])


@pytest.mark.parametrize(("loss", "expected"), [("length", 0.6), ("first", 0.5), ("hybrid", 0.55)])
def test_a_policy_learns_the_loss_that_it_was_named_with(loss: Loss, expected: float) -> None:
    event = make_event(
        num_windows=2,
        num_drafters=1,
        num_speculative_tokens=4,
        acceptance_rule=AcceptanceRule.SPECULATIVE_SAMPLING,
        acceptance_probability=np.array([[0.5], [0.5], [0.0], [1.0]]),
        realised_acceptance=np.array([[1.0], [0.0], [1.0], [1.0]]),
    )
    losses = event_losses(event, policy_loss=loss).of_policy
    np.testing.assert_allclose(losses, [[expected]] * 2)


@pytest.mark.parametrize(
    ("reason", "num_learned"),
    [(FinishReason.STOP, 2), (FinishReason.ABORTED, 1), (FinishReason.ERROR, 1)],
)
def test_a_policy_does_not_learn_windows_that_an_abort_has_cut(
    reason: FinishReason, num_learned: int
) -> None:
    event = make_event(num_windows=6, num_drafters=2, num_speculative_tokens=2)
    scores = np.array([[[1, 0], [1, 0]], [[0, 1], [NAN, NAN]]], np.float16)
    last = event.first_position + event.num_positions - 2
    windows = ScoredWindows(
        start=np.array([event.first_position, last], np.int32),
        num_levels=np.array([2, 1], np.int16),
        acceptance_probability=scores,
        realised_acceptance=scores,
    )
    cut = replace(event, windows=windows, finish_reason=reason)
    assert len(event_losses(cut, policy_loss="first").of_policy) == num_learned


def test_a_policy_learns_nothing_where_nothing_can_be_drafted() -> None:
    event = make_event(num_windows=3, num_drafters=2, num_speculative_tokens=0)
    assert event_losses(event, policy_loss="first").of_policy.shape == (0, 2)
