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


MADE_BY = {"inputs": "abc", "hardware": "card", "torch": "2", "triton": "3"}


def made_up(seeds, machine="one", hour=0, **others):
    """Rows in which P beats H by 1 or 3 points, and B and N by -0.3 or 1.7; `others` are of all of them."""
    rows = []
    for seed in seeds:
        odd = seed % 2
        points = {"P": 50, "H": 47 + 2 * odd, "B": 50.3 - 2 * odd, "N": 48.3 + 2 * odd}
        for arm, accuracy in points.items():
            measures = {measure: accuracy / 100 for measure in contrast.MEASURES}
            rows.append({**MADE_BY, "machine": machine, "name": f"{arm}{seed}", "seed": seed, "arm": arm,
                         "started": f"day {seed:02}, {hour:02}:00", **measures, **others})
    return rows


def changed(rows, arm, **others):
    """The rows, of which that of one arm has other values."""
    return [row | others if row["arm"] == arm else row for row in rows]


def test_a_made_up_record_has_its_known_answer():
    """Differences of m ± 1: Student's interval over n seeds is m ± t / √(n - 1), t of tables 2.201."""
    runs = contrast.counted(made_up(range(1, 13)))
    found = contrast.comparisons(100 * runs.pivot(index="seed", columns="arm", values="accuracy_after"))
    assert found["mean"].round(6).to_dict() == {
        "P - H": 2, "P - B": 0.7, "P - N": 0.7, "N - B": 0, "B - H": 1.3, "2 * B - H - P": 0.6}
    half = 2.201 / 11 ** 0.5
    for name in contrast.ASKED:
        interval = found.loc[name, ["low", "high"]].tolist()
        mean = found["mean"][name]
        assert interval == pytest.approx([mean - half, mean + half], abs=1e-4)
    # t of P - H is 2 √11 = 6.63. Alone P - B and P - N are at 0.0405, but Holm's method multiplies by 3, 2
    # and 1, and none is less than the one before.
    assert found.p[contrast.ASKED].tolist() == pytest.approx([3 * 3.7e-5, 2 * 0.0405, 2 * 0.0405], rel=0.01)
    assert found.p[contrast.SECONDARY].isna().all()


SEED_2 = {
    "complete": (made_up([2]), "one"),
    "an arm on another machine": (changed(made_up([2]), "H", machine="two"), None),
    "an arm on another card": (changed(made_up([2]), "H", hardware="another"), None),
    "an arm of other code": (changed(made_up([2]), "H", inputs="others"), None),
    "all of other code": (made_up([2], inputs="others"), None),
    "and made anew": (made_up([2], inputs="others") + made_up([2], "two", hour=1), "two"),
    "complete on two machines": (made_up([2], "two", hour=1) + made_up([2]), "one"),
    "H resumed later than those of machine two": (
        changed(made_up([2]), "H", started="day 02, 02:00") + made_up([2], "two", hour=1), "one"),
    "twice on a machine": (made_up([2], hour=1, accuracy_after=0) + made_up([2]), "one"),
}


@pytest.mark.parametrize("rows, machine", SEED_2.values(), ids=SEED_2)
def test_a_seed_counts_with_its_first_complete_block(rows, machine, capsys):
    """Seed 0, the pilot, never does; seed 1 tells which code, model and data the others must have."""
    runs = contrast.counted(rows + made_up([0, 1]))
    assert set(zip(runs.seed, runs.machine)) == {(1, "one")} | ({(2, machine)} if machine else set())
    assert sorted(runs.arm) == sorted("BHNP" * runs.seed.nunique())
    assert (runs.accuracy_after > 0).all()
    named = capsys.readouterr().out
    left_out = [row for row in rows if row["machine"] != machine]
    assert "one/P0" in named and "one/P1" not in named
    assert all("{machine}/{name}".format_map(row) in named for row in left_out)


def test_a_record_only_grows(tmp_path, capsys):
    """What it has stays. A run that was begun anew is named, one that went on is not."""
    record, folder = tmp_path / "record.jsonl", tmp_path / "two"
    old = {"machine": "two", "commit": "abc", "started": "1"}              # as of the cut pilot
    names = ["finished", "stopped", "anew"]
    write_jsonl(record, [old | {"name": name, "greedy_after": 0.5} for name in names])
    folder.mkdir()
    write_jsonl(folder / "starts.jsonl", [
        {"machine": "two", "commit": "def"},
        {"name": "finished", "started": "1", "resumed": False},
        {"name": "stopped", "started": "2", "resumed": True},
        {"name": "anew", "started": "3", "resumed": False}])
    for _ in range(2):
        contrast.main([str(record), str(folder)])
        said = capsys.readouterr().out
        assert "begun anew: two anew 3" in said.splitlines() and said.count("begun") == 1
    rows = read_jsonl(record)
    assert [(row["name"], row["started"]) for row in rows] == [
        *((name, "1") for name in names), ("stopped", "2"), ("anew", "3")]
    assert [row.get("greedy_after") for row in rows] == [0.5, 0.5, 0.5, None, None]


@pytest.mark.parametrize("seeds, tests", [(7, None), (8, 0), (11, 0), (12, 1)])
def test_the_test_needs_all_seeds_and_is_of_one_measure(seeds, tests, tmp_path, capsys):
    """Before the end there is no accuracy, and before eight seeds no end."""
    record = tmp_path / "record.jsonl"
    write_jsonl(record, made_up(range(1, 1 + seeds)))
    contrast.main([str(record)])
    assert "%" not in capsys.readouterr().out
    if tests is None:
        with pytest.raises(UserError, match="needs eight complete seeds"):
            contrast.main([str(record), "--final"])
        return
    contrast.main([str(record), "--final"])
    said = capsys.readouterr().out
    assert all(f"{title}, {seeds} seeds" in said for title in contrast.MEASURES.values())
    assert said.count(" p\n") == said.partition("greedy")[0].count(" p\n") == tests


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU's xargs")
def test_the_arms_differ_in_format_noise_and_rate_alone(quiz, tmp_path):
    """With another program in Python's place, which says its flags."""
    program = tmp_path / "python"
    program.write_text('#!/bin/bash\n[ "$1" = - ] && echo "{\\"commit\\": \\"${*:2}\\"}" || echo "$*"\n')
    program.chmod(0o755)
    folder, data = tmp_path / "runs", tmp_path / "data"
    data.mkdir()

    def call(text):
        (data / "train.jsonl").write_text(text)
        return subprocess.run(
            ["bash", f"{HERE}/studies/contrast.sh", folder, "1", "1", "3 4 5 6", quiz, data], cwd=HERE,
            env={**os.environ, "PYTHON": str(program), "COMMIT": "abc"}, text=True, capture_output=True)

    assert call("some").returncode == 0
    settings = {}
    for log in folder.glob("*-seed3.log"):
        flags = log.read_text().split()[1:]
        run = train_gsm8k.arguments([*flags, "--device", "cpu"])
        arm = contrast.ARMS[log.name.partition("-lr")[0], run.lr]
        settings[arm] = vars(run) | {"out": None}
    own = {arm: {name: value for name, value in values.items() if value != settings["P"][name]}
           for arm, values in settings.items()}
    quiet = {"sigma_start": 0, "sigma_end": 0}
    assert own == {"P": {}, "N": quiet, "B": {**quiet, "weights": "bf16", "quantizer": "rtn"},
                   "H": {**quiet, "weights": "bf16", "quantizer": "rtn", "lr": 5e-5}}
    common = {"seed": 3, "train_norms": True, "exact": False, "sigma_start": 1e-2, "sigma_end": 5e-4,
              "model": quiz, "data": str(data)}
    assert settings["P"].items() >= common.items()

    first, *starts = read_jsonl(folder / "starts.jsonl")
    machine, commit, inputs = first["commit"].split()
    assert (commit, len(inputs), machine) == ("abc", 16, "runs")
    arms = [start["name"].rpartition("-seed")[0] for start in starts]
    assert len(set(arms)) == 4
    assert len({tuple(arms[i:i + 4]) for i in (0, 4, 8, 12)}) > 1      # each seed has its own order
    # The folder is of one code, model and data.
    assert call("some").returncode == 0
    refused = call("others")
    assert refused.returncode == 2
    assert refused.stderr == f"{folder}: has runs of other code, model or data; name a new folder\n"


def test_a_run_becomes_a_row_with_its_counts(quiz, tmp_path):
    """Its first start did not finish. A finished run without a start is refused."""
    name = "gptq-lr1e-4-seed1"
    write_jsonl(tmp_path / "starts.jsonl", [
        {"machine": "one", "commit": "abc"}, {"name": name, "started": "1"}, {"name": name, "started": "2"}])
    run_main("--model", quiz, "--data", quiz, *QUICK, "--group 4 --lr 1e-4 --steps 2 --validation 4",
             "--eval-every 1 --eval-samples 4 --validation-samples 2 --out", tmp_path / name)
    stopped, row = json.loads(json.dumps(contrast.rows_of(tmp_path)))
    assert stopped["started"] == "1" and "arm" not in stopped
    assert (row["arm"], row["seed"], row["commit"], row["started"]) == ("N", 0, "abc", "2")
    assert len(contrast.counted([stopped])) == 0
    summary = read_json(tmp_path / name / "summary.json")
    assert sum(row["right_accuracy"]) / 24 == pytest.approx(summary["accuracy_after"])
    assert max(row["right_accuracy"]) > 1
    steps = read_jsonl(tmp_path / name / "metrics.jsonl")
    step = steps[-1]
    assert "pass@2_validation" in step and "pass@4_validation" not in step and "pass@4_after" in summary
    for measure in contrast.MEASURES.keys() - summary.keys():
        assert row[measure] == pytest.approx(sum(step[measure] for step in steps) / 2)
    write_jsonl(tmp_path / "starts.jsonl", [{"machine": "one", "commit": "abc"}])
    with pytest.raises(UserError, match=f"{name}: starts.jsonl has no start of it; move it away"):
        contrast.rows_of(tmp_path)
    with pytest.raises(UserError, match="elsewhere: has no starts.jsonl"):
        contrast.rows_of(tmp_path / "elsewhere")
