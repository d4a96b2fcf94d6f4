"""The studies behind results/claims and results/methods."""
import itertools
import json
import math
import os
import sys

import pytest
import torch
from filelock import FileLock
from matplotlib import pyplot

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


def drawn(axis, marker):
    """The x of the points with this marker, in the order in which they were drawn."""
    return [round(float(x), 6)
        for line in axis.lines if line.get_marker() == marker for x in line.get_xdata()]


def test_an_arms_line_tells_its_weights_by_colour_and_its_noise_by_dashes():
    """Two arms look alike in no picture; those of the same weights differ by their dashes alone."""
    styles = {arm: claims_pictures.style_of(arm) for arm in factorial.ARMS}
    assert len({tuple(style.values()) for style in styles.values()}) == len(styles)
    for arm in ("nvfp4", "bf16", "gptq", "awq"):
        assert styles[arm]["color"] == styles[f"{arm}+aqn"]["color"]
        assert (styles[f"{arm}+aqn"]["linestyle"], styles[arm]["linestyle"]) == ("-", "--")


def test_what_a_larger_rate_changes():
    """By seed and arm; beside it NVFP4 + AQN at the larger rate over BF16 at the smaller, as the
    paper compares them.
    """
    faster = [{**row, "lr": 3e-4, "accuracy_after": row["accuracy_after"] + 0.1 * (1 + row["seed"])}
        for row in made_up_rows()]
    lines = claims.rates_table([*made_up_rows(), *faster])[2:]
    assert [line.split(" | ")[2] for line in lines] == ["nvfp4+aqn", "nvfp4", "bf16+aqn", "bf16",
        "both, 16 bit at the smaller"]
    assert all(line.startswith("| m | 1e-4 to 3e-4 | ") for line in lines)
    assert all("| 2 | 15.0 ± 5.0 | 0.0 ± 0.0 |" in line for line in lines[:4])
    # 3 and 5 points of "both", 10 and 20 of the rate
    assert "| 2 | 18.0 ± 6.0 | 3.0 ± 1.0 |" in lines[4]
    assert claims.rates_table(list(made_up_rows())) == claims.PAIRED_HEAD


def test_measures_of_the_steps_by_phase():
    """Ten steps: the first, the second and third, the last five."""
    def run(arm, seed, values, measure="entropy"):
        return {"model": "m", "arm": arm, "lr": 1e-4,
            "seed": seed}, [{measure: value} for value in values]

    plain = [9, 1, 3, 7, 7, 5, 5, 5, 5, 5]
    runs = [run("nvfp4", seed, plain) for seed in (0, 1)]
    runs += [run("nvfp4+aqn", seed, [9, 2 + seed, 4 + seed, *plain[3:]]) for seed in (0, 1)]
    # seed 1 has not logged all steps
    runs += [run("bf16", 0, [0, *plain[1:]]), run("bf16", 1, [1.0, None])]
    lines = {line.split(" | ")[2]: line.split(" | ", 3)[3]
        for line in claims.phase_table(runs, "entropy", 1, 1)[2:]}
    assert lines == {"nvfp4+aqn": "2 | 9.0 ± 0.0 | 3.5 ± 0.5 | 5.0 ± 0.0 |",
        "nvfp4": "2 | 9.0 ± 0.0 | 2.0 ± 0.0 | 5.0 ± 0.0 |",
                     "bf16": "1 | 0.0 | 2.0 | 5.0 |",
                     "noise in NVFP4": "2 | 0.0 ± 0.0 | 1.5 ± 0.5 | 0.0 ± 0.0 |",
                     "4 bits without noise": "1 | 9.0 | 0.0 | 0.0 |",
                     "both": "1 | 9.0 | 1.0 | 0.0 |"}
    assert claims.phase_table([run("nf4", 0, [2e-4], "mismatch_kl")], "mismatch_kl", 1e4,
        2)[2:] == ["| m | 1e-4 | nf4 | 1 | 2.00 | - | 2.00 |"]
    # the head alone
    assert len(claims.phase_table(runs, "effective_completions", 1, 2)) == 2


def call_in_a_fork(command, stdout, **_):
    """subprocess.call for a command of train_gsm8k.py, which here need not import torch anew;
    returns its exit status.
    """
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
    """Its runs are forks where there are any; test_claims_runs_what_is_missing starts processes, as
    a study does.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if hasattr(os, "fork") and not CUDA:
        monkeypatch.setattr(study.subprocess, "call", call_in_a_fork)
    arms = ["qerl", "rollout_correction:token-tis"]
    assert compare.main(["--model", qwen[0], "--data", data, "--lrs", "1e-3", "--seeds", "0",
        "--arms", *arms, "--out", f"{tmp_path}/out",
                         *quick_study()]) == 0
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split(" | ")[1] for line in lines[4:]] == arms
    assert "NVFP4 + LoRA, noise" in lines[-1]
    assert (tmp_path / "out" / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    assert "pass@1" in capsys.readouterr().out
    for flags in (*compare.flags_of(small=True).values(), *compare.flags_of(small=False).values(),
            *claims.FLAGS.values()):
        # every arm's flags go together
        train_gsm8k.arguments(["--device", "cpu", *flags])


def test_an_arms_flags_win_and_studies_round_to_nearest():
    run = study.Run("nvfp4", "some/Model", 1e-4, 0)
    for arm, expected in (([], "rtn"), (["--quantizer", "gptq"], "gptq")):
        flags = ["--weights", "nvfp4", *arm]
        command = run.command("runs/new", None, flags, ["--weights", "bf16"], True)
        settings = train_gsm8k.arguments([*command[2:], "--device", "cpu"])
        assert (settings.weights, settings.quantizer) == ("nvfp4", expected)


def test_what_a_study_begins_with_is_looked_for_first(tmp_path, data, monkeypatch):
    monkeypatch.setattr(study.subprocess, "call", None)
    for options, message in ((["--data", f"{tmp_path}/none"], "no such folder"),
            (["--data", data], "Hugging Face does not give it")):
        with pytest.raises(qerl.UserError, match=message):
            claims.main(["--model", "no/such-model", "--out", f"{tmp_path}/out", *options])


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
    assert sorted(failed) == ["Model-a-lr5e-05-seed0", "Model-a-lr5e-05-seed1",
        "Model-b-lr5e-05-seed1"]
    assert [row["name"] for row in study.finished_runs(args.out)] == ["Model-b-lr5e-05-seed0"]
    said = capsys.readouterr().out
    assert "ended with status 1" in said and "metrics.jsonl: does not hold the steps 1 to 2" in said


@pytest.mark.parametrize("own,expected", [
    ([], [("nvfp4", "5e-05", 2)]),
    (["--own-starts"], [("nvfp4", "5e-05", 2), ("nvfp4", "5e-05", 1), ("bf16", "5e-05", 1)]),
])
def test_a_start_is_measured_once(tmp_path, monkeypatch, own, expected):
    """By the first missing run that begins with it, at whatever rate; not again if a finished run
    has measured it.
    """
    monkeypatch.setattr(study, "warm_start", lambda seed=0: None)
    measured = []

    def run_one(run, measure_start, *_):
        if measure_start:
            measured.append((run.arm, str(run.lr), run.seed))
    monkeypatch.setattr(study, "run_one", run_one)
    model = "small-own-starts" if own else "small"
    note_run(tmp_path, f"{model}-bf16-lr5e-05-seed2", model=model, arm="bf16", seed=2,
        start_seed=2 if own else 0, accuracy_before=0.2)
    args = study.arguments([*own, "--arms", "nvfp4", "bf16", "--seeds", "2", "1", "--lrs", "5e-5",
        "1e-4", "--out", str(tmp_path)],
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
    options = ["--weights", "nvfp4", "bf16", "--sigmas", "0", "0.5", "--draws", "2", "--prompts",
        "4", "--device", "cpu",
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
    # 0.5 is far from the clean policy
    assert row["mismatch_kl"] < 1e-6 < result["rows"][7]["mismatch_kl"]
    assert (tmp_path / "out" / "entropy.png").read_bytes()[:4] == b"\x89PNG"
    assert "entropy" in capsys.readouterr().out


def test_a_mismatch_beyond_all_bounds_is_a_number():
    """It is a diagnostic: a run does not end for it."""
    kl, ratio = qerl.mismatch(torch.tensor([[-100.0, -1.0]]), torch.tensor([[-1.0, -1.0]]),
        torch.ones(1, 2, dtype=torch.bool))
    assert kl == pytest.approx(9.5) and ratio == pytest.approx(math.exp(20))


def test_claims_tables():
    """Percent, mean and standard error over seeds. A gain is of an arm's own start."""
    rows = list(made_up_rows())
    paired = {line.split(" | ")[2]: line for line in claims.paired_table(rows)[2:]}
    assert "| 2 | 4.0 ± 1.0 | 4.0 ± 1.0 |" in paired["noise"]
    assert "| 2 | -1.0 ± 0.0 |" in paired["4 bits"]
    assert "| 2 | 3.0 ± 1.0 |" in paired["both"]
    arms = "\n".join(claims.arms_table(rows))
    assert "| m | nvfp4+aqn | 1e-4 | 2 | 9 | 20.0, 30.0 | 53.0 ± 1.0 |" in arms
    assert "| 1 | 3.0 |" in claims.paired_table(rows[:4])[2]     # one seed has no error
    noisy = [row for row in rows if row["arm"] == "nvfp4+aqn"]
    larger = [{**row, "lr": 2e-4} for row in rows]
    for row in larger:
        row["accuracy_after"] += 0.02 * (row["arm"] == "nvfp4+aqn")
    expected = "| 2 | 5.0 ± 1.0 | 4.0 ± 1.0 | 4.0 ± 1.0 | 5.0 ± 1.0 |"
    over_rates = "| m | 1e-4, 2e-4 | noise in NVFP4 " + expected
    assert over_rates in claims.over_rates_table([*rows, *larger])
    changed = [{**row, "arm": "tis"} for row in noisy]
    for row in changed:
        row["accuracy_after"] += 0.02 + 0.01 * row["seed"]
    started = {"nvfp4+aqn": 0.3, "tis": 0.29}
    gains = [{**row, "accuracy_before": started[row["arm"]]} for row in noisy + changed]
    assert claims.ablation_table(gains)[2:] == [
        "| m | 1e-4 | tis | 2 | 2.5 ± 0.5 | 0.0 ± 0.0 | 0.0 ± 0.0 | 3.5 ± 0.5 |"]


def test_pictures_show_each_seeds_difference():
    """Noise gives 3, 5 and 4 points: three dots, their mean, and Student's interval of 95 %."""
    pyplot.switch_backend("Agg")
    rows = list(made_up_rows())
    rows += [{**row, "seed": 2} for row in rows[:4]]
    for row in rows[-4:]:
        row["accuracy_after"] += 0.01 * row["arm"].endswith("aqn")
    figure = claims_pictures.plot_differences(rows, pyplot)
    noise = figure.axes[1]
    assert drawn(noise, "o") == [3, 5, 4]
    assert drawn(noise, "D") == [4]
    assert claims_pictures.interval([3, 5, 4]) == pytest.approx(4.303 / 3 ** 0.5, rel=2e-3)
    arms = [{**rows[0], "seed": seed, "accuracy_after": 0.5} for seed in range(5)]
    arms += [{**row, "arm": "tis", "accuracy_after": 0.52 + 0.01 * row["seed"]} for row in arms]
    axis, = claims_pictures.plot_changes(arms, pyplot).axes
    assert drawn(axis, "o") == [2, 3, 4, 5, 6]
    assert drawn(axis, "D") == [4]
    pyplot.close("all")


def test_seeds_with_starts_of_their_own():
    """Each seed has its own policy before the training, and its gain is from that."""
    run = study.Run("bf16", None, 1e-3, 3, own_start=True)
    command = run.command("folder", None, [], [], measure_start=True)
    assert command[command.index("--start-seed") + 1] == "3"
    assert "--skip-eval-before" not in command
    assert run.name == "small-own-starts-bf16-lr0.001-seed3"
    common = study.Run("bf16", None, 1e-3, 3).command("folder", None, [], [], measure_start=False)
    assert "--start-seed" not in common
    assert "--skip-eval-before" in common
    starts = {0: 0.2, 1: 0.3}
    rows = [{**row, "start_seed": row["seed"], "accuracy_before": starts[row["seed"]],
             "greedy_before": 0.1} for row in made_up_rows()]
    gained = [row["gained"] for row in claims.with_gains(rows) if row["arm"] == "bf16"]
    assert gained == pytest.approx([0.3, 0.2])                   # 0.5 after both
    assert "| 25.0 ± 5.0, 10.0 ± 0.0 |" in claims.arms_table(rows)[2]


def test_a_start_seed_makes_another_policy(monkeypatch, tmp_path):
    monkeypatch.setattr(cache_folder, "CACHE", str(tmp_path))
    train_policy = small_policy.train_policy
    monkeypatch.setattr(
        small_policy, "train_policy", lambda seed: train_policy(seed, steps=1, batch=2))
    monkeypatch.setattr(small_policy.inspect, "getsource", lambda maker: "source")
    first, second, again = (
        qerl.load_model(warm_start(seed), "bf16").embedding for seed in (0, 1, 0))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    with pytest.raises(qerl.UserError, match="--start-seed 1: is for the small built-in policy"):
        train_gsm8k.arguments(["--start-seed", "1", "--model", "folder"])


def rate_rows(accuracies):
    """Rows of {(arm, rate): training accuracies, one a seed}; on the test questions all are equal.
    """
    measures = dict.fromkeys(claims.MEASURES, 0.2)
    return [
        {"name": f"{arm}{lr}{seed}", "model": "m", "arm": arm, "lr": lr, "seed": seed, "steps": 3,
         **measures, "training_accuracy": accuracy}
        for (arm, lr), values in accuracies.items() for seed, accuracy in enumerate(values)
    ]


def test_claims_at_each_arms_own_best_rate(tmp_path):
    """Training accuracy of the seeds that rates share chooses; a picture shows one common rate."""
    rows = rate_rows({("nvfp4+aqn", 1e-4): [0.5, 0.1], ("nvfp4+aqn", 3e-4): [0.4],
                      ("bf16", 1e-4): [0.4, 0.0], ("bf16", 3e-4): [0.5]})
    assert claims.best_rates(rows) == {("m", "nvfp4+aqn"): 1e-4, ("m", "bf16"): 3e-4}
    assert claims.best_table(rows)[2:] == [
        "| m | bf16 | 1e-4, 3e-4 | 3e-4 | 1 | 20.0 | 20.0 | 50.0 |",
        "| m | nvfp4+aqn | 1e-4, 3e-4 | 1e-4 | 2 | 20.0 ± 0.0 | 20.0 ± 0.0 | 30.0 ± 20.0 |"]
    assert claims.best_rates([r for r in rows if r["lr"] == 1e-4]) == {}      # nothing to choose
    # A third rate, of one seed, does not keep the second seed from deciding between the others.
    three = rate_rows({("nf4", 1e-4): [0.4, 0.4], ("nf4", 3e-4): [0.3, 0.6], ("nf4", 1e-3): [0.1]})
    assert claims.best_rates(three) == {("m", "nf4"): 3e-4}
    assert claims_pictures.shown_rates(rows) == {"nvfp4+aqn": 1e-4, "bf16": 1e-4}
    metrics = {"accuracy": 0.1, "entropy": 0.2, "mismatch_kl": 1e-3}
    steps = {row["name"]: [{"step": i, **metrics} for i in (1, 2, 3)] for row in rows}
    claims.make_tables(str(tmp_path), rows, steps)
    phases = (tmp_path / "phases.md").read_text()
    assert phases.count("| m | 1e-4 | nvfp4+aqn | 2 |") == 2
    assert "0.200 ± 0.000" in phases
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "curves.png", "differences.png", "rates.png"]


@pytest.mark.parametrize("study_of", [claims, compare])
@pytest.mark.parametrize("flags,message", [
    (["--seed", "7"], "--seed: the study sets it for each run; use --seeds"),
    (["--weights", "nf4"], "--weights: .* use --arms"),
    (["--quantizer", "gptq"], "--quantizer: .* use --arms"),
    (["--resume"], "--resume: .* by itself"),
    (["--foo"], "unrecognized arguments: --foo"),
    (["--group", "1"], "--group 1: advantages compare"),
    (["--model", "a/same", "b/same"], "--model same: is what two of them are called"),
    (["--tables"], "out: holds no finished run"),
])
def test_a_study_refuses_what_it_cannot_run(tmp_path, study_of, flags, message):
    with pytest.raises(qerl.UserError, match=message):
        study_of.main(["--out", str(tmp_path / "out"), *flags])
    assert not os.listdir(tmp_path)


def test_two_studies_do_not_share_a_folder(tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / "lock"):
        with pytest.raises(qerl.UserError, match="out: another study runs here"):
            claims.main(["--out", f"{tmp_path}/out"])


@pytest.mark.parametrize("flags,message", [
    (["--prompts", "8", "--slots", "7"], None),
    (["--prompts", "16"], "--prompts 16: Model-a-lr5e-05-seed0 in .*out has 8; give another --out"),
    ([], "--prompts 64: .* has 8"),
    (["--prompts", "8", "--algo", "dapo"], "--algo dapo: .* has grpo"),
    (["--prompts", "16", "--arms", "b"], "16: .* has 8"),
])
def test_a_finished_run_of_other_flags_is_no_row_of_this_study(
        tmp_path, monkeypatch, flags, message):
    """A default counts as given.

    How a run's work is cut does not matter, nor where the model lies.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(study.subprocess, "call", finished_run)
    arms = {"a": [], "b": ["--algo", "dapo"]}
    begun = ["--seeds", "0", "--arms", "a"]
    assert not run_missing(arms, study_arguments(tmp_path, *begun, "--prompts", "8"))
    args = study_arguments(tmp_path, *begun, *flags)
    args.model = ["moved/Model"]
    if message is None:
        assert study.missing_runs(args) == []
    else:
        with pytest.raises(qerl.UserError, match=message):
            study.missing_runs(args)


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
    assert printed[0] == "2 runs, 0 missing"
    assert printed[1:-1] == claims.arms_table(rows)
    failing = [*options, "--arms", "bf16", "--lora-rank", "1000", "--out", f"{tmp_path}/other"]
    assert claims.main(failing) == 1                             # what fails is said, and is no row
    assert "ended with status 2" in capsys.readouterr().out
    assert study.finished_runs(f"{tmp_path}/other") == []


def test_entropy_of_one_question_has_no_standard_error(tmp_path):
    options = ["--prompts", "1", "--draws", "1", "--weights", "bf16", "--sigmas", "0",
               "--device", "cpu", "--out", str(tmp_path)]
    assert entropy.main(options) == 0
    row, = json.loads((tmp_path / "entropy.json").read_text())["rows"]
    assert row["standard_error"] is None
    with pytest.raises(qerl.UserError, match="--prompts 100000: there are .* questions; lower it"):
        entropy.main([*options, "--prompts", "100000"])
