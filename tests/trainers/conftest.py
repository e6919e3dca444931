"""Trainers that can't be installed beside the rest: without dependencies, into folders of their own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

PATCHES = Path(__file__).with_name("patches")
"""The recipes for trainers that one edits: what is applied to them."""
PACKAGES = {
    # Their dependencies want CUDA builds, and versions that exclude each other. What they import of
    # these, and is not installed, comes along.
    "torchtitan": "torchtitan==0.3.0 spmd-types==0.2.3 torch-checkpointing==0.1.1 tyro==1.0.17 typeguard "
    "docstring-parser tensorboard==2.21.0 absl-py torchdata==0.11.0",
    "skyrl": "skyrl==0.4.0 skyrl-gym==0.4.0 cloudpathlib jaxtyping wadler-lindig orjson pybase64",
    "verl": "verl==0.9.1 codetiming hydra-core orjson torchdata==0.11.0",
}


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], str]:
    """A function that installs a trainer, once for all workers, with its recipe; returns its folder."""
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent

    def install(trainer: str) -> str:
        folder = Path(shared, "trainers", trainer)
        with FileLock(f"{shared}/{trainer}.lock"):
            if not folder.exists():
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
                # SkyRL asks for Python 3.12, and runs on 3.11 with one stub.
                pip += ["--ignore-requires-python", "--target", f"{folder}.part", *PACKAGES[trainer].split()]
                subprocess.run(pip, check=True, timeout=280)
                patch = PATCHES / f"{trainer}.patch"
                if patch.exists():
                    apply = ["git", "apply", "--unidiff-zero", str(patch)]
                    subprocess.run(apply, check=True, cwd=f"{folder}.part")
                Path(f"{folder}.part").rename(folder)
        return str(folder)

    return install
