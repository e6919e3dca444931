"""Where patterns come from: every kind of config, and never a list overlooked."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import omegaconf
import pydantic
import pytest
from omegaconf import OmegaConf

from frozen_opt import FreezeConfigError, read_patterns

PATTERNS = ["*.mlp.gate.weight"]


@dataclass
class Role:
    freeze_parameters: list[str] = field(default_factory=lambda: list(PATTERNS))


class Settings(pydantic.BaseModel):
    freeze_parameters: list[str] = PATTERNS


def kinds_of(node: dict[str, Any]) -> dict[str, Any]:
    return {
        "mapping": {"trainer": {"policy": node}},
        "omegaconf": OmegaConf.create({"trainer": {"policy": node}}),
        "namespace": SimpleNamespace(trainer=SimpleNamespace(policy=SimpleNamespace(**node))),
        "mixed": SimpleNamespace(trainer={"policy": OmegaConf.create(node)}),
        "role at the top": {"policy": node},
        "the role's node itself": node,
    }


@pytest.mark.parametrize("kind", kinds_of({}))
def test_every_kind_of_config_gives_the_list(kind: str) -> None:
    config = kinds_of({"freeze_parameters": PATTERNS})[kind]
    assert read_patterns(config, "policy") == PATTERNS


def test_dataclasses_and_pydantic_models() -> None:
    assert read_patterns(SimpleNamespace(trainer=SimpleNamespace(policy=Role())), "policy") == PATTERNS
    assert read_patterns({"trainer": {"policy": Settings()}}, "policy") == PATTERNS


@pytest.mark.parametrize("kind", kinds_of({}))
@pytest.mark.parametrize(
    "node", [{"optimizer_config": {"lr": 1}}, {"freeze_parameters": None}, {"freeze_parameters": []}]
)
def test_a_node_without_patterns_means_none(kind: str, node: dict[str, Any]) -> None:
    assert read_patterns(kinds_of(node)[kind], "policy") == []


def test_roles_do_not_mix() -> None:
    config = {"trainer": {"policy": {"freeze_parameters": PATTERNS}, "critic": {"lr": 1}}}
    assert read_patterns(config, "critic") == []


def test_trainer_comes_first() -> None:
    config = {"trainer": {"policy": {"freeze_parameters": ["a"]}}, "policy": {"freeze_parameters": ["b"]}}
    assert read_patterns(config, "policy") == ["a"]


@pytest.mark.parametrize(
    "config",
    [
        {"lr": 1e-3, "weight_decay": 0.1},
        {"trainer": {"policy": {"freeze_parameters": PATTERNS}}},
        {"trainer": {"critic": None}},
        SimpleNamespace(lr=1e-3),
        "critic",
        7,
    ],
)
def test_a_role_that_cannot_be_found_is_an_error(config: object) -> None:
    with pytest.raises(FreezeConfigError, match=r"no settings for role 'critic'.*trainer\.critic"):
        read_patterns(config, "critic")


def test_a_mandatory_value_that_was_never_given_is_not_taken_for_empty() -> None:
    config = OmegaConf.create({"trainer": {"policy": {"freeze_parameters": "???"}}})
    with pytest.raises(omegaconf.errors.MissingMandatoryValue):
        read_patterns(config, "policy")


def test_a_broken_interpolation_is_not_taken_for_empty() -> None:
    config = OmegaConf.create({"trainer": {"policy": {"freeze_parameters": "${mistyped}"}}})
    with pytest.raises(omegaconf.errors.InterpolationKeyError):
        read_patterns(config, "policy")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"trainer": {"policy": {"freeze_params": PATTERNS}}}, "has freeze_params, which is not read"),
        (
            {"trainer": {"policy": {"frozen_parameters": PATTERNS}}},
            "has frozen_parameters, which is not read",
        ),
        (SimpleNamespace(policy=SimpleNamespace(freeze_parameter=PATTERNS)), "has freeze_parameter, which"),
        ({"trainer": {"policy": {"lr": 1}, "freeze_parameters": PATTERNS}}, "stands in trainer, where"),
        ({"trainer": {"policy": {"lr": 1}}, "policy": {"freeze_parameters": PATTERNS}}, "stands in policy,"),
        ({"policy": {"lr": 1}, "freeze_parameters": PATTERNS}, "stands in the config itself, where"),
        (
            {"trainer": {"policy": {"optimizer_config": {"freeze_parameters": PATTERNS}}}},
            r"stands in trainer\.policy\.optimizer_config, where it is not read",
        ),
    ],
)
def test_a_list_that_is_not_read_is_an_error(config: Any, says: str) -> None:
    with pytest.raises(FreezeConfigError, match=says):
        read_patterns(config, "policy")


@pytest.mark.parametrize(
    "key",
    ["freeze", "freeze_params", "freeze_patterns", "freeze_modules", "freeze_layers", "freeze_module_pattern",
     "frozen_params", "frozen_parameters", "trainable_parameters", "Freeze_Layers"],
)  # fmt: skip
@pytest.mark.parametrize("beside", [{}, {"freeze_parameters": []}, {"freeze_parameters": ["a"]}])
def test_case_26_keys_that_look_like_it_are_refused(key: str, beside: dict[str, Any]) -> None:
    node = {"optimizer_config": {}, key: PATTERNS, **beside}
    fields = {name: (Any, value) for name, value in node.items()}
    kinds = [
        node,
        OmegaConf.create(node),
        SimpleNamespace(**node),
        dataclasses.make_dataclass("Slots", list(node), slots=True)(**node),
        pydantic.create_model("Model", **fields)(),
        type("Class", (), node),
    ]
    for kind in kinds:
        with pytest.raises(
            FreezeConfigError, match=f"the config itself has {key}, which is not read: call it"
        ):
            read_patterns(kind, "policy")


@pytest.mark.parametrize(
    "node",
    [{"freeze_vision_tower": ["a"]}, {"freeze_layers": 0}, {"freeze": False}, {"frozen_params": []},
     {"freeze_modules": None}, {"trainable_parameters": 7}, {"trainable": ["a"]}],
)  # fmt: skip
def test_case_26_what_is_empty_or_another_s_is_left_alone(node: dict[str, Any]) -> None:
    assert read_patterns({"policy": node | {"unread": "???"}}, "policy") == []


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"trainer": {"policy": {"model": {"freeze_parameters": PATTERNS}}}}, r"trainer\.policy\.model"),
        ({"trainer": {"policy": {"freeze_parameters": [], "model": {"freeze_parameters": PATTERNS}}}},
         r"trainer\.policy\.model"),
        ({"trainer": {"policy": {"freeze_parameters": None}, "freeze_parameters": PATTERNS}}, "trainer"),
        ({"trainer": {"policy": {"lr": 1}}, "freeze_parameters": PATTERNS}, "the config itself"),
    ],
)  # fmt: skip
def test_case_26_a_list_one_level_off_is_refused(config: Any, place: str) -> None:
    for kind in (config, OmegaConf.create(config)):
        with pytest.raises(
            FreezeConfigError, match=f"freeze_parameters stands in {place}, where it is not read"
        ):
            read_patterns(kind, "policy")


@dataclasses.dataclass
class OverAttributes(Mapping):
    """As verl's BaseConfig: a mapping whose look-up of a missing key is an AttributeError."""

    lr: float = 1e-3
    freeze_parameters: list[str] = dataclasses.field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Any:
        return (field.name for field in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(dataclasses.fields(self))


def test_case_26_a_mapping_that_raises_attribute_errors() -> None:
    assert read_patterns(OverAttributes(freeze_parameters=PATTERNS), "policy") == PATTERNS
    assert read_patterns({"trainer": {"policy": OverAttributes()}}, "policy") == []


def test_a_name_in_place_of_a_node_is_no_node() -> None:
    assert read_patterns({"policy": "MlpPolicy", "freeze_parameters": PATTERNS}, "policy") == PATTERNS
    config = {"trainer": {"policy": "ppo"}, "policy": {"freeze_parameters": PATTERNS}}
    assert read_patterns(config, "policy") == PATTERNS


def test_keys_that_are_none_of_ours_are_left_alone() -> None:
    node = {"freeze_router_bias": True, "num_parameters": 3, "optimizer_config": {"lr": 1}}
    assert (
        read_patterns({"trainer": {"policy": node}, "critic": {"freeze_parameters": ["a"]}}, "policy") == []
    )
