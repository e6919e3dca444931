"""A real Ray: decorated factories freeze in actors, and the driver gets their metrics."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(600)  # Ray starts slowly where others work as well
def test_case_23_decorated_methods_freeze_in_actors_of_every_form() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # a short path: Ray's sockets lie there
        driver = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "ray_driver.py")],
            env=environment | {"RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert driver.returncode == 0, driver.stderr
    told = json.loads(driver.stdout.splitlines()[-1])
    assert len(told) == 6
    for actor, methods in told.items():
        for method, metrics in methods.items():
            role = "critic" if (actor, method) == ("@ray.remote of the script", "own") else "policy"
            assert metrics[f"{role}/frozen_parameter_count"] == 2, (actor, method)
            assert metrics[f"{role}/frozen_element_count"] == 6, (actor, method)
