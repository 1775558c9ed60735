"""What the documents say is so: links, options, exit codes, files, and the README's job file."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import click
import pytest

from spectrain.coordinator import sinks
from spectrain.launch.cli import launch
from spectrain.launch.options import parse_size
from spectrain.protocol.errors import ExitCode
from spectrain.protocol.job import load_job
from spectrain.protocol.settings import Settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FOR_USERS = [document for document in DOCUMENTS if document.name != "CONTRIBUTING.md"]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
OPERATIONS = ROOT / "docs" / "operations.md"

OF_OTHER_COMMANDS = {"--help", "--lr", "--shm-size"}  # click's, a benchmark's, Docker's

OPTIONS = {
    param.name: {*param.opts, *param.secondary_opts}
    for param in launch.params
    if isinstance(param, click.Option) and param.name != "version"
}
SETTINGS = {field.name: field.default for field in fields(Settings)}


def option_tables() -> list[dict[str, tuple[set[str], str]]]:
    """Return each table of options in docs/operations.md: by name, the spellings, the default."""
    section = OPERATIONS.read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [
        {
            name: (set(re.findall(r"`(--?[A-Za-z-]+)", spellings)), default.strip("` "))
            for spellings, name, default in re.findall(r"\| (`-.*?) \| `(\w+)` \|(.*?)\|", table)
        }
        for table in tables
    ]


def number(text: str) -> float | None:
    """Read a default such as 64 or 1 GiB; None for words."""
    try:
        return float(text)
    except ValueError:
        return parse_size(text) if re.fullmatch(r"\d+ \w+B", text) else None


def anchors(document: Path) -> set[str]:
    """Return the names that headings can be linked by."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_of_ours_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not re.match(r"https?://", link):
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_job_file_of_the_readme_is_complete(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    path = tmp_path / "job.py"
    path.write_text(block)
    job = load_job(path)
    hyper = job.check_hyper({"width": "32", "lr": "0.005"})
    model = job.build_model(0, hyper)
    train, test = job.build_datasets(0, hyper)
    optimizer = job.build_optimizer(model.parameters(), hyper)
    assert (len(train), len(test)) == (3584, 512)
    assert optimizer.param_groups[0]["lr"] == 0.005
    inputs, targets = train[0]
    job.loss(model(inputs), targets).backward()


def test_the_readme_opens_with_what_it_is_and_both_commands() -> None:
    opening = README.read_text()[:1500]
    assert opening.startswith("# SpecTrain\n\nSpecTrain trains one PyTorch model")
    assert "\nmake demo" in opening
    assert "\nmake test" in opening


@pytest.mark.parametrize("document", FOR_USERS, ids=lambda path: path.name)
def test_every_option_that_a_document_names_exists(document: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", document.read_text()))
    known = {"--version", *OF_OTHER_COMMANDS}.union(*OPTIONS.values())
    assert named <= known


def test_every_option_of_the_command_is_described_with_all_its_spellings() -> None:
    described = {name: row[0] for table in option_tables() for name, row in table.items()}
    assert described == OPTIONS


def test_the_first_table_of_options_holds_those_that_a_job_may_set() -> None:
    of_the_job = (OPTIONS.keys() & SETTINGS.keys()) - {"run_dir"}  # that is of one launch
    assert set(option_tables()[0]) == of_the_job


def test_defaults_in_the_table_are_those_of_the_settings() -> None:
    numbers = {name: number(default) for name, (_, default) in option_tables()[0].items()}
    stated = {name: value for name, value in numbers.items() if value is not None}
    assert len(stated) >= 10
    assert stated == {name: SETTINGS[name] for name in stated}


def test_exit_codes_in_the_table_are_those_of_the_command() -> None:
    table = OPERATIONS.read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert sorted(map(int, re.findall(r"^\| (\d+) \|", table, re.MULTILINE))) == sorted(ExitCode)


def test_every_file_of_a_run_directory_is_described() -> None:
    assert sinks.__doc__ is not None
    names = re.findall(r"\b[a-z]+\.(?:jsonl?|safetensors)\b", sinks.__doc__)
    described = OPERATIONS.read_text().partition("## The run directory")[2]
    assert "commit.json" in names
    assert [name for name in names if f"`{name}`" not in described] == []


@pytest.mark.parametrize("folder", ["protocol", "coordinator", "worker", "launch", "readers"])
def test_the_architecture_names_every_module_and_no_other(folder: str) -> None:
    house = ARCHITECTURE.read_text().partition(f"\n`{folder}/`: ")[2].partition("\n\n`")[0]
    modules = {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}
    assert set(re.findall(r"^\| `(\S+\.py)` \|", house, re.MULTILINE)) == modules - {"__init__.py"}
