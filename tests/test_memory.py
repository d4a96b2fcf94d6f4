"""bench.py memory, and what is said where memory ends."""
import json
import sys

import pytest
import torch

import bench
import qerl
from common import QUICK, refused
from harness.batches import Batch
from harness.figures import save_figure
from studies import memory_bench


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize("place,name", [(qerl, "load_model"), (qerl.Sampler, "steps"), (torch.optim.AdamW, "step")])
def test_out_of_memory_is_one_line_with_the_remedies(qwen, data, tmp_path, monkeypatch, capsys, place, name):
    monkeypatch.setattr(place, name, no_memory)
    line = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--skip-eval-before", "--out", tmp_path / "run")
    assert line.startswith("error: out of memory; lower --slots (rollout) or --micro-tokens") and "--resume" in line


def bench_main(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, args)])
    bench.main()


def test_bench_memory_on_a_cpu(tmp_path, monkeypatch, capsys):
    """The table and the picture of the tiny shape."""
    bench_main(monkeypatch, "memory", "--device", "cpu", "--out", tmp_path)
    path = tmp_path / "cpu" / "memory.json"
    row, = json.loads(path.read_text())["rows"]
    assert row["model"] == "tiny" and set(row["rest_gb"]) == set(memory_bench.PHASES)
    # LoRA of rank 16 on tiny's layers, float32: A and B of q, k, v, o, gate, up and down in two blocks.
    sizes = [(256, 256), (256, 128), (256, 128), (256, 256), (256, 512), (256, 512), (512, 256)]
    lora = 2 * 16 * sum(a + b for a, b in sizes) * 4
    assert row["lora_gb"] == row["gradients_gb"] == lora / 1e9
    assert 2 * lora <= row["optimizer_gb"] * 1e9 < 2.01 * lora                        # and a count of steps each
    assert row["embeddings_gb"] == 2 * 512 * 256 * 4 / 1e9
    cache = qerl.KVCache(bench.random_model("tiny", "nvfp4", 0, "cpu"), 2, 20)
    cache.reserve(20)
    assert row["cache_gb"] == sum(piece.nbytes for pieces in cache.pieces for piece in pieces) / 1e9
    assert (tmp_path / "cpu" / "memory.png").stat().st_size > 10000
    out = capsys.readouterr().out
    assert "these figures mean nothing" in out and "| tiny |" in out


@pytest.mark.parametrize("argv,message", [
    (["memory", "--model", "Qwen2.5-9B"], "no such shape"),
])
def test_bench_memory_refuses(monkeypatch, capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        bench_main(monkeypatch, *argv, "--device", "cpu")
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("place,name,phase", [
    (qerl.Sampler, "steps", "rollout"), (Batch, "logprobs_under", "logprobs"), (torch.Tensor, "backward", "update")])
def test_a_step_that_does_not_fit_is_a_row(monkeypatch, place, name, phase):
    """Of the step that is measured; an error of another kind is none of memory."""
    settings = memory_bench.MemorySettings(**memory_bench.SMALL)
    whole_step = memory_bench.grpo_step

    def step_after_warm_up(model, optimizer, own, phases):
        if phases.current is None:                  # the warm-up's own
            return None
        monkeypatch.setattr(place, name, no_memory)
        return whole_step(model, optimizer, own, phases)
    monkeypatch.setattr(memory_bench, "grpo_step", step_after_warm_up)
    row, = memory_bench.step_rows("tiny", 12.0, settings, "cpu")
    assert row["out_of_memory"] == phase and "weights_gb" in row and "rest_gb" not in row
    assert memory_bench.outcome(row) == f"out of memory under 12 GB in phase {phase}"

    def broken():
        raise RuntimeError("shapes do not fit")
    with pytest.raises(RuntimeError, match="shapes"):
        memory_bench.phase_without_memory(broken, memory_bench.Phases("cpu"))


def test_a_process_that_fails_is_a_row(capfd):
    """Rows come one by one; the last says how the process ended."""
    rows = memory_bench.in_own_process(map, json.loads, ['{"model": "a"}', "nonsense"])
    assert next(rows) == {"model": "a"}
    failed, = rows
    assert memory_bench.outcome(failed) == "its process ended with status 1"
    assert "JSONDecodeError" in capfd.readouterr().err


def memory_row(model, weights, embeddings, cap, phase=None):
    parts = dict(weights=weights, embeddings=embeddings, lora=0.2, optimizer=0.4, gradients=0.2)
    peaks = {"loading": 2 * weights, "rollout": weights + 2, "logprobs": weights + 1.6, "update": weights + 3}
    row = {"model": model, "cap_gb": cap, "cache_gb": 0.9, "peak_gb": peaks, "reserved_gb": weights + 3.5,
           "seconds": dict.fromkeys(peaks, 1.5), **{f"{k}_gb": v for k, v in parts.items()}}
    if phase:
        return {**row, "out_of_memory": phase}
    measured = {p: peaks[p] for p in memory_bench.PHASES}
    return {**row, "rest_gb": memory_bench.what_is_left(measured, parts, 0.9)}


def test_memory_table_and_picture(tmp_path, capsys):
    steps = [memory_row("Qwen2.5-7B", 5.86, 2.18, 12.0), memory_row("Qwen2.5-72B", 44.5, 4.98, 80.0, "update"),
             {"model": "Qwen2.5-14B", "cap_gb": 18.0, "failed": "its process ended with status -9"}]
    # What makes a phase's peak adds up to it: the cache only in the rollout, the gradients only in the update.
    for phase in memory_bench.PHASES:
        stack = memory_bench.stack_of(steps[0], phase)
        assert sum(stack.values()) == pytest.approx(steps[0]["peak_gb"][phase])
        assert (stack["KV cache"] > 0) == (phase == "rollout") and (stack["gradients"] > 0) == (phase == "update")
    bench.print_memory({"rows": steps})
    table = capsys.readouterr().out
    assert "| Qwen2.5-7B | 12 | 5.86 | 5.9 | 0.20 | 0.60 | 0.90 | 7.9 | 7.5 | 8.9 | 9.4 | 1.5 / 1.5 / 1.5 | fits |" in table
    assert "| out of memory under 80 GB in phase update |" in table and "status -9 |" in table
    titles = []

    def plot(result, plt):
        figure = memory_bench.plot_memory(result, plt)
        titles.append([axis.get_title() for axis in figure.axes])
        return figure
    for rows in (steps, steps[:1], steps[2:]):
        save_figure(tmp_path / "memory.png", plot, {"rows": rows})
    whole = "peak of a GRPO step, by phase"
    assert titles == [[f"{whole}; not shown: Qwen2.5-72B, Qwen2.5-14B"], [whole], [f"{whole}; not shown: Qwen2.5-14B"]]
