"""The studies behind results/claims and results/methods."""
import dataclasses
import itertools
import json
import os
import sys
import time

import pytest
import torch
from matplotlib import pyplot

import bench
import qerl
import train_gsm8k
from common import finished_run, made_up_rows, quick_study, study_arguments
from harness import folders, small_policy
from harness.small_policy import ByteText, made_up_problems, warm_start
from studies import claims, claims_pictures, compare, factorial, study


def cells(lines, first=2):
    """{what a line of a table is about: its cells after that}."""
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    return {row[first]: row[first + 1:] for row in rows}


# --------------------------------------------------------------------------------------------------
# Tables and pictures

def test_claims_tables():
    """Percent, mean and standard error over seeds. A gain is of an arm's own start."""
    rows = list(made_up_rows())
    first_rate = claims.differences_table(rows, claims.paired)
    assert cells(first_rate)["noise"][:3] == ["2", "4.0 ± 1.0", "4.0 ± 1.0"]
    assert cells(first_rate)["4 bits"][:2] == ["2", "-1.0 ± 0.0"]
    assert cells(first_rate)["both"][:2] == ["2", "3.0 ± 1.0"]
    alone = claims.differences_table(rows[:4], claims.paired)
    assert cells(alone)["noise"][:2] == ["1", "3.0"]            # one seed has no error
    arms = "\n".join(claims.arms_table(rows))
    assert "| m | nvfp4+aqn | 1e-4 | 2 | 9 | 20.0, 30.0 | 53.0 ± 1.0 |" in arms
    larger = [{**row, "lr": 2e-4} for row in rows]
    for row in larger:
        row["accuracy_after"] += 0.02 * (row["arm"] == "nvfp4+aqn")
    over_rates = claims.differences_table([*rows, *larger], claims.over_rates)
    assert ("| m | 1e-4, 2e-4 | noise in NVFP4 | 2 | 5.0 ± 1.0 | 4.0 ± 1.0 | 4.0 ± 1.0 | 5.0 ± 1.0 |"
            in over_rates)


def test_an_arms_own_best_rate_is_chosen_by_training_questions():
    """By those of the seeds that two rates share; a rate of one seed decides nothing between others."""
    def best_of(accuracies):
        rows = [{"arm": "nf4", "lr": lr, "seed": seed, "training_accuracy": accuracy}
                for lr, values in accuracies.items() for seed, accuracy in enumerate(values)]
        return factorial.best_rates(rows)

    assert best_of({1e-4: [0.5, 0.1], 3e-4: [0.4]}) == {"nf4": 1e-4}
    assert best_of({1e-4: [0.4, 0.0], 3e-4: [0.5]}) == {"nf4": 3e-4}
    assert best_of({1e-4: [0.4, 0.4], 3e-4: [0.3, 0.6], 1e-3: [0.1]}) == {"nf4": 3e-4}
    assert best_of({1e-4: [0.4]}) == {}                          # nothing to choose


def test_pictures_show_each_seeds_difference():
    """Noise gives 3, 5 and 4 points: three dots, their mean, and Student's interval of 95 %."""
    pyplot.switch_backend("Agg")
    rows = list(made_up_rows())
    rows += [{**row, "seed": 2} for row in rows[:4]]
    for row in rows[-4:]:
        row["accuracy_after"] += 0.01 * row["arm"].endswith("aqn")
    noise = claims_pictures.plot_differences(rows, pyplot).axes[1]
    drawn = {line.get_marker(): line.get_xdata() for line in noise.lines}
    assert list(drawn["o"]) == pytest.approx([3, 5, 4]) and list(drawn["D"]) == pytest.approx([4])
    assert claims_pictures.interval([3, 5, 4]) == pytest.approx(4.303 / 3 ** 0.5, rel=2e-3)
    pyplot.close("all")


# --------------------------------------------------------------------------------------------------
# Runs

def test_methods_side_by_side():
    """A method's gain is over QeRL's run of the same seed, where there is one."""
    row = {"model": "m", "peak_memory_gb": 1.0, "seconds_a_step": 2.0, "mismatch_kl": 1e-4}
    reached = [("qerl", 0, 0.5), ("qerl", 1, 0.4), ("maspo", 1, 0.43), ("maspo", 2, 0.9)]
    rows = [{**row, "arm": arm, "seed": seed, "accuracy_after": value, "greedy_after": value}
            for arm, seed, value in reached]
    found = cells(compare.methods_table(rows), first=1)
    assert found["qerl"][-4:] == ["45.0 ± 5.0", "-", "45.0 ± 5.0", "2"]
    assert found["maspo"][-3] == "3.0 (1)" and found["maspo"][0] == "NVFP4 + LoRA, noise"


def test_methods_are_compared_at_one_learning_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "missing_runs", lambda args: [])
    options = ["--out", str(tmp_path), "--lrs", "1e-3"]
    with pytest.raises(qerl.UserError, match="holds no finished run"):
        compare.main(options)
    with pytest.raises(qerl.UserError, match="lrs .*: methods are compared at one learning rate"):
        compare.main([*options, "2e-3"])
    with pytest.raises(qerl.UserError, match="--lr 0.002: the runs in .* have 0.001"):
        compare.main([*options, "--lrs", "2e-3"])


@pytest.mark.parametrize("flags", [
    compare.flags_of(small=True), compare.flags_of(small=False), claims.FLAGS])
def test_every_arms_flags_go_together(flags):
    for arm in flags.values():
        train_gsm8k.arguments(["--device", "cpu", *arm.split()])


def test_claims_runs_what_is_missing(qwen, data, tmp_path, monkeypatch, capsys):
    """In processes, as a study does. A second start runs nothing and prints the same table."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    options = ["--model", qwen[0], "--data", data, "--arms", "nvfp4+aqn", "bf16", "bf16",
               "--lrs", "1e-3", "--seeds", "0", "--out", f"{tmp_path}/out", *quick_study()]
    assert claims.main(options) == 0
    rows = study.finished_runs(f"{tmp_path}/out")
    assert [(r["arm"], r["aqn"], r["weights"], r["steps"]) for r in rows] == [
        ("bf16", False, "bf16", 2), ("nvfp4+aqn", True, "nvfp4", 2)]
    assert {"curves.png", "tables.md"} <= set(os.listdir(tmp_path / "out"))
    capsys.readouterr()
    assert claims.main(options) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "2 runs, 0 missing" and printed[1:-1] == claims.arms_table(rows)
    failing = [*options, "--arms", "bf16", "--lora-rank", "1000", "--out", f"{tmp_path}/other"]
    assert claims.main(failing) == 1                             # what fails is said, and is no row
    assert "ended with status 2" in capsys.readouterr().out
    assert study.finished_runs(f"{tmp_path}/other") == []


def test_an_arms_flags_win_and_studies_round_to_nearest(tmp_path):
    args = study_arguments(tmp_path, "--group", "4")
    run = study.labels_of("a", 1e-4, 0, args)
    for flags, expected in (("", "rtn"), ("--quantizer gptq", "gptq")):
        command = study.command_of(run, "cpu", {"a": f"--group 2 {flags}"}, args)
        settings = train_gsm8k.arguments(command[2:])
        assert (settings.group, settings.quantizer) == (2, expected)


def test_a_model_that_is_not_there_is_missed_before_any_run(tmp_path, monkeypatch):
    monkeypatch.setattr(study.subprocess, "call", None)
    with pytest.raises(qerl.UserError, match="Hugging Face does not give it"):
        claims.main(["--model", "no/such-model", "--out", f"{tmp_path}/out"])


def test_a_run_that_fails_ends_no_other(tmp_path, monkeypatch, capsys):
    def call(command, **_):
        finished_run(command)
        return int("-a-" in command[command.index("--out") + 1])
    monkeypatch.setattr(study.subprocess, "call", call)
    args = study_arguments(tmp_path, "--seeds", "0", "1")
    assert study.run_all(study.missing_runs(args), {"a": "", "b": ""}, args)
    names = [row["name"] for row in study.finished_runs(args.out)]
    assert names == ["Model-b-lr5e-05-seed0", "Model-b-lr5e-05-seed1"]
    assert capsys.readouterr().out.count("ended with status 1") == 2


@pytest.mark.parametrize("own,expected", [
    ([], [("nvfp4", 5e-5, 2), ("bf16", 5e-5, 2)]),
    (["--own-starts"], [("nvfp4", 5e-5, 2), ("bf16", 5e-5, 2), ("nvfp4", 5e-5, 1), ("bf16", 5e-5, 1)]),
])
def test_a_start_is_measured_once(tmp_path, own, expected):
    """By the run of the first learning rate, and of the first seed if seeds share it."""
    arms = ["nvfp4", "bf16"]
    args = study.arguments(
        [*own, "--seeds", "2", "1", "2", "--lrs", "5e-5", "1e-4", "--out", str(tmp_path)],
        "a study", arms, arms, (2, 2), "results")
    missing = study.missing_runs(args)
    measured = [(run["arm"], run["lr"], run["seed"]) for run in missing
                if "--skip-eval-before" not in study.command_of(run, "cpu", dict.fromkeys(arms, ""), args)]
    assert measured == expected
    assert len(missing) == 8


def test_seeds_may_have_starts_of_their_own(tmp_path):
    for flags, start, model in ((["--own-starts"], "3", "small-own-starts"), ([], "0", "small")):
        args = study.arguments(flags, "a study", ["a"], ["a"], (1, 1), str(tmp_path))
        run = study.labels_of("a", 1e-3, 3, args)
        command = study.command_of(run, "cpu", {"a": ""}, args)
        assert command[command.index("--start-seed") + 1] == start
        assert run["name"] == f"{model}-a-lr0.001-seed3"


def test_a_start_seed_makes_another_policy(monkeypatch, tmp_path):
    monkeypatch.setattr(folders, "CACHE", str(tmp_path))
    train_policy = small_policy.train_policy
    monkeypatch.setattr(
        small_policy, "train_policy", lambda seed: train_policy(seed, steps=1, batch=2))
    monkeypatch.setattr(small_policy.inspect, "getsource", lambda maker: "source")
    first, second, again = (
        qerl.load_model(warm_start(seed), "bf16").embedding for seed in (0, 1, 0))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_a_study_takes_the_gpus_that_it_sees(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = study_arguments(tmp_path, "--jobs", "2", "--seeds", "0", "1", "2", "3")
    for given, expected in (("cuda", ["cuda:0", "cuda:1"]), ("cuda:1", ["cuda:1"]), ("cpu", ["cpu"])):
        used = set()
        monkeypatch.setattr(
            study, "run_one", lambda run, device, *_: used.add(device) or time.sleep(0.05))
        args.settings = dataclasses.replace(args.settings, device=given)
        assert not study.run_all(study.missing_runs(args), {}, args)
        assert sorted(used) == expected


@pytest.mark.parametrize("study_of", [claims, compare])
@pytest.mark.parametrize("flags,message", [
    (["--seed", "7"], "--seed: the study sets it for each run; use --arms, --lrs, --seeds"),
    (["--quantizer=gptq"], "--quantizer=gptq: the study sets it"),
    (["--foo"], "unrecognized arguments: --foo"),
    (["--group", "1"], "--group 1: advantages compare"),
    (["--own-starts", "--model", "a"], "own-starts .*: is for the small policy"),
    (["--tables"], "out: holds no finished run"),
])
def test_a_study_refuses_what_it_cannot_run(tmp_path, study_of, flags, message):
    with pytest.raises(qerl.UserError, match=message):
        study_of.main(["--out", str(tmp_path / "out"), *flags])
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("flags,message", [
    (["--prompts", "8", "--slots", "7"], None),
    (["--prompts", "16"], "--prompts 16: the runs in .*out have 8; give another --out"),
    ([], "--prompts 64: .* have 8"),
    (["--prompts", "8", "--algo", "dapo"], "--algo dapo: .* have grpo"),
])
def test_a_study_of_other_flags_has_another_folder(tmp_path, flags, message):
    """How a run's work is cut does not matter, nor where the model lies."""
    study.require_same_settings(study_arguments(tmp_path, "--prompts", "8"))
    args = study_arguments(tmp_path, *flags)
    args.model = "moved/Model"
    if message is None:
        return study.require_same_settings(args)
    with pytest.raises(qerl.UserError, match=message):
        study.require_same_settings(args)


# --------------------------------------------------------------------------------------------------
# Entropy

def test_entropy_before_training(tmp_path, monkeypatch):
    """Each format at each sigma; a rollout under no noise is sampled as the sampler does."""
    options = ["--weights", "nvfp4", "bf16", "--sigmas", "0", "0.5", "--draws", "2",
               "--prompts", "4", "--device", "cpu", "--slots", "256", "--out", f"{tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", ["bench.py", "entropy", *options])
    bench.main()
    result = json.loads((tmp_path / "out" / "entropy.json").read_text())
    assert [(r["weights"], r["sigma"], r["draw"]) for r in result["rows"]] == list(
        itertools.product(["nvfp4", "bf16"], [0, 0.5], [0, 1]))
    model = qerl.load_model(warm_start(), "bf16")
    prompts = [ByteText().prompt(p["question"]) for p in made_up_problems()[0][:4]]
    generator = torch.Generator().manual_seed(1)
    rollout = qerl.generate(model, prompts, 64, 8, eos=ByteText().eos, generator=generator)
    row = result["rows"][5]
    assert row["entropy"] == pytest.approx(rollout.entropy[rollout.mask].mean().item(), rel=1e-5)
    # 0.5 is far from the clean policy
    assert row["mismatch_kl"] < 1e-6 < result["rows"][7]["mismatch_kl"]
    assert (tmp_path / "out" / "entropy.png").read_bytes()[:4] == b"\x89PNG"


def test_entropy_of_one_question_has_no_standard_error(tmp_path, monkeypatch, capsys):
    options = ["--prompts", "1", "--draws", "1", "--weights", "bf16", "--sigmas", "0",
               "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench.py", "entropy", *options])
    bench.main()
    row, = json.loads((tmp_path / "entropy.json").read_text())["rows"]
    assert row["standard_error"] is None
    sys.argv += ["--prompts", "100000"]
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "--prompts 100000: there are" in capsys.readouterr().err
