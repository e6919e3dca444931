"""Freeze chosen parameters of a model by config, before its optimizer is built, and prove it.

Imports nothing until a name is asked for: not even torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frozen_opt.backends.base import Backend as Backend
    from frozen_opt.backends.registry import register_backend as register_backend
    from frozen_opt.config import read_patterns as read_patterns
    from frozen_opt.decorator import with_freezing as with_freezing
    from frozen_opt.errors import (
        FreezeConfigError as FreezeConfigError,
    )
    from frozen_opt.errors import (
        FreezingError as FreezingError,
    )
    from frozen_opt.errors import (
        FrozenParameterChangedError as FrozenParameterChangedError,
    )
    from frozen_opt.errors import (
        FrozenParameterInOptimizerError as FrozenParameterInOptimizerError,
    )
    from frozen_opt.errors import (
        NothingTrainableError as NothingTrainableError,
    )
    from frozen_opt.errors import (
        ResumeMismatchError as ResumeMismatchError,
    )
    from frozen_opt.errors import (
        UnmatchedPatternError as UnmatchedPatternError,
    )
    from frozen_opt.errors import (
        UnsupportedBackendError as UnsupportedBackendError,
    )
    from frozen_opt.guards.migration import migrate_optimizer_state as migrate_optimizer_state
    from frozen_opt.hook import freezing_hook as freezing_hook
    from frozen_opt.matching.wrappers import register_wrapper as register_wrapper
    from frozen_opt.parameters import (
        named_parameters as named_parameters,
    )
    from frozen_opt.parameters import (
        trainable_named_parameters as trainable_named_parameters,
    )
    from frozen_opt.parameters import (
        trainable_parameters as trainable_parameters,
    )
    from frozen_opt.patching import decorate as decorate
    from frozen_opt.plan import (
        freeze_parameters as freeze_parameters,
    )
    from frozen_opt.plan import (
        plan_freezing as plan_freezing,
    )
    from frozen_opt.planning.freeze_plan import FreezePlan as FreezePlan
    from frozen_opt.reports.freeze_report import FreezeReport as FreezeReport
    from frozen_opt.reports.remembered import (
        metrics as metrics,
    )
    from frozen_opt.reports.remembered import (
        report as report,
    )
    from frozen_opt.reports.remembered import (
        reset as reset,
    )

_HOMES = {
    "backends.base": ["Backend"],
    "backends.registry": ["register_backend"],
    "config": ["read_patterns"],
    "decorator": ["with_freezing"],
    "errors": [
        "FreezeConfigError",
        "FreezingError",
        "FrozenParameterChangedError",
        "FrozenParameterInOptimizerError",
        "NothingTrainableError",
        "ResumeMismatchError",
        "UnmatchedPatternError",
        "UnsupportedBackendError",
    ],
    "guards.migration": ["migrate_optimizer_state"],
    "hook": ["freezing_hook"],
    "matching.wrappers": ["register_wrapper"],
    "parameters": ["named_parameters", "trainable_named_parameters", "trainable_parameters"],
    "patching": ["decorate"],
    "plan": ["freeze_parameters", "plan_freezing"],
    "planning.freeze_plan": ["FreezePlan"],
    "reports.freeze_report": ["FreezeReport"],
    "reports.remembered": ["metrics", "report", "reset"],
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
