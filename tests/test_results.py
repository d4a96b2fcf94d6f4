"""results/: its tables and pictures come from the packed files beside them."""
import shutil

import pytest

import bench
from common import files_below
from harness.errors import UserError
from harness.folders import write_jsonl
from studies import results
from test_qerl import HERE

# Which no command draws any more; report.png a browser made.
RECORDED = ("curves.png", "differences.png", "entropy.png", "memory.png", "report.png")


def test_every_table_comes_from_the_packed_files_byte_for_byte(tmp_path):
    """Every picture is drawn, too, but not compared: another matplotlib draws other pixels."""
    left_out = shutil.ignore_patterns("tables.md", "*.png")
    shutil.copytree(f"{HERE}/results", tmp_path, dirs_exist_ok=True, ignore=left_out)
    results.make_all(str(tmp_path), bench.PLOTS)
    recorded = files_below(HERE / "results")
    made = files_below(tmp_path)
    assert made.keys() == {name for name in recorded if not name.endswith(RECORDED)}
    for name in made:
        assert name.endswith(".png") or made[name] == recorded[name], name


def test_runs_are_added_to_the_results(tmp_path):
    """With six digits; what was there before stays. Small policies' start seeds give them a name."""
    files = [
        shutil.copy(f"{HERE}/results/{name}", tmp_path) for name in ("runs.csv", "steps.csv.gz")]
    before = list(map(results.read_csv, files))
    for seed in (0, 1):
        run = tmp_path / f"runs/sigma-4-lr0.1-seed{seed}"
        run.mkdir(parents=True)
        settings = {"model": None, "lr": 0.1, "seed": seed, "start_seed": seed}
        write_jsonl(run / "summary.json", [{
            "settings": settings, "steps": 1, "accuracy_after": 1 / 3, "seconds": 9.0,
            "hardware": "none"}])
        write_jsonl(run / "metrics.jsonl", [{
            "step": 1, "accuracy": 1 / 3, "entropy": 2e-11 / 3, "mismatch_kl": 0.0,
            "peak_memory_gb": 0.5, "seconds": {"step": 1.0}}])
    results.add_runs(tmp_path, tmp_path / "runs", "claims/new")
    with pytest.raises(UserError, match="add claims/new: has sigma-4-lr0.1-seed0 already"):
        results.add_runs(tmp_path, tmp_path / "runs", "claims/new")
    after = list(map(results.read_csv, files))
    for old, new in zip(before, after):
        assert new[:-2].equals(old)
    run, step = (frame.iloc[-1] for frame in after)
    assert (run.model, run.arm, run.seed, run.accuracy_after) == (
        "small-own-starts", "sigma / 4", 1, 0.333333)
    assert (step.run, step.entropy) == ("sigma-4-lr0.1-seed1", 6.66667e-12)
