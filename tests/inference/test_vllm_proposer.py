"""The class that vLLM builds: what it reads off vLLM, and what never reaches the engine."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inference.vllm_plugin import DraftloopProposer
from inference.vllm_plugin.guard import MOST_IN_A_ROW, Guard
from inference.vllm_plugin.ports import Connection, ModelPlace
from inference.vllm_plugin.proposer import tell_version, with_lent_rows
from inference.vllm_plugin.runner_hook import (
    listen,
    missing,
    request_facts,
    sampling_rule,
    state_rows,
)
from schemas.events import AcceptanceRule
from tests.inference.vllm_fakes import FakeEngine, Kept, connection, repeating


def vllm_config(*, num_speculative_tokens: int = 4, num_ranks: int = 1) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model="/models/target", tokenizer=None, max_model_len=512),
        parallel_config=SimpleNamespace(data_parallel_rank=1, data_parallel_size=num_ranks),
        speculative_config=SimpleNamespace(num_speculative_tokens=num_speculative_tokens),
    )


@dataclass
class FakeParams:
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = 20
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    structured_outputs: object = None
    extra_args: dict[str, object] | None = None


@dataclass
class FakeCached:
    sampling_params: FakeParams = field(default_factory=FakeParams)
    num_prompt_tokens: int = 3
    lora_request: object = None


def runner_class() -> Any:
    """Return a class like vLLM's runner, fresh for every test: a method of it is wrapped."""

    class GPUModelRunner:
        def __init__(self, drafter: object) -> None:
            self.drafter = drafter
            self.requests = {"a": FakeCached()}
            self.input_batch = SimpleNamespace(req_ids=["a"])
            self.asked: list[object] = []
            self.effective_drafter_max_model_len = 512

        def propose_draft_token_ids(
            self,
            scheduler_output: object,
            sampled_token_ids: list[list[int]],
            sample_hidden_states: torch.Tensor,
            spec_decode_metadata: object,
        ) -> list[list[int]]:
            self.asked.append(sampled_token_ids)
            ids = np.zeros((1, 512), np.int32)
            ids[0, :4] = [5, 6, 7, sampled_token_ids[0][0]]
            propose: Callable[..., list[list[int]]] = getattr(self.drafter, "propose")  # noqa: B009
            return propose(sampled_token_ids, np.array([4]), ids, slot_mappings={})

    return GPUModelRunner


def proposer(kept: Kept, **options: Any) -> DraftloopProposer:
    made = DraftloopProposer(
        vllm_config(), connect=lambda place: connection(kept, **options), runner_class=object
    )
    made.load_model(None)
    return made


def test_it_drafts_for_an_engine_that_tells_it_tokens_alone() -> None:
    kept = Kept()
    made = proposer(kept)
    engine = FakeEngine(
        lambda sampled, sizes, ids, _: made.propose(sampled, sizes, ids, slot_mappings={}),
        repeating(),
        tells=False,
    )
    engine.add("a", list(range(10, 17)) * 2, 40)
    engine.run()
    made.close()
    assert engine.num_accepted > 20
    assert sum(event.num_positions for event in kept.events) >= 40


def test_what_is_at_work_is_reported_when_the_process_ends(tmp_path: Path) -> None:
    program = """
import sys, numpy as np
from multiprocessing import get_context
from tests.inference.test_vllm_proposer import proposer
from tests.inference.vllm_fakes import Kept

class Written(Kept):
    def emit(self, event):
        open(sys.argv[1], "a").write(event.request_id + chr(10))

def engine():
    ids = np.zeros((1, 64), np.int32)
    ids[0, :4] = [5, 6, 7, 8]
    proposer(Written()).propose([[8]], np.array([4]), ids)

if __name__ == "__main__":
    child = get_context("fork").Process(target=engine)
    child.start()
    child.join()
"""
    file = tmp_path / "written"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", program, str(file)], cwd=root, check=True)
    assert len(file.read_text().splitlines()) == 1


def test_it_is_told_where_it_stands_before_it_connects() -> None:
    places: list[ModelPlace] = []

    def connect(place: ModelPlace) -> Connection:
        places.append(place)
        return connection(Kept())

    made = DraftloopProposer(vllm_config(num_ranks=2), connect=connect, runner_class=object)
    made.load_model(None)
    made.close()
    (place,) = places
    assert (place.model, place.tokenizer) == ("/models/target", "/models/target")
    assert (place.rank, place.num_ranks, place.num_speculative_tokens) == (1, 2, 4)


def test_a_failing_step_costs_its_drafts_and_three_switch_drafting_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Kept()
    made = proposer(kept)
    sizes, broken = np.array([4]), np.zeros((0, 0), np.int32)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert made.propose([[7]], sizes, broken) == [[]]
    assert kept.counts["failures", "step"] == MOST_IN_A_ROW
    assert sum("this step goes on without it" in one.message for one in caplog.records) == 1
    assert sum("is off until" in one.message for one in caplog.records) == 1
    made.close()


def test_settings_that_cannot_be_used_are_told_when_the_model_is_loaded() -> None:
    def connect(place: ModelPlace) -> Connection:
        raise ValueError("draftloop.toml: workers is no setting; did you mean worker?")

    made = DraftloopProposer(vllm_config(), connect=connect, runner_class=object)
    with pytest.raises(ValueError, match="did you mean worker"):
        made.load_model(None)


def test_a_runner_shows_its_steps_and_is_wrapped_once() -> None:
    kind = runner_class()
    assert listen(kind) == ""
    wrapped = kind.propose_draft_token_ids
    assert listen(kind) == ""
    assert kind.propose_draft_token_ids is wrapped
    kept = Kept()
    made = DraftloopProposer(vllm_config(), connect=lambda _: connection(kept), runner_class=kind)
    made.load_model(None)
    runner = kind(made)
    metadata = SimpleNamespace(num_draft_tokens=[0])
    states = torch.zeros((1, 4))
    output = SimpleNamespace(total_num_scheduled_tokens=3)
    assert runner.propose_draft_token_ids(output, [[8]], states, spec_decode_metadata=metadata) == [
        []
    ]
    made.close()
    # Asked in every step, near the end of the context too.
    assert runner.effective_drafter_max_model_len > 10**9
    assert [event.request_id for event in kept.events] == ["a"]
    assert kept.events[0].num_prompt_tokens == 3


def test_a_runner_with_another_drafter_is_left_alone() -> None:
    kind = runner_class()
    listen(kind)
    runner = kind(SimpleNamespace(propose=lambda *_, slot_mappings: [[1]]))
    assert runner.propose_draft_token_ids(None, [[8]], None, None) == [[1]]
    assert runner.effective_drafter_max_model_len == 512


def test_a_runner_that_lacks_a_name_switches_the_feature_off_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Renamed:
        def propose_draft_token_ids(self, scheduler_output: object) -> None: ...

    assert "sample_hidden_states" in missing(Renamed)
    assert "propose_draft_token_ids" in missing(object)
    with caplog.at_level(logging.WARNING):
        DraftloopProposer(vllm_config(), connect=lambda _: connection(Kept()), runner_class=Renamed)
    (line,) = [one.message for one in caplog.records]
    assert "tokens alone" in line


@pytest.mark.parametrize(
    ("version", "is_told"), [("0.9.2", True), ("1.4.0", True), ("0.32.1", False)]
)
def test_a_vllm_that_was_never_tested_is_told_in_one_line(
    version: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with caplog.at_level(logging.WARNING):
        tell_version()
    assert [version in one.message for one in caplog.records] == [True] * is_told


def test_what_a_request_asks_for_is_read_as_it_is_verified() -> None:
    facts = request_facts(FakeCached(FakeParams(extra_args={"draftloop_stream": "support"})))
    assert facts.stream == "support"
    assert facts.sampling.acceptance_rule is AcceptanceRule.GREEDY
    assert request_facts(FakeCached(lora_request=SimpleNamespace(lora_name="sql"))).stream == "sql"
    bad = FakeParams(extra_args={"draftloop_stream": "../../etc"})
    assert request_facts(FakeCached(bad)).stream == ""
    assert request_facts(FakeCached(FakeParams(structured_outputs=object()))).is_constrained
    drawn = sampling_rule(0.8, 0.9, -1)
    assert (drawn.acceptance_rule, drawn.top_k) == (AcceptanceRule.ONE_HOT, 0)


@pytest.mark.parametrize(
    ("num_emitted", "num_drafts", "num_states", "places"),
    [
        ([1, 1], None, 2, [0, 1]),
        ([2, 0, 1], [3, 0, 2], 8, [0, 4, 5]),
        ([1], [0], 1, [0]),
        ([1, 1], [1, 1], 3, None),
        ([1, 1], None, 3, None),
    ],
)
def test_states_are_found_as_vllm_lays_them_out(
    num_emitted: list[int], num_drafts: list[int] | None, num_states: int, places: list[int] | None
) -> None:
    assert state_rows(num_emitted, num_drafts, num_states) == places


def test_rows_are_lent_where_the_model_has_them() -> None:
    place = ModelPlace(model="m", tokenizer="m")
    rows = torch.zeros((6, 2))
    whole = SimpleNamespace(
        model=SimpleNamespace(embed_tokens=SimpleNamespace(weight=rows)),
        lm_head=SimpleNamespace(weight=rows),
    )
    assert with_lent_rows(place, whole).lent_rows is not None
    assert with_lent_rows(place, SimpleNamespace()).lent_rows is None
    whole.lm_head.weight = torch.zeros((3, 2))
    assert with_lent_rows(place, whole).lent_rows is None


def test_a_guard_counts_tells_once_and_forgives_after_a_success() -> None:
    kinds: list[str] = []
    guard = Guard(kinds.append)

    def fail() -> int:
        raise ValueError("no")

    for _ in range(MOST_IN_A_ROW - 1):
        assert guard.run("part", fail, 0) == 0
    assert guard.run("part", lambda: 7, 0) == 7
    for _ in range(MOST_IN_A_ROW):
        guard.run("part", fail, 0)
    assert guard.run("part", lambda: 7, 0) == 0
    guard.switch_on("part")
    assert guard.run("part", lambda: 7, 0) == 7
    assert len(kinds) == 2 * MOST_IN_A_ROW - 1
