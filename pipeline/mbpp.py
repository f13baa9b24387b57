"""Read the prompts of MBPP (a JSON array of objects with ``prompt``), for benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.prompts import PromptsError


def read_mbpp(path: Path) -> list[str]:
    """Return the prompts in the order of the file.

    Raises:
        PromptsError: If the file is missing or of another shape.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [str(entry["prompt"]) for entry in entries]
    except OSError as error:
        raise PromptsError(
            f"{path}: {error.strerror}: name the sanitized MBPP file with --prompts"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise PromptsError(f"{path}: not a JSON array of objects with a prompt: {error}") from error
