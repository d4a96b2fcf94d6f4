"""Every command and snippet of docs/course.md."""
import hashlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import qerl
from common import NUMBER, columns
from harness.small_policy import warm_start
from test_qerl import HERE

COURSE_BLOCK = re.compile(r"(?:<!-- (figures of the built-in policy) -->\n)?```(\w*)\n(.*?)```\n", re.DOTALL)

# The built-in policy of which the course prints figures. Other processors make other ones, whose decimals may be any; what
# the course concludes from them must hold all the same (test_course_claims).
COURSE_POLICY = "c52dd642e0f503f163dd2d75e7cf6d86"


def course_exercises():
    """[(heading, [(whether its figures are the built-in policy's, kind, text) of each fenced block])] of the course."""
    with open(f"{HERE}/docs/course.md", encoding="utf-8") as f:
        parts = re.split(r"^## ", f.read(), flags=re.MULTILINE)[1:]
    exercises = [part for part in parts if part[0].isdigit()]
    return [(part.splitlines()[0], COURSE_BLOCK.findall(part)) for part in exercises]


def number_agrees(expected, found, any_decimals):
    """Integers are equal; decimals agree to the last digit shown."""
    if "." not in expected and "e" not in expected:
        return found == expected
    if any_decimals:
        return True
    shown = 10.0 ** -len(expected.partition("e")[0].partition(".")[2])
    if "e" in expected:
        shown *= 10.0 ** int(expected.partition("e")[2])
    return abs(float(found) - float(expected)) <= 1.01 * shown


def line_agrees(expected, found, any_decimals=False):
    """Do two lines say the same? "..." stands for any text, "a ± b" for a mean and its error.

    Means also agree if they differ by at most three of their standard errors, and an error may be
    three times as large or small.
    """
    pattern, numbers, after = "", [], []
    for text in re.split(r"(\.\.\.)", expected.strip()):
        if text == "...":
            pattern += ".*"
            continue
        end = 0
        for number in NUMBER.finditer(text):
            between = text[end:number.start()]
            pattern += r"\s+".join(map(re.escape, re.split(r"\s+", between))) + f"({NUMBER.pattern})"
            numbers.append(number[0])
            after.append(between)
            end = number.end()
        pattern += r"\s+".join(map(re.escape, re.split(r"\s+", text[end:])))
    match = re.fullmatch(pattern, found.strip())
    if not match:
        return False
    is_error = [between.strip() == "±" for between in after] + [False]
    for i, (wanted, got) in enumerate(zip(numbers, match.groups())):
        agrees = number_agrees(wanted, got, any_decimals)
        if is_error[i]:
            a, b = float(wanted), float(got)
            agrees = agrees or a / 3 <= b <= 3 * a
        elif is_error[i + 1]:
            error = math.hypot(float(numbers[i + 1]), float(match.groups()[i + 1]))
            agrees = agrees or abs(float(wanted) - float(got)) <= 3 * error
        if not agrees:
            return False
    return True


def course_difference(expected, found, any_decimals=False):
    """None if the output is as the course shows it, else the first line that is not.

    A line "..." stands for any lines. Empty lines do not count.
    """
    wanted = [line for line in expected.splitlines() if line.strip()]
    got = [line for line in found.splitlines() if line.strip()]
    skipping = False
    for line in wanted:
        if line.strip() == "...":
            skipping = True
            continue
        while skipping and got and not line_agrees(line, got[0], any_decimals):
            got.pop(0)
        skipping = False
        if not got or not line_agrees(line, got[0], any_decimals):
            return f"the course has {line!r}, the output {got[0] if got else 'ends'!r}"
        got.pop(0)
    return None if skipping or not got else f"the output goes on with {got[0]!r}"


def run_course_block(command, folder, commands=None):
    """Run a line of the course in a copy of the project -> what it writes to stdout."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder), "NO_COLOR": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = re.sub(r"(?<![\w./-])python(?= )", lambda _: shlex.quote(sys.executable), command)
    result = subprocess.run(["bash", "-c", command], cwd=folder, env=env, input=commands or "", capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.stderr[-2000:]}"
    return result.stdout


def pdb_steps(transcript):
    """A ```pdb block -> (the command that starts pdb, [(what is typed, what it prints)])."""
    start, *steps = transcript.split("\n(Pdb) ")
    return start.removeprefix("$ "), [step.partition("\n")[::2] for step in steps]


def run_exercise(blocks, folder):
    """Run an exercise's blocks in order in a copy of the project -> (what differs, the outputs of its scripts)."""
    for name in ("qerl.py", "fp4_kernels.py", "train_gsm8k.py", "bench.py"):
        shutil.copy(f"{HERE}/{name}", folder)
    for name in ("harness", "methods", "studies", "results"):
        shutil.copytree(f"{HERE}/{name}", f"{folder}/{name}", ignore=shutil.ignore_patterns("__pycache__"))
    with open(f"{warm_start()}/model.safetensors", "rb") as f:
        other_policy = hashlib.md5(f.read()).hexdigest() != COURSE_POLICY
    differences, outputs = [], []
    for of_policy, kind, text in blocks:
        any_decimals = bool(of_policy) and other_policy
        if kind == "python":
            (folder / "try.py").write_text(text)
        elif kind == "sh":
            outputs.append(run_course_block(text.strip(), folder))
        elif kind == "text":
            differences.append(course_difference(text, outputs[-1], any_decimals))
        elif kind == "pdb":
            start, steps = pdb_steps(text.rstrip())
            typed = "".join(f"{command}\n" for command, _ in steps)
            _, *printed_by = run_course_block(start, folder, typed).split("(Pdb) ")
            assert len(printed_by) == len(steps), f"pdb stopped after {len(printed_by)} of {len(steps)} commands"
            for (command, expected), found in zip(steps, printed_by):
                if expected.strip():
                    difference = course_difference(expected, found, any_decimals)
                    differences.append(difference and f"{command}: {difference}")
    return [d for d in differences if d], outputs


def claims_of_exercise_4(outputs):
    noisy = columns(outputs[0], "nvfp4 sigma")          # sigma; mean and error of the entropy, its change, the accuracy
    unchanged, changed = noisy[2], noisy[-1]
    assert unchanged[0] == 0.01 and abs(unchanged[3]) < 0.1 * changed[3]
    assert changed[0] == 0.3 and changed[3] > 3 * changed[4] and changed[5] < noisy[0][5] / 1.3


def claims_of_exercise_6(outputs):
    (_, spread, advantage), = columns(outputs[1], "somebody right:")
    (_, small_spread, large_advantage), = columns(outputs[1], "nobody right:")
    assert small_spread < spread / 5 and large_advantage > advantage / 2


def claims_of_exercise_7(outputs):
    k1, k3 = zip(*(row[2:5:2] for row in columns(outputs[0], "sigma ")[:4]))
    assert sorted(k1) == list(k1) and k1[2] == pytest.approx(k3[2], rel=0.5)
    assert 1 / 3 < k1[3] / k3[3] < 3                    # at sigma 0.3 a few tokens make most of K3
    capped = columns(outputs[0], "cap ")                # cap; mean and deviation of the weights; estimate and its error
    for column in (1, 2, 3, 4):
        assert sorted(row[column] for row in capped) == [row[column] for row in capped]
    (in_16_bit,), tokens_of_01 = columns(outputs[0], "trained in BF16, sigma 0"), k3[1]
    assert in_16_bit[3] > 10 * tokens_of_01             # rounding the rollout alone: a larger mismatch than noise of 0.01
    *_, (_, mean, deviation, *_) = capped               # of about 7,000 weights
    assert mean == pytest.approx(1, abs=5 * deviation / 7000 ** 0.5)

# What the course concludes from the built-in policy's figures, on whatever policy this processor has made.
COURSE_CLAIMS = {4: claims_of_exercise_4, 6: claims_of_exercise_6, 7: claims_of_exercise_7}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("number", range(1, 9))
def test_course_exercise(tmp_path, number):
    if number == 8:
        if qerl.kernels is None:
            pytest.skip("there is no Triton")
        if qerl.kernels.triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
            pytest.skip("Triton 3.6's interpreter fails with numpy from 2.4 on")
    _, blocks = course_exercises()[number - 1]
    differences, outputs = run_exercise(blocks, tmp_path)
    assert differences == []
    COURSE_CLAIMS.get(number, lambda _: None)(outputs)


def test_course_blocks_are_all_run():
    """No fenced block of the course escapes the test: each is of a known kind and in an exercise."""
    with open(f"{HERE}/docs/course.md", encoding="utf-8") as f:
        fences = re.findall(r"^ *```(\w*)$", f.read(), flags=re.MULTILINE)
    exercises = course_exercises()
    kinds = [kind for _, blocks in exercises for _, kind, _ in blocks]
    assert len(exercises) == 8 and len(fences) == 2 * len(kinds)
    assert set(kinds) <= {"sh", "python", "pdb", "text"}
    for heading, blocks in exercises:
        assert any(kind in ("text", "pdb") for _, kind, _ in blocks), heading


@pytest.mark.parametrize("expected,found,agree", [
    ("error 0.0951", "error 0.0951", True), ("error 0.0951", "error 0.0952", True), ("error 0.0951", "error 0.0961", False),
    ("codes [6, 11]", "codes [6, 11]", True), ("codes [6, 11]", "codes [6, 10]", False), ("codes [6, 11]", "codes [6]", False),
    ("0.277 ± 0.002", "0.283 ± 0.002", True), ("0.277 ± 0.002", "0.297 ± 0.002", False), ("0.277 ± 0.002", "0.277 ± 0.02", False),
    ("> ...qerl.py(...)pick()", "> /a/qerl.py(813)pick()", True), ("> ...qerl.py(...)pick()", "> /a/qerl.py(813)step()", False),
    ("a 1\n...\nb 2", "a 1\nx\ny\nb 2", True), ("a 1\n...", "a 1\nx", True), ("a 1", "a 1\nx", False), ("a 1\nb 2", "a 1", False),
])
def test_course_outputs_are_compared(expected, found, agree):
    assert (course_difference(expected, found) is None) == agree


def test_course_wrong_numbers_are_noticed():
    """Any number of any output in the course, changed by its double and one, is noticed."""
    for heading, blocks in course_exercises():
        for _, kind, text in blocks:
            if kind != "text":
                continue
            for number in NUMBER.finditer(text):
                wrong = f"{text[:number.start()]}{2 * float(number[0]) + 1}{text[number.end():]}"
                assert course_difference(text, wrong), (heading, number[0])


def test_the_step_that_the_readme_shows_is_one(qwen):
    """It runs as it stands, changes the adapter, and starts from a ratio of 1."""
    with open(f"{HERE}/README.md", encoding="utf-8") as f:
        lines, = re.findall(r"<!-- these lines are run by the tests -->\n```python\n(.*?)```", f.read(), flags=re.DOTALL)
    torch.manual_seed(0)
    model = qerl.load_model(qwen[0], lora_rank=4)
    trained = qerl.trainable(model)
    before = {name: p.detach().clone() for name, p in trained.items()}
    values = {
        "qerl": qerl, "model": model, "step": 1, "steps": 2, "prompts": [[1, 2, 3], [4]], "eos": {256},
        "score": lambda rollout: rollout.length.view(2, 8) + torch.arange(8.0),
        "optimizer": torch.optim.AdamW(trained.values(), lr=0.1),
    }
    exec(lines, values)
    assert not all(torch.equal(before[name], p) for name, p in trained.items())
    assert torch.equal(values["logprobs"], values["old_logprobs"]) and values["sigma"] > 0
