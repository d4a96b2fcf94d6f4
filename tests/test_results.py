"""results/: its tables and pictures come from the packed files beside them."""
import os
import shutil

import pytest

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
    """Every picture, too; these are not drawn here, as another matplotlib draws other pixels."""
    drawn = set()
    for module in (claims, results):
        monkeypatch.setattr(module, "save_figure",
                            lambda path, *_: drawn.add(os.path.relpath(path, tmp_path)))
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


def test_packed_runs_are_read_as_they_were(tmp_path):
    rows = [{**row, "lr": 0.1 + 0.2, "aqn": False} for row in made_up_rows()]
    many_digits = {"step": 1, "accuracy": 1 / 3, "entropy": 2e-11 / 3, "mismatch_kl": -0.0,
                   "effective_completions": 1.0}
    few_digits = {"step": 2, "accuracy": 0.0, "entropy": 123456.0, "mismatch_kl": 1e-9}
    steps = {row["name"]: [many_digits, few_digits] for row in rows}
    packed = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        results.write_studies(folder, {"claims": (rows, steps), "methods": (rows[:1], {})})
        packed.append([(folder / name).read_bytes() for name in ("runs.csv", "steps.csv.gz")])
    assert packed[0] == packed[1]                             # at any time, by any process
    studies = results.read_studies(tmp_path / "a")
    assert list(studies) == ["claims", "methods"] and studies["claims"][0] == rows
    name = rows[0]["name"]
    assert studies["methods"][1] == {name: []}
    rounded = {**many_digits, "accuracy": 0.333333, "entropy": 6.66667e-12}
    assert studies["claims"][1][name] == [rounded, few_digits]


def test_runs_are_added_to_the_results(tmp_path, monkeypatch):
    out, new = tmp_path / "results", tmp_path / "new"
    out.mkdir()
    rows = list(made_up_rows())
    results.write_studies(str(out), {"claims": (rows, {})})
    monkeypatch.setattr(results, "make_tables", lambda folder, plots: None)
    options = ["--out", str(out), "--add", str(new)]
    with pytest.raises(qerl.UserError, match="holds no finished run"):
        results.main([*options, "claims"], {})
    step = {"step": 1, "accuracy": 0.5, "entropy": 1.0, "mismatch_kl": 0.0}
    added = {**rows[0], "name": "another"}
    note_run(new, **added)
    write_jsonl(new / "another" / "metrics.jsonl", [{**step, "kl": 0.0}])
    for study in ("claims", "claims/new"):
        results.main([*options, study], {})
    with pytest.raises(qerl.UserError, match="add claims: has another already"):
        results.main([*options, "claims"], {})
    with pytest.raises(qerl.UserError, match="must begin with claims or methods"):
        results.main([*options, "other"], {})
    studies = results.read_studies(str(out))
    assert studies["claims"][0] == [*rows, added]
    assert studies["claims/new"] == ([added], {"another": [step]})
