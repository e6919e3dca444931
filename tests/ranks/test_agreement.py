"""Ranks that agree: the same counts or the same error on each of them, and none left waiting."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import frozen_opt
from frozen_opt.ranks import agreement
from tests.ranks.launch import run_ranks

LIMIT = 30  # seconds; a rank that waits for ever fails the test


class Stage(nn.Module):
    """One layer of a model that is spread over ranks, under its number in the whole model."""

    def __init__(self, number: int, *, last: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(4, 4)})
        if last:
            self.head = nn.Linear(4, 2)


def stage() -> Stage:
    rank = dist.get_rank()
    return Stage(rank, last=rank == dist.get_world_size() - 1)


def flags(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def build(model: nn.Module, patterns: list[str]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(frozen_opt.trainable_parameters(model), weight_decay=0.1)


decorated = frozen_opt.with_freezing("policy", patterns=lambda arguments: arguments["patterns"])(build)


def outcome(call: Callable[[], Any], model: nn.Module) -> tuple[str, str]:
    """The error of a call that must leave model and memory as they were: its class, its text."""
    before = flags(model)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    assert flags(model) == before
    assert frozen_opt.report("policy").parameter_count == 0
    return type(caught.value).__name__, str(caught.value)


def on_the_last_stage() -> Any:
    model = stage()
    decorated(model, ["head.*", "layers.1.*", "layers.0.bias", "!layers.1.bias"])
    report = frozen_opt.report("policy")
    mine = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return report.names, report.element_count, dict(report.matches), mine


def test_what_only_one_rank_holds_is_frozen_there_and_counted_everywhere() -> None:
    names = ("layers.0.bias", "layers.1.weight", "head.weight", "head.bias")
    matches = {"head.*": 2, "layers.1.*": 2, "layers.0.bias": 1, "!layers.1.bias": 1}
    everywhere = (names, 4 + 16 + 8 + 2, matches)
    first, second, third = run_ranks(on_the_last_stage, 3, timeout=LIMIT)
    assert first == (*everywhere, ["layers.0.bias"])
    assert second == (*everywhere, ["layers.1.weight"])
    assert third == (*everywhere, ["head.weight", "head.bias"])


def nowhere() -> Any:
    model = stage()
    return outcome(lambda: decorated(model, ["layers.0.bias", "layers.1.wieght", "hed.weight"]), model)


def test_what_matches_nowhere_is_the_same_error_everywhere() -> None:
    first, second = run_ranks(nowhere, 2, timeout=LIMIT)
    assert first == second
    kind, text = first
    assert kind == "UnmatchedPatternError"
    assert "'hed.weight' matches no parameter; the closest names: head.weight" in text  # rank 1's name
    assert (
        "'layers.1.wieght' matches no parameter; the closest names: layers.0.weight, layers.1.weight" in text
    )
    assert "'layers.0.bias'" not in text.partition(": ")[2]


def different_lists() -> Any:
    model = stage()
    patterns = ["layers.*.bias"] if dist.get_rank() < 2 else ["layers.*.weight"]
    role = "policy" if dist.get_rank() < 2 else "critic"
    return [
        outcome(lambda: decorated(model, patterns), model),
        outcome(lambda: frozen_opt.freeze_parameters(model, ["layers.*.bias"], role=role), model),
    ]


def test_different_lists_and_different_roles_are_refused() -> None:
    outcomes = run_ranks(different_lists, 3, timeout=LIMIT)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    (kind, lists), (other_kind, roles) = outcomes[0]
    assert kind == other_kind == "FreezeConfigError"
    assert "rank 0 has role 'policy' with ['layers.*.bias']" in lists
    assert "rank 2 has role 'policy' with ['layers.*.weight']" in lists
    assert "rank 2 has role 'critic' with ['layers.*.bias']" in roles
    assert "Every rank must read the same config" in roles


def failing_on_one() -> Any:
    model = stage()
    held = []

    @frozen_opt.with_freezing("policy", patterns=["layers.*.bias"])
    def fail(model: nn.Module) -> Any:
        held.append(flags(model))
        if dist.get_rank() == 1:
            raise ValueError("no memory left")
        return build(model, [])

    found = [outcome(lambda: fail(model), model)]
    assert not all(held[0])  # frozen while the factory ran
    decorated(model, ["layers.*.bias"])  # the ranks are still in step
    assert frozen_opt.report("policy").parameter_count == 3
    return found


def test_a_factory_that_fails_on_one_rank_is_rolled_back_on_all() -> None:
    first, failed, third = run_ranks(failing_on_one, 3, timeout=LIMIT)
    assert failed == [("ValueError", "no memory left")]
    assert first == third
    kind, text = first[0]
    assert kind == "FreezingError"
    assert "role 'policy': rank 1 failed with ValueError: no memory left" in text
    assert "Every rank has put back the requires_grad flags" in text


def caught_on_one() -> Any:
    model = stage()

    @frozen_opt.with_freezing("policy", patterns=["layers.*.bias"])
    def naive(model: nn.Module) -> Any:
        parameters = model.parameters() if dist.get_rank() == 1 else frozen_opt.trainable_parameters(model)
        return torch.optim.AdamW(parameters)

    broken: Any = model if dist.get_rank() == 0 else "no model"
    return [
        outcome(lambda: naive(model), model),
        outcome(lambda: frozen_opt.freeze_parameters(broken, ["layers.*.bias"], role="policy"), model),
    ]


def test_what_one_rank_is_refused_all_are_refused() -> None:
    first, second = run_ranks(caught_on_one, 2, timeout=LIMIT)
    assert first == second
    (kind, text), (other_kind, other_text) = first
    assert kind == "FrozenParameterInOptimizerError"
    assert "holds 1 frozen parameters: layers.1.bias" in text
    assert other_kind == "UnsupportedBackendError"
    assert "can't freeze parameters of a str" in other_text


def idle_rank() -> Any:
    model = stage()
    return outcome(lambda: decorated(model, ["layers.1.*", "head.*"]), model)


def test_case_07_a_rank_with_nothing_left_to_train_is_named() -> None:
    # Without the refusal rank 1 fails alone, and late: "ValueError: optimizer got an empty parameter list".
    # (Take `stuck` out of plan.make_plan.)
    first, second = run_ranks(idle_rank, 2, timeout=LIMIT)
    assert first == second
    kind, text = first
    assert kind == "NothingTrainableError"
    assert "rank 1: role 'policy', patterns ['layers.1.*', 'head.*']: nothing is left to train" in text


def two_groups() -> Any:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, rank = pairs[dist.get_rank() // 2], dist.get_rank() % 2
    role = ("policy", "critic")[dist.get_rank() // 2]
    model = Stage(rank, last=rank == 1)
    frozen_opt.freeze_parameters(model, ["layers.1.weight"], role=role, group=pair)
    found = [frozen_opt.metrics()]
    patterns = ["layers.0.bias"] if dist.get_rank() < 3 else ["layers.1.bias"]
    if role == "critic":  # the others have no part in it, and do not wait
        with pytest.raises(frozen_opt.FreezeConfigError, match=r"rank 2 has role .*rank 3 has role"):
            frozen_opt.freeze_parameters(model, patterns, role=role, group=pair)

    @frozen_opt.with_freezing(role, patterns=["layers.*.bias"], group=pair)
    def fail(model: nn.Module) -> Any:
        if dist.get_rank() == 3:
            raise ValueError("on purpose")
        return build(model, [])

    if role == "critic":
        before = flags(model)
        with pytest.raises(Exception, match=r"on purpose") as caught:
            fail(model)
        found.append(str(caught.value))
        assert flags(model) == before
    return found


def test_a_group_agrees_by_itself() -> None:
    policy, critic = "policy/frozen_{}_count", "critic/frozen_{}_count"
    found = run_ranks(two_groups, 4, timeout=LIMIT)
    assert found[0] == found[1] == [{policy.format("parameter"): 1, policy.format("element"): 16}]
    assert found[2][0] == found[3][0] == {critic.format("parameter"): 1, critic.format("element"): 16}
    assert found[3][1] == "on purpose"
    assert "rank 3 failed with ValueError: on purpose" in found[2][1]


class Collectives(TorchDispatchMode):
    """Every collective of torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


def counted() -> Any:
    def replica() -> nn.Module:
        return nn.ModuleDict({f"a_rather_long_name_{index}": nn.Linear(2, 2) for index in range(200)})

    def call() -> None:
        decorated(replica(), [])
        decorated(replica(), ["*.bias"])
        frozen_opt.plan_freezing(replica(), ["*.weight"], role="policy")
        decorated(stage(), ["layers.*.bias"])
        with pytest.raises(frozen_opt.UnmatchedPatternError):
            decorated(stage(), ["nowhere"])
        with pytest.raises(frozen_opt.FrozenParameterInOptimizerError):
            frozen_opt.with_freezing("critic", patterns=["layers.*.bias"])(
                lambda model: torch.optim.SGD(model.parameters())
            )(stage())

    store = dist.distributed_c10d._get_default_store()
    with Collectives() as collectives:
        for _ in range(8):
            call()
            frozen_opt.reset()
    counts = []
    for _ in range(3):
        call()
        dist.barrier()  # the last rank of a call deletes what it left
        counts.append(store.num_keys())
        dist.barrier()
    return collectives.seen, counts


def test_no_collective_and_nothing_piles_up_in_the_store() -> None:
    for collectives, counts in run_ranks(counted, 3, timeout=LIMIT):
        assert collectives == []
        assert len(set(counts)) == 1


def failing_inside_a_collective() -> tuple[float, str, str, bool]:
    model = stage()
    shared = torch.full((3,), float(dist.get_rank()))

    @frozen_opt.with_freezing("policy", patterns=["layers.*.bias"])
    def load(model: nn.Module) -> torch.optim.Optimizer:
        if dist.get_rank() == 0:
            raise MemoryError("no memory left on this rank")
        dist.broadcast(shared, 0)  # as FSDP2's loading of a full state does
        return build(model, [])

    before, start = flags(model), time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011
        load(model)
    seconds = time.monotonic() - start
    if dist.get_rank() == 0:
        time.sleep(2)
        dist.broadcast(shared, 0)  # a launcher would end the others
    return seconds, type(caught.value).__name__, str(caught.value), flags(model) == before


def test_case_22_a_rank_that_fails_waits_for_nobody() -> None:
    failed, waited = run_ranks(failing_inside_a_collective, 2, timeout=LIMIT)
    assert failed[0] < waited[0] < 5
    assert failed[1:] == ("MemoryError", "no memory left on this rank", True)
    assert waited[1] == "FreezingError"
    assert "rank 0 failed with MemoryError: no memory left on this rank" in waited[2]
    assert waited[3]


def both_fail() -> tuple[str, str, list[str]]:
    @frozen_opt.with_freezing("policy", patterns=["layers.*.bias"])
    def load(model: nn.Module) -> torch.optim.Optimizer:
        if dist.get_rank() == 1:
            time.sleep(1)
        raise ValueError(f"on rank {dist.get_rank()}")

    with pytest.raises(ValueError, match="on rank") as caught:
        load(stage())
    return type(caught.value).__name__, str(caught.value), getattr(caught.value, "__notes__", [])


def test_case_22_each_rank_raises_its_own_and_names_the_first() -> None:
    first, second = run_ranks(both_fail, 2, timeout=LIMIT)
    assert first == ("ValueError", "on rank 0", [])
    assert second[:2] == ("ValueError", "on rank 1")
    assert "Before that: role 'policy': rank 0 failed with ValueError: on rank 0" in second[2][0]


def empty_on_one_rank(first: bool) -> tuple[float, str]:
    model, empty = stage(), (dist.get_rank() == 0) == first
    if empty:
        start = time.monotonic()
        decorated(model, [])
        seconds = time.monotonic() - start
        time.sleep(1)
        return seconds, ""
    time.sleep(0.5 * first)
    start = time.monotonic()
    kind, text = outcome(lambda: decorated(model, ["layers.*.bias"]), model)
    return time.monotonic() - start, f"{kind}: {text}"


@pytest.mark.parametrize("first", [True, False])
def test_case_22_an_empty_list_on_one_rank_alone_is_an_error_on_the_others(first: bool) -> None:
    results = run_ranks(empty_on_one_rank, 2, first, timeout=LIMIT)
    (waited, nothing), (seconds, text) = results if first else results[::-1]
    assert waited < 5
    assert nothing == ""
    assert seconds < 5
    other = 0 if first else 1
    assert text == (
        f"FreezeConfigError: role 'policy': the list of rank {other} is empty, and that of rank "
        f"{1 - other} is ['layers.*.bias']. Every rank must read the same config"
    )


def no_call_on_one_rank() -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        time.sleep(4)
        return ""
    dist.distributed_c10d._get_process_group_store(group).set_timeout(timedelta(seconds=2))
    with pytest.raises(frozen_opt.FreezingError) as caught:
        frozen_opt.freeze_parameters(stage(), ["layers.*.bias"], role="policy", group=group)
    return str(caught.value)


def test_a_rank_that_never_calls_is_waited_for_as_long_as_the_group_waits() -> None:
    text, _ = run_ranks(no_call_on_one_rank, 2, timeout=LIMIT)
    assert re.search(r"rank 0 waited 2 s for the others. Every rank of the group must call", text)


def malformed_on_one_rank(how: str) -> tuple[str, str]:
    model, here = stage(), dist.get_rank() == 1
    if how == "list":
        patterns: Any = "*.bias" if here else ["*.bias"]
        return outcome(lambda: frozen_opt.freeze_parameters(model, patterns, role="policy"), model)
    if how == "config":
        config = None if here else {"trainer": {"policy": {"freeze_parameters": ["*.bias"]}}}
        from_config = frozen_opt.with_freezing("policy")(lambda model, config: build(model, []))
        return outcome(lambda: from_config(model, config), model)

    @frozen_opt.with_freezing("policy", patterns=["*.bias"])
    def leaving(model: nn.Module) -> torch.optim.Optimizer:
        if here:
            raise SystemExit("bad lr")
        return build(model, [])

    before = flags(model)
    try:
        leaving(model)
    except (SystemExit, frozen_opt.FreezingError) as error:
        assert flags(model) == before
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("how", "classes", "says"),
    [
        ("list", ["FreezeConfigError"] * 2, "must be a list of patterns"),
        ("config", ["FreezeConfigError"] * 2, "no config in this call"),
        ("exit", ["FreezingError", "SystemExit"], "bad lr"),
    ],
)
def test_what_one_rank_cannot_even_begin_with_stops_all(how: str, classes: list[str], says: str) -> None:
    results = run_ranks(malformed_on_one_rank, 2, how, timeout=LIMIT)
    assert [name for name, _ in results] == classes
    assert all(says in text for _, text in results)


def another_shape_on_one_rank() -> tuple[str, str]:
    model = nn.Sequential(nn.Linear(4, 4 + dist.get_rank()), nn.LayerNorm(4))
    return outcome(lambda: frozen_opt.freeze_parameters(model, ["0.weight"], role="policy"), model)


def test_ranks_that_hold_different_models_are_told() -> None:
    results = run_ranks(another_shape_on_one_rank, 2, timeout=LIMIT)
    assert results[0] == results[1]
    assert results[0][0] == "FreezeConfigError"
    assert "0.weight has 16 elements on one rank and 20 on another" in results[0][1]


def without_a_store() -> str:
    def no_store(group: Any) -> Any:
        raise KeyError(group)

    agreement._get_process_group_store = no_store
    model = stage()
    decorated(model, [])
    kind, text = outcome(lambda: decorated(model, ["layers.*.bias"]), model)
    return f"{kind}: {text}"


def test_a_group_without_a_store_is_refused_unless_nothing_is_frozen() -> None:
    for text in run_ranks(without_a_store, 2, timeout=LIMIT):
        assert text.startswith("UnsupportedBackendError: this process group (gloo) has no store")
