"""Update rules by name, and the specification of a rule as one line of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from learner.updates.ensemble import Ensemble, EnsembleSettings
from learner.updates.momentum import MomentumGradient, MomentumSettings
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from learner.updates.optimistic import OptimisticGradient, OptimisticSettings
from learner.updates.rule import UpdateRule, Weights

Settings = OnlineGradientSettings | MomentumSettings | OptimisticSettings | EnsembleSettings

RULES: Mapping[str, tuple[type[Any], type[Any]]] = {
    rule.name: (rule, settings)
    for rule, settings in (
        (OnlineGradient, OnlineGradientSettings),
        (MomentumGradient, MomentumSettings),
        (OptimisticGradient, OptimisticSettings),
        (Ensemble, EnsembleSettings),
    )
}
"""Every rule and its settings."""

_SHARED = tuple(one.name for one in fields(OnlineGradientSettings) if one.name != "betas")


def rule_names() -> tuple[str, ...]:
    """Return the names of the rules."""
    return tuple(sorted(RULES))


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleSpec:
    """A rule and what differs from its defaults.

    Attributes:
        name: One of ``rule_names()``.
        parameters: Settings of the rule, or of the gradient steps inside it, by name.
    """

    name: str
    parameters: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """Return the text that ``parse_rule`` reads back."""
        options = ",".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.name}:{options}" if options else self.name

    def settings(self, gradient: OnlineGradientSettings) -> Settings:
        """Return the rule's settings over the steps of ``gradient``.

        Raises:
            ValueError: If a parameter is out of range.
        """
        kind: type[Any] = RULES[self.name][1]
        own = {one.name for one in fields(kind)} - {"gradient"} - set(_SHARED)
        shared = {key: value for key, value in self.parameters if key not in own}
        steps = replace(gradient, **shared)
        if kind is OnlineGradientSettings:
            return steps
        settings: Settings = kind(
            gradient=steps, **{key: value for key, value in self.parameters if key in own}
        )
        return settings

    def build(self, weights: Weights, gradient: OnlineGradientSettings) -> UpdateRule:
        """Start afresh from ``weights``."""
        rule: UpdateRule = RULES[self.name][0](weights, self.settings(gradient))
        return rule

    def resume(
        self,
        tensors: Mapping[str, torch.Tensor],
        gradient: OnlineGradientSettings,
        *,
        name: str,
        version: int,
    ) -> UpdateRule:
        """Continue from a state; if it is another rule's, start afresh from what that served.

        Args:
            tensors: The state.
            gradient: Step size and guards from now on.
            name: Of the rule that wrote the state.
            version: Of the layout of that state.

        Raises:
            ValueError: If that rule or layout is unknown, or the state incomplete.
        """
        if name not in RULES or version != RULES[name][0].version:
            known = ", ".join(f"{one} {RULES[one][0].version}" for one in rule_names())
            raise ValueError(
                f"state of update rule {name} {version}, expected one of: {known}; "
                "retire the drafter, or run the version that wrote it"
            )
        if name == self.name:
            rule: UpdateRule = RULES[name][0].from_state(tensors, self.settings(gradient))
            return rule
        before: UpdateRule = RULES[name][0].from_state(
            tensors, RuleSpec(name=name).settings(gradient)
        )
        return self.build(before.served_weights, gradient)


def parse_rule(text: str) -> RuleSpec:
    """Read ``name`` or ``name:key=value,...``.

    Keys are the settings of the rule, and those of the gradient steps inside it.

    Raises:
        ValueError: If the rule, a key or a value is unknown, with what is known.
    """
    name, _, rest = text.partition(":")
    if name not in RULES:
        raise ValueError(
            f"unknown update rule {name!r}, expected one of: {', '.join(rule_names())}"
        )
    hints = _parameter_types(name)
    parameters: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in hints:
            known = ", ".join(hints)
            raise ValueError(f"update rule {text!r}: unknown key {key!r}, expected one of: {known}")
        parameters[key] = _value(text, key, value, hints[key])
    spec = RuleSpec(name=name, parameters=tuple(parameters.items()))
    try:
        spec.settings(OnlineGradientSettings())
    except ValueError as error:
        raise ValueError(f"update rule {text!r}: {error}") from error
    return spec


def _parameter_types(name: str) -> dict[str, Any]:
    shared = get_type_hints(OnlineGradientSettings)
    own = get_type_hints(RULES[name][1])
    hints = {key: hint for key, hint in own.items() if key not in ("gradient", "betas")}
    return hints | {key: shared[key] for key in _SHARED}


def _value(text: str, key: str, value: str, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        if value not in allowed:
            raise ValueError(
                f"update rule {text!r}: {key}={value!r}, expected {' or '.join(allowed)}"
            )
        return value
    if hint is bool:
        if value not in ("true", "false", "True", "False"):
            raise ValueError(f"update rule {text!r}: {key}={value!r}, expected true or false")
        return value.lower() == "true"
    try:
        return int(value) if hint is int else float(value)
    except ValueError:
        raise ValueError(f"update rule {text!r}: {key}={value!r} is no number") from None
