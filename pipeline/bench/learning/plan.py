"""The runs of the learning benchmark: which policy on which stream, and in which order.

No full factorial: delays, arrival orders and the gate are varied where they matter, on the abrupt
stream. The runs that the flat keys need come first, so that a benchmark that is interrupted has
those.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from learner.gate import GateSettings
from learner.spawning import SpawnSettings
from learner.training import TrainingSettings
from learner.updates.online_gradient import OnlineGradientSettings
from pipeline.bench.learning.worker import NUM_SPECULATIVE_TOKENS

SEEDS = (1, 2, 3, 4, 5)
"""Test seeds; what was chosen was chosen on other prompts (docs/learning.md)."""

BATCH_SIZE = 96
STEPS_PER_EVENT = 2
MEMORY_POSITIONS = 3000
REPLAY_BYTES = 32 * 2**20
LEARNING_RATE = 3e-4
DEFAULT_RATE = OnlineGradientSettings().learning_rate
"""The trainer's own, which the untuned ensemble is built around."""

PROJECTED_RATE = 0.3
FORGETFUL_POSITIONS = 500
FIXED_STEPS = (1e-4, 1e-3, 3e-3)
"""Step sizes beside the chosen one that hindsight may choose from."""

NUM_FURTHER_SEEDS = 1
"""Seeds of the runs that the keys do not need."""

STATIC = "static"
GRADIENT, OPTIMISTIC = "online gradient", "optimistic"
PLAIN_GRADIENT, PLAIN_OPTIMISTIC = "online gradient, no momentum", "optimistic, no momentum"
PROJECTED, MOMENTUM = "projected gradient", "projected momentum"
ENSEMBLE, SPAWNING, GATED = "ensemble", "ensemble + spawning", "online gradient + gate"
FORGETFUL, FORGETFUL_GATED = "forgetful", "forgetful + gate"
"""Learners that poison can harm: a long step, ten requests of memory, and no reservoir."""

AT_ONCE = "delay:0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a head learns.

    Attributes:
        rule: Update rule as text.
        gradient: Step size and guards.
        gate: Whether versions pass the gate before they serve.
        spawns: Whether heads are kept as experts.
        replays: Whether half of a batch is from a reservoir, and the memory long.
    """

    rule: str
    gradient: OnlineGradientSettings
    gate: bool = False
    spawns: bool = False
    replays: bool = True

    def settings(self, seed: int) -> TrainingSettings:
        """Return them as the trainer takes them."""
        return TrainingSettings(
            num_levels=NUM_SPECULATIVE_TOKENS,
            batch_size=BATCH_SIZE,
            steps_per_event=STEPS_PER_EVENT,
            memory_positions=MEMORY_POSITIONS if self.replays else FORGETFUL_POSITIONS,
            replay_bytes=REPLAY_BYTES if self.replays else 0,
            seed=seed,
            rule=self.rule,
            gradient=self.gradient,
            gate=GateSettings() if self.gate else None,
            experts=SpawnSettings() if self.spawns else None,
        )


def policy(name: str) -> Policy:
    """Return a policy by name; ``fixed step 0.003`` is an online gradient of that step.

    Raises:
        ValueError: If it is unknown.
    """
    step = OnlineGradientSettings(learning_rate=LEARNING_RATE)
    untuned = replace(step, learning_rate=DEFAULT_RATE)
    plain = replace(step, betas=(0.0, step.betas[1]))
    projected = replace(step, form="projected", learning_rate=PROJECTED_RATE)
    known = {
        GRADIENT: Policy(rule="online_gradient", gradient=step),
        PLAIN_GRADIENT: Policy(rule="online_gradient", gradient=plain),
        OPTIMISTIC: Policy(rule="optimistic:momentum=0.9,hint_decay=0.9", gradient=step),
        PLAIN_OPTIMISTIC: Policy(rule="optimistic", gradient=step),
        PROJECTED: Policy(rule="online_gradient", gradient=projected),
        MOMENTUM: Policy(rule="momentum", gradient=projected),
        ENSEMBLE: Policy(rule="ensemble", gradient=untuned),
        SPAWNING: Policy(rule="ensemble", gradient=untuned, spawns=True),
        GATED: Policy(rule="online_gradient", gradient=step, gate=True),
        FORGETFUL: Policy(rule="online_gradient", gradient=untuned, replays=False),
        FORGETFUL_GATED: Policy(rule="online_gradient", gradient=untuned, replays=False, gate=True),
    }
    if name.startswith(_FIXED):
        rate = float(name.removeprefix(_FIXED))
        return Policy(rule="online_gradient", gradient=replace(step, learning_rate=rate))
    if name not in known:
        raise ValueError(f"unknown policy {name!r}, expected one of: {', '.join(known)}")
    return known[name]


_FIXED = "fixed step "


def fixed_step(rate: float) -> str:
    """Return the name of the online gradient with another step size."""
    return f"{_FIXED}{rate:.2g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """One run."""

    seed: int
    stream: str
    policy: str
    order: str = AT_ONCE

    @property
    def file_name(self) -> str:
        """Name of its file in a work folder; another setting has another name."""
        digest = hashlib.sha256(repr(policy(self.policy).settings(self.seed)).encode()).hexdigest()
        text = f"{self.seed}-{self.stream}-{self.policy}-{self.order}-{digest[:8]}"
        return re.sub(r"[^A-Za-z0-9.]+", "-", text) + ".npz"


_NEEDED: Sequence[tuple[str, str, str]] = (
    ("abrupt", GRADIENT, AT_ONCE),
    ("stationary", GRADIENT, AT_ONCE),
    ("poison", GATED, AT_ONCE),
    ("poison", FORGETFUL_GATED, AT_ONCE),
    ("poison", FORGETFUL, AT_ONCE),
    ("abrupt", GRADIENT, "delay:16"),
    ("gradual", GRADIENT, AT_ONCE),
    ("gradual", OPTIMISTIC, AT_ONCE),
    ("recurring", SPAWNING, AT_ONCE),
    ("abrupt", ENSEMBLE, AT_ONCE),
    *(("abrupt", fixed_step(rate), AT_ONCE) for rate in FIXED_STEPS),
)
_FURTHER: Sequence[tuple[str, str, str]] = (
    # Long runs first: with two processes, the last run is one's alone.
    ("stationary", ENSEMBLE, AT_ONCE),
    *(("stationary", fixed_step(rate), AT_ONCE) for rate in FIXED_STEPS),
    ("abrupt", GATED, AT_ONCE),
    ("stationary", GATED, AT_ONCE),
    ("recurring", GRADIENT, AT_ONCE),
    ("poison", GRADIENT, AT_ONCE),
    ("abrupt", GRADIENT, "delay:1"),
    ("abrupt", GRADIENT, "delay:4"),
    ("abrupt", GRADIENT, "workers:2"),
    ("abrupt", GRADIENT, "workers:4"),
    ("abrupt", GRADIENT, "duplicates"),
    ("gradual", PLAIN_GRADIENT, AT_ONCE),
    ("gradual", PLAIN_OPTIMISTIC, AT_ONCE),
    ("gradual", PROJECTED, AT_ONCE),
    ("gradual", MOMENTUM, AT_ONCE),
    ("abrupt", OPTIMISTIC, AT_ONCE),
)


def planned_runs(seeds: Sequence[int], *, has_further: bool = True) -> list[RunSpec]:
    """Return all runs, those that the flat keys need first, and of them whole seeds first."""
    needed = [(seed, place) for seed in seeds for place in _NEEDED]
    some = seeds[:NUM_FURTHER_SEEDS] if has_further else ()
    further = [(seed, place) for seed in some for place in _FURTHER]
    return [
        RunSpec(seed=seed, stream=stream, policy=name, order=order)
        for seed, (stream, name, order) in [*needed, *further]
    ]
