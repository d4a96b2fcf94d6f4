"""results/: its tables and pictures come from the packed files beside them."""
import shutil
from pathlib import Path

import pytest

import bench
from harness.errors import UserError
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


def test_runs_are_added_to_the_results(tmp_path):
    """They are read as they were, to six digits, and what was there before stays."""
    runs = tmp_path / "runs/new"
    runs.mkdir(parents=True)
    for name in ("runs.csv", "steps.csv.gz"):
        shutil.copy(f"{HERE}/results/{name}", tmp_path)
    row = {"name": "new", "arm": "bf16", "seed": 0, "lr": 0.1 + 0.2}
    step = {"step": 1, "accuracy": 1 / 3, "entropy": 2e-11 / 3, "mismatch_kl": -0.0}
    write_jsonl(runs / "row.json", [row])
    write_jsonl(runs / "metrics.jsonl", [{**step, "kl": 0.0}])

    def packed(folder):
        return [results.read_csv(f"{folder}/{name}") for name in ("runs.csv", "steps.csv.gz")]
    results.add_runs(tmp_path, tmp_path / "runs", "claims/new")
    with pytest.raises(UserError, match="add claims/new: has new already"):
        results.add_runs(tmp_path, tmp_path / "runs", "claims/new")
    rows, steps = packed(f"{HERE}/results")
    step |= {"accuracy": 0.333333, "entropy": 6.66667e-12}
    assert packed(tmp_path) == [
        [*rows, {**row, "study": "claims/new", "lr": 0.3}],
        [*steps, {**step, "study": "claims/new", "run": "new"}]]
