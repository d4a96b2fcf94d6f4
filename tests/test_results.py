"""results/: its tables and pictures come from the packed files beside them."""
import os
import shutil

import pytest

import qerl
from common import made_up_rows, note_run
from harness.run_folder import write_jsonl
from studies import claims, compare, results
from test_qerl import HERE


def files_below(folder, ending):
    return {os.path.relpath(os.path.join(place, name), folder)
            for place, _, names in os.walk(folder) for name in names if name.endswith(ending)}


def test_every_table_comes_from_the_packed_files_byte_for_byte(tmp_path, monkeypatch):
    """Every picture, too; these are not drawn here, as another matplotlib draws other pixels."""
    drawn = set()
    for module in (claims, compare, results):
        monkeypatch.setattr(module, "save_figure", lambda path, *_: drawn.add(os.path.relpath(path, tmp_path)))
    shutil.copytree(f"{HERE}/results", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("table*.md", "phases.md", "*.png"))
    results.make_tables(str(tmp_path), dict.fromkeys(["kernels", "rollout", "step", "scaling", "memory", "entropy"]))
    tables = files_below(tmp_path, ".md")
    assert tables == files_below(f"{HERE}/results", ".md") and len(tables) > 10
    for name in tables:
        assert (tmp_path / name).read_bytes() == open(f"{HERE}/results/{name}", "rb").read(), name
    assert drawn == files_below(f"{HERE}/results", ".png") - {"learning/report.png"}           # which a browser made


def test_packed_runs_are_read_as_they_were(tmp_path):
    rows = [{**row, "lr": 0.1 + 0.2, "aqn": False} for row in made_up_rows()]
    steps = {row["name"]: [{"step": 1, "accuracy": 1 / 3, "entropy": 2e-11 / 3, "mismatch_kl": -0.0, "effective_completions": 1.0},
                           {"step": 2, "accuracy": 0.0, "entropy": 123456.0, "mismatch_kl": 1e-9}] for row in rows}
    packed = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        results.write_studies(folder, {"claims": (rows, steps), "methods": (rows[:1], {})})
        packed.append([(folder / name).read_bytes() for name in ("runs.csv", "steps.csv.gz")])
    assert packed[0] == packed[1]                             # at any time, by any process
    studies = results.read_studies(tmp_path / "a")
    assert studies["claims"][0] == rows and list(studies) == ["claims", "methods"] and studies["methods"][1] == {rows[0]["name"]: []}
    first, second = studies["claims"][1][rows[0]["name"]]
    assert second == steps[rows[0]["name"]][1] and first == {**steps[rows[0]["name"]][0], "accuracy": 0.333333, "entropy": 6.66667e-12}


def test_a_studys_runs_are_added_to_the_results(tmp_path, monkeypatch):
    out, new = tmp_path / "results", tmp_path / "new"
    out.mkdir()
    results.write_studies(str(out), {"claims": (list(made_up_rows()), {})})
    monkeypatch.setattr(results, "make_tables", lambda folder, plots: None)
    before = results.read_studies(str(out))
    options = ["--out", str(out), "--add", str(new)]
    for study, message in (("claims/new", "holds no finished run"), ("claims", "is there already"), ("other", "is there already, or")):
        with pytest.raises(qerl.UserError, match=message):
            results.main([*options, study], {})
        if study == "claims/new":
            row = next(made_up_rows())
            note_run(new, **row)
            write_jsonl(new / row["name"] / "metrics.jsonl", [{"step": 1, "accuracy": 0.5, "entropy": 1.0, "mismatch_kl": 0.0, "kl": 0.0}])
    results.main([*options, "claims/new"], {})
    after = results.read_studies(str(out))
    assert after.pop("claims/new") == ([row], {row["name"]: [{"step": 1, "accuracy": 0.5, "entropy": 1.0, "mismatch_kl": 0.0}]})
    assert after == before and (out / "claims" / "new").is_dir()
