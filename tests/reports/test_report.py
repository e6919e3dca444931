"""Reports, metrics and the log."""

import gc
from typing import Any

import torch
from torch import nn

import frozen_opt
from frozen_opt import with_freezing
from frozen_opt.parameters import trainable_parameters
from frozen_opt.reports.remembered import frozen_so_far, optimizers_elsewhere
from tests.models import transformer


def test_one_record_a_role_with_everything_in_it(logs: list[Any]) -> None:
    model = transformer(tied=True)
    report = frozen_opt.freeze_parameters(model, ["*.gate.weight", "head.weight"], role="policy")
    (record,) = logs
    assert record["level"].name == "INFO"
    assert record["message"] == (
        "policy: froze 3 parameters (120 elements, backend torch): embedding.weight, "
        "layers.0.mlp.gate.weight, layers.1.mlp.gate.weight; embedding.weight is tied to head.weight"
    )
    assert record["extra"] == {
        "role": "policy",
        "backend": "torch",
        "patterns": ["*.gate.weight", "head.weight"],
        "names": list(report.names),
        "ties": {"embedding.weight": ["head.weight"]},
        "mapped": {},
        "untied": {},
        "thawed": [],
        "policy/frozen_parameter_count": 3,
        "policy/frozen_element_count": 120,
    }


def test_above_a_hundred_names_the_text_folds_and_the_data_does_not(logs: list[Any]) -> None:
    frozen_opt.freeze_parameters(transformer(layers=51), ["*.experts.*"], role="policy")
    (record,) = logs
    assert record["message"].endswith(": layers.{0..50}.mlp.experts.{0..1}.weight")
    assert len(record["extra"]["names"]) == 102


def test_a_hook_and_then_a_decorated_factory_log_and_count_once(logs: list[Any]) -> None:
    model, patterns = transformer(), ["*.gate.weight"]
    assert frozen_opt.freezing_hook("policy", patterns)(model) is model
    chunks = [model]
    assert frozen_opt.freezing_hook("policy", patterns)(chunks) is chunks
    first = frozen_opt.report("policy")

    @frozen_opt.with_freezing("policy", patterns=patterns)
    def factory(model: Any) -> Any:
        return torch.optim.SGD(trainable_parameters(model))

    factory(model)
    assert [record["level"].name for record in logs] == ["INFO"]
    assert frozen_opt.report("policy") == first
    assert frozen_opt.metrics()["policy/frozen_parameter_count"] == 2


def test_another_freeze_of_the_role_is_logged_again(logs: list[Any]) -> None:
    frozen_opt.freeze_parameters(transformer(), ["*.gate.weight"], role="policy")
    frozen_opt.freeze_parameters(transformer(), ["head.weight"], role="policy")
    assert len(logs) == 2
    assert frozen_opt.report("policy").names == ("head.weight",)


def test_case_28_metrics_have_the_roles_that_called_and_never_lack_a_key() -> None:
    none = {"policy/frozen_parameter_count": 0, "policy/frozen_element_count": 0}
    assert frozen_opt.metrics() == none
    assert frozen_opt.metrics("critic") == {"frozen_parameter_count": 0, "frozen_element_count": 0}
    assert frozen_opt.report("critic").parameter_count == 0
    frozen_opt.freeze_parameters(transformer(), ["head.weight"], role="policy")
    assert frozen_opt.metrics() == {"policy/frozen_parameter_count": 1, "policy/frozen_element_count": 88}
    frozen_opt.freeze_parameters(transformer(), [], role="critic")
    assert frozen_opt.metrics()["critic/frozen_parameter_count"] == 0
    assert frozen_opt.metrics("policy") == {"frozen_parameter_count": 1, "frozen_element_count": 88}
    frozen_opt.reset()
    assert frozen_opt.metrics() == none


def test_case_40_calling_again_and_again_adds_nothing_to_the_memory() -> None:
    model = transformer()

    def remembered(calls: int) -> tuple[int, int]:
        for _ in range(calls):
            frozen_opt.freeze_parameters(model, ["*.mlp.*"], role="policy")
            with_freezing("critic", patterns=[])(lambda model: torch.optim.SGD(model.parameters()))(
                nn.Linear(1, 1)
            )
        gc.collect()  # optimizers hold themselves by the hooks of torch
        return sum(1 for _ in frozen_so_far()), sum(1 for _ in optimizers_elsewhere("policy"))

    assert remembered(1) == remembered(50) == (6, 0)


def test_a_model_that_is_gone_leaves_the_memory() -> None:
    frozen_opt.freeze_parameters(transformer(), ["head.weight"], role="policy")
    gc.collect()
    assert not list(frozen_so_far())
    frozen_opt.freeze_parameters(transformer(), [], role="policy")
    assert frozen_opt.metrics("policy")["frozen_parameter_count"] == 0


def test_another_model_of_the_role_is_logged_as_well(logs: list[Any]) -> None:
    models = [transformer(), transformer()]
    for model in [*models, models[1]]:
        frozen_opt.freeze_parameters(model, ["head.weight"], role="policy")
    assert [record["message"].split(" (")[0] for record in logs] == ["policy: froze 1 parameter"] * 2
