"""Rules are named in one line; every one keeps the contract; a changed rule begins from the old."""

from __future__ import annotations

import gc
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from learner.updates.online_gradient import OnlineGradientSettings
from learner.updates.registry import RULES, parse_rule, rule_names
from learner.updates.rule import UpdateRefusedError
from tests.learner.updates.tensors import distance_to, not_a_number, same, weights

GRADIENT = OnlineGradientSettings(learning_rate=0.05)
SPECS = [
    *rule_names(),
    "online_gradient:form=projected,step_size=accumulated_delay,radius=4",
    "optimistic:form=projected,hint_decay=0.5",
    "ensemble:num_experts=4,serve=best",
    "ensemble:backward=shared,losses=surrogate,form=projected",
]


@pytest.mark.parametrize("text", SPECS)
def test_every_rule_learns_serves_refuses_and_goes_on_bit_for_bit(text: str) -> None:
    spec = parse_rule(text)
    rule = spec.build(weights(), GRADIENT)
    first = rule.step(distance_to(0.5))
    for step in range(40):
        report = rule.step(distance_to(0.5), delay_updates=step % 3)
    assert report.loss < 0.9 * first.loss
    assert min(report.num_forwards, report.num_backwards, report.step_size) > 0
    served = rule.served_weights
    assert all(tensor.dtype == torch.float32 for tensor in served.values())
    assert not any(tensor.requires_grad for tensor in served.values())
    before = rule.state()
    with pytest.raises(UpdateRefusedError):
        rule.step(not_a_number)
    assert same(rule.state(), before)
    other = spec.resume(rule.state(), GRADIENT, name=rule.name, version=rule.version)
    for _ in range(3):
        rule.step(distance_to(0.1), delay_updates=2)
        other.step(distance_to(0.1), delay_updates=2)
    assert same(rule.state(), other.state())
    assert same(rule.served_weights, other.served_weights)


@pytest.mark.parametrize("text", SPECS)
def test_a_state_can_be_saved_as_it_is(text: str) -> None:
    """B10: safetensors refuses tensors that share memory or are not contiguous."""
    rule = parse_rule(text).build(weights(), GRADIENT)
    rule.step(distance_to(0.5))
    tensors = list(rule.state().values())
    assert all(tensor.is_contiguous() for tensor in tensors)
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("text", SPECS)
def test_many_steps_take_no_memory(text: str) -> None:
    """B12."""
    rule = parse_rule(text).build(weights(), GRADIENT)

    def num_tensors_after(num_steps: int) -> int:
        for step in range(num_steps):
            rule.step(distance_to(0.5), delay_updates=step % 5)
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    before = num_tensors_after(10)
    assert num_tensors_after(100) <= before
    names = sorted(rule.state())
    rule.step(distance_to(0.5))
    assert sorted(rule.state()) == names


@pytest.mark.parametrize("old", rule_names())
@pytest.mark.parametrize("new", rule_names())
def test_another_rule_begins_from_what_the_old_one_served(old: str, new: str) -> None:
    before = parse_rule(old).build(weights(), GRADIENT)
    for _ in range(3):
        before.step(distance_to(0.5))
    after = parse_rule(new).resume(
        before.state(), GRADIENT, name=before.name, version=before.version
    )
    assert after.name == new
    assert same(after.served_weights, before.served_weights)


def test_the_text_of_a_specification_is_read_back() -> None:
    for text in SPECS:
        assert parse_rule(str(parse_rule(text))) == parse_rule(text)


def test_parameters_reach_the_rule_and_the_steps_inside_it() -> None:
    settings = parse_rule("ensemble:num_experts=5,restarts=false,radius=2.5").settings(GRADIENT)
    assert settings.num_experts == 5  # type: ignore[union-attr]
    assert settings.restarts is False  # type: ignore[union-attr]
    assert settings.gradient.radius == 2.5  # type: ignore[union-attr]
    assert settings.gradient.learning_rate == GRADIENT.learning_rate  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adam", "unknown update rule 'adam', expected one of: ensemble, momentum, online_"),
        ("momentum:beta=1", "'momentum:beta=1': unknown key 'beta', expected one of: momentum"),
        ("momentum:momentum=1", r"momentum=1\.0 outside"),
        ("momentum:momentum=x", "momentum='x' is no number"),
        ("ensemble:serve=both", "serve='both', expected average or best"),
        ("ensemble:restarts=1", "restarts='1', expected true or false"),
        ("ensemble:num_experts=0", "num_experts=0"),
        ("optimistic:radius=0", r"radius=0\.0, expected > 0"),
    ],
)
def test_invalid_specifications_are_refused_with_what_is_known(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rule(text)


def test_every_rule_and_every_key_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "learning.md").read_text("utf-8")
    for name, (_, settings) in RULES.items():
        assert f"| `{name}` |" in page
        for field in fields(settings):
            assert field.name in ("gradient", "betas") or f"`{field.name}`" in page, field.name


@pytest.mark.parametrize(("name", "version"), [("adam", 1), ("ensemble", 99)])
def test_invalid_states_of_unknown_rules_are_refused(name: str, version: int) -> None:
    assert set(RULES) == set(rule_names())
    with pytest.raises(ValueError, match=f"update rule {name} {version}, expected one of"):
        parse_rule("ensemble").resume({}, GRADIENT, name=name, version=version)
