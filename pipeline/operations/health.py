"""``draftloop health SERVICE``: asks a running service whether it does its work."""

from __future__ import annotations

import urllib.error
import urllib.request

from pipeline.configuration.settings import Settings
from pipeline.locks import LockError, only_one
from pipeline.operations.services import SCHEDULER, health_url
from schemas.errors import KnownError

MOST_SECONDS = 5.0


class NotHealthyError(KnownError):
    """A service does not do its work; the message says what was asked."""


def check_health(name: str, settings: Settings) -> str:
    """Return what a healthy service said, in a few words.

    Raises:
        NotHealthyError: If it does not answer, is not ready, or one of its loops stands still.
    """
    if name == SCHEDULER.name and not settings.metrics.scheduler_port:
        return _check_lock(name, settings)
    try:
        url = health_url(name, settings)
    except KeyError as error:
        raise NotHealthyError(f"health: {error.args[0]}") from error
    try:
        with urllib.request.urlopen(url, timeout=MOST_SECONDS):
            return f"{name} is well"
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(1000).decode(errors="replace").strip()
        raise NotHealthyError(f"{name}: {url} says {error.code}: {said}") from error
    except (urllib.error.URLError, OSError) as error:
        raise NotHealthyError(f"{name}: {url} does not say that it is well: {error}") from error


def _check_lock(name: str, settings: Settings) -> str:
    """Return that a service runs, which answers on no port but holds its lock while it does."""
    try:
        with only_one(settings.data, name, cure=""):
            pass
    except LockError:
        return f"{name} is well"
    raise NotHealthyError(f"{name}: none runs on {settings.data}")
