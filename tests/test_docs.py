"""What the documentation names exists: files, functions, links, pictures, make targets, commands, settings."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import run
from configs.load import load_config
from configs.schema import RunConfig

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
WANTED_IDEAS = (
    "a prompt becomes tokens",
    "a response becomes actions",
    "a group's start is checked",
    "a prefix is encoded",
    "a prefix's gradient comes back",
    "responses are packed",
    "the mask is built",
    "the window gets its quanta",
    "a loss is computed",
    "an algorithm is added",
    "weights become views",
    "storages are checked",
    "caches are dropped on publish",
    "a stale encoding is refused",
    "a buffer leaves memory",
    "a buffer is leased and released",
    "the plan is computed",
    "a checkpoint becomes complete",
    "an episode is judged",
    "an environment is added",
    "a config knob is added",
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def table(page: str, header: str) -> list[tuple[str, ...]]:
    """Cells of the table whose header row begins with this cell, without the header."""
    lines = text_of(page).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return rows


def places(cell: str) -> Iterator[tuple[str, str]]:
    """(file, name) of a cell such as "`a.py` `f`, `C.g`; `b.py` `h`"."""
    path = ""
    for word in re.findall(r"`([^`]+)`", cell):
        if word.endswith(".py"):
            path = word
        else:
            assert path, f"{cell!r} names {word} before any file"
            yield path, word


def defined_names(source: str) -> set[str]:
    """Functions, classes and variables of a module, and `Class.member` of its classes."""
    names: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            names.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    collect(ast.parse(source).body, "")
    return names


def code_of(page: str) -> Iterator[str]:
    """Lines of code blocks (indented or fenced) and spans of inline code."""
    is_fenced = False
    for line in text_of(page).splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            yield line.strip()
        else:
            yield from re.findall(r"`([^`]+)`", line)


def test_defined_names_finds_functions_classes_members_and_variables() -> None:
    source = "A = 1\nb: int = 2\ndef f(): pass\nclass C:\n    x: int = 0\n    def g(self): pass\n"
    assert defined_names(source) == {"A", "b", "f", "C", "C.x", "C.g"}


def test_places_reads_several_names_of_a_file_and_several_files() -> None:
    assert list(places("`a.py` `f`, `C.g`; `b.py` `h`")) == [("a.py", "f"), ("a.py", "C.g"), ("b.py", "h")]


@pytest.mark.parametrize(
    "cells", table("docs/architecture.md", "idea") + table("docs/architecture.md", "claim"), ids=lambda cells: cells[0]
)
def test_every_idea_and_claim_points_at_code_that_exists(cells: tuple[str, ...]) -> None:
    named = list(places(cells[-1]))
    assert named, f"{cells[0]!r} names no function"
    for path, name in named:
        assert (ROOT / path).is_file(), f"{cells[0]!r}: {path} does not exist"
        assert name in defined_names(text_of(path)), f"{cells[0]!r}: {path} has no {name}"


def test_the_table_answers_what_a_newcomer_asks() -> None:
    ideas = [cells[0] for cells in table("docs/architecture.md", "idea")]
    assert [idea for idea in WANTED_IDEAS if idea not in ideas] == []
    assert len(set(ideas)) == len(ideas)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page: str) -> None:
    for target in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue  # another site
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}, which does not exist (make demo draws docs/demo.png)"
        if anchor:
            titles = re.findall(r"(?m)^#+ (.*)$", file.read_text(encoding="utf-8"))
            anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{page} links to {target}, and {file.name} has no such title"


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"(?m)^([a-z]+):", text_of("Makefile")))
    named = {word for code in code_of(page) for word in re.findall(r"^make ([a-z]+)", code)}
    assert named <= targets, f"{page} names targets that the Makefile lacks: {sorted(named - targets)}"


def parse(words: list[str]) -> argparse.Namespace | None:
    """The arguments of a command of `run.py`; None where it is not one."""
    try:
        return run.parse_arguments(words)
    except SystemExit:
        return None


@pytest.mark.parametrize("page", PAGES)
def test_commands_can_be_parsed_and_their_settings_loaded(page: str) -> None:
    for code in code_of(page):
        if not (command := re.search(r"run\.py ([a-z].*)", code)):
            continue
        words = shlex.split(command[1], comments=True)
        is_whole = any(word.endswith(".yaml") for word in words)
        args = parse(words if is_whole else [*words, "any.yaml"])  # `run.py plan` in a sentence
        assert args is not None, f"{page}: `{code}` is no command of run.py"
        if is_whole:
            load_config(ROOT / args.config, args.overrides)


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page: str) -> None:
    """`section.field` in code, for the sections of a run's config."""
    config = RunConfig()
    sections = {field.name: getattr(config, field.name) for field in fields(config)}
    sections = {name: section for name, section in sections.items() if is_dataclass(section)}
    known = {f"{name}.{field.name}" for name, section in sections.items() for field in fields(section)}
    pattern = rf"(?<![\w./])(?:{'|'.join(sections)})\.[a-z_]+"
    for code in code_of(page):
        names = [] if code.startswith("error:") else re.findall(pattern, code)  # a message may show a typo
        for name in names:
            assert name in known, f"{page}: {name} is no setting"


def test_every_folder_is_in_the_readmes_tree() -> None:
    listed = {line.split()[0] for line in code_of("README.md") if line}
    folders = {f"{path.parent.name}/" for path in ROOT.glob("*/*") if path.suffix in (".py", ".txt", ".md")}
    hidden = {folder for folder in folders if folder.startswith((".", "__"))}
    assert {folder for folder in folders - hidden if folder not in ("runs/", "build/", "dist/")} <= listed
