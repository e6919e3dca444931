"""What trainers ask for and a CPU does not have, each with its reason. Call in a rank, never in pytest."""

from typing import Any


def accelerate_fsdp() -> None:
    """accelerate takes its FSDP plugin only where the ranks have accelerators."""
    from accelerate.state import DistributedType, PartialState

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
