"""FSDP2 of torch 2.6 on a CPU, where it lacks what newer ones have: it was made for GPUs alone."""

from typing import Any

import torch

from tests.versions import TORCH_2_6


def complete_fsdp2() -> None:
    """Make this process's torch run FSDP2 on the CPU, if it is 2.6."""
    if not TORCH_2_6:
        return
    torch.cpu.Stream.record_event = lambda _: torch.cpu.Event()  # there is nothing to wait for
    torch.cpu.Stream.wait_event = lambda *_: None
    torch.cuda.current_stream = torch.cpu.current_stream
    split = torch.split_with_sizes_copy

    def split_with_sizes_copy(*args: Any, out: Any = None, **more: Any) -> Any:
        """As the GPU's, this does not count as a change of `out`, which autograd would refuse."""
        versions = [tensor._version for tensor in out or ()]
        result = split(*args, out=out, **more)
        for tensor, version in zip(out or (), versions, strict=True):
            torch._C._autograd._unsafe_set_version_counter(tensor, version)
        return result

    torch.split_with_sizes_copy = split_with_sizes_copy
