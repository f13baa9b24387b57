"""What every test stands on: no network, one thread, and the real target where one is asked for."""

from __future__ import annotations

import os
from pathlib import Path

# Read when the libraries are first imported, so set before any test module is. Two spinning
# threads on a shared two-core machine are slower than one.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import HealthCheck, settings

from inference import model_files

# A busy machine is not a failure of the code: nothing here is a timed test.
settings.register_profile("draftloop", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("draftloop")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of the real target (mark the test ``real_model``)."""
    cache = os.environ.get("DRAFTLOOP_CACHE")
    return model_files.smollm2_folder(Path(cache) if cache else None)
