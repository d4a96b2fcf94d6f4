"""Layers: what lies above can be taken away, and imports point down only."""
import re
import shutil
from pathlib import Path

import pytest

from common import QUICK, read_json, run_python
from test_qerl import HERE

# From the lowest to the highest. (What is lower may import what is higher inside a function alone,
# where a flag asks for it.)
LAYERS = ["fp4_kernels", "qerl", "harness", "train_gsm8k", "methods", "studies", "bench"]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down(layer):
    file = Path(HERE, f"{layer}.py")
    files = [file] if file.exists() else Path(HERE, layer).rglob("*.py")
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    imported = re.findall(r"^(?:from|import) (\w+)", code, flags=re.MULTILINE)
    higher = LAYERS[LAYERS.index(layer) + 1:]
    assert imported
    assert not set(imported) & set(higher)


@pytest.mark.parametrize("real", [False, True])
def test_a_run_needs_no_upper_layer(qwen, data, tmp_path, real):
    """Without methods/, studies/, bench.py and the tests: the default run and a model rounded."""
    for name in ("qerl.py", "fp4_kernels.py", "train_gsm8k.py"):
        shutil.copy(Path(HERE, name), tmp_path)
    shutil.copytree(Path(HERE, "harness"), tmp_path / "harness")
    options = ["--model", qwen, "--data", data] if real else []
    done = run_python("train_gsm8k.py", *options, *QUICK, "--steps", 1, "--eval-questions", 2,
                      "--skip-eval-before", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_json(tmp_path / "run/metrics.jsonl")["step"] == 1
