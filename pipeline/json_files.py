"""JSON results on disk: whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.errors import KnownError


class OutputError(KnownError):
    """A result could not be written; the message names the file and the reason."""


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write one JSON object under a temporary name and rename it into place.

    Raises:
        OutputError: If the folder is missing or cannot be written.
    """
    temporary = path.with_name(f"_{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror}): name a file in a folder that exists"
        ) from error
