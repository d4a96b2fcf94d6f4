"""What a run is said to take before anything is loaded, beside what was measured."""
import csv
import gzip
import json
from dataclasses import fields, replace
from statistics import fmean, median

import pytest
import torch

import train_gsm8k
from common import refused, run_main
from harness.machine import GPUS, estimate, forecast
from studies.random_models import config_of
from test_qerl import HERE
from train_gsm8k import Settings


def recorded(name):
    with open(f"{HERE}/results/{name}.json", encoding="utf-8") as f:
        return json.load(f)


@pytest.mark.parametrize("row", recorded("h200/memory")["rows"], ids=lambda row: row["model"])
def test_memory_is_within_a_twentieth_of_the_recorded_peaks(row):
    settings = Settings(lora_rank=16, prompts=1, updates=1, max_new_tokens=1024, micro_tokens=1152)
    needed, _ = estimate(config_of(row["model"]), settings, GPUS["H200"], length=1024)
    assert needed / 1e9 == pytest.approx(max(row["peak_gb"].values()), rel=0.05)


OURS = [row for row in recorded("h100-80gb-hbm3/step-peers")["rows"] if row["weights"] != "trl"]


@pytest.mark.parametrize("row", OURS, ids=lambda row: "{model}-{weights}-{prompts}".format(**row))
def test_a_step_on_an_h100_is_within_a_quarter_of_the_recorded_one(row):
    settings = Settings(
        weights=row["weights"], prompts=row["prompts"], updates=1, max_new_tokens=256)
    _, seconds = estimate(config_of(row["model"]), settings, GPUS["H100"], row["length"])
    assert seconds == pytest.approx(row["step"], rel=0.25)


def test_a_step_of_real_runs_is_within_a_quarter_of_the_recorded_one():
    """GSM8K on an H200, with the run's mean length and share of groups. Earlier code took longer."""
    with gzip.open(f"{HERE}/results/learning/steps.csv.gz", "rt") as f:
        steps = list(csv.DictReader(f))
    known = {f.name for f in fields(Settings)}
    runs = {name: run for name, run in recorded("learning/runs").items()
            if run["date"] >= "2026-11-26" and run["settings"]["device"].startswith("cuda")}
    assert len(runs) >= 10
    for name, run in runs.items():
        settings = Settings(**{key: v for key, v in run["settings"].items() if key in known})
        size = settings.model.split("-")[2]                           # Qwen2.5-Coder-0.5B-Instruct
        own = [step for step in steps if step["run"] == name]
        length = fmean(float(step["length"]) for step in own)
        taught = 1 - fmean(float(step["groups_left_out"]) for step in own)
        _, seconds = estimate(config_of(f"Qwen2.5-{size}"), settings, GPUS["H200"], length, taught)
        measured = median(float(step["seconds_step"]) for step in own)
        assert seconds == pytest.approx(measured, rel=0.25), name


@pytest.fixture
def config_only(tmp_path):
    config_of("Qwen2.5-7B").save_pretrained(tmp_path / "7B")
    return tmp_path / "7B"


def test_a_dry_run_needs_no_more_than_the_config(config_only, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gsm8k, "train", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ("--model", config_only, "--dry-run", "--device", "cpu")
    run_main(monkeypatch, *options)
    (line,) = capsys.readouterr().out.splitlines()
    settings = Settings(model=str(config_only))
    needed, seconds = estimate(config_of("Qwen2.5-7B"), settings, GPUS["H100"], 256, 0.5)
    assert f"at least {needed / 1e9:.1f} of 80 GB" in line
    assert f"about {300 * seconds / 60:.0f} minutes on an H100: 300 steps of {seconds:.1f} s" in line
    assert "completions have 256 tokens, half of --max-new-tokens, and 50%" in line
    run_main(monkeypatch, *options, "--gpu", "RTX 4090", "--beta", "0.1")
    line = capsys.readouterr().out
    assert "of 24 GB" in line and "on an RTX 4090" in line and "100% of the groups" in line
    assert [path.name for path in tmp_path.iterdir()] == ["7B"]


def test_a_run_on_a_gpu_says_it_before_it_loads(config_only, tmp_path, monkeypatch, capsys):
    """Of the memory that is free there, and of this process's share of the questions."""
    settings = Settings(model=str(config_only), device="cuda", out=str(tmp_path / "run"))
    said = []
    monkeypatch.setattr(train_gsm8k, "arguments", lambda: settings)
    monkeypatch.setattr(train_gsm8k, "train", lambda _: said.append(capsys.readouterr().out))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("harness.machine.free_memory", lambda device: 99e9)
    run_main(monkeypatch)
    assert said == [forecast(settings, 1) + "\n"]
    assert "of 99 GB" in said[0] and "on an H200" in said[0]
    assert forecast(replace(settings, prompts=128), 2) == forecast(settings, 1)


@pytest.mark.parametrize("flags,message", [
    ([], "--dry-run: knows real models that are not cut; name one with --model"),
    (["--model", "m", "--shard"], "leave --shard out"),
    (["--model", "{folder}"], "its config.json cannot be read"),
    (["--model", "m", "--gpu", "H300"], "argument --gpu: invalid choice: 'H300'"),
])
def test_a_dry_run_that_cannot_be_meant_is_one_line(flags, message, tmp_path, monkeypatch, capsys):
    flags = [flag.format(folder=tmp_path) for flag in flags]
    assert message in refused(monkeypatch, capsys, "--dry-run", "--device", "cpu", *flags)
