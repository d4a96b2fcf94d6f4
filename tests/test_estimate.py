"""What a run is said to take before anything is loaded, beside what was measured."""
import pandas as pd
import pytest
import torch

import train_gsm8k
from common import run_main
from harness import machine
from harness.folders import read_json
from harness.machine import GPUS, estimate
from harness.ranks import Ranks
from studies.random_models import config_of
from test_qerl import HERE
from train_gsm8k import Settings

RESULTS = HERE / "results"


def test_memory_is_within_a_twentieth_of_the_recorded_peaks():
    peaks = {}                                                            # of the phases
    for row in read_json(RESULTS / "h200/memory.json")["rows"]:
        peaks[row["model"]] = max(row["peak_gb"], peaks.get(row["model"], 0))
    settings = Settings(lora_rank=16, prompts=1, updates=1, max_new_tokens=1024, micro_tokens=1152)
    needed = {name: estimate(config_of(name), settings, GPUS["H200"], length=1024)[0] / 1e9
              for name in peaks}
    assert needed == pytest.approx(peaks, rel=0.05)


def test_a_step_of_real_runs_is_near_the_recorded_one():
    """GSM8K on an H200, with the run's mean length and share of groups. Earlier code took longer.

    A run that does not say how many slots it had was given 256.
    """
    runs = {name: run["settings"] for name, run in read_json(RESULTS / "learning/runs.json").items()
            if run["date"] >= "2026-11-28" and run["settings"]["device"].startswith("cuda")
            and "gpu_shared_with_tests" not in run}
    assert len(runs) >= 10
    steps = pd.read_csv(RESULTS / "learning/steps.csv.gz").groupby("run")
    for name, stored in runs.items():
        known = {key: value for key, value in stored.items() if hasattr(Settings, key)}
        settings = Settings(**known | {"slots": known.get("slots") or 256})
        size = settings.model.split("-")[2]                           # Qwen2.5-Coder-0.5B-Instruct
        own = steps.get_group(name)
        taught = 1 - own.groups_left_out.mean()
        _, seconds = estimate(
            config_of(f"Qwen2.5-{size}"), settings, GPUS["H200"], own.length.mean(), taught)
        assert seconds == pytest.approx(own.seconds_step.median(), rel=0.15), name


def test_a_run_says_what_it_will_take(tmp_path, monkeypatch, capsys):
    """A dry run needs no more than the config. A KL term trains on all groups.

    On a GPU any run says it: of the memory that is free there, and of this process's share.
    """
    folder = str(tmp_path / "7B")
    config_of("Qwen2.5-7B").save_pretrained(folder)

    def on_this_machine(**facts):
        for name, value in facts.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    def said(*flags):
        run_main("--model", folder, *flags)
        return capsys.readouterr().out.strip()

    on_this_machine(is_available=False)
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    of_7b = said("--dry-run --device cpu").replace(folder, "Qwen/Qwen2.5-7B-Instruct")
    assert of_7b in " ".join(readme.split())
    small = said("--dry-run --device cpu --beta 0.1 --gpu", "RTX 4090")
    assert "of 24 GB" in small and "on an RTX 4090" in small and "100% of the groups" in small
    on_this_machine(is_available=True, device_count=1, get_device_capability=(9, 0),
                    get_device_name="NVIDIA H200")
    monkeypatch.setattr(machine, "free_memory", lambda device: 99e9)
    monkeypatch.setattr(Ranks, "start", lambda ranks, device: device)
    monkeypatch.setattr(train_gsm8k, "train", lambda *_: None)
    here = said("--device cuda --out", tmp_path / "run")
    assert "of 99 GB" in here and "on an H200" in here
    assert here == machine.forecast(Settings(model=folder, prompts=128), 2)
