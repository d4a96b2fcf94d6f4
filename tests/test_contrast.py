"""The contrast of four arms: its runs, its record, its test."""
import json
import os
import subprocess
import sys

import pytest

import train_gsm8k
from common import QUICK, run_main
from harness.errors import UserError
from harness.folders import read_json, read_jsonl, write_jsonl
from studies import contrast
from test_qerl import HERE


def made_up(seeds, machine="one"):
    """Rows in which P beats H by 1 or 3 points, and B and N by -0.3 or 1.7."""
    rows = []
    for seed in seeds:
        odd = seed % 2
        points = {"P": 50, "H": 47 + 2 * odd, "B": 50.3 - 2 * odd, "N": 48.3 + 2 * odd}
        for arm, accuracy in points.items():
            rows.append({
                "machine": machine, "seed": seed, "arm": arm, "started": f"day {seed:02}",
                "accuracy_after": accuracy / 100, "greedy_after": accuracy / 100 + 0.01 * odd,
                "accuracy_validation": [0.3, 0.4], "entropy": [0.2, 0.3], "one_right": [0.1, 0.2]})
    return rows


def test_a_made_up_record_has_its_known_answer():
    """Differences of m ± 1: Student's interval over n seeds is m ± t / √(n - 1), t of tables 2.201."""
    runs = contrast.complete_seeds(made_up(range(1, 13)))
    found = contrast.comparisons(100 * runs.pivot(index="seed", columns="arm", values="accuracy_after"))
    assert found["mean"].round(6).to_dict() == {"P-H": 2, "P-B": 0.7, "P-N": 0.7, "N-B": 0, "B-H": 1.3}
    half = 2.201 / 11 ** 0.5
    for name in ("P-H", "P-B", "P-N"):
        interval = found.loc[name, ["low", "high"]].tolist()
        mean = found["mean"][name]
        assert interval == pytest.approx([mean - half, mean + half], abs=1e-4)
    # Alone P-B and P-N are below 5 %, but not by Holm: times 3, 2 and 1, and no less than the one before.
    assert found.p["P-B"] == pytest.approx(0.0405, abs=1e-4)
    assert found["by Holm"][["P-H", "P-B", "P-N"]].tolist() == pytest.approx(
        [3 * found.p["P-H"], 2 * found.p["P-B"], 2 * found.p["P-B"]])
    assert found["by Holm"][["N-B", "B-H"]].isna().all()


def test_what_would_be_found_is_what_the_rule_says():
    shown = {seeds: [round(contrast.detectable(1.3, seeds, level), 1) for level in (0.05, 0.05 / 3)]
             for seeds in (12, 8)}
    assert shown == {12: [1.2, 1.4], 8: [1.5, 1.9]}


def test_only_complete_seeds_of_one_machine_count(tmp_path, capsys):
    """Not the pilot's, nor a seed whose arms are on two machines; a seed's first machine counts."""
    rows = made_up(range(10))                          # seed 0 is the pilot's
    rows[4 * 5]["machine"] = "two"                     # of seed 5
    del rows[4 * 6]["accuracy_after"]                  # an arm of seed 6 was stopped
    again = [{**row, "started": "later", "accuracy_after": 0} for row in made_up([7], machine="two")]
    record = tmp_path / "record.jsonl"
    write_jsonl(record, again + rows)
    runs = contrast.complete_seeds(again + rows)
    assert sorted(runs.seed.unique()) == [1, 2, 3, 4, 7, 8, 9]
    assert (runs.accuracy_after > 0).all() and len(runs) == 7 * 4
    assert "seed 6 of one does not count: H, B, N" in capsys.readouterr().out
    with pytest.raises(UserError, match="needs eight complete seeds"):
        contrast.main([str(record), "--final"])
    write_jsonl(record, rows + made_up([6], machine="two"))
    contrast.main([str(record)])
    assert "%" not in capsys.readouterr().out          # no accuracy before the end
    contrast.main([str(record), "--final"])
    said = capsys.readouterr().out
    assert all(f"{title}, 8 seeds" in said for title in contrast.MEASURES.values())


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU's xargs")
def test_the_arms_differ_in_format_noise_and_rate_alone(tmp_path):
    """With another program in Python's place, which says its flags."""
    program = tmp_path / "python"
    program.write_text('#!/bin/bash\n[ "$1" = - ] && echo "{\\"commit\\": \\"$2\\"}" || echo "$*"\n')
    program.chmod(0o755)
    folder = tmp_path / "runs"
    environment = {**os.environ, "PYTHON": str(program), "COMMIT": "abc"}
    subprocess.run(["bash", f"{HERE}/studies/contrast.sh", folder, "1", "2", "3", "--model", "Q",
                    "--data", "D"], check=True, env=environment, capture_output=True)
    settings = {}
    for log in folder.glob("*.log"):
        flags = log.read_text().split()[1:]
        run = train_gsm8k.arguments([*flags, "--device", "cpu"])
        arm = contrast.ARMS[log.name.partition("-lr")[0], run.lr]
        settings[arm] = vars(run) | {"out": None}
    own = {arm: {name: value for name, value in values.items() if value != settings["P"][name]}
           for arm, values in settings.items()}
    quiet = {"sigma_start": 0, "sigma_end": 0}
    assert own == {"P": {}, "N": quiet, "B": {**quiet, "weights": "bf16", "quantizer": "rtn"},
                   "H": {**quiet, "weights": "bf16", "quantizer": "rtn", "lr": 5e-5}}
    assert settings["P"]["seed"] == 3 and settings["P"]["train_norms"] and settings["P"]["exact"] is False


def test_a_run_becomes_a_row_with_its_counts(quiz, tmp_path):
    """Its first start did not finish."""
    name = "gptq-lr1e-4-seed1"
    write_jsonl(tmp_path / "starts.jsonl", [
        {"commit": "abc"}, {"name": name, "started": "1"}, {"name": name, "started": "2"}])
    run_main("--model", quiz, "--data", quiz, *QUICK, "--group 4 --lr 1e-4 --steps 2 --validation 4",
             "--eval-every 1 --eval-samples 4 --validation-samples 2 --out", tmp_path / name)
    stopped, row = json.loads(json.dumps(contrast.rows_of(tmp_path)))
    assert stopped["started"] == "1" and "arm" not in stopped
    assert (row["arm"], row["seed"], row["commit"], row["started"]) == ("N", 0, "abc", "2")
    assert len(contrast.complete_seeds([stopped])) == 0
    summary = read_json(tmp_path / name / "summary.json")
    assert sum(row["right_accuracy"]) / 24 == pytest.approx(summary["accuracy_after"])
    assert max(row["right_accuracy"]) > 1
    step = read_jsonl(tmp_path / name / "metrics.jsonl")[-1]
    assert "pass@2_validation" in step and "pass@4_validation" not in step and "pass@4_after" in summary
    assert len(row["entropy"]) == len(row["one_right"]) == len(row["accuracy_validation"]) == 1
