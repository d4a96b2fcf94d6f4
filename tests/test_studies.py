"""The studies behind results/claims and results/methods."""
import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import time

import pytest
import torch
from filelock import FileLock

import qerl
import train_gsm8k
from common import finished_run, made_up_rows, note_run, quick_study, run_missing
from common import study_arguments
from harness import cache as cache_folder
from harness import small_policy
from harness.run_folder import write_jsonl
from harness.small_policy import ByteText, made_up_problems, warm_start
from studies import claims, claims_pictures, compare, entropy, factorial
from studies import study
from test_qerl import CUDA


def test_claims_tables():
    rows = list(made_up_rows())
    paired = {line.split(" | ")[2]: line for line in claims.paired_table(rows)[2:]}
    assert "| 2 | 4.0 ± 1.0 | 4.0 ± 1.0 |" in paired["noise"] and "| 2 | -1.0 ± 0.0 |" in paired["4 bits"]
    assert "| 2 | 3.0 ± 1.0 |" in paired["both"]
    assert any(line.startswith("| m | nvfp4+aqn | 1e-4 | 2 | 9 | 20.0, 30.0 | 53.0 ± 1.0 |") for line in claims.arms_table(rows))
    assert "| 1 | 3.0 |" in claims.paired_table(rows[:4])[2]                             # one seed has no error
    assert not any("noise" in line for line in claims.paired_table(rows[:1]))
    assert len(claims.ablation_table(rows)) == 2                                         # the head alone
    assert len(claims.over_rates_table(rows)) == 2                                       # of one rate there is no mean
    larger = [{**row, "lr": 2e-4, "accuracy_after": row["accuracy_after"] + 0.02 * (row["arm"] == "nvfp4+aqn")} for row in rows]
    single = {**rows[0], "lr": 3e-4}                                                     # a rate that answers no question is left out
    expected = "| m | 1e-4, 2e-4 | noise in NVFP4 | 2 | 5.0 ± 1.0 | 4.0 ± 1.0 | 4.0 ± 1.0 | 5.0 ± 1.0 |"
    assert expected in claims.over_rates_table([*rows, *larger, single])
    changed = [{**row, "arm": "tis", "accuracy_after": row["accuracy_after"] + 0.02 + 0.01 * row["seed"]} for row in rows
               if row["arm"] == "nvfp4+aqn"]
    assert claims.ablation_table(rows + changed)[2:] == ["| m | 1e-4 | tis | 2 | 2.5 ± 0.5 | 0.0 ± 0.0 | 0.0 ± 0.0 | 2.5 ± 0.5 |"]
    started = {"nvfp4+aqn": 0.3, "tis": 0.29}                # a gain is of an arm's own start
    gains = [{**row, "accuracy_before": started[row["arm"]]} for row in rows + changed if row["arm"] in started]
    assert claims.ablation_table(gains)[2].endswith("| 2.5 ± 0.5 | 0.0 ± 0.0 | 0.0 ± 0.0 | 3.5 ± 0.5 |")
    unmeasured = [{k: v for k, v in row.items() if k != "accuracy_before"} for row in gains]
    assert claims.ablation_table(unmeasured)[2].endswith("| 0.0 ± 0.0 | - |")


def drawn(axis, marker):
    """The x of the points with this marker, in the order in which they were drawn."""
    return [round(float(x), 6) for line in axis.lines if line.get_marker() == marker for x in line.get_xdata()]


def test_the_picture_of_differences():
    """Noise gives 3 and 5 points: two dots; with a third seed of 4 also their mean and Student's interval."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows = list(made_up_rows())
    _, noise, both, *_ = claims_pictures.plot_differences(rows, plt).axes
    assert drawn(noise, "o") == [3, 5] and drawn(noise, "D") == []
    assert not claims_pictures.compared_settings(rows[:4])   # of one seed there is no picture
    rows += [{**row, "seed": 2, "accuracy_after": row["accuracy_after"] + 0.01 * row["arm"].endswith("aqn")} for row in rows[:4]]
    rows = [{**row, "accuracy_before": 0.2 - 0.05 * row["arm"].startswith("nvfp4")} for row in rows]
    _, noise, both, by_gptq, _ = claims_pictures.plot_differences(rows, plt).axes
    assert drawn(by_gptq, "o") == []                         # which these rows do not answer
    assert drawn(noise, "o") == [3, 5, 4] and drawn(noise, "D") == [4] and drawn(noise, "|")[0] == 0
    assert drawn(both, "|")[0] == -5                         # what NVFP4 begins with
    assert claims_pictures.interval([3, 5, 4]) == pytest.approx(4.303 * 1 / 3 ** 0.5, rel=2e-3)
    small = [{**row, "model": "small", "lr": 1.5e-4} for row in rows]
    *real, _, noise, _, _, _ = claims_pictures.plot_differences(rows + small, plt).axes                  # below, at another scale
    assert len(real) == 5 and drawn(noise, "o") == [3, 5, 4] and real[0].get_yticklabels()[0].get_text() == "m, 1e-4"
    plt.close("all")


def test_the_picture_of_ablations():
    """TIS gives 2 to 6 points at five seeds: five dots, their mean and Student's interval; of four seeds there is no picture."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    first = next(made_up_rows())
    rows = [{**first, "seed": seed, "accuracy_after": 0.5} for seed in range(5)]
    rows += [{**row, "arm": "tis", "accuracy_after": 0.52 + 0.01 * row["seed"]} for row in rows]
    rows.append({**first, "arm": "dapo", "accuracy_after": 0.45})
    assert not claims_pictures.compared_changes([row for row in rows if row["seed"] < 4])
    axis, = claims_pictures.plot_changes(rows, plt).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["dapo", "tis"] and axis.get_title() == "m, 1e-4"
    assert drawn(axis, "o") == [-5, 2, 3, 4, 5, 6] and drawn(axis, "D") == [4]
    rows += [{**row, "arm": "rank 64", "accuracy_after": 0.2} for row in rows if row["arm"] == "nvfp4+aqn"]
    upper, lower = claims_pictures.plot_changes(rows, plt).axes            # what changes much more has its own scale
    assert [label.get_text() for label in lower.get_yticklabels()] == ["rank 64"] and drawn(lower, "o") == [-30] * 5
    assert drawn(upper, "o") == [-5, 2, 3, 4, 5, 6]
    plt.close("all")


def test_curves_say_which_arms_have_other_rates_or_fewer_seeds():
    seeds = {"nvfp4": 2, "bf16": 2, "nf4": 2, "mxfp4": 2, "full": 1}
    rates = {"nvfp4": 1.5e-4, "bf16": 1.5e-4, "nf4": 5e-5, "mxfp4": 5e-5, "full": 3e-6}
    assert claims_pictures.unusual_arms(seeds, rates, (2, 1.5e-4)) == "NF4, MXFP4: 5e-5; full fine-tuning: 1 seed, 3e-6"
    assert claims_pictures.unusual_arms({"bf16": 2}, {"bf16": 1e-3}, (2, 1e-3)) == ""


def test_an_arms_line_tells_its_weights_by_colour_and_its_noise_by_dashes():
    """Two arms look alike in no picture; those of the same weights differ by their dashes alone."""
    styles = {arm: claims_pictures.style_of(arm) for arm in factorial.ARMS}
    assert len({tuple(style.values()) for style in styles.values()}) == len(styles)
    for arm in ("nvfp4", "bf16", "gptq", "awq"):
        assert styles[arm]["color"] == styles[f"{arm}+aqn"]["color"]
        assert (styles[f"{arm}+aqn"]["linestyle"], styles[arm]["linestyle"]) == ("-", "--")


@pytest.mark.parametrize("lr,text", [(0.00015, "1.5e-4"), (5e-5, "5e-5"), (1e-3, "1e-3"), (0.25, "2.5e-1")])
def test_rates_are_spelled_as_one_writes_them(lr, text):
    assert study.rate_text(lr) == text


def test_seeds_with_starts_of_their_own(tmp_path, monkeypatch):
    """Each has its own policy before the training, and rows of their own name."""
    run = study.Run("bf16", None, 1e-3, 3, own_start=True)
    command = run.command("folder", None, [], [], measure_start=True)
    assert command[command.index("--start-seed") + 1] == "3" and "--skip-eval-before" not in command
    assert run.name == "small-own-starts-bf16-lr0.001-seed3"
    common = study.Run("bf16", None, 1e-3, 3).command("folder", None, [], [], measure_start=False)
    assert "--start-seed" not in common and "--skip-eval-before" in common
    rows = [{**row, "start_seed": row["seed"], "accuracy_before": 0.2 + 0.1 * row["seed"], "greedy_before": 0.1} for row in made_up_rows()]
    assert [round(row["gained"], 6) for row in claims.with_gains(rows)][3::4] == [0.3, 0.2]              # bf16: 0.5 of both
    assert "| 25.0 ± 5.0, 10.0 ± 0.0 |" in claims.arms_table(rows)[2]
    later = {k: v for k, v in rows[0].items() if not k.endswith("_before")} | {"lr": 2e-4}                # the same start at another rate
    assert [line for line in claims.arms_table([*rows, later]) if "| 2e-4 | 1 | 9 | 20.0, 10.0 |" in line]
    made = []
    monkeypatch.setattr(study, "warm_start", lambda seed=0: made.append(seed))
    monkeypatch.setattr(study, "run_one", lambda *arguments: None)
    options = ["--seeds", "4", "2", "--arms", "bf16", "--lrs", "1e-4", "--out", f"{tmp_path}/out"]
    with pytest.raises(qerl.UserError, match="out: holds no finished run"):
        claims.main([*options, "--own-starts"])
    assert made == [4, 2]
    with pytest.raises(qerl.UserError, match="out: holds no finished run"):
        claims.main(options)
    assert made == [4, 2, 0]
    done = {**next(made_up_rows()), "name": "small-own-starts-bf16-lr0.0001-seed4", "arm": "linear"}
    note_run(tmp_path / "out", **done)
    claims.main([*options, "--own-starts"])
    assert made == [4, 2, 0, 2]                              # what is finished needs no policy
    qerls = [{**row, "arm": "qerl", "peak_memory_gb": 1, "seconds_a_step": 1, "mismatch_kl": 0} for row in rows if row["arm"] == "bf16"]
    assert "| 25.0 ± 5.0 | 50.0 ± 0.0 |" in compare.table(qerls)[2]
    with pytest.raises(qerl.UserError, match="--own-starts: is for the small policy"):
        claims.main([*options, "--own-starts", "--model", "folder"])


def test_a_warm_start_that_another_process_made_meanwhile_is_not_made_again(qwen, tmp_path, monkeypatch):
    made = []

    @contextlib.contextmanager
    def waited(folder):                                      # the other one ends while this one waits
        assert folder == str(tmp_path)
        shutil.copytree(first, next(wanted))
        yield

    monkeypatch.setattr(cache_folder, "CACHE", str(tmp_path))
    monkeypatch.setattr(small_policy, "train_policy", lambda seed: made.append(seed) or qwen[1])
    monkeypatch.setattr(small_policy.inspect, "getsource", lambda maker: "source")
    first = small_policy.warm_start(0)
    wanted = iter([first.replace("seed0", "seed1")])
    monkeypatch.setattr(cache_folder, "one_at_a_time", waited)
    assert small_policy.warm_start(1) == first.replace("seed0", "seed1") and made == [0]


def test_a_start_seed_makes_another_policy(monkeypatch, tmp_path):
    monkeypatch.setattr(cache_folder, "CACHE", str(tmp_path))
    train_policy = small_policy.train_policy
    monkeypatch.setattr(small_policy, "train_policy", lambda seed: train_policy(seed, steps=1, batch=2))
    monkeypatch.setattr(small_policy.inspect, "getsource", lambda maker: "source")
    first, second = (qerl.load_model(small_policy.warm_start(seed), "bf16") for seed in (0, 1))
    assert not torch.equal(first.embedding, second.embedding) and len(os.listdir(tmp_path)) == 2
    assert torch.equal(qerl.load_model(small_policy.warm_start(0), "bf16").embedding, first.embedding)
    command = train_gsm8k.arguments(["--start-seed", "1"])
    assert command.start_seed == 1
    with pytest.raises(qerl.UserError, match="--start-seed 1: is for the small built-in policy"):
        train_gsm8k.arguments(["--start-seed", "1", "--model", "folder"])


def test_what_a_larger_rate_changes():
    """By seed and arm; beside it NVFP4 + AQN at the larger rate over BF16 at the smaller, as the paper compares them."""
    faster = [{**row, "lr": 3e-4, "accuracy_after": row["accuracy_after"] + 0.1 * (1 + row["seed"])} for row in made_up_rows()]
    lines = claims.rates_table([*made_up_rows(), *faster])[2:]
    assert [line.split(" | ")[2] for line in lines] == ["nvfp4+aqn", "nvfp4", "bf16+aqn", "bf16", "both, 16 bit at the smaller"]
    assert all(line.startswith("| m | 1e-4 to 3e-4 | ") for line in lines)
    assert all("| 2 | 15.0 ± 5.0 | 0.0 ± 0.0 |" in line for line in lines[:4])
    assert "| 2 | 18.0 ± 6.0 | 3.0 ± 1.0 |" in lines[4]                                  # 3 and 5 points of "both", 10 and 20 of the rate
    assert claims.rates_table(list(made_up_rows())) == claims.PAIRED_HEAD


def test_measures_of_the_steps_by_phase():
    """Ten steps: the first, the second and third, the last five."""
    def run(arm, seed, values, measure="entropy"):
        return {"model": "m", "arm": arm, "lr": 1e-4, "seed": seed}, [{measure: value} for value in values]

    plain = [9, 1, 3, 7, 7, 5, 5, 5, 5, 5]
    runs = [run("nvfp4", seed, plain) for seed in (0, 1)]
    runs += [run("nvfp4+aqn", seed, [9, 2 + seed, 4 + seed, *plain[3:]]) for seed in (0, 1)]
    runs += [run("bf16", 0, [0, *plain[1:]]), run("bf16", 1, [1.0, None])]                # seed 1 has not logged all steps
    lines = {line.split(" | ")[2]: line.split(" | ", 3)[3] for line in claims.phase_table(runs, "entropy", 1, 1)[2:]}
    assert lines == {"nvfp4+aqn": "2 | 9.0 ± 0.0 | 3.5 ± 0.5 | 5.0 ± 0.0 |", "nvfp4": "2 | 9.0 ± 0.0 | 2.0 ± 0.0 | 5.0 ± 0.0 |",
                     "bf16": "1 | 0.0 | 2.0 | 5.0 |", "noise in NVFP4": "2 | 0.0 ± 0.0 | 1.5 ± 0.5 | 0.0 ± 0.0 |",
                     "4 bits without noise": "1 | 9.0 | 0.0 | 0.0 |", "both": "1 | 9.0 | 1.0 | 0.0 |"}
    assert claims.phase_table([run("nf4", 0, [2e-4], "mismatch_kl")], "mismatch_kl", 1e4, 2)[2:] == ["| m | 1e-4 | nf4 | 1 | 2.00 | - | 2.00 |"]
    assert len(claims.phase_table(runs, "effective_completions", 1, 2)) == 2              # the head alone


def test_claims_at_each_arms_own_best_rate(tmp_path):
    """Training accuracy chooses the rate, whatever the test questions say; a rate of fewer seeds is no worse for it."""
    rows = []
    for arm, best in (("nvfp4+aqn", 1e-4), ("bf16", 3e-4)):
        for lr, seeds in ((1e-4, (0, 1)), (3e-4, (0,))):
            for seed in seeds:
                measures = dict.fromkeys(claims.MEASURES, 0.2 if lr == best else 0.3)        # on the test the other rate wins
                measures["training_accuracy"] = (0.5 if lr == best else 0.4) - 0.4 * seed     # the second seed is bad
                rows.append({"name": f"{arm}{lr}{seed}", "model": "m", "arm": arm, "lr": lr, "seed": seed, "steps": 3, **measures})
    assert claims.best_rates(rows) == {("m", "nvfp4+aqn"): 1e-4, ("m", "bf16"): 3e-4}
    assert claims.best_table(rows)[2:] == ["| m | bf16 | 1e-4, 3e-4 | 3e-4 | 1 | 20.0 | 20.0 | 50.0 |",
                                           "| m | nvfp4+aqn | 1e-4, 3e-4 | 1e-4 | 2 | 20.0 ± 0.0 | 20.0 ± 0.0 | 30.0 ± 20.0 |"]
    assert [line for line in claims.paired_table(rows) if "own best | both | 1 | 0.0 |" in line]
    assert claims.best_rates([r for r in rows if r["lr"] == 1e-4]) == {}                  # one rate is not the best of any
    # A third rate, of one seed, does not keep the second seed from deciding between the other two.
    of_two = [{**row, "arm": "nf4", "lr": lr, "seed": seed, "training_accuracy": accuracy}
              for row, lr, seed, accuracy in [(rows[0], 1e-4, 0, 0.4), (rows[0], 1e-4, 1, 0.4), (rows[0], 3e-4, 0, 0.3),
                                              (rows[0], 3e-4, 1, 0.6), (rows[0], 1e-3, 0, 0.1)]]
    assert claims.best_rates(of_two) == {("m", "nf4"): 3e-4}
    apart = [{**row, "seed": row["seed"] + 5 * (row["lr"] == 1e-4)} for row in of_two if row["lr"] < 1e-3]
    assert claims.best_rates(apart) == {}                                                 # no seed that both rates have
    assert claims_pictures.shown_rates(rows) == {"nvfp4+aqn": 1e-4, "bf16": 1e-4}                  # 3e-4 has a single seed
    again = [{**row, "seed": 1, "training_accuracy": row["training_accuracy"] - 0.4} for row in rows if row["lr"] == 3e-4]
    of_both = rows + again
    assert claims_pictures.shown_rates(of_both) == {"nvfp4+aqn": 1e-4, "bf16": 1e-4}               # both at one rate, of several seeds
    without = [row for row in of_both if (row["arm"], row["lr"]) != ("bf16", 1e-4)]
    assert claims_pictures.shown_rates(without) == {"nvfp4+aqn": 3e-4, "bf16": 3e-4}               # the rate that both have
    lone = [row for row in without if (row["arm"], row["lr"]) != ("nvfp4+aqn", 3e-4)]
    assert claims_pictures.shown_rates(lone) == {"nvfp4+aqn": 1e-4, "bf16": 3e-4}
    full = [{**row, "arm": "full"} for row in of_both if row["arm"] == "bf16"]
    assert claims_pictures.shown_rates(of_both + full)["full"] == 3e-4                             # its rates are not LoRA's
    single = [row for row in full if row["seed"] == 0]
    assert claims_pictures.shown_rates(of_both + single)["full"] == 3e-4                           # each rate has one seed: the best
    of_run = [{"step": i, "accuracy": 0.1, "entropy": 0.2, "mismatch_kl": 1e-3} for i in (1, 2, 3)]
    steps = {row["name"]: of_run for row in rows}
    claims.make_tables(str(tmp_path), [{**row, "arm": "linear"} for row in rows[:1]], steps)   # no picture shows ablations
    assert not list(tmp_path.glob("*.png"))
    claims.make_tables(str(tmp_path), rows, steps)
    phases = (tmp_path / "phases.md").read_text()
    assert phases.count("| m | 1e-4 | nvfp4+aqn | 2 |") == 2 and "0.200 ± 0.000" in phases and "10.00 ± 0.00" in phases
    for picture in ("curves.png", "differences.png", "rates.png"):
        assert (tmp_path / picture).read_bytes()[:4] == b"\x89PNG"


def call_in_a_fork(command, stdout, **_):
    """subprocess.call for a command of train_gsm8k.py, which here need not import torch anew; returns its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(stdout.fileno(), 1)
            os.dup2(1, 2)
            torch.set_num_threads(1)
            sys.argv = command[1:]
            train_gsm8k.main()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_methods_side_by_side(qwen, data, tmp_path, monkeypatch, capsys):
    """Its runs are forks where there are any; test_claims_runs_what_is_missing starts processes, as a study does."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if hasattr(os, "fork") and not CUDA:
        monkeypatch.setattr(study.subprocess, "call", call_in_a_fork)
    arms = ["qerl", "rollout_correction:token-tis"]
    assert compare.main(["--model", qwen[0], "--data", data, "--lrs", "1e-3", "--seeds", "0", "--arms", *arms, "--out", f"{tmp_path}/out",
                         *quick_study()]) == 0
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split(" | ")[1] for line in lines[4:]] == arms and "NVFP4 + LoRA, noise" in lines[-1]
    assert (tmp_path / "out" / "accuracy.png").read_bytes()[:4] == b"\x89PNG" and "pass@1" in capsys.readouterr().out
    for flags in (*compare.flags_of(small=True).values(), *compare.flags_of(small=False).values(), *claims.FLAGS.values()):
        train_gsm8k.arguments(["--device", "cpu", *flags])                               # every arm's flags go together


@pytest.mark.parametrize("flags,message", [
    (["--seed", "7"], "--seed: the study sets it for each run; use --seeds"), (["--lr=1e-5"], "--lr: .* use --lrs"),
    (["--eval-only"], "--eval-only: .* leave it out"), (["--resume"], "--resume: .* by itself"),
    (["--weights", "nf4"], "--weights: .* use --arms"), (["--quantizer", "gptq"], "--quantizer: .* use --arms"),
    (["--foo"], "unrecognized arguments: --foo"), (["--steps", "x"], "argument --steps: invalid int value")])
def test_a_study_sets_its_runs_flags_itself(tmp_path, flags, message):
    for study_of in (claims, compare):
        with pytest.raises(qerl.UserError, match=message):
            study_of.main(["--out", str(tmp_path / "out"), *flags])
    assert not os.listdir(tmp_path)


def test_what_is_named_twice_is_run_once(tmp_path):
    args = study_arguments(tmp_path, "--arms", "b", "a", "b", "--seeds", "1", "1", "0", "--lrs", "1e-4", "1e-4")
    assert (args.arms, args.seeds, args.lrs) == (["b", "a"], [1, 0], [1e-4])


def test_studies_round_to_nearest_unless_told_otherwise():
    run = study.Run("nvfp4", "some/Model", 1e-4, 0)
    for arm, expected in (([], "rtn"), (["--quantizer", "gptq"], "gptq")):
        _, _, *flags = run.command("runs/new", None, ["--weights", "nvfp4", *arm], [], True)
        assert train_gsm8k.arguments([*flags, "--device", "cpu"]).quantizer == expected


@pytest.mark.parametrize("flags,message", [
    (["--prompts", "8"], None), (["--prompts", "8", "--slots", "7"], None),
    (["--prompts", "8", "--eval-questions", "0", "--save-every", "3"], None), (["--prompts", "8", "--eval-questions", "9"], "9: .* has 0"),
    (["--prompts", "16"], "--prompts 16: Model-a-lr5e-05-seed0 in .*out has 8; give another --out"),
    ([], "--prompts 64: .* has 8"), (["--prompts", "8", "--data", "other"], "--data other: .* has None"),
    (["--prompts", "8", "--algo", "dapo"], "--algo dapo: .* has grpo"),
    (["--prompts", "8", "--dtype", "float32"], "--dtype float32: .* has auto"),
    (["--prompts", "8", "--preset", "paper"], "--max-new-tokens 4096: .* has 512"),
    (["--prompts", "16", "--seeds", "5"], "16: .* has 8"), (["--prompts", "16", "--arms", "b"], "16: .* has 8")])
def test_a_finished_run_of_other_flags_is_no_row_of_this_study(tmp_path, monkeypatch, flags, message):
    """What a flag has by default counts as given; how a run's work is cut does not matter, nor in which folder the model lies."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(study.subprocess, "call", finished_run)
    begun = ["--arms", "a", "--seeds", "0", "--prompts", "8"]
    arms = {"a": [], "b": ["--algo", "dapo"]}
    assert not run_missing(arms, study_arguments(tmp_path, *begun))
    args = study.arguments([*begun[:4], *flags, "--model", "moved/Model", "--out", f"{tmp_path}/out"],
                           "a study", list(arms), list(arms), (1, 2), "results")
    if message is None:
        assert study.missing_runs(args) == []
    else:
        with pytest.raises(qerl.UserError, match=message):
            study.missing_runs(args)


def test_two_studies_do_not_share_a_folder(tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / "lock"), pytest.raises(qerl.UserError, match="out: another study runs here"):
        claims.main(["--out", f"{tmp_path}/out"])


def test_what_a_study_begins_with_is_looked_for_first(tmp_path, data, monkeypatch):
    monkeypatch.setattr(study.subprocess, "call", None)
    for options, message in ((["--data", f"{tmp_path}/none"], "no such folder"), (["--data", data], "Hugging Face does not give it")):
        with pytest.raises(qerl.UserError, match=message):
            claims.main(["--model", "no/such-model", "--out", f"{tmp_path}/out", *options])


def test_the_tables_of_no_study_are_refused(tmp_path):
    for study_of in (claims, compare):
        with pytest.raises(qerl.UserError, match="typo: holds no finished run"):
            study_of.main(["--tables", "--out", f"{tmp_path}/typo"])
    assert not os.listdir(tmp_path)


def test_methods_are_compared_at_one_rate(tmp_path):
    with pytest.raises(qerl.UserError, match="compared at one learning rate"):
        compare.main(["--lrs", "1e-3", "3e-3", "--out", str(tmp_path)])
    note_run(tmp_path, "a", model="small", arm="gptq", lr=1e-3)
    note_run(tmp_path, "b", model="other", arm="qerl")
    with pytest.raises(qerl.UserError, match="--lrs 0.003: .* has a; give another --out"):
        compare.main(["--out", str(tmp_path)])


def test_flags_that_a_run_would_refuse_are_refused_before_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(study.subprocess, "call", None)
    with pytest.raises(qerl.UserError, match="--group 1: advantages compare"):
        run_missing({"a": [], "b": []}, study_arguments(tmp_path, "--group", "1"))


@pytest.mark.parametrize("options,message", [
    (["--model", ""], "--model '': is empty"), (["--out", ""], "--out '': is empty"),
    (["--data", ""], "--data '': is empty"), (["--lrs", "1.2345671e-4"], "--lrs 0.00012345671: names of runs have six digits"),
    (["--model", "own/small"], "--model small: is what the built-in policy is called")])
def test_a_study_refuses_what_its_rows_cannot_tell_apart(options, message):
    with pytest.raises(qerl.UserError, match=message):
        study.arguments(options, "a study", ["a"], ["a"], (1, 2), "results")


def test_a_run_that_leaves_nothing_to_read_ends_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def call(command, **_):
        finished_run(command)
        folder = command[command.index("--out") + 1]
        if "seed1" in folder:
            write_jsonl(f"{folder}/metrics.jsonl", [{"step": 2}])
        return int("-a-" in folder)
    monkeypatch.setattr(study.subprocess, "call", call)
    args = study_arguments(tmp_path, "--seeds", "0", "1")
    failed = run_missing({"a": [], "b": []}, args)
    assert sorted(failed) == ["Model-a-lr5e-05-seed0", "Model-a-lr5e-05-seed1", "Model-b-lr5e-05-seed1"]
    assert [row["name"] for row in study.finished_runs(args.out)] == ["Model-b-lr5e-05-seed0"]
    said = capsys.readouterr().out
    assert "ended with status 1" in said and "metrics.jsonl: does not hold the steps 1 to 2" in said


@pytest.mark.parametrize("own,expected", [
    ([], [("nvfp4", "5e-05", 2)]),
    (["--own-starts"], [("nvfp4", "5e-05", 2), ("nvfp4", "5e-05", 1), ("bf16", "5e-05", 1)]),
])
def test_a_start_is_measured_once(tmp_path, monkeypatch, own, expected):
    """By the first missing run that begins with it, at whatever rate; not again if a finished run has measured it."""
    monkeypatch.setattr(study, "warm_start", lambda seed=0: None)
    measured = []

    def run_one(run, measure_start, *_):
        if measure_start:
            measured.append((run.arm, str(run.lr), run.seed))
    monkeypatch.setattr(study, "run_one", run_one)
    model = "small-own-starts" if own else "small"
    note_run(tmp_path, f"{model}-bf16-lr5e-05-seed2", model=model, arm="bf16", seed=2, start_seed=2 if own else 0, accuracy_before=0.2)
    args = study.arguments([*own, "--arms", "nvfp4", "bf16", "--seeds", "2", "1", "--lrs", "5e-5", "1e-4", "--out", str(tmp_path)],
                           "a study", list(factorial.ARMS), [], (2, 2), "results")
    run_missing(factorial.FLAGS, args)
    assert measured == expected


def test_a_stopped_run_of_a_study_goes_on_with_its_settings(tmp_path):
    """Those that its checkpoint holds; --resume reads them."""
    run = study.Run("bf16", None, 1e-3, 3)
    for measure in (True, False):
        command = run.command(str(tmp_path), None, study.NO_NOISE, [], measure)
        assert ("--skip-eval-before" in command) is not measure and command[-1] == "--resume"
    (tmp_path / "checkpoint.safetensors").touch()
    command = run.command(str(tmp_path), None, study.NO_NOISE, ["--slots", "7"], True)
    assert command[2:] == ["--resume", "--out", str(tmp_path), "--slots", "7"]


def test_after_ctrl_c_no_other_run_begins(tmp_path, monkeypatch):
    """The first worker's run is interrupted; the second's goes on to its end, and the rest of the queue is left."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    begun = []

    def call(command, **_):
        begun.append(command)
        if len(begun) == 1:
            raise KeyboardInterrupt
        time.sleep(0.2)
        return finished_run(command)
    monkeypatch.setattr(study.subprocess, "call", call)
    args = study_arguments(tmp_path, "--seeds", "0", "1", "2", "3", "--jobs", "2")
    with pytest.raises(KeyboardInterrupt):
        run_missing({"a": [], "b": []}, args)
    assert 1 <= len(begun) <= 3 and len(study.finished_runs(args.out)) == len(begun) - 1


def test_a_study_whose_runs_cannot_be_kept_says_so(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(qerl.UserError, match="--out .*out: cannot be written"):
        claims.main(["--out", f"{tmp_path}/out"])


def test_claims_takes_the_gpus_that_it_was_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert study.visible_devices() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert study.visible_devices() == ["2", "3"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert study.visible_devices() == ["cpu"]


def test_entropy_before_training(tmp_path, monkeypatch, capsys):
    """Each format at each sigma; a rollout under no noise is sampled as the sampler does."""
    options = ["--weights", "nvfp4", "bf16", "--sigmas", "0", "0.5", "--draws", "2", "--prompts", "4", "--device", "cpu",
               "--out", f"{tmp_path}/out"]
    assert entropy.main(options) == 0
    result = json.loads((tmp_path / "out" / "entropy.json").read_text())
    assert [(r["weights"], r["sigma"], r["draw"]) for r in result["rows"]] == list(
        itertools.product(["nvfp4", "bf16"], [0, 0.5], [0, 1]))
    model = qerl.load_model(warm_start(), "bf16")
    prompts = [ByteText().prompt(p["question"]) for p in made_up_problems()[0][:4]]
    generator = torch.Generator().manual_seed(1)
    rollout = qerl.generate(model, prompts, 64, 8, eos=ByteText().eos, generator=generator)
    row = result["rows"][5]
    assert row["entropy"] == pytest.approx(rollout.entropy[rollout.mask].mean().item(), rel=1e-5)
    assert row["mismatch_kl"] < 1e-6 < result["rows"][7]["mismatch_kl"]                  # 0.5 is far from the clean policy
    assert (tmp_path / "out" / "entropy.png").read_bytes()[:4] == b"\x89PNG"
    assert "entropy" in capsys.readouterr().out


def test_a_mismatch_beyond_all_bounds_is_a_number():
    """It is a diagnostic: a run does not end for it."""
    kl, ratio = qerl.mismatch(torch.tensor([[-100.0, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert kl == pytest.approx(9.5) and ratio == pytest.approx(math.exp(20))


def test_claims_runs_what_is_missing(qwen, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    options = ["--model", qwen[0], "--data", data, "--arms", "nvfp4+aqn", "bf16", "--lrs", "1e-3", "--seeds", "0",
               "--out", f"{tmp_path}/out", *quick_study()]
    assert claims.main(options) == 0
    rows = study.finished_runs(f"{tmp_path}/out")
    assert [(r["arm"], r["aqn"], r["weights"], r["steps"]) for r in rows] == [
        ("bf16", False, "bf16", 2), ("nvfp4+aqn", True, "nvfp4", 2)]
    assert (tmp_path / "out" / "curves.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "out" / "tables.md").exists()
    capsys.readouterr()
    assert claims.main(options) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "2 runs, 0 missing"
    assert printed[1:-1] == claims.arms_table(rows) and f"{tmp_path}/out/tables.md" in printed[-1]
    assert not (tmp_path / "out" / "curves-others.png").exists()                          # BF16 alone stands in the other one
    claims.make_tables(str(tmp_path / "out"), [rows[1], {**rows[0], "arm": "nf4"}], study.steps_of(f"{tmp_path}/out", rows))
    assert (tmp_path / "out" / "curves-others.png").exists()
    failing = [*options, "--arms", "bf16", "--lora-rank", "1000"]
    with pytest.raises(qerl.UserError, match="--lora-rank 1000: .* has 2"):
        claims.main(failing)
    assert claims.main([*failing, "--out", f"{tmp_path}/other"]) == 1                     # what fails is said, and is no row
    assert "ended with status 2" in capsys.readouterr().out and study.finished_runs(f"{tmp_path}/other") == []
