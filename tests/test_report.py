"""Reports, metrics and the log."""

from typing import Any

import pytest

import frozen_opt
from frozen_opt.names import trainable_parameters
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
        import torch

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


def test_metrics_have_the_roles_that_called() -> None:
    assert frozen_opt.metrics() == {}
    frozen_opt.freeze_parameters(transformer(), ["head.weight"], role="policy")
    assert frozen_opt.metrics() == {"policy/frozen_parameter_count": 1, "policy/frozen_element_count": 88}
    frozen_opt.freeze_parameters(transformer(), [], role="critic")
    assert frozen_opt.metrics()["critic/frozen_parameter_count"] == 0
    frozen_opt.reset()
    assert frozen_opt.metrics() == {}
    with pytest.raises(KeyError, match="nothing was frozen for role 'policy'"):
        frozen_opt.report("policy")


def test_another_model_of_the_role_is_logged_as_well(logs: list[Any]) -> None:
    models = [transformer(), transformer()]
    for model in [*models, models[1]]:
        frozen_opt.freeze_parameters(model, ["head.weight"], role="policy")
    assert [record["message"].split(" (")[0] for record in logs] == ["policy: froze 1 parameter"] * 2
