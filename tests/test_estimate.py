"""What a run is said to take before anything is loaded, beside what was measured."""
import json
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean, median

import pytest
import torch

import train_gsm8k
from common import run_main
from harness.machine import GPUS, estimate, forecast
from studies.random_models import config_of
from studies.results import read_csv
from test_qerl import HERE
from train_gsm8k import Settings

RESULTS = Path(HERE, "results")


def recorded(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def test_memory_is_within_a_twentieth_of_the_recorded_peaks():
    peaks = {}                                                            # of the phases
    for row in recorded("h200/memory")["rows"]:
        peaks[row["model"]] = max(row["peak_gb"], peaks.get(row["model"], 0))
    settings = Settings(lora_rank=16, prompts=1, updates=1, max_new_tokens=1024, micro_tokens=1152)
    needed = {name: estimate(config_of(name), settings, GPUS["H200"], length=1024)[0] / 1e9
              for name in peaks}
    assert needed == pytest.approx(peaks, rel=0.05)


def test_a_step_on_an_h100_is_within_a_quarter_of_the_recorded_one():
    for row in recorded("h100-80gb-hbm3/step-peers")["rows"]:
        if row["weights"] == "trl":
            continue
        settings = Settings(
            weights=row["weights"], prompts=row["prompts"], updates=1, max_new_tokens=256)
        _, seconds = estimate(config_of(row["model"]), settings, GPUS["H100"], row["length"])
        assert seconds == pytest.approx(row["step"], rel=0.25), row


def test_a_step_of_real_runs_is_within_a_quarter_of_the_recorded_one():
    """GSM8K on an H200, with the run's mean length and share of groups. Earlier code took longer."""
    steps = read_csv(str(RESULTS / "learning/steps.csv.gz"))

    def column(run, name):
        return [step[name] for step in steps if step["run"] == run]

    known = {f.name for f in fields(Settings)}
    runs = {name: run["settings"] for name, run in recorded("learning/runs").items()
            if run["date"] >= "2026-11-26" and run["settings"]["device"].startswith("cuda")}
    assert len(runs) >= 10
    for run, stored in runs.items():
        settings = Settings(**{key: stored[key] for key in known & stored.keys()})
        size = settings.model.split("-")[2]                           # Qwen2.5-Coder-0.5B-Instruct
        length = fmean(column(run, "length"))
        taught = 1 - fmean(column(run, "groups_left_out"))
        _, seconds = estimate(config_of(f"Qwen2.5-{size}"), settings, GPUS["H200"], length, taught)
        assert seconds == pytest.approx(median(column(run, "seconds_step")), rel=0.25), run


@pytest.fixture
def config_only(tmp_path):
    config_of("Qwen2.5-7B").save_pretrained(tmp_path / "7B")
    return str(tmp_path / "7B")


def test_a_dry_run_says_what_the_readme_says(config_only, monkeypatch, capsys):
    """It needs no more than the config. A KL term trains on all groups."""
    monkeypatch.setattr(train_gsm8k, "train", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dry_run = ("--model", config_only, "--dry-run", "--device", "cpu")
    run_main(*dry_run)
    said = capsys.readouterr().out.strip().replace(config_only, "Qwen/Qwen2.5-7B-Instruct")
    assert said in " ".join(Path(HERE, "README.md").read_text(encoding="utf-8").split())
    run_main(*dry_run, "--gpu", "RTX 4090", "--beta", 0.1)
    said = capsys.readouterr().out
    assert "of 24 GB" in said and "on an RTX 4090" in said and "100% of the groups" in said


def test_a_run_on_a_gpu_says_it_before_it_loads(config_only, tmp_path, monkeypatch, capsys):
    """Of the memory that is free there, and of this process's share of the questions."""
    settings = Settings(model=config_only, device="cuda", out=str(tmp_path / "run"))
    said = []
    monkeypatch.setattr(train_gsm8k, "arguments", lambda: settings)
    monkeypatch.setattr(train_gsm8k, "train", lambda _: said.append(capsys.readouterr().out))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("harness.machine.free_memory", lambda device: 99e9)
    run_main()
    assert "of 99 GB" in said[0] and "on an H200" in said[0]
    assert said[0] == forecast(replace(settings, prompts=128), 2) + "\n"
