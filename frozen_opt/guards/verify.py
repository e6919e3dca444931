"""Check a freeze for as long as training runs: cheaply at each step, by checksum at each checkpoint.

With torch.distributed up, every rank must call, and all of them raise the same error. A step costs one
all-reduce of 3 integers, and a look at each module on the way to a frozen parameter.
"""

from __future__ import annotations

from frozen_opt.backends.optimizer_search import require_optimizers
from frozen_opt.errors import FrozenParameterInOptimizerError, listing
from frozen_opt.exclusion.proof import held_by, refuse_a_strangers_optimizer, refuse_copies
from frozen_opt.guards.fingerprint import compare, take_fingerprint
from frozen_opt.guards.presence import check
from frozen_opt.parameters import Model, resting_parameters
from frozen_opt.ranks.collectives import Group, together
from frozen_opt.reports.freeze_report import Fingerprint, FreezeReport


def verify(
    report: FreezeReport,
    model: Model,
    optimizer: object = None,
    *,
    fingerprint: Fingerprint | None = None,
    group: Group = None,
) -> None:
    """What `FreezeReport.verify` says."""
    if not report.patterns:
        return

    def look() -> None:
        check(report, model)
        if optimizer is not None:
            _check_optimizer(report, model, optimizer)

    together(look, report.role, report.patterns, group)
    if fingerprint is not None:
        now = take_fingerprint(report, model, group=group)
        together(lambda: compare(report, fingerprint, now), report.role, report.patterns, group)


def _check_optimizer(report: FreezeReport, model: Model, optimizer: object) -> None:
    about = f"role {report.role!r}"
    current, backend = resting_parameters(model)
    frozen = {name: current[name] for name in report.every_name if name in current}
    held = held_by(require_optimizers(optimizer))
    if caught := [name for name, parameter in frozen.items() if id(parameter) in held]:
        raise FrozenParameterInOptimizerError(
            f"{about}: the optimizer holds {listing(caught)}, which should be frozen: something called "
            "add_param_group with it, or built another optimizer. Give it "
            "frozen_opt.trainable_parameters(model)"
        )
    refuse_a_strangers_optimizer(about, held, current.values())
    refuse_copies(about, frozen, current.values(), held, backend, report._second)
