"""Names of the topics; ``asyncapi.yaml`` describes what travels on each."""

from __future__ import annotations

VERIFICATION_EVENTS = "draftloop.verification-events"
"""Verification events, key = stream."""

POLICIES = "draftloop.policies"
"""Published policies, compacted, key = stream."""

DRAFTER_RELEASES = "draftloop.drafter-releases"
"""Releases of drafter weights, compacted, key = drafter id."""

DEAD_LETTERS = "draftloop.dead-letters"
"""Messages that no contract admits, byte for byte, with the reason in the headers."""
