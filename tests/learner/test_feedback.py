"""Which events are new, which windows count, and whose losses they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import feedback
from learner.feedback import (
    Contained,
    Standing,
    aligned,
    charge_sleeping,
    drafter_positions,
    event_losses,
    window_losses,
)
from learner.selection import policy_from_name, policy_names
from schemas.codec import decode_policy_published, encode
from schemas.events import FinishReason, ScoredWindows, VerificationEvent
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
    np.testing.assert_allclose(event_losses(event), [[0.8, 0.0, 0.8], [0.8, 0.8, 0.4]])


def test_the_loss_at_level_one_can_be_mixed_in() -> None:
    acceptance = np.zeros((1, 4, 1))
    acceptance[0, 0] = 1.0
    event = make_event(num_windows=1, num_drafters=1, acceptance_probability=acceptance)
    np.testing.assert_allclose(event_losses(event, length_weight=0.25), [[0.25 * 0.6]])


def test_windows_shortened_by_the_end_of_a_request_count_alike_for_all() -> None:
    losses = event_losses(ending_with([4, 3, 1]))
    np.testing.assert_allclose(losses, np.tile([[0.0], [0.2], [0.6]], 3))


@pytest.mark.parametrize("reason", [FinishReason.ABORTED, FinishReason.ERROR])
def test_windows_cut_off_by_an_abort_are_censored(reason: FinishReason) -> None:
    losses = event_losses(ending_with([4, 3, 1], finish_reason=reason))
    np.testing.assert_allclose(losses, np.zeros((1, 3)))


def test_truncated_windows_hide_the_better_drafter() -> None:
    """The guard against censored windows: who drafts far looks like who drafts one token."""
    generator = np.random.default_rng(0)
    hits = np.zeros((4000, 4, 2))
    hits[:, :1, 0] = generator.random((4000, 1)) < 0.75
    hits[:, :, 1] = generator.random((4000, 1)) < 0.7
    event = make_event(num_windows=4000, num_drafters=2, acceptance_probability=hits)
    honest = event_losses(event).mean(axis=0)
    truncated = window_losses(cut(event.windows, [1] * 4000), 4).mean(axis=0)
    assert honest[1] < honest[0] - 0.1
    assert truncated[1] > truncated[0]


def test_without_levels_there_is_nothing_to_tell_drafters_apart() -> None:
    event = make_event(num_windows=0, num_speculative_tokens=0, num_drafters=2)
    assert window_losses(event.windows, 0).shape == (0, 2)


def test_losses_are_aligned_by_drafter_id_and_orphans_left_out() -> None:
    known = make_drafters(4)
    event_drafters = (known[3], make_drafters(6)[5], known[1])
    positions = drafter_positions(event_drafters, known)
    np.testing.assert_array_equal(positions, [3, -1, 1])
    losses = aligned(np.array([[0.1, 0.2, 0.3]]), positions, 4)
    np.testing.assert_array_equal(losses, [[NAN, 0.3, NAN, 0.1]])


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**16), num_asleep=st.integers(0, 5))
@pytest.mark.parametrize("name", policy_names())
def test_a_sleeping_drafter_keeps_its_weight_relative_to_the_rest(
    name: str, seed: int, num_asleep: int
) -> None:
    generator = np.random.default_rng(seed)
    policy = policy_from_name(name, 5)
    for row in generator.random((20, 5)):
        policy.learn(row)
    losses = generator.random(5)
    losses[:num_asleep] = NAN
    probabilities = policy.probabilities()
    charged = charge_sleeping(losses, probabilities)
    assert np.all((charged >= 0.0) & (charged <= 1.0))
    awake = probabilities[num_asleep:]
    if awake.sum() > 1e-9:
        mixture = probabilities @ charged
        np.testing.assert_allclose(charged[:num_asleep], mixture, atol=1e-6)


def test_when_all_sleep_no_policy_moves() -> None:
    policy = policy_from_name("normal_hedge", 2, prior=[0.7, 0.3])
    policy.learn(charge_sleeping(np.array([NAN, NAN]), policy.probabilities()))
    np.testing.assert_allclose(policy.probabilities(), [0.7, 0.3])


def test_sleepers_are_charged_the_plain_mean_when_nobody_awake_has_weight() -> None:
    charged = charge_sleeping(np.array([NAN, 0.2, 0.6]), np.array([1.0, 0.0, 0.0]))
    np.testing.assert_allclose(charged, [0.4, 0.2, 0.6])
