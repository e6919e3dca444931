"""YAML as OmegaConf reads it, whoever wrote it: within limits, and errors give place and remedy."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frozen_opt.commands.bad_input import BadInput, first_line
from frozen_opt.commands.safetensors_header import open_file

_MAX_BYTES = 1 << 18
_MAX_NODES = 50_000
_MAX_DEPTH = 50
"""Real configs have up to some thousand nodes, ten deep."""
_MAX_TEXT = 1 << 20
"""Characters that its texts may have once their `${...}` are replaced."""


def read_config(path: Path) -> Any:
    """The config in a YAML file, as `OmegaConf.load` gives it to a trainer.

    Raises:
        BadInput: There is no such file, it is no YAML, or it is larger or deeper than any config.
    """
    try:
        from omegaconf import OmegaConf
    except ModuleNotFoundError as error:
        raise BadInput(f"--config needs {error.name}: pip install 'frozen_opt[demo]'") from error
    with open_file(path) as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise BadInput(f"{path} is too large for a config: {_MAX_BYTES:,} bytes at most are read")
    text = ""
    try:
        text = content.decode()
        check_size(text)
        config = OmegaConf.load(io.StringIO(text))
        if isinstance(config, Mapping):
            check_interpolations(OmegaConf.to_container(config, resolve=False))
    except Exception as error:  # of YAML, of OmegaConf, of Python on numbers and nesting
        raise BadInput(f"{path} is no config: {explain(error, text)}") from None
    if not isinstance(config, Mapping) or not config.keys():
        raise BadInput(f"{path} is no config: it must hold keys and values")
    return config


def check_size(text: str) -> None:
    """Refuse YAML whose nodes, aliases written out, are too many or too deep, before they are made.

    Raises:
        ValueError: They are.
        yaml.YAMLError: It is no YAML.
    """
    import yaml

    sizes: dict[str, tuple[int, int]] = {}  # anchor -> nodes, depth
    above: list[tuple[str | None, int, int]] = [(None, 0, 0)]  # anchor, nodes so far, depth so far
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            above.append((event.anchor, 1, 1))
            nodes, depth = 0, len(above)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, nodes, depth = above.pop()
            sizes |= {anchor: (nodes, depth)} if anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in [anchor for anchor, *_ in above]:
                raise ValueError(f"&{event.anchor} refers to itself")
            nodes, depth = sizes.get(event.anchor, (1, 1))
        elif isinstance(event, yaml.ScalarEvent):
            nodes, depth = 1 + 5 * len(event.value) * ("${" in event.value), 1  # OmegaConf parses these
            sizes |= {event.anchor: (nodes, depth)} if event.anchor else {}
        else:
            continue
        anchor, others, deepest = above[-1]
        above[-1] = (anchor, others + nodes, max(deepest, depth + 1))
        if above[-1][1] > _MAX_NODES or above[-1][2] + len(above) > _MAX_DEPTH:
            raise ValueError(
                f"it is too large: more than {_MAX_NODES:,} nodes, or more than {_MAX_DEPTH} deep"
            )


def check_interpolations(config: Any) -> None:
    """Refuse `${...}` that would write out too much, as by doubling a text time and again.

    Args:
        config: Plain dicts and lists, nothing in them resolved yet.

    Raises:
        ValueError: They would.
    """
    texts: dict[_Path, str] = {}
    children: dict[_Path, list[_Path]] = {}
    sizes: dict[_Path, int] = {}

    def collect(node: Any, path: _Path) -> None:
        if isinstance(node, dict | list):
            parts = dict(enumerate(node)) if isinstance(node, list) else node
            children[path] = [(*path, str(key)) for key in parts]
            for key, part in parts.items():
                collect(part, (*path, str(key)))
        else:
            texts[path] = str(node)

    def size(path: _Path) -> int:
        if path not in sizes:
            sizes[path] = 0  # a circle, of which OmegaConf tells
            text = texts.get(path, "")
            parts = [*children.get(path, ()), *(_references(text, path) if "${" in text else ())]
            sizes[path] = len(text) + sum(map(size, parts))
            if sizes[path] > _MAX_TEXT:
                raise ValueError(f"its ${{...}} write out more than {_MAX_TEXT:,} characters")
        return sizes[path]

    collect(config, ())
    size(())


_Path = tuple[str, ...]


def _references(text: str, path: _Path) -> list[_Path]:
    """Whatever in a text may be the path of another node, from the root or, after dots, from this one."""
    places = []
    for word in re.findall(r"[\w.\[\]-]+", text):
        keys = word.lstrip(".")
        above = path[: -(len(word) - len(keys))] if word != keys else ()
        places.append((*above, *re.findall(r"[^.\[\]]+", keys)))
    return places


_UNQUOTED = re.compile(
    r"(?<![^\s\[,{])[*!&%@`]"  # in the place of a value
    r"|[\[{][^\s\[\]{}]*[\]}](?=[^\s,\]}])"  # [01].weight
    r"|(?<=[\w.*?])[\[{]"  # layers.[01]
)
_BEGINS = {"*": "an alias", "!": "a tag", "[": "a list", "{": "a mapping", "&": "an anchor"}


def explain(error: Exception, text: str) -> str:
    """What is wrong with YAML, with line and column, and the remedy where a pattern stands unquoted.

    Args:
        error: What reading it raised.
        text: The YAML.
    """
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return first_line(error)
    problem = str(getattr(error, "problem", None))
    if not re.search("duplicate|recursive|limit|supported", problem):
        lines = text.split("\n")
        start = (getattr(error, "context_mark", None) or mark).line
        for number in dict.fromkeys([mark.line, *range(start, min(mark.line, start + 100))]):
            line = lines[number] if number < len(lines) else ""
            quoted = r'"(?:\\.|[^"\\])*"|\'[^\']*\'|(?<!\S)#.*'
            if match := _UNQUOTED.search(re.sub(quoted, lambda match: " " * len(match[0]), line)):
                sign = match[0][0]
                return (
                    f"line {number + 1}, column {match.start() + 1}: without quotes {sign} begins "
                    f"{_BEGINS.get(sign, 'no value')} in YAML. Quote each pattern, as in "
                    '["*.mlp.gate.weight", "!lm_head.*"]'
                )
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
