"""studies/peers.py without its peers: its arithmetic, its settings and its refusal."""
import importlib.util
import sys

import pytest

import bench
from studies import peers
from studies.step import settings_for


def test_phases_add_up_to_the_step():
    found = peers.phases({"rollout": 2.0, "scoring": 3.5, "step": 10.0})
    assert found == {"rollout": 2.0, "logprobs": 1.5, "update": 6.5, "step": 10.0}


@pytest.mark.parametrize("name, prompts, group", [
    ("Qwen2.5-1.5B", 64, 8), ("Qwen2.5-7B", 1, 6), ("Qwen2.5-3B", 3, 5),
])
def test_trl_makes_one_update_of_all_completions(name, prompts, group):
    settings = settings_for("cpu")
    tuning = peers.tuning_for(name, prompts * group)
    arguments = peers.trainer_arguments("out", settings, prompts, group, 4, tuning)
    rows = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    assert rows == prompts * group
    assert arguments["vllm_max_model_length"] == 8 + settings.max_new_tokens


def test_missing_packages_are_one_line(monkeypatch, capsys, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *rest: None if name == "vllm" else real(name, *rest))
    monkeypatch.setattr(sys, "argv", ["bench.py", "step", "--peers", "--device", "cpu",
                                      "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        bench.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "vllm" in error and "pip install" in error
