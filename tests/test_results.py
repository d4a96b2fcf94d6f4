"""results/: its tables and pictures come from the packed files beside them."""
import os
import shutil

import pytest
from matplotlib import pyplot

import bench
import qerl
from common import made_up_rows, note_run
from harness.folders import write_jsonl
from studies import claims, results
from test_qerl import HERE


def files_below(folder, ending):
    """{path in the folder} of its files whose names end so."""
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    return {os.path.relpath(path, folder) for path in paths if path.endswith(ending)}


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
    tables = files_below(tmp_path, ".md")
    assert tables == files_below(f"{HERE}/results", ".md") and len(tables) > 10
    for name in tables:
        with open(f"{HERE}/results/{name}", "rb") as f:
            assert (tmp_path / name).read_bytes() == f.read(), name
    pictures = files_below(f"{HERE}/results", ".png")
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
    options = ["--out", str(out), "--add", str(new)]
    with pytest.raises(qerl.UserError, match="holds no finished run"):
        results.main([*options, "claims"], {})
    row = {**next(made_up_rows()), "lr": 0.1 + 0.2, "aqn": False}
    step = {"step": 1, "accuracy": 1 / 3, "entropy": 2e-11 / 3, "mismatch_kl": -0.0}
    note_run(new, **row)
    write_jsonl(new / row["name"] / "metrics.jsonl", [{**step, "kl": 0.0}])
    for study in ("claims", "claims/new"):
        results.main([*options, study], {})
    with pytest.raises(qerl.UserError, match="add claims: has .* already"):
        results.main([*options, "claims"], {})
    with pytest.raises(qerl.UserError, match="must begin with claims or methods"):
        results.main([*options, "other"], {})
    rows, steps = (results.read_csv(f"{out}/{name}") for name in packed)
    assert [rows[:-2], steps[:-2]] == before
    assert rows[-2:] == [{**row, "study": study, "lr": 0.3} for study in ("claims", "claims/new")]
    rounded = {**step, "accuracy": 0.333333, "entropy": 6.66667e-12, "run": row["name"]}
    assert steps[-2:] == [{**rounded, "study": study} for study in ("claims", "claims/new")]
