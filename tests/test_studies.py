"""The studies of learning: lists of runs, the shell loop, means, and the rule of an experiment."""
import os
import shlex
import subprocess
import sys
from functools import partial

import numpy as np
import pandas as pd
import pytest

import train_gsm8k
from harness import fast, small_policy
from harness.errors import UserError
from harness.folders import CHECKPOINT, write_jsonl
from studies import decide, results
from test_qerl import HERE


def printed(script, *args):
    """A finished process of a script of studies/."""
    return subprocess.run(["bash", f"{HERE}/studies/{script}", *args], text=True,
                          capture_output=True)


def listed(script, *args):
    """{name of a run: its Settings} that it prints."""
    found = {}
    for line in printed(script, *args).stdout.splitlines():
        name, *flags = shlex.split(line)
        found[name] = train_gsm8k.arguments([*flags, "--device", "cpu"])
    return found


def test_every_arms_flags_go_together():
    for flags in results.ARMS["flags"]:
        train_gsm8k.arguments(["--device", "cpu", *flags.split()])


def test_a_study_has_each_arm_at_each_rate_and_seed():
    """An arm's flags win; SEED is the run's. An arm that is unknown is refused."""
    runs = listed("arms.sh", "1e-3 2e-3", "0 1", "sigma / 4", "gptq", "--",
                  "--start-seed", "SEED", "--sigma-start", "0.5")
    assert len(runs) == 8
    last = runs["gptq-lr2e-3-seed1"]
    assert (last.lr, last.seed, last.start_seed, last.quantizer) == (2e-3, 1, 1, "gptq")
    first = runs["sigma-4-lr1e-3-seed0"]
    assert (first.sigma_start, first.quantizer) == (2.5e-3, "rtn")
    unknown = printed("arms.sh", "1", "0", "none", "--")
    assert (unknown.returncode, unknown.stderr) == (2, "studies/arms.tsv has no arm none\n")


def test_the_experiment_has_four_arms_a_seed():
    model_and_data = ("some/Model", "some/data")
    runs = listed("decide.sh", "train", *model_and_data, "0.07", "4", "5")
    assert [name for name in runs if name.endswith("-4")] == [
        "gptq-4", "gptq+noise-4", "bf16-4", "bf16+noise-4"]
    noisy = runs["bf16+noise-5"]
    assert (noisy.seed, noisy.weights, noisy.sigma_start, noisy.sigma_end) == (
        5, "bf16", 0.07, 0.0035)
    assert runs["gptq-5"].sigma_start == 0
    starts = listed("decide.sh", "start", *model_and_data)
    assert sum(run.eval_samples for run in starts.values() if run.weights == "nvfp4") == 256


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU's xargs")
def test_the_loop_makes_what_is_missing_and_tries_again_what_failed(tmp_path):
    """With other programs in Python's place: one that fails, and one that says its GPU and flags."""
    program = tmp_path / "python"
    program.write_text('#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES $*"\n')
    program.chmod(0o755)
    for left in (f"b/{CHECKPOINT}", "c/summary.json"):
        (tmp_path / left).parent.mkdir()
        (tmp_path / left).touch()

    def loop(python):
        return subprocess.run(
            ["bash", f"{HERE}/studies/runs.sh", tmp_path, "1", "1"], text=True, check=True,
            input="a --lr 1\nb --lr 2\nc --lr 3\n", env={**os.environ, "PYTHON": str(python)},
            capture_output=True).stdout

    assert loop("false").count("status 1") == 2
    assert "status" not in loop(program)
    assert {path.stem: path.read_text() for path in tmp_path.glob("*.log")} == {
        "a": f"0 train_gsm8k.py --lr 1 --out {tmp_path}/a\n",
        "b": f"0 train_gsm8k.py --lr 2 --resume --out {tmp_path}/b\n"}


def test_a_start_seed_makes_another_policy(cache, monkeypatch):
    short = partial(small_policy.train_policy, steps=1, batch=2)
    monkeypatch.setattr(small_policy, "train_policy", short)
    one, other = (fast.load_model(small_policy.warm_start(seed), "bf16") for seed in (0, 1))
    assert not one.embedding.equal(other.embedding)


# --------------------------------------------------------------------------------------------------
# The experiment's analysis

def experiment():
    """Two seeds: 4 bits cost 3 points, under noise 2; noise gives BF16 1, NVFP4 2."""
    arms = np.array([0, 1, -3, -1])
    return pd.DataFrame([20 + arms, 25 + arms + [0, 0, 1, 1]], columns=decide.ARMS)


def test_effects_are_those_of_the_arms_and_starts_add_to_the_error():
    """A seed is one value of each effect, whatever else it changes in all arms."""
    found = decide.effects(experiment())
    assert found.estimate.to_dict() == {
        "4 bits and noise": -0.5, "4 bits": -2, "noise": 1.5, "4 bits, without noise": -2.5,
        "4 bits, under noise": -1.5, "noise in NVFP4": 2, "noise in BF16": 1,
        "4 bits, under noise minus without": 1}
    assert found.error[["4 bits", "noise"]].tolist() == pytest.approx([0.5, 0])
    added = decide.effects(experiment(), 0.7)
    variance = added.error ** 2 - found.error ** 2
    three = ["4 bits", "4 bits, under noise", "noise"]
    assert variance[three].tolist() == pytest.approx([0.7, 0.7, 0])
    assert added.df["4 bits"] == pytest.approx((1 + 0.7 / 0.25) ** 2) and found.df["4 bits"] == 1


@pytest.mark.parametrize("estimate,error,says", [
    (2, 0.5, "helps"),
    (-2, 0.5, "costs"),
    (0.5, 0.1, "helps, by less than a point"),
    (0.2, 0.3, "changes less than a point"),
    (-0.5, 0.5, "undetermined, but a gain of a point is excluded"),
    (0.5, 0.5, "undetermined, but a loss of a point is excluded"),
    (-0.6, 0.9, "undetermined, but a gain of a point is excluded"),
    (0, 1, "undetermined"),
])
def test_the_rule_has_a_verdict_for_every_interval(estimate, error, says):
    assert decide.verdict(pd.Series({"estimate": estimate, "error": error, "df": 27})) == says


def test_finished_runs_have_verdicts_from_folders_and_from_their_record(tmp_path, monkeypatch, capsys):
    """The gain is pass@1 after minus the start, which all sessions share."""
    def write(folder, name, **content):
        (tmp_path / folder).mkdir(exist_ok=True, parents=True)
        write_jsonl(tmp_path / folder / name, [content])

    def decided(*args):
        monkeypatch.setattr("sys.argv", ["decide", *map(str, args)])
        decide.main()
        return capsys.readouterr().out

    steps = dict.fromkeys(["accuracy", "entropy", "length", "mismatch_kl"], 0.5)
    for arm, after in (("bf16", 0.40), ("bf16+noise", 0.41), ("gptq", 0.36), ("gptq+noise", 0.37)):
        for session, seed, other in ((1, 0, 0), (2, 1, 0.001), (2, 2, -0.001), (2, 0, 0.5)):
            if (arm, seed) != ("gptq", 2):
                changed = after + other * arm.startswith("gptq")
                write(f"{session}/{arm}-{seed}", "metrics.jsonl", **steps)
                write(f"{session}/{arm}-{seed}", "summary.json", accuracy_after=changed, greedy_after=after)
    for format, before in (("bf16", 0.25), ("gptq", 0.24)):
        write(f"1/start-{format}-0", "eval.json", accuracy_now=before, greedy_now=before,
              settings={"eval_samples": 64}, **{"pass@2_now": before + 0.1})
    for session, seed, after in ((1, 0, 0.38), (2, 1, 0.4), (2, 0, 0.9)):
        write(f"{session}/round-gptq-{seed}", "eval.json", accuracy_now=after, greedy_now=after,
              settings={"eval_samples": 8}, **{"pass@2_now": after})
    write("1/bf16-2", "metrics.jsonl", **steps)            # of a seed that another session began anew
    write("1/bf16-2", "summary.json", accuracy_after=0.4, greedy_after=0.4)
    for session in (1, 2):
        (tmp_path / f"{session}/codes.txt").write_text("abc  model.safetensors\n")
    record = tmp_path / "record.json"
    printed = decided(tmp_path / "1", tmp_path / "2", "--record", record)
    assert "seed 2 of session 2 is left out: it has only bf16+noise, bf16, gptq+noise" in printed
    assert "seed 2 of session 1 is left out: it has only bf16\n" in printed
    assert "no verdict: 2 of 8 seeds are complete" in printed
    assert "| 4 bits | -2.95 ± " in printed
    assert "| round-gptq minus gptq | 2 | 2.95 ± " in printed
    # The mean of p(1 - p) is 0.1.
    starts = decide.starts_of(decide.read_rows([str(record)]))
    assert starts["bf16"] == pytest.approx((25, 1e4 * 0.1 / (64 * 660)))
    assert decided(record, "--final").count("4 bits: costs") == 1
    (tmp_path / "2/codes.txt").write_text("other  model.safetensors\n")
    with pytest.raises(UserError, match="different codes"):
        decided(tmp_path / "1", tmp_path / "2")
