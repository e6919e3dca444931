"""Run a function on several real ranks (gloo, CPU), and get what each returned.

The processes come from one fork server that has imported the heavy packages once, so a rank starts in a
fraction of a second. They meet through a file, have a time limit, and never outlive the call.
"""

import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.ranks.preload"])


@cache
def build_extensions() -> None:
    """Build what DeepSpeed would build on the ranks, outside of their time limit.

    Where it is built already this takes seconds; what is there may be another version's.
    """
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])  # of tests/conftest.py
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "building"):
        script = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as b; b().load(verbose=False)"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Call `function(*args)` on each rank, with the default process group up.

    Args:
        function: A module-level function. Its result must pickle.
        world_size: How many ranks.
        args: The same arguments for each rank.
        timeout: Seconds until every rank must have returned.

    Returns:
        The results in the order of ranks.

    Raises:
        AssertionError: A rank raised, died or did not return in time; all are dead by then.
    """
    build_extensions()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _processes.Process(target=_rank, args=(function, rank, world_size, folder, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            # A rank that fails would leave the others waiting for it.
            while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
                if any(process.exitcode for process in ranks):
                    time.sleep(1)  # others may have something to say as well
                    break
                time.sleep(0.02)
            late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        failures = [
            f"--- rank {rank}\n{path.read_text()}"
            for rank in range(world_size)
            if (path := Path(folder, f"error{rank}")).exists()
        ]
        assert not failures, "\n".join(failures)
        assert not late, f"ranks {late} did not return within {timeout} s"
        assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(world_size)]


def _rank(function: Callable[..., Any], rank: int, world_size: int, folder: str, args: Any) -> None:
    import torch
    import torch.distributed as dist

    from tests.ranks import preload

    if preload.error:
        Path(folder, f"error{rank}").write_text(f"what ranks import failed to\n{preload.error}")
        os._exit(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        result = function(*args)
        Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()  # no rank goes while another still talks to it
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)
    # Interpreter shutdown with live gloo threads can hang; everything is written.
    os._exit(0)
