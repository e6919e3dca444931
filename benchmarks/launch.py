"""Real ranks for benchmarks: processes with a gloo group, on this machine."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # all of this runs on the CPU, whatever the machine has

# One server imports what takes long, once; ranks are forked from it.
multiprocessing.set_forkserver_preload(
    [
        "deepspeed",
        "matplotlib.figure",
        "torch.distributed.fsdp",
        "torch_optimizer",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "typer",
        "frozen_opt",
    ]
)


def run_ranks(function: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """Call a module-level function on each rank, and return what each returned, in the order of ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            _rank, (count, store.port, folder, function, arguments), nprocs=count, start_method="forkserver"
        )
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(count)]


def _rank(
    rank: int, count: int, port: int, folder: str, function: Callable[..., Any], arguments: Any
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch and DeepSpeed about themselves; they would hide the progress
    logging.disable(logging.WARNING)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=120))
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        result = function(*arguments)
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()  # no rank goes while another still talks to it
    os._exit(0)  # interpreter shutdown with live gloo threads can hang
