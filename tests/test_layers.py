"""Layers: what lies above can be taken away, and imports point down only."""
import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import QUICK
from test_qerl import HERE

# From the lowest to the highest. (What is lower may import what is higher inside a function alone,
# where a flag asks for it.)
LAYERS = ["fp4_kernels", "qerl", "harness", "train_gsm8k", "methods", "studies", "bench"]
OPTIONS = (*map(str, QUICK), "--steps", "1", "--eval-questions", "2", "--skip-eval-before")


def modules():
    """(layer, path) of each file that is no test."""
    for layer in LAYERS:
        place = Path(HERE, layer)
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        yield from ((layer, file) for file in files)


def imported(file):
    """The first parts of the modules that a file imports when it is loaded."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_imports_point_down():
    found = list(modules())
    assert len(found) > 50
    for layer, file in found:
        below = LAYERS[:LAYERS.index(layer) + 1]
        for name in imported(file):
            assert name not in LAYERS or name in below, f"{file} imports {name}"


@pytest.mark.parametrize("real", [False, True])
def test_a_run_needs_no_upper_layer(qwen, data, tmp_path, real):
    """Without methods/, studies/, bench.py and the tests: the default run and a model rounded."""
    for name in ("qerl.py", "fp4_kernels.py", "train_gsm8k.py"):
        shutil.copy(Path(HERE, name), tmp_path)
    shutil.copytree(Path(HERE, "harness"), tmp_path / "harness")
    options = ("--model", qwen[0], "--data", str(data)) if real else ()
    command = [sys.executable, "train_gsm8k.py", *options, *OPTIONS, "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["step"] == 1
