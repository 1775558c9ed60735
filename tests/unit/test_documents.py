"""What the documents show works: links lead somewhere, and the README's job file is a job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spectrain.protocol.job import load_job

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = ROOT / "README.md"


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
