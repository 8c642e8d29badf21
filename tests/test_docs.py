"""What the documentation says is there: links, presets, experiments, and commands that compose."""

import re
import shlex
from pathlib import Path

import pytest

from experiments.launch import notebook as _cells
from moejax import LLM, EngineConfig, ParallelConfig, QuantConfig, SamplingParams, notebook
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.opening.foreign import EQUIVALENTS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRESETS = {
    path.stem for group in ("experiment", "scenario") for path in (ROOT / "configs" / group).glob("*.yaml")
}
EXPERIMENT_PAGES = sorted((ROOT / "docs" / "experiments").glob("*.md"))
# Commands over runs, files and servers that only a reader has, and flags of the command line.
OF_THE_READERS = re.compile(
    r"DATE_TIME|FILE|TRACE|A B|outputs/|routing=|=ME|hydra\.|url=|person.json|venv/bin|hf_transformers|"
    r"experiments\.\w+ -m | --"
)


def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line in a fenced block that starts an experiment; a command's first page."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [
                (page.name, re.sub(r"\s+# .*$", "", line.strip()))
                for line in lines
                if re.match(r"\s*(\.venv/bin/)?python -m experiments\.", line)
            ]
    first = {command: page for page, command in reversed(found)}
    return [(page, command) for command, page in first.items()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            wrong.append(target)
    assert wrong == []


def test_presets_that_are_named_exist_and_all_are_named() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"\b(?:experiment|scenario)=(\w+)", text)) - {"NAME"}
    assert named - PRESETS == set()
    assert PRESETS - named - set(re.findall(r"`(\w+)`", text)) == set()


def test_every_experiment_is_in_the_index() -> None:
    index = "\n".join(page.read_text() for page in [ROOT / "docs" / "experiments.md", *EXPERIMENT_PAGES])
    assert [name for name in _cells.names() if f"python -m experiments.{name}" not in index] == []


def test_every_page_has_its_parts() -> None:
    index = (ROOT / "docs" / "experiments.md").read_text()
    for page in EXPERIMENT_PAGES:
        text = page.read_text()
        assert f"(experiments/{page.name})" in index
        assert re.search(r"^\*\*.+[?.]\*\*$", text, re.MULTILINE | re.DOTALL), f"{page.name} asks no question"
        assert "python -m experiments." in text


@pytest.mark.parametrize(
    ("page", "command"), [pair for pair in commands() if not OF_THE_READERS.search(pair[1])]
)
def test_commands_compose(page: str, command: str) -> None:
    _, _, module, *overrides = shlex.split(command)
    try:
        notebook.load_config(overrides, module.removeprefix("experiments."))
    except ConfigError as error:
        if "this is a sweep" not in str(error):
            raise


# -- coming from vLLM ------------------------------------------------------------------------------------


def vllm_rows(title: str) -> list[tuple[list[str], str]]:
    """(vLLM's names, what the page says of them) of the rows below a heading."""
    part = (ROOT / "docs" / "coming-from-vllm.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ", 1) for line in part.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(\w+)=?`", names), said) for names, said in rows]


def test_vllms_keywords_are_refused_with_what_the_page_says() -> None:
    rows = vllm_rows("LLM's keywords")
    assert {name for names, _ in rows for name in names} == EQUIVALENTS.keys()
    for (name,), said in rows:
        with pytest.raises(ConfigError) as caught:
            LLM("tiny", **{name: 1})
        assert str(caught.value) == f"LLM({name}=) is vLLM's; here it is {said.replace('`', '')}"
    with pytest.raises(ConfigError, match=r"LLM: unknown keyword 'paralel'; did you mean 'parallel'\?"):
        LLM("tiny", paralel=None)
    # Every keyword, field and method that an equivalent names is there.
    text = " ".join(EQUIVALENTS.values())
    for cls in (ParallelConfig, EngineConfig, QuantConfig):
        for field in re.findall(rf"{cls.__name__}\((\w+)=", text):
            assert field in cls.__dataclass_fields__
    assert all(hasattr(LLM, name) for name in re.findall(r"LLM\.(\w+)", text))


@pytest.mark.parametrize("title", ["SamplingParams", "Methods"])
def test_what_is_said_of_vllms_parameters_and_methods(title: str) -> None:
    there = SamplingParams.__dataclass_fields__ if title == "SamplingParams" else dir(LLM)
    for names, said in vllm_rows(title):
        assert said.startswith(("the same", "other", "not there"))
        in_place = not said.startswith(("not there", "other: a function"))
        assert [name in there for name in names] == [in_place] * len(names)
    if title == "SamplingParams":
        with pytest.raises(RequestError, match="SamplingParams: unknown keyword 'logits_processors'"):
            SamplingParams(logits_processors=[])  # type: ignore[call-arg]


@pytest.mark.slow
def test_the_first_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "coming-from-vllm.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
