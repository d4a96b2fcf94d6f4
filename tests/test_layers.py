"""Layers: what lies above can be taken away, imports point down only, names lead to what runs."""
import ast
import shutil
from pathlib import Path

import pytest

from common import QUICK, run_python
from harness.folders import read_json
from test_qerl import HERE

# From the lowest to the highest.
LAYERS = ["qerl", "fp4_kernels", "harness", "train_gsm8k", "methods", "studies", "bench"]


def imported_by(layer):
    """The packages and modules that a layer's files import, wherever in a file."""
    file = HERE / f"{layer}.py"
    for file in [file] if file.exists() else (HERE / layer).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            yield from (name.partition(".")[0] for name in names)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down(layer):
    higher = LAYERS[LAYERS.index(layer) + 1:]
    found = set(imported_by(layer))
    assert found
    assert not found & set(higher)
    assert layer != "qerl" or not found & set(LAYERS)


def test_a_run_needs_no_upper_layer_nor_what_makes_it_fast(tmp_path):
    for name in ("qerl.py", "train_gsm8k.py"):
        shutil.copy(HERE / name, tmp_path)
    shutil.copytree(HERE / "harness", tmp_path / "harness")
    (tmp_path / "harness/fast.py").unlink()
    flags = "--steps 1 --eval-questions 2 --skip-eval-before --out run"
    done = run_python("train_gsm8k.py", *QUICK, *flags.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_json(tmp_path / "run/metrics.jsonl")["step"] == 1


def test_an_editor_finds_each_call_of_the_loop():
    """One definition; that of the engine's functions is in qerl.py."""
    jedi = pytest.importorskip("jedi")
    loop = HERE / "train_gsm8k.py"
    source = loop.read_text(encoding="utf-8")
    script = jedi.Script(source, path=loop, project=jedi.Project(HERE))
    (train,) = [f for f in ast.parse(source).body if getattr(f, "name", "") == "train"]
    calls = [node.func for node in ast.walk(train) if isinstance(node, ast.Call)]
    of_engine = [call for call in calls if ast.unparse(call).startswith(("engine.", "qerl."))]
    assert len(of_engine) >= 5
    for call in calls:
        if call in of_engine or isinstance(call, ast.Name):
            found = script.goto(call.end_lineno, call.end_col_offset - 1, follow_imports=True)
            assert len(found) == 1, ast.unparse(call)
            assert call not in of_engine or Path(found[0].module_path) == HERE / "qerl.py"
