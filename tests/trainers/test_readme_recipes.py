"""README's recipes are what the tests run: each line that it changes is one of a patch, or of a test."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "README.md").read_text()
DIFFS = "".join(re.findall(r"^```diff\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE))
PATCHES = "".join(path.read_text() for path in sorted((HERE / "patches").glob("*.patch")))


@pytest.mark.parametrize("line", [line for line in DIFFS.splitlines() if line[0] in "+-"])
def test_a_changed_line_is_in_a_patch(line: str) -> None:
    if "torchtitan" in line:
        assert "OptimizersContainer.__init__" in (HERE / "torchtitan_run.py").read_text()
    else:
        assert line in PATCHES.splitlines()


@pytest.mark.parametrize("patch", ["marinskyrl", "skyrl", "verl"])
def test_the_table_counts_the_lines_of_a_patch(patch: str) -> None:
    (row,) = re.findall(rf"^\|[^|]*\|([^|]*)\| `tests/trainers/patches/{patch}\.patch`", TEXT, re.MULTILINE)
    added = re.findall(r"^\+(?!\+\+ )", (HERE / "patches" / f"{patch}.patch").read_text(), re.MULTILINE)
    once = re.sub(r"5 for all of them:", "", row)
    assert sum(map(int, re.findall(r"\d+", once))) == len(added)
