"""Python's garbage collector is paused while a freeze is planned and recorded, and only then."""

import gc
from collections.abc import Callable
from unittest import mock

import pytest
from torch import nn

import frozen_opt
from frozen_opt.planning import freeze_plan, local
from tests.models import transformer


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("make", "error"),
    [(transformer, None), (lambda: nn.Sequential(nn.LazyLinear(2)), frozen_opt.UnsupportedBackendError)],
)
def test_the_collector_is_paused_and_then_as_it_was(
    enabled: bool, make: Callable[[], nn.Module], error: type[Exception] | None
) -> None:
    paused = []

    def spy(function: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **kwargs: (paused.append(not gc.isenabled()), function(*args, **kwargs))[1]

    (gc.enable if enabled else gc.disable)()
    try:
        with (
            mock.patch.object(local, "choose_backend", spy(local.choose_backend)),
            mock.patch.object(local, "_refuse_lazy", spy(local._refuse_lazy)),
            mock.patch.object(freeze_plan, "log", spy(freeze_plan.log)),
        ):
            if error is None:
                frozen_opt.freeze_parameters(make(), ["*norm.weight"], role="policy")
            else:
                with pytest.raises(error):
                    frozen_opt.freeze_parameters(make(), ["*weight"], role="policy")
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert paused == [True] * (3 if error is None else 1)
