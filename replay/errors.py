"""The one error with which replay refuses a log."""

from __future__ import annotations

from schemas.errors import KnownError


class ReplayError(KnownError):
    """A log cannot be replayed; the message is one line that names the thing and the cure."""
