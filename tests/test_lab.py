"""The lab's checker gives the right points, names likely mistakes, survives what students write."""
import copy
import inspect
import itertools
import json
import shutil

import pytest

import qerl
from common import run_python
from docs.lab import check, student
from lab_solutions import RIGHT, SOLUTION, WRONG, changed
from test_qerl import HERE

LAB = HERE / "docs/lab"


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def rows(table):
    """Each row of a table of lab_solutions.py, behind its function's name."""
    return [pytest.param(function, *row, id=title)
            for function, entries in table.items() for title, row in entries.items()]


@pytest.mark.parametrize("name,help_,text,replacement", rows(WRONG))
def test_each_wrong_solution_loses_points_and_is_told_why(name, help_, text, replacement, tmp_path):
    points, lines = check.grade(name, write(tmp_path / "student.py", changed(text, replacement)))
    assert points < check.POINTS[name]
    assert help_ in "\n".join(lines), lines


@pytest.mark.parametrize("name,text,replacement", rows(RIGHT))
def test_a_right_solution_in_another_style_has_all_points(name, text, replacement, tmp_path):
    file = write(tmp_path / "student.py", changed(text, replacement))
    for seed in range(2):
        points, lines = check.grade(name, file, seed)
        assert points == check.POINTS[name], lines


WRONG_FUNCTIONS = check.wrong_functions()


def case_of(given):
    def case(function):
        """A search has found this input."""
        return check.tried(function, given.get("try"))(**copy.deepcopy(given["arguments"]))
    return case


@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_a_search_finds_a_case_for_each_wrong_function(name):
    kind = name.rpartition("_")[0]
    drawn = (check.random_case(kind, number) for number in range(check.RANDOM_INPUTS))
    assert any(check.why_not(case_of(given), *WRONG_FUNCTIONS[name], LAB) is None
               for given in itertools.chain(drawn, check.CASES[kind]))


@pytest.mark.parametrize("body, reason", [
    ('"""Why they differ is this."""\n    return 1', "both functions give 1"),
    ('"""Too short."""\n    return 1', "no docstring of four words or more that says why"),
    ('"""Their names tell them apart."""\n    return str(function)', "gives it two results"),
    ('"""Only one has this argument."""\n    return function(0, 9, schedule="exponential")',
     "no error: TypeError"),
    ('"""A step that is not there."""\n    return function(9, 9)', "it fails with the right function")])
def test_a_case_that_does_not_count_is_told_why(body, reason, tmp_path):
    file = write(tmp_path / "mycases.py", f"def noise_sigma_1(function):\n    {body}\n")
    points, lines = check.grade_cases(file)
    (line,) = [line for line in lines if line.startswith("noise_sigma_1: ")]
    assert points == 0 and len(lines) == 24 and reason in line


@pytest.mark.parametrize("name", check.CASES)
def test_qerl_has_the_recorded_results(name):
    """Other tests hold qerl.py to the libraries: so the recorded results are right."""
    for case in check.CASES[name]:
        assert check.run_case(getattr(qerl, name), case, LAB) == (1, [])


def run_check(*args, lab=LAB, **environment):
    """(exit status, all points, {name: a part of what --json prints})"""
    result = run_python(lab / "check.py", "--json", *args, **environment)
    assert "Traceback" not in result.stderr
    printed = json.loads(result.stdout)
    return result.returncode, printed["score"], {part["name"]: part for part in printed["tests"]}


def test_a_right_solution_has_all_points(tmp_path):
    """Whatever the seed, and with files that are called as packages beside it and the checker."""
    lab = shutil.copytree(LAB, tmp_path / "project/docs/lab")
    for folder in (tmp_path, lab):
        for name in ("numpy.py", "random.py"):
            write(folder / name, "raise ImportError")
    file = write(tmp_path / "solution.py", SOLUTION)
    status, points, _ = run_check(
        *check.CASES, "--file", file, "--seed", 7, lab=lab, cwd=tmp_path, PYTHONPATH=str(HERE))
    assert (status, points) == (0, 40)


NOT_WRITTEN = "not written yet: the file has no `def` of it, or still NotImplementedError"


def test_the_empty_file_has_none(tmp_path):
    status, points, parts = run_check("--file", shutil.copy(LAB / "student.py", tmp_path))
    assert (status, points, sum(part["max_score"] for part in parts.values())) == (1, 0, 70)
    cases = parts.pop("cases")
    assert "no case yet: there is no file mycases.py" in cases["output"]
    assert {part["output"] for part in parts.values()} == {NOT_WRITTEN}


BROKEN = SOLUTION + """
import gc, multiprocessing.connection, os

def noise_sigma(*args, **options):
    while True:
        pass

def sample(*args, **options):
    exit(3)

def group_advantages(rewards):
    print("a print is no harm")
    os.write(1, b"nor is this")
    return rewards.no_such_method()

def dequantize_blocks(*args, **options):
    for thing in gc.get_objects():
        if isinstance(thing, multiprocessing.connection.Connection):
            thing.send_bytes(b"[1000, []]")
"""


def test_what_a_function_does_costs_its_own_points_alone(tmp_path):
    file = write(tmp_path / "broken.py", BROKEN)
    names = ["noise_sigma", "sample", "group_advantages", "dequantize_blocks", "lora_linear"]
    status, points, parts = run_check(*names, "--file", file, "--limit", 30)
    assert (status, points, parts["lora_linear"]["score"]) == (1, 3, 3)
    line = BROKEN.splitlines().index("    return rewards.no_such_method()") + 1
    for name, said in (
            ("noise_sigma", "no result within 30 seconds"),
            ("sample", "exit()"),
            ("group_advantages", f"AttributeError in line {line} of broken.py"),
            ("dequantize_blocks", "the file has sent points of its own")):
        assert said in parts[name]["output"]


def test_a_wrong_dtype_costs_half_and_a_comment_nothing(tmp_path):
    text = changed("scales).to(dtype)", "scales).to(dtype).double()     # no NotImplementedError")
    assert check.grade("dequantize_blocks", write(tmp_path / "student.py", text))[0] == 1.5


@pytest.mark.parametrize("end, line", [
    ("del sample", NOT_WRITTEN),
    ("from qerl import *", NOT_WRITTEN),
    ("import functools\nsample = functools.partial(sample, top_p=1)", NOT_WRITTEN),
    ("def sample(*args, **options): raise ValueError('two\\nlines')",
     f"  found ValueError in line {SOLUTION.count(chr(10)) + 1} of student.py: two lines")])
def test_what_is_no_function_and_what_raises_is_said_in_a_line(end, line, tmp_path):
    _, lines = check.grade("sample", write(tmp_path / "student.py", f"{SOLUTION}{end}\n"))
    assert line in lines, lines


def test_a_file_that_does_not_load_is_said_in_a_line(tmp_path):
    file = write(tmp_path / "broken.py", "def sample(:\n")
    result = run_python(LAB / "check.py", "sample", "--file", file)
    assert result.returncode == 1 and not result.stderr
    assert "broken.py cannot be loaded: SyntaxError" in result.stdout


@pytest.mark.parametrize("args", [["no_such"], ["--file", "no_such.py"]])
def test_what_cannot_be_checked_is_refused(args):
    result = run_python(LAB / "check.py", *args)
    assert result.returncode == 2 and "no_such" in result.stderr.splitlines()[-1]


def test_the_functions_are_called_as_those_of_qerl():
    """So that the training can use them."""
    for name in check.CASES:
        theirs, ours = (list(inspect.signature(getattr(module, name)).parameters.values())
                        for module in (qerl, student))
        assert theirs[:len(ours)] == ours, name
