"""results/: its tables and pictures come from the packed files beside them."""
import shutil
from pathlib import Path

import pytest

import bench
import qerl
from common import files_below, made_up_rows
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
    packed = ("results/runs.csv", "results/steps.csv.gz")
    Path("results").mkdir()
    for path in packed:
        shutil.copy(f"{HERE}/{path}", path)
    before = list(map(results.read_csv, packed))
    monkeypatch.setattr(results, "make_tables", lambda folder, plots: None)
    row = {**next(made_up_rows()), "lr": 0.1 + 0.2}
    step = {"step": 1, "accuracy": 1 / 3, "entropy": 2e-11 / 3, "mismatch_kl": -0.0}
    folder = Path("new", row["name"])
    folder.mkdir(parents=True)
    write_jsonl(folder / "row.json", [row])
    write_jsonl(folder / "metrics.jsonl", [{**step, "kl": 0.0}])

    add = ["--add", "new", "claims/new"]
    results.main(add, {})
    with pytest.raises(qerl.UserError, match="add claims/new: has .* already"):
        results.main(add, {})
    rows, steps = map(results.read_csv, packed)
    assert [rows[:-1], steps[:-1]] == before
    assert rows[-1] == {**row, "study": "claims/new", "lr": 0.3}
    rounded = {**step, "accuracy": 0.333333, "entropy": 6.66667e-12}
    assert steps[-1] == {**rounded, "study": "claims/new", "run": row["name"]}
