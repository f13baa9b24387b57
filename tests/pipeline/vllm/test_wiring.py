"""The connection that vLLM's environment finds: settings, identity, metrics, what is missing."""

from __future__ import annotations

import logging
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from inference.drafters.frozen_rows import VOCABULARY
from inference.drafters.hydra import initial_hydra_weights
from inference.vllm_plugin.ports import ENTRY_POINTS, ModelPlace
from pipeline.bench.vllm.heads import release_head
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.configuration.settings import Settings, SettingsError, WorkerSettings
from pipeline.vllm.metrics import NAME_TO_HELP, PREFIX, VllmCounters, serve_metrics
from pipeline.vllm.wiring import connect, connect_with, plugin_options
from tests.inference.tiny import tiny_llama, tiny_tokenizer

PLACE = ModelPlace(model="/nowhere/target", tokenizer="/nowhere/target")


def settings(tmp_path: Path, **drafters: str) -> Settings:
    pool = {"none": "none", "lookup": "prompt_lookup", **drafters}
    return Settings(
        data=tmp_path,
        drafters=tuple(DrafterSettings(drafter_id=k, kind=v) for k, v in pool.items()),  # type: ignore[arg-type]
        worker=WorkerSettings(poll_seconds=0.05),
    )


def test_the_entry_point_names_what_connects() -> None:
    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][ENTRY_POINTS] == {"connect": "pipeline.vllm.wiring:connect"}


def test_ranks_have_worker_ids_of_their_own(tmp_path: Path) -> None:
    one = settings(tmp_path)
    assert plugin_options(one, PLACE, 7).worker_id == "worker-0"
    ranks = [
        plugin_options(one, replace(PLACE, rank=rank, num_ranks=2), 7).worker_id for rank in (0, 1)
    ]
    assert ranks == ["worker-0-dp0", "worker-0-dp1"]


def test_a_typo_in_the_settings_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "draftloop.toml"
    file.write_text("[vllm]\nhistory_byte = 5\n")
    monkeypatch.setenv("DRAFTLOOP_CONFIG", str(file))
    with pytest.raises(SettingsError, match=r"vllm.history_byte is no setting; did you mean"):
        connect(PLACE)


def test_a_model_without_a_folder_serves_without_heads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = connect_with(
            settings(tmp_path, head="hydra"), PLACE, VllmCounters(CollectorRegistry())
        )
    found.close()
    assert found.target.fingerprint == "unknown"
    assert "heads are off" in caplog.text
    assert list(found.inbox.take_drafters()) == []


def test_a_kind_that_does_not_draft_here_is_told_and_keeps_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        options = plugin_options(settings(tmp_path, eagle="eagle"), PLACE, 7)
    assert [one.version.drafter_id for one in options.pool] == ["none", "lookup", "eagle"]
    assert "kind eagle does not draft inside vLLM yet" in caplog.text


def test_a_broker_that_is_away_holds_up_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_llama().model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    away = settings(tmp_path / "data", head="hydra")
    away = away.model_copy(
        update={
            "event_log": away.event_log.model_copy(update={"url": "sqlite:////proc/no/log.sqlite"})
        }
    )
    rows = torch.zeros((16, 4))
    place = ModelPlace(model=str(folder), tokenizer=str(folder), lent_rows=(rows, rows))
    found = connect_with(away, place, VllmCounters(CollectorRegistry()))
    assert list(found.inbox.take_drafters()) == []
    assert len(found.target.fingerprint) == 64
    found.close()


def test_a_head_of_another_target_is_refused_in_one_line_and_nothing_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, folder = tiny_llama(), tmp_path / "model"
    target.model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    own = settings(tmp_path / "data", head="hydra")
    weights = initial_hydra_weights(target.hidden_size, 8, torch.Generator().manual_seed(0))
    tensors = weights | {VOCABULARY: torch.arange(8)}
    target.fingerprint = "0" * 64
    release_head(own, target, "head", tensors)
    rows = (target.embedding_rows, target.head_rows)
    place = ModelPlace(model=str(folder), tokenizer=str(folder), lent_rows=rows)
    with caplog.at_level(logging.WARNING):
        found = connect_with(own, place, VllmCounters(CollectorRegistry()))
    assert list(found.inbox.take_drafters()) == []
    found.close()
    (line,) = [one.message for one in caplog.records if "is not used" in one.message]
    assert "target_fingerprint" in line


def test_several_engines_in_one_process_share_their_counters(tmp_path: Path) -> None:
    first, second = (connect_with(settings(tmp_path), PLACE) for _ in range(2))
    assert first.counters is second.counters
    first.close()
    second.close()


def test_counters_add_up_on_a_page_of_their_own() -> None:
    registry = CollectorRegistry()
    counters = VllmCounters(registry)
    counters.count("draft_tokens", 3, drafter="suffix")
    counters.count("draft_tokens", 2, drafter="suffix")
    value = registry.get_sample_value("draftloop_vllm_draft_tokens_total", {"drafter": "suffix"})
    assert value == 5
    serve_metrics(0)()


def test_the_metrics_that_documents_and_dashboard_name_are_counted() -> None:
    root = Path(__file__).resolve().parents[3]
    texts = [
        (root / "docs" / "vllm.md").read_text(),
        (root / "deploy" / "grafana" / "vllm-row.json").read_text(),
    ]
    for text in texts:
        named = set(re.findall(rf"{PREFIX}(\w+)_total", text))
        assert named
        assert named <= NAME_TO_HELP.keys()
