"""Every notebook is committed without outputs, and its cells only call the library.

`make test-slow` executes them too, each in a kernel of its own: `pytest --nbmake notebooks`.
"""

import ast
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PLAIN = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
LOGIC = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.NamedExpr)
MOST_LINES = 20

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


def logic(source: str) -> list[str]:
    """What of a cell is more than imports, calls and names for their results; nothing where all is well."""
    tree = ast.parse(source)
    found = [type(node).__name__ for node in tree.body if not isinstance(node, PLAIN)]
    found += [type(node).__name__ for node in ast.walk(tree) if isinstance(node, LOGIC)]
    return found + (["more than a few lines"] if len(source.splitlines()) > MOST_LINES else [])


def test_the_seven_are_there() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06", "07"]


@each_notebook
def test_notebook_has_no_outputs(path: Path) -> None:
    content = json.loads(path.read_text())
    assert content["nbformat"] == 4
    assert not [c for c in content["cells"] if c.get("outputs") or c.get("execution_count")]


@each_notebook
def test_cells_only_call_the_library(path: Path) -> None:
    assert [found for source in cells(path, "code") if (found := logic(source))] == []


@each_notebook
def test_text_leads_and_its_links_lead_somewhere(path: Path) -> None:
    assert json.loads(path.read_text())["cells"][0]["cell_type"] == "markdown"
    texts = cells(path, "markdown")
    assert texts[0].startswith("# ")
    links = [target for text in texts for target in re.findall(r"\]\(([^)#:]+)\)", text)]
    assert [target for target in links if not (FOLDER / target).exists()] == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    pass",
        "for x in y:\n    f(x)",
        "if a:\n    f()",
        "with a:\n    f()",
        "x += 1",
        "[f(x) for x in y]",
        "g(lambda x: x)",
        "class A: ...",
        "f()\n" * 21,
    ],
)
def test_logic_is_found(source: str) -> None:
    assert logic(source)


def test_calls_are_no_logic() -> None:
    assert not logic("import moejax\nllm = moejax.LLM('tiny')\nllm.stats()['running']")
