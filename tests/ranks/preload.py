"""What the ranks import, for the fork server to import once.

The server itself passes over an ImportError, so that each rank would import everything anew and run out of
time, and dies of any other, of which a test sees a closed pipe. Here the ranks get the error to raise.
"""

import importlib
import traceback

from tests.ranks.old_torch import complete_fsdp2

complete_fsdp2()
error = ""
try:
    for name in (
        "torch.distributed.fsdp",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "deepspeed",
        "frozen_opt.decorator",
        "tests.ranks.megatron_preload",
    ):
        importlib.import_module(name)
except BaseException:
    error = traceback.format_exc()
