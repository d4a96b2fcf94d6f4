"""docs/: the course as a notebook and its sessions with the debugger, the lecture, links."""
import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.doctest import _get_checker, _get_number_flag

from common import run_python
from harness.folders import fingerprint
from harness.small_policy import warm_start
from test_qerl import HERE
from test_triton import needs_interpreter

BLOCK = re.compile(r"(?:<!-- (figures of the built-in policy) -->\n)?```(\w*)\n(.*?)```\n", re.DOTALL)
# The built-in policy of which the course prints figures. Other processors make other ones, whose
# decimals may be any, or sample other texts from the same one, whose decimals are about the same.
COURSE_POLICY = "12906bb8f60ddb51a0d0ed84dc240d25a62e48f7f64603d4d2da2d5420d95152"
ABOUT = {"rel": 0.5, "abs": 0.1}
DECIMALS = r"-?\d+\.\d+(?:e-\d+)?"
# "..." stands for any text, and decimals agree to the last digit shown (pytest's own option NUMBER).
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | _get_number_flag()


def course_notebook(number):
    """The cells before the exercises, then those of one of them."""
    jupytext = pytest.importorskip("jupytext")
    text = (HERE / "docs/course.md").read_text(encoding="utf-8")
    before, *exercises = re.split(r"^(?=## \d)", text, flags=re.MULTILINE)
    assert len(exercises) == 8
    return jupytext.reads(before + exercises[number - 1], "md")


def decimals(text):
    return [float(number) for number in re.findall(DECIMALS, text)]


def run_session(text, folder, environment):
    """A session with pdb: "$ command", then "(Pdb) what is typed" each -> (expected, found)."""
    command, shown = text.removeprefix("$ ").split("\n", 1)
    typed = "".join(re.findall(r"^\(Pdb\)(.*\n)", shown, flags=re.MULTILINE))
    result = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, input=typed,
                            capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.stderr[-2000:]}"
    return "..." + re.sub(r"^\(Pdb\).*", "(Pdb)", shown, flags=re.MULTILINE), result.stdout


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("number", [*range(1, 8), pytest.param(8, marks=needs_interpreter)])
def test_course_exercise(tmp_path, number):
    """Its code runs, no snippet with the names of the one before, and prints what stands there."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = course_notebook(number)
    policy = Path(warm_start(), "model.safetensors").read_bytes()
    same_policy = fingerprint([policy]) == COURSE_POLICY
    folder = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "tests", "runs")
    shutil.copytree(HERE, folder, ignore=left_out)
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
        "TRITON_INTERPRET": "0", "TMPDIR": str(tmp_path), "IPYTHONDIR": str(tmp_path),
        "PYTHONPATH": str(folder), "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    for cell in notebook.cells:
        if cell.cell_type == "code" and not cell.source.startswith("%%"):
            cell.source = f"%reset -f\n{cell.source}"
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3").execute(
        cwd=folder / "docs", env=environment)

    for cell in notebook.cells:
        if cell.cell_type == "code":
            printed = "".join(out.text for out in cell.outputs if out.get("name") == "stdout")
            (folder / "try.py").write_text(cell.source.removeprefix("%reset -f\n"))
            continue
        for of_policy, kind, expected in BLOCK.findall(cell.source):
            found = printed
            if kind == "pdb":
                expected, found = run_session(expected, folder, environment)
            if of_policy:
                if same_policy and "..." not in expected:
                    assert decimals(found) == pytest.approx(decimals(expected), **ABOUT)
                expected = re.sub(DECIMALS, "...", expected)
            expected = re.sub(r"\s*\.\.\.\s*", "...", expected)
            agrees = _get_checker().check_output(expected, found, FLAGS)
            assert agrees, f"the output is\n{found}\nand the course has\n{expected}"


DOCS = HERE / "docs"


def headings(page):
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", DOCS.rglob("*.md"), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), target


def test_the_lecture_shows_the_figures_that_are_drawn(tmp_path):
    text = (DOCS / "lecture.md").read_text(encoding="utf-8")
    result = run_python(DOCS / "figures.py", tmp_path)
    assert result.returncode == 0, result.stderr
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == set(re.findall(r"\(figures/(\w+\.png)\)", text))
    assert drawn == {path.name for path in (DOCS / "figures").iterdir()}
