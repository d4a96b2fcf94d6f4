"""docs/course.md as a notebook, its debugger sessions, and the README's step."""
import hashlib
import os
import re
import shutil
import subprocess
import sys
from decimal import Decimal

import jupytext
import pytest
import torch
from nbclient import NotebookClient
from nbformat.v4 import new_notebook

import qerl
from common import NUMBER, columns
from harness.small_policy import warm_start
from test_qerl import HERE
from test_triton import needs_interpreter

BLOCK = re.compile(r"(?:<!-- (figures of the built-in policy) -->\n)?```(\w*)\n(.*?)```\n", re.DOTALL)
# The built-in policy of which the course prints figures. Other processors make other ones, whose
# decimals may be any; what the course concludes from them must hold all the same.
COURSE_POLICY = "c52dd642e0f503f163dd2d75e7cf6d86"


def read(name):
    with open(f"{HERE}/{name}", encoding="utf-8") as f:
        return f.read()


def course_parts():
    """The cells before the exercises, then those of each exercise."""
    parts = [[]]
    for cell in jupytext.read(f"{HERE}/docs/course.md").cells:
        if re.match(r"## \d", cell.source):
            parts.append([])
        parts[-1].append(cell)
    return parts


def course_blocks(cells):
    """(whether its figures are the built-in policy's, kind, text) of each block that is no code."""
    return [b for cell in cells if cell.cell_type == "markdown" for b in BLOCK.findall(cell.source)]


def number_agrees(expected, found, any_decimals):
    """Integers are equal; decimals agree to the last digit shown."""
    exponent = Decimal(expected).as_tuple().exponent
    if exponent == 0:
        return found == expected
    return any_decimals or abs(Decimal(found) - Decimal(expected)) <= Decimal(10) ** exponent


def course_difference(expected, found, any_decimals=False):
    """None if an output is what the course shows, where "..." stands for any text."""
    pattern = ""
    numbers = []
    for part in re.split(rf"(\s*\.\.\.\s*|{NUMBER.pattern}|\s+)", expected.strip()):
        if NUMBER.fullmatch(part):
            numbers.append(part)
            pattern += f"({NUMBER.pattern})"
        elif "..." in part:
            pattern += ".*"
        else:
            pattern += r"\s+" if part.isspace() else re.escape(part)
    match = re.fullmatch(pattern, found.strip(), re.DOTALL)
    if match is None or not all(
            number_agrees(*pair, any_decimals) for pair in zip(numbers, match.groups())):
        return f"the course has\n{expected}\nand the output is\n{found}"


def environment(folder):
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
            "TRITON_INTERPRET": "0", "TMPDIR": str(folder), "IPYTHONDIR": str(folder / "ipython"),
            "PYTHONPATH": str(folder), "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}


def run_cells(cells, folder):
    """Run cells as a notebook in docs, no snippet with the names of the one before."""
    for cell in cells:
        if cell.cell_type == "code" and not cell.source.startswith("%%"):
            cell.source = f"%reset -f\n{cell.source}"
    NotebookClient(new_notebook(cells=cells), timeout=None, kernel_name="python3").execute(
        cwd=folder / "docs", env=environment(folder))


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def run_session(text, folder):
    """A session with pdb: "$ command", then "(Pdb) what is typed" each -> (expected, found)."""
    command, shown = text.removeprefix("$ ").split("\n", 1)
    typed = "".join(re.findall(r"^\(Pdb\)(.*\n)", shown, flags=re.MULTILINE))
    result = subprocess.run(["bash", "-c", command], cwd=folder, env=environment(folder), input=typed,
                            capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.stderr[-2000:]}"
    return "..." + re.sub(r"^\(Pdb\).*", "(Pdb)", shown, flags=re.MULTILINE), result.stdout


def run_exercise(number, folder):
    """Run an exercise's cells -> (what differs from the course, the outputs)."""
    with open(f"{warm_start()}/model.safetensors", "rb") as f:
        other_policy = hashlib.md5(f.read()).hexdigest() != COURSE_POLICY
    before, *exercises = course_parts()
    cells = exercises[number - 1]
    run_cells(before + cells, folder)
    differences = []
    outputs = []
    for cell in cells:
        if cell.cell_type == "code":
            outputs.append(printed(cell))
            (folder / "try.py").write_text(cell.source.removeprefix("%reset -f\n"))
        for of_policy, kind, text in course_blocks([cell]):
            found = outputs[-1] if outputs else ""
            if kind == "pdb":
                text, found = run_session(text, folder)
            differences.append(course_difference(text, found, bool(of_policy) and other_policy))
    return [d for d in differences if d], outputs


def claims_of_exercise_4(outputs):
    # sigma; mean and error of the entropy, its change, the accuracy
    without, _, small, *_, large = columns(outputs[0], "nvfp4 sigma")
    assert abs(small[3]) < 0.1 * large[3]
    assert large[3] > 3 * large[4]
    assert large[5] < without[5] / 1.3


def claims_of_exercise_6(outputs):
    (before,) = columns(outputs[-1], "pass@1 before")          # %, questions, tokens
    (after,) = columns(outputs[-1], "pass@1 after")
    assert after[0] < before[0] / 4
    assert after[2] < before[2] / 4


def claims_of_exercise_7(outputs):
    _, *k1 = (row[2] for row in columns(outputs[0], "sigma ")[:4])
    _, *k3 = (row[4] for row in columns(outputs[0], "sigma ")[:4])
    assert k1 == sorted(k1)
    assert k1[1] == pytest.approx(k3[1], rel=0.5)
    assert 1 / 3 < k1[2] / k3[2] < 3                   # at sigma 0.3 a few tokens make most of K3
    (in_16_bit,) = columns(outputs[0], "trained in BF16, sigma 0")
    assert in_16_bit[3] > 10 * k3[0]                   # a larger mismatch than noise of 0.01
    capped = columns(outputs[0], "cap ")               # mean and deviation; the estimate, its error
    for column in list(zip(*capped))[1:5]:
        assert sorted(column) == list(column)
    _, mean, deviation, *_ = capped[-1]                # of about 7,000 weights
    assert mean == pytest.approx(1, abs=5 * deviation / 7000 ** 0.5)


# What the course concludes from the built-in policy's figures, whichever policy this processor makes.
CLAIMS = {4: claims_of_exercise_4, 6: claims_of_exercise_6, 7: claims_of_exercise_7}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("number", [*range(1, 8), pytest.param(8, marks=needs_interpreter)])
def test_course_exercise(tmp_path, number):
    folder = tmp_path / "copy"
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "runs"))
    differences, outputs = run_exercise(number, folder)
    assert not differences, differences[0]
    if number in CLAIMS:
        CLAIMS[number](outputs)


def test_course_blocks_are_all_run():
    """Each fenced block of the course is a cell of code or a block of a known kind in an exercise."""
    fences = re.findall(r"^ *```\w*$", read("docs/course.md"), flags=re.MULTILINE)
    before, *exercises = course_parts()
    cells = sum(exercises, before)
    code = [cell for cell in cells if cell.cell_type == "code"]
    kinds = [kind for cells in exercises for _, kind, _ in course_blocks(cells)]
    assert len(exercises) == 8
    assert len(fences) == 2 * (len(code) + len(kinds))
    assert set(kinds) == {"pdb", "text"}


def test_course_wrong_numbers_are_noticed():
    """Any number of any output in the course, changed to its double and one, is noticed."""
    blocks = [block for cells in course_parts() for block in course_blocks(cells)]
    for text in (text for _, kind, text in blocks if kind == "text"):
        assert course_difference(text, text) is None
        for number in NUMBER.finditer(text):
            wrong = f"{text[:number.start()]}{2 * float(number[0]) + 1}{text[number.end():]}"
            assert course_difference(text, wrong), number[0]


def test_the_step_that_the_readme_shows_is_one(qwen):
    """It runs as it stands, changes the adapter, and starts from a ratio of 1."""
    lines, = re.findall(r"<!-- these lines are run by the tests -->\n```python\n(.*?)```",
                        read("README.md"), flags=re.DOTALL)
    model = qerl.load_model(qwen[0], lora_rank=4)
    trained = list(qerl.trainable(model).values())
    before = [p.detach().clone() for p in trained]
    values = {
        "qerl": qerl,
        "model": model,
        "step": 1,
        "steps": 2,
        "prompts": [[1, 2, 3], [4]],
        "eos": {256},
        "score": lambda rollout: rollout.length.view(2, 8) + torch.arange(8.0),
        "optimizer": torch.optim.AdamW(trained, lr=0.1),
    }
    exec(lines, values)
    assert not all(map(torch.equal, before, trained))
    assert torch.equal(values["logprobs"], values["old_logprobs"])
    assert values["sigma"] > 0
