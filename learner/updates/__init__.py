"""How drafter weights move: one file per rule behind the contract of ``rule``."""

DEFAULT_RULE = "online_gradient"
"""The rule of drafters that name none."""
