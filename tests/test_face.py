"""The public face: complete, the same for a type checker, and free of cost until a name is asked for."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import frozen_opt


def imported_by(code: str) -> set[str]:
    """The packages that a new process has imported once it has run this."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import frozen_opt",
        "import frozen_opt.plugin",
        "from frozen_opt.cli import main; main(['--help'])",
        "from frozen_opt.cli import main; main(['preview', '--help'])",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    heavy = {"torch", "wrapt", "loguru", "transformers", "omegaconf"}
    assert not heavy & imported_by(code)
    assert "torch" in imported_by("import frozen_opt; frozen_opt.report")


def test_every_name_is_there_and_no_other() -> None:
    for name in frozen_opt.__all__:
        assert getattr(frozen_opt, name).__name__ == name
    assert set(frozen_opt.__all__) <= set(dir(frozen_opt))
    with pytest.raises(AttributeError, match="'frozen_opt' has no attribute 'freeze'"):
        _ = frozen_opt.freeze


def test_no_module_takes_the_place_of_a_function() -> None:
    folder = Path(frozen_opt.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir()}
    assert not modules & set(frozen_opt.__all__)


def test_a_type_checker_sees_the_same_names_in_the_same_places() -> None:
    tree = ast.parse(Path(frozen_opt.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == sorted(frozen_opt.__all__)
    for name, module in seen.items():
        assert getattr(importlib.import_module(str(module)), str(name)) is getattr(frozen_opt, str(name))
