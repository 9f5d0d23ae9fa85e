"""README and docs: commands they show exist, links lead somewhere, figures have sources."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from graphs.contract import spec

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "models/README.md", *ROOT.glob("docs/*.md"))
FIGURES = tuple(ROOT / "docs" / f"{n}.md" for n in ("benchmarks", "budgets", "engines"))
FIGURES += (ROOT / "docs/experiments.md",)
PACKAGES = ("export", "graphs", "runtime")
GROUPS = ("export", "graphs")  # of kimi-trt; what else it does is the runtime's
MAX_LINES, MAX_WORDS = 170, 2000

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_COMMAND = re.compile(
    r"^(?:\$ |/usr/bin/time -v |\.venv/bin/)*(python -m \S+|kimi-trt|make)( .*)?$"
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"^(?:docs|export|graphs|runtime|bench|models|tests)/[\w./-]*$")
_DATE = re.compile(r"\b[A-Z][a-z]+ 20\d\d\b")  # November 2026
_NUMBER_CELL = re.compile(r"^\|.*\|\s*[≤~]?\s*\d[^|]*\|", re.M)


def snippets(text: str) -> Iterator[str]:
    """Each code span, and each line of a block, with lines that end in a backslash joined."""
    for language, block in _FENCE.findall(text):
        if language in ("", "bash"):
            yield from re.sub(r"\\\n\s*", "", block).splitlines()
    for span in _SPAN.findall(_FENCE.sub("", text)):
        yield " ".join(span.split())


def commands(text: str) -> list[list[str]]:
    """The words of every command of this project that the text shows."""
    matches = (_COMMAND.match(snippet) for snippet in snippets(text))
    words = [shlex.split(f"{m[1]}{m[2] or ''}", comments=True) for m in matches if m]
    return [
        w for w in words if w[0] != "python" or w[2].split(".")[0] in (*PACKAGES, "bench", "models")
    ]


def command_fault(words: list[str]) -> str | None:
    """What the command lacks: a target, a variable, a command or an option; None: nothing."""
    if words[0] == "make":
        return _make_fault(words[1:])
    if words[0] == "python":
        module, arguments = words[2], words[3:]
    elif words[1:2] and words[1] in GROUPS:
        module, arguments = words[1], words[2:]
    else:
        module, arguments = "runtime", words[1:]
    if module not in PACKAGES:
        return _script_fault(module, arguments)
    if not arguments:
        return None
    result = _help(module, arguments[0])
    if result is None:
        return f"{module} has no command {arguments[0]}"
    return _option_fault(arguments, set(re.findall(r"--[\w-]+", result)))


@cache
def _help(module: str, command: str) -> str | None:
    """What the command's `--help` prints; None where the module has no such command."""
    app = import_module(f"{module}.__main__").app
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    return result.output if result.exit_code == 0 else None


def _option_fault(arguments: list[str], options: set[str]) -> str | None:
    shown = [word.split("=")[0] for word in arguments if word.startswith("--")]
    return next((f"no option {name}" for name in shown if name not in options), None)


@cache
def _makefile() -> tuple[set[str], set[str]]:
    """The targets that `make help` lists, and the variables that a command line may set."""
    text = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"^([a-z-]+):.*## ", text, re.M)
    return set(targets), set(re.findall(r"^(\w+) \?=", text, re.M))


def _make_fault(arguments: list[str]) -> str | None:
    targets, variables = _makefile()
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        if name not in (variables if is_variable else targets):
            return f"make help lists no {name}"
    return None


def _script_fault(module: str, arguments: list[str]) -> str | None:
    """A script's commands and options, read from its source: its imports may be heavy."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        return f"no module {module}"
    source = path.read_text("utf-8")
    names = re.findall(r"^@app\.command\(.*\)\ndef (\w+)", source, re.M)
    if len(names) > 1 and arguments and arguments[0] not in names:
        return f"{module} has no command {arguments[0]}"
    parameters = re.findall(r"(\w+): Annotated", source)
    options = {f"--{name.replace('_', '-')}" for name in parameters}
    return _option_fault(arguments, options | set(re.findall(r'"(--[\w-]+)"', source)))


def heading_ids(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(text: str, page: Path) -> list[str]:
    """Relative links to no file or no heading, and paths in code spans that are not there."""
    prose = _FENCE.sub("", text)
    broken = [s for s in _SPAN.findall(prose) if _PATH.match(s) and not (ROOT / s).exists()]
    for link in _LINK.findall(_SPAN.sub("", prose)):
        name, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = page.parent / name
        if name and not target.exists():
            broken.append(link)
            continue
        if anchor and anchor not in heading_ids(target.read_text("utf-8") if name else text):
            broken.append(link)
    return broken


def sourceless_figures(text: str) -> list[str]:
    """Sections whose table of figures stands beside no command; `date` where the page has none."""
    sections = re.split(r"^## ", text, flags=re.M)
    missing = [] if _DATE.search(text) else ["date"]
    for section in sections:
        if _NUMBER_CELL.search(section) and not (commands(section) or "`git show " in section):
            missing.append(section.splitlines()[0])
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_shown_exists_with_its_options(page: Path) -> None:
    shown = commands(page.read_text("utf-8"))
    faults = {shlex.join(words): command_fault(words) for words in shown}
    assert not {command: fault for command, fault in faults.items() if fault}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert not broken_links(page.read_text("utf-8"), page)


def test_the_readme_is_short_and_shows_its_commands() -> None:
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= MAX_LINES and len(text.split()) <= MAX_WORDS
    shown = commands(text)
    assert ["make", "engines"] in shown and ["make", "test"] in shown
    for package in PACKAGES:
        app: Any = typer.main.get_command(import_module(f"{package}.__main__").app)
        group = [package] if package in GROUPS else []
        for name in app.list_commands(None):
            command = ["kimi-trt", *group, name]
            assert any(w[: len(command)] == command for w in shown), f"{command} is not shown"


def test_architecture_names_every_folder_and_the_dimensions_of_the_spec() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    folders = [f"{p}/{f.parent.name}/" for p in PACKAGES for f in ROOT.glob(f"{p}/*/__init__.py")]
    assert not [folder for folder in folders if f"`{folder}`" not in text]
    key = re.findall(r"^    ([A-Za-z])  (\S.*)$", spec.__doc__ or "", re.M)
    assert key and re.findall(r"^\| ([A-Za-z]) \| (.*) \|$", text, re.M) == key


@pytest.mark.parametrize("page", FIGURES, ids=lambda p: p.stem)
def test_figures_have_a_date_and_a_command(page: Path) -> None:
    assert not sourceless_figures(page.read_text("utf-8"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`make engines PRESET=k2 CONTEXT=64`", None),
        ("`make engine`", "make help lists no engine"),
        ("`make engines PRESETS=k2`", "make help lists no PRESETS"),
        ("```bash\nmake parity   # all\n```", None),
        ("```\n$ python -m graphs budget k2 \\\n  --gpus h200\n```", "no option --gpus"),
        ("`python -m graphs explain k2`", "graphs has no command explain"),
        ("`kimi-trt graphs verify B --layer 1`", "no option --layer"),
        ("`kimi-trt export weights\n--checkpoint D --out B`", None),
        ("`kimi-trt export wieghts`", "export has no command wieghts"),
        ("`kimi-trt generate B --promt 'a b'`", "no option --promt"),
        ("`python -m bench.speed.fast`", "no module bench.speed.fast"),
        ("`python -m bench.speed.run measured`", "bench.speed.run has no command measured"),
        ("`python -m bench.host.overhead B --round 3`", "no option --round"),
        ("`python -m models.train --out D`", None),
        ("`/usr/bin/time -v python -m export graphs --preest k2`", "no option --preest"),
    ],
)
def test_a_command_that_is_not_there_shows(text: str, fault: str | None) -> None:
    (words,) = commands(text)
    assert command_fault(words) == fault


def test_other_peoples_commands_are_left_alone() -> None:
    assert not commands("`python -m venv .venv` makes one; make it so.\n```\nit can make more\n```")


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](docs/engines.md) [b](https://example.org/x.md) `graphs/ops/`", []),
        ("[a](docs/engine.md)", ["docs/engine.md"]),
        ("![a](bench/plots/nothing.png)", ["bench/plots/nothing.png"]),
        ("[a](docs/engines.md#compilers-and-gpus) # x\n# Up [a](#a-b)\n## A, b", []),
        ("[a](docs/engines.md#compilers)", ["docs/engines.md#compilers"]),
        ("## A\n[a](#b)", ["#b"]),
        ("`graphs/ops/nothing.py`", ["graphs/ops/nothing.py"]),
    ],
)
def test_a_link_to_nothing_shows(text: str, broken: list[str]) -> None:
    assert broken_links(text, README) == broken


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("November 2026\n## A\n`make bench`\n| a | 1.2 |\n", []),
        ("## A\n`make bench`\n| a | 1.2 |\n", ["date"]),
        ("May 2026 `make bench`\n## A\n| a | ≤ 2 GB |\n## B\n| a | b |\n", ["A"]),
    ],
)
def test_a_figure_without_a_source_shows(text: str, missing: list[str]) -> None:
    assert sourceless_figures(text) == missing
