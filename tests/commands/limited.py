"""Run the command line in a process of its own that has little time and little memory."""

import multiprocessing
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CPU_SECONDS = 20
MEMORY = 2 << 30
"""Bytes beyond what the imports take."""

_processes = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "tests.commands.limited",
    "omegaconf",
    "frozen_opt.commands.preview",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
]


class Ended(NamedTuple):
    """How the command ended; the code is negative where a limit has killed it."""

    code: int
    out: str
    err: str


def run_limited(arguments: Sequence[str], cpu_seconds: int = CPU_SECONDS, memory: int = MEMORY) -> Ended:
    """`frozen-opt` with these arguments, within limits that the kernel enforces."""
    _processes.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        process = _processes.Process(target=_run, args=(arguments, files, cpu_seconds, memory))
        process.start()
        process.join(10 * cpu_seconds)  # it might wait for something, which takes no CPU
        if process.exitcode is None:
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
        return Ended(code, *(file.read_text(errors="replace") if file.exists() else "" for file in files))


def _run(arguments: Sequence[str], files: Sequence[Path], cpu_seconds: int, memory: int) -> None:
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_seconds,) * 2)
    code = 99
    try:
        from frozen_opt.cli import main

        code = main(list(arguments))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
