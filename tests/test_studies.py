"""The studies of learning: lists of runs, the shell loop, means."""
import os
import shlex
import subprocess
import sys
from functools import partial

import pandas as pd
import pytest

import train_gsm8k
from harness import fast, small_policy
from harness.folders import CHECKPOINT, read_jsonl
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
    for flags in pd.read_csv(HERE / "studies/arms.tsv", sep="\t")["flags"]:
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
    starts = [(start["name"], start["resumed"]) for start in read_jsonl(tmp_path / "starts.jsonl")]
    assert starts == 2 * [("a", False), ("b", True)]


def test_a_start_seed_makes_another_policy(cache, monkeypatch):
    short = partial(small_policy.train_policy, steps=1, batch=2)
    monkeypatch.setattr(small_policy, "train_policy", short)
    one, other = (fast.load_model(small_policy.warm_start(seed), "bf16") for seed in (0, 1))
    assert not one.embedding.equal(other.embedding)
