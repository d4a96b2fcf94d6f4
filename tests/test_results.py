"""results/: its tables and pictures come from the packed files beside them."""
import os
import shutil
from pathlib import Path

import pytest
from matplotlib import pyplot

import bench
import qerl
from common import files_below, made_up_rows, note_run
from harness.folders import write_jsonl
from studies import claims, results
from test_qerl import HERE


def test_every_table_comes_from_the_packed_files_byte_for_byte(tmp_path, monkeypatch):
    """Every picture is drawn, too, but not compared: another matplotlib draws other pixels."""
    drawn = set()
    pyplot.switch_backend("Agg")

    def note(path, draw, *data):
        pyplot.close(draw(*data, pyplot))
        drawn.add(os.path.relpath(path, tmp_path))

    for module in (claims, results):
        monkeypatch.setattr(module, "save_figure", note)
    left_out = shutil.ignore_patterns("table*.md", "phases.md", "*.png")
    shutil.copytree(f"{HERE}/results", tmp_path, dirs_exist_ok=True, ignore=left_out)
    results.make_tables(str(tmp_path), bench.PLOTS)
    recorded = files_below(Path(HERE, "results"))
    made, expected = ({name: data for name, data in files.items() if name.endswith(".md")}
                      for files in (files_below(tmp_path), recorded))
    assert made == expected
    pictures = {name for name in recorded if name.endswith(".png")}
    assert drawn == pictures - {"learning/report.png"}           # which a browser made


def test_runs_are_added_to_the_results(tmp_path, monkeypatch):
    """They are read as they were, to six digits, and what was there before stays."""
    out, new = tmp_path / "results", tmp_path / "new"
    out.mkdir()
    packed = ("runs.csv", "steps.csv.gz")
    for name in packed:
        shutil.copy(f"{HERE}/results/{name}", out)
    before = [results.read_csv(f"{out}/{name}") for name in packed]
    monkeypatch.setattr(results, "make_tables", lambda folder, plots: None)
    row = {**next(made_up_rows()), "lr": 0.1 + 0.2}
    step = {"step": 1, "accuracy": 1 / 3, "entropy": 2e-11 / 3, "mismatch_kl": -0.0}
    note_run(new, **row)
    write_jsonl(new / row["name"] / "metrics.jsonl", [{**step, "kl": 0.0}])

    def add(folder, study):
        results.main(["--out", str(out), "--add", str(folder), study], {})
    add(new, "claims/new")
    with pytest.raises(qerl.UserError, match="add claims/new: has .* already"):
        add(new, "claims/new")
    rows, steps = (results.read_csv(f"{out}/{name}") for name in packed)
    assert [rows[:-1], steps[:-1]] == before
    assert rows[-1] == {**row, "study": "claims/new", "lr": 0.3}
    rounded = {**step, "accuracy": 0.333333, "entropy": 6.66667e-12}
    assert steps[-1] == {**rounded, "study": "claims/new", "run": row["name"]}
