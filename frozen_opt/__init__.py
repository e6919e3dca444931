"""Freeze chosen parameters of a model by config, before its optimizer is built, and prove it."""

from frozen_opt.backends import Backend, register_backend
from frozen_opt.config import read_patterns
from frozen_opt.decorator import with_freezing
from frozen_opt.errors import (
    FreezeConfigError,
    FreezingError,
    FrozenParameterChangedError,
    FrozenParameterInOptimizerError,
    NothingTrainableError,
    ResumeMismatchError,
    UnmatchedPatternError,
    UnsupportedBackendError,
)
from frozen_opt.hook import freezing_hook
from frozen_opt.migration import migrate_optimizer_state
from frozen_opt.names import (
    named_parameters,
    register_wrapper,
    trainable_named_parameters,
    trainable_parameters,
)
from frozen_opt.patching import decorate
from frozen_opt.plan import FreezePlan, freeze_parameters, plan_freezing
from frozen_opt.report import FreezeReport, metrics, report, reset

__all__ = [
    "Backend",
    "FreezeConfigError",
    "FreezePlan",
    "FreezeReport",
    "FreezingError",
    "FrozenParameterChangedError",
    "FrozenParameterInOptimizerError",
    "NothingTrainableError",
    "ResumeMismatchError",
    "UnmatchedPatternError",
    "UnsupportedBackendError",
    "decorate",
    "freeze_parameters",
    "freezing_hook",
    "metrics",
    "migrate_optimizer_state",
    "named_parameters",
    "plan_freezing",
    "read_patterns",
    "register_backend",
    "register_wrapper",
    "report",
    "reset",
    "trainable_named_parameters",
    "trainable_parameters",
    "with_freezing",
]
