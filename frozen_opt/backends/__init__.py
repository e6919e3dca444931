"""The training backends, a file each: all that frozen_opt knows of torch, FSDP, DeepSpeed and Megatron.

`base` says what is asked of a backend, `registry` which of them a model belongs to.
"""

from frozen_opt.backends.deepspeed import DeepSpeedBackend
from frozen_opt.backends.fsdp import FSDPBackend
from frozen_opt.backends.megatron import MegatronBackend
from frozen_opt.backends.plain import TorchBackend
from frozen_opt.backends.registry import build_in

build_in(MegatronBackend(), DeepSpeedBackend(), FSDPBackend(), TorchBackend())
