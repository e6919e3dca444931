"""Buffers that move though the part of the model that they belong to is frozen, by what the code does.

No optimizer moves them. A forward does, which its source tells, or a hook (spectral norm), or the trainer
(a router's load-balancing bias).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from frozen_opt.errors import listing
from frozen_opt.matching.names import Found, Walk

_STATISTICS = (
    "the running statistics of {modules} are buffers, and still move in training mode though the parameters "
    "are frozen: call .eval() on these modules if they must stay as well"
)
_POWER = (
    "the spectral norm of {modules} still moves its buffers in training mode, and with them the weight, "
    "though the parameters are frozen: call .eval() on these modules if it must stay as well"
)
# Without modules, so that pipeline stages say the same, and it is logged once.
_BALANCING = (
    "the load-balancing buffers {buffers} of the frozen routers are not covered: they are updated outside "
    "the optimizer. Set the rate to 0 if they must stay as well (moe_router_bias_update_rate=0 on Megatron, "
    "load_balance_coeff=None on torchtitan)"
)
_OTHER = (
    "the buffers {names} are moved by forward, though the parameters there are frozen: call .eval() on their "
    "modules if that stops it and they must stay as well, else put them back after each step"
)


def moving_buffers(walk: Walk, matched: Sequence[Found]) -> list[str]:
    """A sentence on each kind of buffers that move in what `matched` freezes, with the remedy."""
    moving = [(prefix, module, names) for prefix, module in walk.buffered if (names := _moving(module))]
    if not moving:
        return []
    parents = {
        id(child): module
        for chunk in walk.chunks
        for module in chunk.modules()
        for child in module.children()
    }
    frozen = {id(found.parameter) for found in matched}
    kinds: dict[str, list[tuple[str, str]]] = {}
    for prefix, module, names in moving:
        for name, kind in names.items():
            if all(_is_frozen(part, parents, frozen) for part in _concerned(module, kind)):
                kinds.setdefault(kind, []).append((prefix, name))
    return [
        kind.format(
            modules=listing(sorted({prefix.rstrip(".") or "the model" for prefix, _ in buffers})),
            buffers=listing(sorted({name for _, name in buffers})),
            names=listing(sorted(prefix + name for prefix, name in buffers)),
        )
        for kind, buffers in sorted(kinds.items())
    ]


def _moving(module: nn.Module) -> dict[str, str]:
    """The buffers of a module that move and are saved with the model, and how it will be said."""
    saved = {
        name
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    if not saved:
        return {}
    kinds = dict.fromkeys(saved & _written_by_forward(type(module)), _OTHER)  # type: ignore[arg-type]
    if isinstance(module, _NormBase):
        kinds = dict.fromkeys(saved, _STATISTICS) if module.track_running_stats else {}
    if isinstance(module, _SpectralNorm):
        kinds = dict.fromkeys(kinds, _POWER)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            kinds |= dict.fromkeys(saved & {f"{hook.name}_u", f"{hook.name}_v"}, _POWER)
    balancing = [name for name in saved if "expert_bias" in name or (name in kinds and "expert" in name)]
    return kinds | dict.fromkeys(balancing, _BALANCING)


def _concerned(module: nn.Module, kind: str) -> list[nn.Module]:
    """The modules that are to be frozen for it to surprise: what balances experts belongs to the router."""
    routers = [child for name, child in module.named_children() if name in ("router", "gate")]
    return routers if kind == _BALANCING and routers else [module]


def _is_frozen(module: nn.Module, parents: Mapping[int, nn.Module], frozen: set[int]) -> bool:
    """Is all of it frozen, some of it by this list? Of what has no parameters, the part that it stands in."""
    while not (parameters := list(module.parameters())) and id(module) in parents:
        module = parents[id(module)]
    ids = set(map(id, parameters))
    return not ids.isdisjoint(frozen) and all(not p.requires_grad or id(p) in frozen for p in parameters)


@lru_cache(maxsize=256)
def _written_by_forward(kind: type[nn.Module]) -> set[str]:
    """The attributes that `forward`, and the methods that it calls, assign or change in place."""
    written: set[str] = set()
    pending, seen = deque(["forward"]), {"forward"}
    while pending:
        for function in _sources(kind, pending.popleft()):
            writes = _Writes(function)
            written |= writes.written
            pending.extend(writes.called - seen)
            seen |= writes.called
    return written


def _sources(kind: type[nn.Module], name: str) -> Iterator[ast.FunctionDef]:
    """The method of this name, and those of base classes that it calls by `super()`."""
    for cls in kind.__mro__:
        if cls is nn.Module:
            return
        member = inspect.unwrap(vars(cls)[name]) if callable(vars(cls).get(name)) else None
        if member is None:
            continue
        try:
            (function,) = ast.parse(textwrap.dedent(inspect.getsource(member))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # no source: built in, or typed at a prompt
            return
        if not isinstance(function, ast.FunctionDef):
            return
        yield function
        if not any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(function)):
            return


class _Writes(ast.NodeVisitor):
    """What a method does to the attributes of its object."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.written: set[str] = set()
        self.called: set[str] = set()
        arguments = [*function.args.posonlyargs, *function.args.args]
        self._own = arguments[0].arg if arguments else ""
        self.visit(function)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assigned(target, node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assigned(node.target, None)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Name) and function.value.id == self._own:
                self.called.add(name)
            elif name.endswith("_") and not name.endswith("__"):
                self._write(function.value)
        if name in ("batch_norm", "instance_norm") or name.endswith("_") or "inplace" in name:
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                self._write(argument)
        for keyword in node.keywords:
            if keyword.arg == "out":
                self._write(keyword.value)
        self.generic_visit(node)

    def _assigned(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._assigned(part, None)
            return
        # `self.x = self.x.to(device)` moves it to another place, and no value.
        moved = isinstance(value, ast.Call) and getattr(value.func, "attr", "") in ("to", "type_as")
        if not (moved and value is not None and self._attribute(value) == self._attribute(target)):
            self._write(target)

    def _write(self, expression: ast.expr) -> None:
        if attribute := self._attribute(expression):
            self.written.add(attribute)

    def _attribute(self, expression: Any) -> str | None:
        """`x` of `self.x`, `self.x[0]`, `self.x.data.view(-1)`."""
        while isinstance(expression, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
            inner = expression.func if isinstance(expression, ast.Call) else expression.value
            if isinstance(expression, ast.Attribute) and getattr(inner, "id", None) == self._own:
                return expression.attr
            expression = inner
        return None
