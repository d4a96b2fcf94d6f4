"""results/: its tables and pictures come from the packed files beside them."""
import itertools
import os
import shutil
from pathlib import Path

import pytest

import bench
import qerl
from common import files_below
from harness.folders import write_jsonl
from studies import results
from test_qerl import HERE


def test_every_table_comes_from_the_packed_files_byte_for_byte(tmp_path):
    """Every picture is drawn, too, but not compared: another matplotlib draws other pixels."""
    left_out = shutil.ignore_patterns("table*.md", "phases.md", "*.png")
    shutil.copytree(f"{HERE}/results", tmp_path, dirs_exist_ok=True, ignore=left_out)
    results.make_tables(str(tmp_path), bench.PLOTS)
    recorded = files_below(Path(HERE, "results"))
    made = files_below(tmp_path)
    assert made.keys() == recorded.keys() - {"learning/report.png"}          # which a browser made
    for name in made:
        assert name.endswith(".png") or made[name] == recorded[name], name


def test_runs_are_added_to_the_results(tmp_path, monkeypatch):
    """They are read as they were, to six digits, and what was there before stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "make_tables", lambda folder, plots: None)
    packed = ("results/runs.csv", "results/steps.csv.gz")
    os.makedirs("results")
    os.makedirs("runs/new")
    for path in packed:
        with results.opened(f"{HERE}/{path}", "rt") as whole, results.opened(path, "wt") as few:
            few.writelines(itertools.islice(whole, 3))
    rows, steps = map(results.read_csv, packed)
    row = {"name": "new", "arm": "bf16", "seed": 0, "lr": 0.1 + 0.2}
    step = {"step": 1, "accuracy": 1 / 3, "entropy": 2e-11 / 3, "mismatch_kl": -0.0}
    write_jsonl("runs/new/row.json", [row])
    write_jsonl("runs/new/metrics.jsonl", [{**step, "kl": 0.0}])

    add = ["--add", "runs", "claims/new"]
    results.main(add, {})
    with pytest.raises(qerl.UserError, match="add claims/new: has new already"):
        results.main(add, {})
    rows.append({**row, "study": "claims/new", "lr": 0.3})
    steps.append({**step, "study": "claims/new", "run": "new", "accuracy": 0.333333,
                  "entropy": 6.66667e-12})
    assert list(map(results.read_csv, packed)) == [rows, steps]
