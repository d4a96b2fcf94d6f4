"""docs/: the course as a notebook and its sessions with the debugger, the lecture, links."""
import doctest
import os
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from _pytest.doctest import _get_checker, _get_number_flag

from common import run_python
from harness.small_policy import warm_start
from test_qerl import HERE
from test_triton import needs_interpreter

DOCS = HERE / "docs"
MARK = "*Another processor prints other decimals.*"
SESSION = re.compile(r"```pdb\n(.*?)```\n\n(\*Another processor)?", re.DOTALL)
# "..." stands for any text, and decimals agree to the last digit shown (pytest's own option NUMBER).
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | _get_number_flag()


def run_session(text, folder, environment):
    """A session with pdb: "$ command", then "(Pdb) what is typed" each -> (expected, found)."""
    command, shown = text.removeprefix("$ ").split("\n", 1)
    typed = "".join(re.findall(r"^\(Pdb\)(.*\n)", shown, flags=re.MULTILINE))
    result = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, input=typed,
                            capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.stderr[-2000:]}"
    return "..." + re.sub(r"^\(Pdb\).*", "(Pdb)", shown, flags=re.MULTILINE), result.stdout


def check_output(expected, found, of_policy):
    """of_policy: another processor makes another built-in policy, whose decimals may be any."""
    if of_policy:
        expected = re.sub(r"-?\d+\.\d+(?:e-\d+)?", "...", expected)
    expected = re.sub(r"\s*\.\.\.\s*", "...", expected)
    agrees = _get_checker().check_output(expected, found, FLAGS)
    assert agrees, f"the output is\n{found}\nand the course has\n{expected}"


def printed(cell):
    return "".join(out.text for out in cell.get("outputs", []) if out.get("name") == "stdout")


def test_notebooks_are_those_of_the_page(tmp_path):
    result = run_python(DOCS / "notebook.py", tmp_path)
    assert result.returncode == 0, result.stderr
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.ipynb")}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("name, alone", [
    ("course.ipynb", True), pytest.param("course-8.ipynb", False, marks=needs_interpreter)])
def test_notebook(tmp_path, name, alone):
    """Its code runs, no cell with the names of the one before, and prints what stands there.

    alone: in a folder without the project's files, which are cloned.
    """
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    warm_start()
    project = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "tests", "runs")
    shutil.copytree(HERE, project, ignore=left_out)
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
        "TRITON_INTERPRET": "0", "TMPDIR": str(tmp_path), "IPYTHONDIR": str(tmp_path),
        "PYTHONPATH": "", "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "PIP_DRY_RUN": "1", "PIP_NO_BUILD_ISOLATION": "0"}      # pip looks, and installs nothing
    notebook = nbformat.read(project / "docs" / name, as_version=4)
    expected = [printed(cell) for cell in notebook.cells]
    for cell in notebook.cells:
        if cell.cell_type == "code" and not cell.source.startswith("%%"):
            cell.source = f"%reset -f\n{cell.source}"
    folder = project / "docs"
    if alone:
        git = ["git", "-c", "user.name=a", "-c", "user.email=b"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
            subprocess.run([*git, *command], cwd=project, check=True)
        folder = tmp_path / "alone"
        folder.mkdir()
        first = notebook.cells[1]
        first.source = first.source.replace('REPOSITORY = ""', f'REPOSITORY = "{project}"')
        project = folder / "project"
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3").execute(
        cwd=folder, env=environment)

    following = [*notebook.cells[1:], {"source": ""}]
    for cell, shown, behind in zip(notebook.cells, expected, following):
        if cell.cell_type == "markdown":
            for session, marked in SESSION.findall(cell.source):
                check_output(*run_session(session, project, environment), marked)
            continue
        (project / "try.py").write_text(cell.source.removeprefix("%reset -f\n"))
        if shown:
            check_output(shown, printed(cell), behind["source"].startswith(MARK))


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


def test_the_figures_are_those_that_are_drawn(tmp_path):
    result = run_python(DOCS / "figures.py", tmp_path)
    assert result.returncode == 0, result.stderr
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "figures").glob("*.png")}
    for diagram in (DOCS / "figures").glob("*.svg"):
        assert ElementTree.parse(diagram).getroot().tag == "{http://www.w3.org/2000/svg}svg"
