"""The real worker chooses (drafter, K) by what it costs; its log gives every choice again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inference.sampling import SamplingParams
from inference.worker import WorkerOptions, selection_of
from replay.analysis import analyse
from replay.arm_rerun import chooses_arms, logged_arms, verify_logged_arms
from replay.rerun import verify_logged_rounds
from schemas.codec import decode_verification_event, encode
from schemas.equality import same_message
from schemas.events import NO_DRAFTER
from tests.inference.serving import Outbox, new_worker, request_of
from tests.inference.tiny import plain_greedy, random_prompts, tiny_llama
from tests.replay.synthetic import log, write_log
from tests.replay.test_rerun_of_the_worker import FailingDrafter, drafters_of, joined, served

ARMS = "ada_normal_hedge_grid:objective=seconds"


@pytest.mark.parametrize(("temperature", "draws_drafts"), [(0.0, False), (0.8, True)])
def test_every_choice_and_every_scoring_decision_is_rebuilt(
    temperature: float, draws_drafts: bool
) -> None:
    events = served(policy=ARMS, temperature=temperature, draws_drafts=draws_drafts, num_requests=6)
    for event in events:
        assert same_message(decode_verification_event(encode(event)), event)
    requests = joined(events)
    assert len(requests) == 6
    for request in requests:
        assert chooses_arms(request)
        assert [str(one) for one in verify_logged_rounds(request).disagreements] == []
        found = verify_logged_arms(request, logged_arms(request))
        assert [str(one) for one in found] == []
    scored = sum(request.windows.start.size for request in requests)
    assert scored < sum(request.num_tokens for request in requests)
    chances = np.concatenate([request.rounds.score_probability for request in requests])
    assert chances.min() < 1.0 == chances.max()


def test_the_state_in_the_log_is_needed() -> None:
    requests = joined(served(policy=ARMS, num_requests=3))
    swapped = replace(
        requests[2],
        policy_table=requests[0].policy_table,
        policy_numbers=requests[0].policy_numbers,
    )
    assert verify_logged_arms(swapped, logged_arms(swapped))


def test_a_drafter_that_falls_asleep_takes_its_arms_along() -> None:
    events = served(
        policy=ARMS,
        drafters=lambda target: [
            FailingDrafter(drafters_of(target)[2], scorings=1),
            drafters_of(target)[3],
        ],
    )
    assert any(np.isnan(event.windows.acceptance_probability).any() for event in events)
    for request in joined(events):
        assert verify_logged_arms(request, logged_arms(request)) == ()


def test_greedy_output_is_the_targets_own_whatever_arm_is_played() -> None:
    target, outbox = tiny_llama(1), Outbox()
    prompts = random_prompts(2, count=4, length=12)
    worker = new_worker(target, drafters_of(target), outbox, policy=ARMS)
    params = SamplingParams(max_tokens=50)
    found = [list(worker.serve(request_of(prompt, params)).token_ids) for prompt in prompts]
    assert found == plain_greedy(target, prompts, 50)


def test_drafters_that_are_never_right_are_left_alone() -> None:
    events = served(policy=ARMS, num_requests=6, drafters=lambda t: [drafters_of(t)[3]])
    rounds = np.concatenate([event.rounds.drafter_index for event in events[-6:]])
    assert np.mean(rounds == NO_DRAFTER) > 0.8


def test_the_report_checks_choices_of_arms_and_walks_policies_of_both_kinds(tmp_path: Path) -> None:
    write_log(tmp_path, log(served(policy=ARMS, num_requests=3)))
    found = analyse(tmp_path, np.random.default_rng(0), policies=["hedge", ARMS])
    assert found.summary.check.num_disagreements == 0
    assert found.summary.check.num_selections_checked > 0
    for row in found.summary.policies:
        assert row.num_tokens + row.num_skipped_tokens == found.summary.total.num_tokens


def test_invalid_settings_for_arms_are_refused() -> None:
    options = WorkerOptions(worker_id="w", worker_epoch=1, policy=ARMS)
    engine = replace(options.engine, score_block=0)
    with pytest.raises(ValueError, match="score_block=0"):
        selection_of(replace(options, engine=engine))
    with pytest.raises(ValueError, match="choice=argmax"):
        served(policy=f"{ARMS},choice=sample", num_requests=1)
