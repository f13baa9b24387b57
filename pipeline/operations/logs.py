"""Logs of services: text for people or JSON lines for collectors, without prompts and keys.

Nothing here removes secrets: no code of the project logs any. A failed request is logged by the
kind of its error alone, because what an error says may quote what a user wrote.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from pipeline.configuration.server_settings import LogSettings

NOISY = ("uvicorn", "kafka", "httpx", "asyncio")
"""Loggers of libraries that are only heard when something is wrong."""


class JsonFormatter(logging.Formatter):
    """One object a line.

    Args:
        service: Named in every line.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start_logging(settings: LogSettings, service: str) -> None:
    """Write the logs of this process as the settings say."""
    handler = logging.StreamHandler()
    if settings.format == "json":
        handler.setFormatter(JsonFormatter(service))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logging.basicConfig(level=settings.level, handlers=[handler], force=True)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.root.level))
