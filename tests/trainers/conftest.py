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
    # Their dependencies want CUDA builds, and versions that exclude each other.
    "torchtitan": ["torchtitan==0.3.0", "spmd-types==0.2.3", "torch-checkpointing==0.1.1"],
    "skyrl": ["skyrl==0.4.0", "skyrl-gym==0.4.0"],
    "verl": ["verl==0.9.1"],
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
                pip += ["--ignore-requires-python", "--target", f"{folder}.part", *PACKAGES[trainer]]
                subprocess.run(pip, check=True, timeout=280)
                patch = PATCHES / f"{trainer}.patch"
                if patch.exists():
                    apply = ["git", "apply", "--unidiff-zero", str(patch)]
                    subprocess.run(apply, check=True, cwd=f"{folder}.part")
                Path(f"{folder}.part").rename(folder)
        return str(folder)

    return install
