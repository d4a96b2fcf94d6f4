"""What memory holds; bench.py memory, and what is said where memory ends."""
import json
from dataclasses import replace

import pytest
import torch

import bench
import qerl
import train_gsm8k
from common import assert_same_run, refused, run_main, scored_by_letters
from harness import machine
from harness.batches import Batch
from studies.random_models import random_model
from studies.step import PARTS
from test_qerl import with_lora


@pytest.mark.parametrize("place,name", [
    (qerl, "load_model"), (qerl.Sampler, "steps"), (torch.optim.AdamW, "step"),
])
def test_out_of_memory_is_one_line_with_the_remedies(
        quick, monkeypatch, capsys, place, name):
    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    monkeypatch.setattr(place, name, no_memory)
    line = refused(monkeypatch, capsys, *quick, "--skip-eval-before")
    assert "out of memory; lower --slots (rollout) or --micro-tokens" in line
    assert "--resume" in line


def test_bench_memory_on_a_cpu(tmp_path, monkeypatch, capsys):
    """The table and the picture of the tiny shape."""
    run_main(monkeypatch, "memory", "--device", "cpu", "--out", tmp_path / "memory", program=bench)
    rollout, update = json.loads((tmp_path / "memory.json").read_text())["rows"]
    model = random_model("tiny", "nvfp4", 16, "cpu")
    lora = sum(p.nbytes for p in qerl.trainable(model).values()) / 1e9
    assert rollout["LoRA"] == update["LoRA"] == update["gradients"] == pytest.approx(lora)
    assert 2 * lora <= update["optimiser"] < 2.01 * lora            # and a count of steps each
    assert rollout["KV cache"] == pytest.approx(cache_bytes(model, 8, 20) / 1e9)
    assert sum(rollout[part] for part in PARTS) == pytest.approx(rollout["peak_gb"])
    assert (tmp_path / "memory.png").exists()
    out = capsys.readouterr().out
    assert "these figures mean nothing" in out and "| tiny | rollout |" in out


def cache_bytes(model, slots, length):
    """What so many sequences of this length take in the KV cache."""
    cache = qerl.KVCache(model, slots, length)
    cache.reserve(length)
    return sum(piece.nbytes for pieces in cache.pieces for piece in pieces)


def test_weights_stay_decoded_where_there_is_room(quick, qwen, tmp_path, monkeypatch):
    """In half of the free memory each is decoded once, as it is loaded; else for each token.

    The results are the same.
    """
    scored_by_letters(monkeypatch)
    keep = machine.keep_decoded
    monkeypatch.setattr(
        train_gsm8k, "keep_decoded", lambda model, collect: keep(model, collect, small=0))
    layers = qerl.load_model(qwen[0]).quantized_layers()
    size = sum(layer.weight.dequantize(torch.float32).nbytes for layer in layers)
    nvfp4 = qerl.FORMATS["nvfp4"]
    counts = []
    for name, free in (("room", 2 * size), ("none", 2 * size - 2)):
        decoded = []

        def counted(*args):
            decoded.append(args)
            return nvfp4.dequantize(*args)
        monkeypatch.setattr(machine, "free_memory", lambda device: free)
        monkeypatch.setitem(qerl.FORMATS, "nvfp4", replace(nvfp4, dequantize=counted))
        run_main(monkeypatch, *quick, "--steps", 2, "--out", tmp_path / name)
        counts.append(len(decoded))
    assert counts[0] == len(layers) < counts[1] / 10
    assert_same_run(tmp_path / "room", tmp_path / "none")


def test_slots_are_what_memory_holds(family, monkeypatch, capsys):
    model = qerl.load_model(family[0])
    size = cache_bytes(model, 3, 100)
    monkeypatch.setattr(machine, "free_memory", lambda device: size)
    assert machine.slots_that_fit(model, 100, share=1.0) == 3
    assert "--slots 3: so many sequences of 100 tokens" in capsys.readouterr().out
    assert machine.slots_that_fit(model, 10 ** 6) == 1
    assert machine.slots_that_fit(model, 1, share=1.0) == 256


def test_a_run_keeps_what_memory_held_when_it_began(quick, monkeypatch):
    """Otherwise a resumed run would draw other numbers and add in another order."""
    slots = set()
    budgets = set()
    generate = qerl.generate
    cut = Batch.micro_batches

    def watched_generate(*args, **options):
        slots.add(options["slots"])
        return generate(*args, **options)

    def watched_cut(batch, rows, budget):
        budgets.add(budget)
        return cut(batch, rows, budget)
    monkeypatch.setattr(qerl, "generate", watched_generate)
    monkeypatch.setattr(Batch, "micro_batches", watched_cut)
    options = (*quick, "--steps", 1)
    monkeypatch.setattr(machine, "free_memory", lambda device: 10 ** 6)
    run_main(monkeypatch, *options)
    (first,) = slots
    assert 1 < first < 256
    monkeypatch.setattr(machine, "free_memory", lambda device: 10 ** 9)
    longer = ["--steps", 2]
    for more, expected in ((["--eval-only"], first), (longer, first), (["--slots", 5, *longer], 5)):
        slots.clear()
        run_main(monkeypatch, *options, "--resume", *more)
        assert slots == {expected} and budgets == {512}


def test_pieces_are_what_memory_holds(family, monkeypatch, capsys):
    """Beside the logits and what is trained: two moments and a gradient, float32."""
    model = with_lora(family[0])
    trained = 3 * sum(p.nbytes for p in qerl.trainable(model).values())
    logits = 3 * 2048 * model.config.vocab_size * 4
    thousand = trained + logits + 1000 * 4 * machine.activations(model.config, 2, 0)
    for free, tokens in ((thousand, 1000), (0, 512), (1e15, 16384)):
        monkeypatch.setattr(machine, "free_memory", lambda device: free)
        assert machine.micro_tokens_that_fit(model, share=1.0) == tokens
    assert "--micro-tokens 1000: so many tokens" in capsys.readouterr().out


def test_blocks_keep_their_activations_where_memory_allows(qwen, monkeypatch):
    """As few blocks as possible are recomputed; with a token more, one block more is."""
    model = with_lora(qwen[0])
    model.blocks = torch.nn.ModuleList(list(model.blocks) * 20)
    for recomputed in (0, 3, 7, 40):
        room = 1000 * machine.activations(model.config, 40, recomputed)
        monkeypatch.setattr(machine, "room_for_updates", lambda model: room)
        machine.keep_activations(model, 1000)
        assert model.recompute_blocks == recomputed
        machine.keep_activations(model, 1001)
        assert model.recompute_blocks > recomputed or recomputed == 40


def test_free_memory_is_shared_by_processes_of_a_machine(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(machine, "HOST", str(tmp_path / "meminfo"))
    assert machine.free_memory(cpu) == machine.UNKNOWN              # there is no such file
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 3000 kB\n")
    assert machine.free_memory(cpu) == 3000 * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert machine.free_memory(cpu) == 1000 * 1024
