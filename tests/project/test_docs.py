"""README and docs/: Python blocks run, commands parse, links resolve, and every public name is described."""

import html
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

import bench.__main__
import convert
import jspec
from jspec.bundled import PAIR
from jspec.cli.app import app
from support import gguf_files, shallow
from support.places import ROOT

PAGES = {
    str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
# Pages that test_sharding.py runs on several devices, and that test_drafters.py runs.
ELSEWHERE = {"docs/sharding.md", "docs/drafters.md"}
# Pages whose blocks run with all layers of the bundled pair: the first page, and the one that names layers.
WHOLE = {"README.md", "docs/heads.md"}
COMMANDS = {"jspec": app, "python -m bench": bench.__main__.app}
HOME = r"https://(?:github|raw\.githubusercontent)\.com/jspec-project/jspec/(?:(?:blob|tree)/)?main/"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Replace the models that pages download: the bundled pair for hub models, a one-layer model for SmolLM2."""
    tiny, _ = gguf_files.model(tmp_path / "tiny.gguf", num_hidden_layers=1)
    monkeypatch.setattr("convert.hub_names.find", lambda name: tiny)
    monkeypatch.setattr("jspec.bundled.pretrained.head_of", lambda name: None)  # the head expects all layers
    monkeypatch.setattr(
        "convert.hub_download.snapshot", lambda repo_id, *_: PAIR / ("draft" if "135M" in repo_id else "target")
    )


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page not in ELSEWHERE])
def test_blocks_of_a_page_run(page, stand_ins, quick_compile, monkeypatch):
    """The blocks of a page run in order as one program, on most pages with few layers of the bundled pair."""
    if page not in WHOLE:
        monkeypatch.setattr(jspec, "demo_pair", shallow.pair)
    names = {}
    for block in blocks(page, "python"):
        exec(block, names)


def commands():
    """Yield the commands of sh blocks, one per line, and the `python -m bench` commands listed in tables."""
    for page, text in PAGES.items():
        lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
        if "| `python -m bench` ... |" in text:
            listed = re.findall(r"\| `(?!python)([^`]+)`(?: \.\.\.)? \|$", text, re.MULTILINE)
            lines += [f"python -m bench {one}" for one in listed]
        for line in lines:
            for command in re.split(r"&&| \| ", line):
                yield pytest.param(command.strip(), id=f"{page}: {command.strip()}")


@pytest.mark.parametrize("command", [*commands()])
def test_commands_parse(command, monkeypatch, tmp_path):
    """Every command parses with known options and valid values; the files it reads exist, and it is not run."""
    monkeypatch.chdir(tmp_path)
    for file in re.findall(r"\S+\.(?:jsonl|txt)", command):
        Path(file).touch()
    for folder in re.findall(r"--head (\S+)", command):
        assert (ROOT / folder).is_dir()
        Path(folder).mkdir(parents=True)
    program = next((name for name in COMMANDS if command.startswith(name)), None)
    if program is None:
        first, *others = command.split()
        assert first in ("pip", "pytest", "echo", "curl") or (first == "bash" and (ROOT / others[0]).is_file())
        return
    name, *words = shlex.split(command.removeprefix(program))
    group = typer.main.get_command(COMMANDS[program])
    group.commands[name].make_context(name, words)


def anchors(page):
    """Return the text that can follow # in links to a page."""
    titles = re.findall(r"^#+ (.+)$", PAGES[page], re.MULTILINE)
    given = re.findall(r"\{ #(\S+) \}", PAGES[page])
    return {*given, *(re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles)}


def test_tests_named_in_guarantees_exist():
    named = re.findall(r"`(tests/\S+)`", PAGES["docs/guarantees.md"])
    assert len(named) > 10
    assert not [name for name in named if not list(ROOT.glob(name))]


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    """Links to files in the repository resolve, whether they use a path or a URL."""
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for link in [*re.findall(r"\]\((\S+?)\)", text), *re.findall(r"^\[\w+\]: (\S+)$", text, re.MULTILINE)]:
        inside = re.sub(HOME, "", link)
        if "://" in inside:
            continue
        path, _, anchor = inside.partition("#")
        file = (ROOT if inside != link else (ROOT / page).parent) / (path or Path(page).name)
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(str(file.resolve().relative_to(ROOT))), link


def test_every_public_name_is_in_the_reference():
    described = [name for text in PAGES.values() for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
    assert len(described) == len(set(described))
    public = {f"{module.__name__}.{name}" for module in (jspec, convert) for name in module.__all__}
    assert public <= set(described)


def test_readme_length_and_line_width_are_limited():
    assert len(PAGES["README.md"].splitlines()) <= 120
    long = [
        (page, line)
        for page, text in PAGES.items()
        for line in text.splitlines()
        if len(line) > 120 and (page == "README.md" or not line.startswith("|"))
    ]
    assert not long


def test_citation_names_current_version():
    assert f"version = {{{jspec.__version__}}}" in PAGES["README.md"]


def test_terminal_picture_is_up_to_date(quick_compile):
    """The committed picture has the texts of a fresh run in the same order; the frame that rich draws may differ."""
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
    assert spec is not None and spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    fresh, committed = (
        [html.unescape(one) for one in re.findall(r"<text[^>]*>([^<]*)", svg)]
        for svg in (picture.picture(), picture.FILE.read_text(encoding="utf-8"))
    )
    assert fresh == committed


def test_module_tables_list_every_module_once():
    page = PAGES["docs/how-it-works.md"].partition("\n## Modules\n")[2].partition("\n## ")[0]
    tables = re.findall(r"^\| `(jspec/\w+/)` \| contents \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert len(tables) >= 5
    for room, rows in tables:
        modules = {str(file.relative_to(ROOT / room)) for file in (ROOT / room).rglob("*.py")}
        named = re.findall(r"^\| `([\w/]+\.py)` \|", rows, re.MULTILINE)
        assert sorted(named) == sorted(name for name in modules if not name.endswith("__init__.py"))


def test_module_paths_on_pages_exist():
    for page, text in PAGES.items():
        for path in re.findall(r"`((?:jspec|convert|bench|tests|pair)/[\w/]+\.py)`", text):
            assert (ROOT / path).is_file(), f"{page} names {path}"
