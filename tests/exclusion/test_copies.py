"""The proof by value: what an optimizer holds from outside the model has no frozen values in it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import frozen_opt
from frozen_opt import (
    Backend,
    FrozenParameterInOptimizerError,
    UnsupportedBackendError,
    register_backend,
    trainable_parameters,
    with_freezing,
)
from frozen_opt.exclusion import copies as copies_module
from frozen_opt.exclusion.search import search
from tests.models import transformer

Layout = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Net(nn.Module):
    """Two half-precision layers and a norm, as the case has it, with larger parts and constant ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4, bias=False).bfloat16()
        self.b = nn.Linear(4, 4, bias=False).bfloat16()
        self.big = nn.Linear(40, 30).bfloat16()
        self.small = nn.Linear(5, 4).bfloat16()
        self.norm = nn.LayerNorm(4)
        self.half_norm = nn.LayerNorm(20).bfloat16()
        nn.init.zeros_(self.big.bias)


class Masters(torch.optim.AdamW):
    """Steps what is laid out of fp32 copies of the half-precision parameters, and writes it back."""

    def __init__(self, chosen: list[nn.Parameter], rest: list[nn.Parameter], layout: Layout) -> None:
        self.half = chosen
        masters = [nn.Parameter(t) for t in layout([p.detach().float() for p in chosen])]
        super().__init__([*masters, *rest], lr=0.1, weight_decay=0.5)


def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([tensor.flatten() for tensor in tensors])]


def padded(tensors: list[torch.Tensor], fill: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([part for i, t in enumerate(tensors) for part in (fill(7 * i + 3), t.flatten())])]


LAYOUTS: dict[str, Layout] = {
    "one a parameter": list,
    "flat": flat,
    "flat, in another order": lambda ts: flat(ts[::-1]),
    "flat, with gaps of zeros": lambda ts: padded(ts, torch.zeros),
    "flat, with gaps of anything": lambda ts: padded(ts, torch.randn),
    "flat, in bf16": lambda ts: [flat(ts)[0].bfloat16()],
    "flat, in fp64": lambda ts: [flat(ts)[0].double()],
    "a view of a larger one": lambda ts: [torch.cat([torch.randn(5), *flat(ts), torch.randn(9)])[5:-9]],
    "every other element of a larger one": lambda ts: [flat(ts)[0].repeat_interleave(2)[::2]],
    "a matrix": lambda ts: [flat([*ts, torch.randn(-sum(t.numel() for t in ts) % 3)])[0].view(3, -1)],
    "two halves": lambda ts: list(flat(ts)[0].chunk(2)),
    "pieces of a fifth": lambda ts: list(flat(ts)[0].chunk(5)),
}


def half(model: nn.Module, *, without: tuple[str, ...] = ()) -> list[nn.Parameter]:
    named = model.named_parameters()
    return [p for name, p in named if p.dtype == torch.bfloat16 and not name.startswith(without)]


def build(model: nn.Module, layout: Layout, without: tuple[str, ...] = ()) -> Masters:
    rest = [p for p in model.parameters() if p.dtype != torch.bfloat16]
    return Masters(half(model, without=without), rest, layout)


@pytest.mark.parametrize("patterns", [["a.*"], ["big.weight"], ["a.*", "big.*", "small.weight"]], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_35_a_master_of_a_frozen_parameter_is_caught_and_one_of_the_others_is_not(
    layout: str, patterns: list[str]
) -> None:
    model = Net()
    decorate = with_freezing("policy", patterns=patterns)
    with pytest.raises(FrozenParameterInOptimizerError, match="copies of") as caught:
        decorate(lambda model: build(model, LAYOUTS[layout]))(model)
    assert all(pattern.rstrip(".*") in str(caught.value) for pattern in patterns)
    assert all(parameter.requires_grad for parameter in model.parameters())
    frozen = tuple(pattern.rstrip("*") for pattern in patterns)
    if "zeros" in layout and "big.*" in patterns:
        return  # a frozen bias of zeros, and gaps of zeros: see below
    optimizer = decorate(lambda model: build(model, LAYOUTS[layout], without=frozen))(model)
    frozen_opt.report("policy").verify(model, optimizer)


def test_case_35_a_flat_master_moves_what_is_frozen_and_verify_says_so_at_any_step() -> None:
    model = Net()
    report = frozen_opt.freeze_parameters(model, ["a.*"], role="policy")
    optimizer = build(model, flat)
    before = model.a.weight.clone()
    for _ in range(3):
        with pytest.raises(FrozenParameterInOptimizerError, match=r"copies of a\.weight"):
            report.verify(model, optimizer)
        (master,) = optimizer.param_groups[0]["params"][:1]
        master.grad = torch.randn_like(master)
        optimizer.step()
        start = 0
        for parameter in optimizer.half:
            parameter.data.copy_(master[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
    assert not torch.equal(before, model.a.weight), "the fault that the search prevents"
    report.verify(model, build(model, flat, without=("a.",)))


@pytest.mark.parametrize("seed", range(30))
def test_search_agrees_with_where_the_values_were_put(seed: int) -> None:
    """Any sizes and precisions, any order, gaps, and cuts as ranks make them."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    sizes = [number(*[(16, 40), (100, 400), (60_000, 70_000)][number(0, 3)]) for _ in range(12)]
    needles = {
        str(i): torch.randn(size, generator=generator).to(kinds[number(0, 4)]) for i, size in enumerate(sizes)
    }
    put = [i for i in needles if number(0, 2)]
    put = [put[i] for i in torch.randperm(len(put), generator=generator)]
    kind = kinds[number(0, 2)]  # not fp16, which would round bf16 values away
    parts = [torch.randn(number(0, 90), generator=generator)]
    expected: dict[str, int] = {}
    for name in put:
        expected[name] = sum(map(len, parts))
        parts += [needles[name].float(), torch.randn(number(0, 90), generator=generator)]
    whole = torch.cat(parts).to(kind)
    found, poor = search(needles, [whole])
    assert found == {name: [(0, start)] for name, start in expected.items()}
    assert not poor

    cut = number(0, len(whole))
    found, _ = search(needles, [whole[:cut]])
    for name, start in expected.items():
        held, size = min(cut - start, len(needles[name])), len(needles[name])
        if held > 33_000 or held > max(size // 4, 80):
            assert found[name] == [(0, start)]
        elif held < 16:
            assert name not in found


def test_parameters_are_found_where_ranks_have_cut_them_in_two() -> None:
    for size in (34, 100, 255, 256):
        needle = torch.randn(size)
        for cut in range(0, size, 5):
            around = [torch.randn(11), needle[:cut]], [needle[cut:], torch.randn(11)]
            assert any(search({"": needle}, [torch.cat(parts)])[0] for parts in around)


def test_a_rank_s_part_of_each_of_many_parameters_is_found() -> None:
    needles = {str(size): torch.randn(size) for size in (4096, 300_000, 1_000_000)}
    for rank in range(8):
        parts = [needle.chunk(8)[rank] for needle in needles.values()]
        found, _ = search(needles, [torch.cat([torch.randn(99), *parts])])
        assert set(found) == ({*needles} if rank in (0, 7) else {*needles} - {"4096"})


def test_a_copy_with_a_few_other_values_is_one_still() -> None:
    needle = torch.randn(1000)
    other = needle.clone()
    other[777] = other[777].nextafter(torch.tensor(9.0))
    assert search({"": needle}, [other]) == ({"": [(0, 0)]}, [])
    assert search({"": needle[:700]}, [needle[680:]]) == ({}, [])


STRUCTURED = {
    "one value": torch.ones(500),
    "an identity": torch.eye(60).flatten(),
    "a period": torch.randn(64).repeat(50),
    "zeros with a few others": torch.cat([torch.zeros(900), torch.randn(3), torch.zeros(97)]),
}


@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_values_are_found_or_said_to_tell_nothing(kind: str) -> None:
    needle = STRUCTURED[kind]
    found, poor = search({"": needle}, [torch.cat([torch.randn(65), needle, torch.randn(10)])])
    assert found == {"": [(0, 65)]} or poor == [""]
    assert search({"": needle}, [torch.randn(2000)])[0] == {}


def test_equal_values_of_a_trainable_parameter_excuse_one_copy_each() -> None:
    model = Net()
    model.b.weight.data.copy_(model.a.weight)  # as layers are that were stacked from others
    decorate = with_freezing("policy", patterns=["a.*"])
    with pytest.raises(FrozenParameterInOptimizerError, match=r"a\.weight"):
        decorate(lambda model: build(model, flat))(model)
    decorate(lambda model: build(model, flat, without=("a.",)))(model)


class Vouched(Backend):
    """What the error text advises."""

    name = "vouched"

    def recognises(self, walk: Any) -> bool:
        return False

    def optimizer_parameters(self, optimizer: Any) -> Any:
        if not isinstance(optimizer, Masters):
            return None
        return [*optimizer.half, *optimizer.param_groups[0]["params"][1:]]


@pytest.fixture
def vouching() -> Iterator[Callable[[], None]]:
    from frozen_opt.backends import registry as backends

    before = list(backends._registered)
    yield lambda: register_backend(Vouched())
    backends._registered[:] = before


@pytest.mark.parametrize(
    ("frozen", "layout", "verdict"),
    [
        ("big.bias", "flat", None),
        ("half_norm.*", "flat", None),
        ("big.bias", "flat, with gaps of anything", None),
        ("big.bias", "flat, with gaps of zeros", "big.bias may be among them"),
        ("half_norm.*", "flat, with gaps of zeros", "half_norm.bias may be among them"),
    ],
)
def test_values_that_tell_nothing_are_counted_among_masters(
    frozen: str, layout: str, verdict: str | None, vouching: Callable[[], None]
) -> None:
    model = Net()
    decorate = with_freezing("policy", patterns=[frozen])
    with pytest.raises(UnsupportedBackendError, match=r"may be among them.*register_backend"):
        decorate(lambda model: build(model, LAYOUTS[layout]))(model)
    honest = decorate(lambda model: build(model, LAYOUTS[layout], without=(frozen.rstrip("*"),)))
    if verdict is not None:
        with pytest.raises(UnsupportedBackendError, match=verdict.replace(".", r"\.")):
            honest(model)
        vouching()
    honest(model)
    frozen_opt.report("policy").verify(model, honest(model))


def test_a_new_bias_beside_the_model_is_no_master() -> None:
    model, head = transformer(), nn.Linear(8, 1)
    nn.init.zeros_(head.bias)
    model.layers[0].norm.bias = nn.Parameter(torch.zeros(1))
    decorate = with_freezing("policy", patterns=["*.norm.*"])
    decorate(lambda model: torch.optim.AdamW([*trainable_parameters(model), *head.parameters()]))(model)


def two_networks(policy: nn.Module, value: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*trainable_parameters(policy), *value.parameters()], weight_decay=0.1)


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("frozen_in_both", [False, True])
def test_case_35_a_second_network_of_equal_weights_is_told_from_masters(frozen_in_both: bool) -> None:
    policy = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    value = copy.deepcopy(policy)
    value[0].requires_grad_(not frozen_in_both)
    optimizer = with_freezing("policy", patterns=["0.*"])(lambda model: two_networks(model, value))(policy)
    report = frozen_opt.report("policy")
    for _ in range(3):
        report.verify(policy, optimizer)
        step(optimizer)
    assert torch.equal(policy[0].weight, value[0].weight) == frozen_in_both


def test_a_second_network_excuses_no_third_copy_and_no_flat_one() -> None:
    policy = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    value = copy.deepcopy(policy)
    master = policy[0].weight.detach().clone()
    for more in (master, torch.cat([master.flatten(), torch.randn(3)])):
        with pytest.raises(FrozenParameterInOptimizerError, match=r"copies of 0\.weight"):
            with_freezing("policy", patterns=["0.*"])(
                lambda model, more=more: torch.optim.AdamW(
                    [*trainable_parameters(model), *value.parameters(), nn.Parameter(more)]
                )
            )(policy)


def test_a_second_network_excuses_no_master_in_another_form_or_beside_other_masters() -> None:
    policy = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    second = copy.deepcopy(policy[1])
    flat_one = nn.Parameter(torch.cat([torch.randn(3), policy[0].weight.detach().flatten()]))
    with pytest.raises(FrozenParameterInOptimizerError, match=r"copies of 0\.weight"):
        with_freezing("policy", patterns=["0.*"])(
            lambda model: torch.optim.AdamW([*trainable_parameters(model), *second.parameters(), flat_one])
        )(policy)

    model = Net()
    model.norm.weight = nn.Parameter(torch.randn(30))
    norm = nn.Parameter(model.norm.weight.detach().clone())  # the second network's, which froze the rest
    with pytest.raises(FrozenParameterInOptimizerError, match=r"copies of a\.weight"):
        with_freezing("policy", patterns=["a.*"])(
            lambda model: Masters(half(model), [*model.norm.parameters(), norm], list)
        )(model)


def test_case_35_a_second_network_that_cant_be_told_from_masters_is_refused_with_a_way_out() -> None:
    policy = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    value = nn.Sequential(copy.deepcopy(policy[0]), nn.Linear(4, 1))  # equal only where it is frozen
    decorate = with_freezing("policy", patterns=["0.*"])
    with pytest.raises(FrozenParameterInOptimizerError, match="build its optimizer by itself"):
        decorate(lambda model: two_networks(model, value))(policy)
    optimizer = decorate(lambda model: torch.optim.AdamW(trainable_parameters(model)))(policy)
    torch.optim.AdamW(value.parameters())
    frozen_opt.report("policy").verify(policy, optimizer)


def test_nothing_is_searched_where_all_that_an_optimizer_holds_is_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def searched(*_: object, **__: object) -> Any:
        raise AssertionError

    monkeypatch.setattr(copies_module, "search", searched)
    model = transformer()
    decorate = with_freezing("policy", patterns=["head.weight"])
    optimizer = decorate(lambda model: torch.optim.AdamW(trainable_parameters(model)))(model)
    frozen_opt.report("policy").verify(model, optimizer)
    with pytest.raises(AssertionError):
        decorate(lambda model: two_networks(model, nn.Linear(3, 3)))(model)
