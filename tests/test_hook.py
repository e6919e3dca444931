"""The pre-wrap hook, called with the whole model, or chunk by chunk."""

from typing import Any

import pytest
import torch
from torch import nn

import frozen_opt
from frozen_opt import UnmatchedPatternError, freezing_hook, with_freezing


def chunk(number: int) -> nn.Module:
    return nn.ModuleDict(
        {part: nn.ModuleDict({str(number): nn.Linear(2, 2)}) for part in ("layers", "other")}
    )


def test_case_31_chunks_that_come_one_by_one_are_one_model() -> None:
    hook = freezing_hook("policy", ["layers.0.*", "layers.1.weight"])
    chunks = [chunk(0), chunk(1)]
    for each in chunks:
        assert (
            hook(each, pre_process=each is chunks[0], post_process=False, config=None, hf_config=None) is each
        )
    report = frozen_opt.report("policy")
    assert report.names == ("layers.0.weight", "layers.0.bias", "layers.1.weight")
    assert frozen_opt.metrics("policy") == {"frozen_parameter_count": 3, "frozen_element_count": 10}
    frozen = [name for name, parameter in frozen_opt.named_parameters(chunks) if not parameter.requires_grad]
    assert tuple(frozen) == report.names


def test_case_31_what_matches_in_no_chunk_is_an_error_once_somebody_asks(logs: list[Any]) -> None:
    hook = freezing_hook("policy", ["layers.*", "nowhere"])
    chunks = [hook(chunk(0)), hook(chunk(1))]
    for ask in (
        lambda: frozen_opt.report("policy"),
        frozen_opt.metrics,
        lambda: with_freezing("policy", patterns=["layers.*", "nowhere"])(
            lambda model: torch.optim.SGD(frozen_opt.trainable_parameters(model))
        )(chunks),
    ):
        with pytest.raises(UnmatchedPatternError, match=r"role 'policy': 'nowhere' matches no parameter"):
            ask()
    with pytest.raises(UnmatchedPatternError):  # a list is the whole model
        hook([chunk(0), chunk(1)])


def test_case_31_the_next_model_begins_anew() -> None:
    hook = freezing_hook("policy", ["layers.*"])
    first = [hook(chunk(0)), hook(chunk(1))]
    second = [hook(chunk(0)), hook(chunk(1))]
    assert frozen_opt.report("policy").parameter_count == 4
    for model in (first, second):
        frozen = [p for _, p in frozen_opt.named_parameters(model) if not p.requires_grad]
        assert len(frozen) == 4


def test_a_chunk_of_which_all_is_frozen_is_no_error_yet() -> None:
    hook = freezing_hook("policy", ["*.0.*", "layers.1.*"])
    hook(chunk(0))
    hook(chunk(1))
    assert frozen_opt.report("policy").parameter_count == 6
