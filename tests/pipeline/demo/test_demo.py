"""The plan of the demo: which domains, how much of each, for how long, with which settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.configuration.settings import SettingsError
from pipeline.demo.demo import PHASE_TOKENS, STREAM, DemoOptions, demo_phases, demo_settings
from pipeline.prompts import Prompt, PromptsError, read_prompts

PROMPTS = [
    Prompt(domain=domain, text=f"{domain} {index}") for index in range(2) for domain in "abc"
]


def options(**changes: object) -> DemoOptions:
    values: dict[str, object] = {
        "data": Path("data"),
        "prompts": None,
        "dtype": "float32",
        "checks_all": False,
        "max_tokens": 8,
        "phase_tokens": (),
        "minutes": 0.0,
        "json_file": None,
    }
    return DemoOptions(**values | changes)  # type: ignore[arg-type]


def test_domains_come_in_the_order_of_the_file_as_many_as_there_are_counts() -> None:
    phases = demo_phases(PROMPTS, [100, 50], minutes=0.0)
    assert [(phase.domain, phase.num_tokens) for phase in phases] == [("a", 100), ("b", 50)]
    assert [prompt.text for prompt in phases[1].prompts] == ["b 0", "b 1"]
    assert {phase.seconds for phase in phases} == {float("inf")}


def test_the_time_is_shared_as_the_tokens_are() -> None:
    phases = demo_phases(PROMPTS, [100, 50], minutes=3.0)
    assert [phase.seconds for phase in phases] == [120.0, 60.0]


def test_a_file_of_one_domain_gives_one_phase() -> None:
    (phase,) = demo_phases(PROMPTS[:1], PHASE_TOKENS, minutes=0.0)
    assert (phase.domain, phase.num_tokens) == ("a", PHASE_TOKENS[0])


def test_the_demos_own_prompts_shift_from_code_to_maths() -> None:
    phases = demo_phases(read_prompts(), [100, 50], minutes=0.0)
    assert [phase.domain for phase in phases] == ["code", "maths"]


def test_the_demo_records_what_its_heads_need_and_nothing_of_other_streams() -> None:
    settings = demo_settings(options(), Path("folder"))
    assert settings.data == Path("folder")
    assert settings.model.dtype == "float32"
    assert settings.content.consenting_streams == (STREAM,)
    assert settings.features.enabled


def test_new_weights_pass_the_gate_only_if_it_is_asked_for() -> None:
    assert not demo_settings(options(), Path("folder")).gate.enabled
    assert demo_settings(options(has_gate=True), Path("folder")).gate.enabled


def test_invalid_dtype_is_named() -> None:
    with pytest.raises(SettingsError, match="--dtype fp8: expected bfloat16 or float32"):
        demo_settings(options(dtype="fp8"), Path("folder"))


def test_invalid_more_phases_than_domains_are_refused_with_both_numbers() -> None:
    with pytest.raises(PromptsError, match="2 --phase-tokens, but the prompts have 1 domains: a"):
        demo_phases(PROMPTS[:1], [100, 50], minutes=0.0)
