"""The one error with which replay refuses a log."""

from __future__ import annotations


class ReplayError(Exception):
    """A log cannot be replayed; the message is one line that names the thing and the cure."""
