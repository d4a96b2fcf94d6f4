"""What memory holds; bench.py memory, and what is said where memory ends."""
import json
import sys
from dataclasses import replace

import pytest
import torch

import bench
import qerl
import train_gsm8k
from common import QUICK, refused, run_main, scored_by_letters, without_times
from harness import machine
from harness.batches import Batch
from studies.random_models import random_model
from test_qerl import with_lora


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize("place,name",
                         [(qerl, "load_model"), (qerl.Sampler, "steps"),
                          (torch.optim.AdamW, "step")])
def test_out_of_memory_is_one_line_with_the_remedies(qwen, data, tmp_path, monkeypatch, capsys,
        place, name):
    monkeypatch.setattr(place, name, no_memory)
    line = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK,
                   "--skip-eval-before", "--out", tmp_path / "run")
    assert line.startswith("error: out of memory; lower --slots (rollout) or --micro-tokens") and "--resume" in line


def test_bench_memory_on_a_cpu(tmp_path, monkeypatch, capsys):
    """The table and the picture of the tiny shape."""
    arguments = ["bench.py", "memory", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    bench.main()
    path = tmp_path / "cpu" / "memory.json"
    row, = json.loads(path.read_text())["rows"]
    assert row["model"] == "tiny" and set(row["rest_gb"]) == {"rollout", "update"}
    # LoRA of rank 16 on tiny's layers, float32: A and B of q, k, v, o, gate, up, down in two blocks.
    sizes = [(256, 256), (256, 128), (256, 128), (256, 256), (256, 512), (256, 512), (512, 256)]
    lora = 2 * 16 * sum(a + b for a, b in sizes) * 4
    assert row["lora_gb"] == row["gradients_gb"] == lora / 1e9
    assert 2 * lora <= row["optimizer_gb"] * 1e9 < 2.01 * lora       # and a count of steps each
    assert row["embeddings_gb"] == 2 * 512 * 256 * 4 / 1e9
    cache = qerl.KVCache(random_model("tiny", "nvfp4", 0, "cpu"), 8, 20)
    cache.reserve(20)
    assert row["cache_gb"] == sum(piece.nbytes for pieces in cache.pieces for piece in pieces) / 1e9
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    out = capsys.readouterr().out
    assert "these figures mean nothing" in out and "| tiny |" in out


def test_weights_stay_decoded_where_there_is_room(qwen, data, tmp_path, monkeypatch):
    """With room each weight is decoded once, as it is loaded; without for each token.

    The results are the same.
    """
    scored_by_letters(monkeypatch)
    monkeypatch.setattr(train_gsm8k, "keep_decoded",
                        lambda model, collect: machine.keep_decoded(model, collect, small=0))
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2, "--slots", 4)
    decoded, adapters = {}, {}
    for name, free in (("room", 10 ** 9), ("none", 10 ** 5)):
        monkeypatch.setattr(machine, "free_memory", lambda device: free)
        counted, dequantize = [], qerl.dequantize_nvfp4
        monkeypatch.setitem(qerl.FORMATS, "nvfp4",
            replace(qerl.FORMATS["nvfp4"],
            dequantize=lambda *a: counted.append(1) or dequantize(*a)))
        run_main(monkeypatch, *options, "--out", tmp_path / name)
        decoded[name] = len(counted)
        adapters[name] = (tmp_path / name / "adapter/adapter_model.safetensors").read_bytes()
    assert decoded["room"] == 8 and decoded["none"] > 500 and adapters["room"] == adapters["none"]
    logs = [without_times(tmp_path / name / "metrics.jsonl") for name in ("room", "none")]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("weights,kept", [("nvfp4", 3), ("nf4", 3), ("bf16", 0)])
def test_what_is_kept_decoded_is_weighed(qwen, monkeypatch, weights, kept):
    model = qerl.load_model(qwen[0], weights, dtype=torch.bfloat16)
    before = {id(layer): layer.weight for layer in model.quantized_layers()}
    size = sum(2 * layer.weight.dequantize(torch.bfloat16).numel()
        for layer in model.quantized_layers())
    for free in (2 * size - 2, 2 * size):
        monkeypatch.setattr(machine, "free_memory", lambda device: free)
        # it is small: it stays as it is
        machine.keep_decoded(model)
        assert all(layer.weight is before[id(layer)] for layer in model.quantized_layers())
        machine.keep_decoded(model, small=0)
        same = [layer.weight is before[id(layer)] for layer in model.quantized_layers()]
        assert all(same) or (free == 2 * size and kept and not any(same))
    for layer in model.quantized_layers():
        weight = layer.weight.dequantize(torch.bfloat16)
        assert torch.equal(weight, before[id(layer)].dequantize(torch.bfloat16))
        assert not kept or weight is layer.weight.dequantize(torch.bfloat16)


def test_slots_are_what_memory_holds(family, monkeypatch, capsys):
    model = qerl.load_model(family[0])
    cache = qerl.KVCache(model, 3, 100)
    cache.reserve(100)
    size = sum(piece.nbytes for pieces in cache.pieces for piece in pieces)
    monkeypatch.setattr(machine, "free_memory", lambda device: size)
    assert machine.slots_that_fit(model, 100, share=1.0) == 3
    assert "--slots 3: so many sequences of 100 tokens" in capsys.readouterr().out
    assert machine.slots_that_fit(model, 10 ** 6) == 1
    assert machine.slots_that_fit(model, 1, share=1.0) == 256


def test_a_run_keeps_its_slots(qwen, data, tmp_path, monkeypatch):
    """What memory held when it began; otherwise a resumed run would draw other numbers and add in
    another order.
    """
    used, generate = [], qerl.generate
    budgets, cut = set(), Batch.micro_batches
    monkeypatch.setattr(Batch, "micro_batches", lambda batch, rows, budget: budgets.add(budget)
                        or cut(batch, rows, budget))

    def watched(*args, **options):
        used.append(options["slots"])
        return generate(*args, **options)
    monkeypatch.setattr(qerl, "generate", watched)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--out", tmp_path / "run")
    monkeypatch.setattr(machine, "free_memory", lambda device: 10 ** 6)
    run_main(monkeypatch, *options)
    first = used[0]
    assert 1 < first < 256 and set(used) == {first} and budgets == {512}
    monkeypatch.setattr(machine, "free_memory", lambda device: 10 ** 9)
    for more, slots in ((["--eval-only"], first), ([], first), (["--slots", 5], 5)):
        used.clear()
        run_main(monkeypatch, *options, "--resume", *more)
        assert set(used) == {slots} and budgets == {512}, more


def test_pieces_are_what_memory_holds(family, monkeypatch, capsys):
    """Beside the logits and what is trained: two moments and a gradient, float32."""
    model = with_lora(family[0])
    config = model.config
    trained = 12 * sum(p.numel() for p in qerl.trainable(model).values())
    logits = 3 * 2048 * config.vocab_size * 4
    d = config.hidden_size
    wide = config.intermediate_size
    blocks = len(model.blocks)
    kept = blocks * (6 * d + 3 * wide)
    recomputed = blocks * d + 10 * d + 5 * wide
    for recompute_blocks, values in ((0, kept), (blocks, recomputed)):
        model.recompute_in_backward(recompute_blocks)
        free = trained + logits + 1000 * 4 * values
        monkeypatch.setattr(machine, "free_memory", lambda device: free)
        assert machine.micro_tokens_that_fit(model, share=1.0) == 1000
        assert "--micro-tokens 1000: so many tokens" in capsys.readouterr().out
    monkeypatch.setattr(machine, "free_memory", lambda device: 0)
    assert machine.micro_tokens_that_fit(model) == 512
    monkeypatch.setattr(machine, "free_memory", lambda device: 1e15)
    assert machine.micro_tokens_that_fit(model) == 16384


def test_blocks_keep_their_activations_where_memory_allows(family, monkeypatch):
    """As few blocks as possible are recomputed; with a token more, one block more is."""
    model = with_lora(family[0])
    d = model.config.hidden_size
    wide = model.config.intermediate_size
    model.blocks = torch.nn.ModuleList(list(model.blocks) * 20)
    blocks = len(model.blocks)
    for recomputed in (0, 3, 7, blocks):
        kept = (blocks - recomputed) * (5 * d + 3 * wide)
        values = blocks * d + kept + (10 * d + 5 * wide) * bool(recomputed)
        monkeypatch.setattr(machine, "room_for_updates", lambda model: 1000 * values)
        machine.keep_activations(model, 1000)
        assert model.recompute_blocks == recomputed
        machine.keep_activations(model, 1001)
        assert model.recompute_blocks > recomputed or recomputed == blocks


def test_free_memory_is_shared_by_processes_of_a_machine(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(machine, "HOST", str(tmp_path / "meminfo"))
    # there is no such file
    assert machine.free_memory(cpu) == machine.UNKNOWN
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 3000 kB\n")
    assert machine.free_memory(cpu) == 3000 * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert machine.free_memory(cpu) == 1000 * 1024
