"""The studies behind results/claims and results/methods."""
import os
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from harness import fast
from harness.errors import UserError
import train_gsm8k
from harness import small_policy
from studies import claims, study

SHORT = "--prompts 2 --group 2 --updates 1 --steps 2 --max-new-tokens 8 --lora-rank 2 --device cpu"


def study_arguments(tmp_path, *flags):
    os.makedirs(f"{tmp_path}/out", exist_ok=True)
    return study.arguments(["--model", "some/Model", "--arms", "nf4", "mxfp4", *flags,
                            "--out", f"{tmp_path}/out"], "a study", "claims")


@pytest.mark.parametrize("text,seeds", {
    "53.0 ± 1.0": [0.52, 0.54],
    "50.0": [0.5, 0.5],
    "0.0": [-1e-4],
}.items())
def test_a_mean_has_the_standard_error_of_its_seeds(text, seeds):
    """In percent, and none of equal seeds. What else a table says: test_results.py."""
    assert study.with_error(seeds, 100, 1) == text


def test_every_arms_flags_go_together():
    for arm in study.FLAGS.values():
        train_gsm8k.arguments(["--device", "cpu", *arm.split()])


def test_claims_runs_what_is_missing(qwen, data, tmp_path, capsys):
    """In a process, as a study does. A second start runs nothing and prints the same table."""
    out = f"{tmp_path}/out"
    options = ["--model", qwen, "--data", data, "--arms", "nvfp4+aqn", "nvfp4+aqn",
               "--lrs", "1e-3", "--seeds", "0", "--out", out, *SHORT.split()]
    assert claims.main("claims", options) == 0
    row, = study.finished_runs(out)
    assert (row["arm"], row["steps"]) == ("nvfp4+aqn", 2)
    assert {"curves.png", "tables.md"} <= set(os.listdir(out))
    capsys.readouterr()
    assert claims.main("claims", options) == 0
    first, *table, _ = capsys.readouterr().out.splitlines()
    assert first == "1 runs, 0 missing"
    assert table == claims.arms_table([row], claims.MEASURES)


def test_a_run_that_fails_ends_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study.subprocess, "call", lambda command, **_: "Model-nf4-" in str(command))
    monkeypatch.setattr(study, "row_of", lambda run, folder: run)
    args = study_arguments(tmp_path, "--seeds", "0", "1")
    assert study.run_all(args)
    names = [row["name"] for row in study.finished_runs(args.out)]
    assert names == ["Model-mxfp4-lr5e-05-seed0", "Model-mxfp4-lr5e-05-seed1"]
    assert capsys.readouterr().out.count("ended with status") == 2


def settings_of_runs(args):
    """The Settings of the command of each run."""
    commands = [study.command_of(run, "cpu", args) for run in study.wanted_runs(args).values()]
    return [train_gsm8k.arguments(command[2:]) for command in commands]


def test_an_arms_flags_win_and_studies_round_to_nearest(tmp_path, monkeypatch):
    monkeypatch.setitem(study.FLAGS, "nf4", "--group 2")
    monkeypatch.setitem(study.FLAGS, "mxfp4", "--quantizer gptq")
    runs = settings_of_runs(study_arguments(tmp_path, "--group", "4", "--seeds", "0"))
    assert [(s.group, s.quantizer) for s in runs] == [(2, "rtn"), (4, "gptq")]


def test_own_starts_make_a_policy_a_seed():
    flags = ["--own-starts", "--seeds", "2", "1", "--arms", "bf16"]
    runs = settings_of_runs(study.arguments(flags, "a study", "claims"))
    assert [(s.seed, s.start_seed) for s in runs] == [(2, 2), (1, 1)]


def test_a_start_seed_makes_another_policy(cache, monkeypatch):
    short = partial(small_policy.train_policy, steps=1, batch=2)
    monkeypatch.setattr(small_policy, "train_policy", short)
    first, second, again = (
        fast.load_model(small_policy.warm_start(seed), "bf16").embedding for seed in (0, 1, 0))
    assert not first.equal(second)
    assert first.equal(again)


def test_a_study_takes_the_gpus_that_it_sees(tmp_path, monkeypatch):
    """At once: no run ends before each has one."""
    used = set()
    all_busy = threading.Barrier(2)

    def run_one(run, device, args):
        used.add(device)
        all_busy.wait(60)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(study, "run_one", run_one)
    args = study_arguments(tmp_path, "--seeds", "0")
    args.settings = replace(args.settings, device="cuda")
    study.run_all(args)
    assert used == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize("flags,message", {
    "--seed 7": "--seed: the study sets it for each run; use --arms, --lrs, --seeds",
    "--foo": "unrecognized arguments: --foo",
    "--group 1": "--group 1: must be from 2",
    "--own-starts --model a": "own-starts .*: is for the small policy",
    "--model no/such-model": "Hugging Face does not give it",
    "--tables": "out: holds no finished run",
}.items())
def test_a_study_refuses_what_it_cannot_run(tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        claims.main("claims", ["--out", str(tmp_path / "out"), *flags.split()])
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("flags,message", {
    "--prompts 16": "--prompts 16: the runs in .*out have 8; give another --out",
    "--prompts 8 --algo dapo": "--algo dapo: .* have grpo",
}.items())
def test_a_study_of_other_flags_has_another_folder(tmp_path, flags, message):
    """How a run's work is cut does not matter, nor where the model lies."""
    study.require_same_settings(study_arguments(tmp_path, "--prompts", "8"))
    moved = study_arguments(tmp_path, "--prompts", "8", "--slots", "7", "--model", "moved/Model")
    study.require_same_settings(moved)
    with pytest.raises(UserError, match=message):
        study.require_same_settings(study_arguments(tmp_path, *flags.split()))
