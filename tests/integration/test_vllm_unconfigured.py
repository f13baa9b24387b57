"""A vLLM that has the package installed and does not name it, and one that it was taken out of."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.integration import vllm_stress
from tests.integration.vllm_engines import PYTHON, needs_vllm, run_engine
from tests.integration.vllm_requests import save_tiny_target, stress_requests

NAME = "draftloop"
PROGRAM = "tests.integration.vllm_stress"
NUM_REQUESTS = 24
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}

pytestmark = needs_vllm


def site_packages() -> Path:
    found = subprocess.run(
        [str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(found.stdout.strip())


def environment_without(name: str, folder: Path) -> Path:
    """Make vLLM's environment once more, by links, without a package; return its interpreter."""
    source = site_packages()
    target = folder / "lib" / source.parent.name / "site-packages"
    target.mkdir(parents=True)
    for one in source.iterdir():
        if name not in one.name:
            (target / one.name).symlink_to(one)
    config = source.parents[2] / "pyvenv.cfg"
    (folder / "pyvenv.cfg").write_text(config.read_text(encoding="utf-8"), encoding="utf-8")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(PYTHON.resolve())
    return python


def test_without_the_line_vllm_is_what_it_is_without_the_package(
    tmp_path: Path, smollm2: Path
) -> None:
    target = tmp_path / "target"
    save_tiny_target(target, smollm2)
    requests = [one for one in stress_requests(NUM_REQUESTS, seed=7) if one.temperature == 0.0]
    job = {
        "model": str(target),
        "engine": ENGINE,
        "num_running": 6,
        "requests": [one.as_json() for one in requests],
    }
    installed, _ = run_engine(PROGRAM, job, tmp_path / "installed", None)
    python = environment_without(NAME, tmp_path / "environment")
    listed = subprocess.run(
        [str(python), "-c", LIST], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert json.loads(listed.stdout) == {"has_package": False, "has_modules": False}
    programs = tmp_path / "programs"
    program = programs.joinpath(*PROGRAM.split(".")).with_suffix(".py")
    program.parent.mkdir(parents=True)
    shutil.copy(vllm_stress.__file__, program)
    removed, _ = run_engine(
        PROGRAM,
        job,
        tmp_path / "removed",
        None,
        python=python,
        environment={"PYTHONPATH": str(programs)},
    )
    assert installed["own_modules"] == removed["own_modules"] == []
    assert installed["outputs"] == removed["outputs"]


LIST = """
import importlib.metadata, importlib.util, json
names = {one.name for one in importlib.metadata.distributions()}
print(json.dumps({"has_package": "draftloop" in names,
                  "has_modules": importlib.util.find_spec("inference") is not None}))
"""
