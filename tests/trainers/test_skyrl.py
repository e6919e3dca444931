"""SkyRL's FSDP workers: two real Ray actors for each role."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers import stubs, tiny
from tests.trainers.launch import run


def in_ray(function: str, folder: str, *args: Any) -> Any:
    """Call a function of `skyrl_run` in a driver with a Ray of its own."""
    import ray

    runtime = {
        "env_vars": {
            "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}",
            "SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1",
        },
        "worker_process_setup_hook": "tests.trainers.stubs.skyrl",
    }
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, runtime_env=runtime)
    try:
        stubs.skyrl()
        from tests.trainers import skyrl_run

        return getattr(skyrl_run, function)(*args)
    finally:
        ray.shutdown()


@pytest.mark.timeout(600)  # Ray's actors start one after the other
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_trains_resumes_and_sends(role: str, tmp_path: Path, installed: Callable[[str], str]) -> None:
    folder = installed("skyrl")
    path = tiny.save(tmp_path / "model")
    arguments = "train_and_resume", folder, role, path, tmp_path
    (found,) = run(in_ray, 1, *arguments, folders=[folder], timeout=550)
    for each in (*found["trained"], *found["resumed"]):
        tiny.check(each, found["start"], role)
    assert found["metrics"]["frozen_parameter_count"] == len(tiny.frozen_names())
    resumed, straight = found["weights"]
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
    for text in found["refusals"]:
        assert text.startswith("UnmatchedPatternError")
        assert "mlp.gate.weight" in text
    if role == "policy":
        sent = {name: found["sent"][name] for name in resumed}
        torch.testing.assert_close(sent, resumed, rtol=0, atol=0)
