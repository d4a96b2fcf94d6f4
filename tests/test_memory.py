"""What memory holds, as a run finds it out and keeps it."""
from unittest import mock

import torch

import qerl
import train_gsm8k
from common import run_main
from harness import fast, machine
from harness.folders import read_json
from test_qerl import TOKENS


def free(monkeypatch, size):
    monkeypatch.setattr(machine, "free_memory", lambda device: size)


def test_weights_stay_decoded_in_half_of_the_free_memory(model, monkeypatch):
    """The results are the same to the last bit."""
    packed = [layer.weight for layer in model.quantized_layers()]
    expected = model(TOKENS)
    size = sum(weight.dequantize(torch.float32).nbytes for weight in packed)
    for bytes_free, format in ((2 * size - 2, "nvfp4"), (2 * size, "bf16")):
        free(monkeypatch, bytes_free)
        machine.keep_decoded(model, fast, small=0)
        formats = {layer.weight.format for layer in model.quantized_layers()}
        assert formats == {fast.FORMATS[format]}
        assert model(TOKENS).equal(expected)


def test_slots_and_pieces_are_what_memory_holds(model, monkeypatch):
    """Beside what is trained, two moments and a gradient; pieces beside logits and a cache that stays."""
    token = sum(kv.nbytes for kv in fast.KVCache(model, 1, 1).layers)
    trained = 3 * sum(p.nbytes for p in qerl.trainable(model).values())
    logits = 3 * 2048 * model.config.vocab_size * 4
    activation = 4 * machine.activations(model.config, 2, 0)
    three = trained + 300.01 * token / 0.7
    thousand = trained + logits + 1000.1 * activation / 0.8
    for bytes_free, longest, completions, slots, micro_tokens, stays in (
            (three, 100, 512, 3, 512, False),
            (three, 101, 512, 2, 512, False),
            (three, 1, 8, 256, 512, True),
            (thousand, 10 ** 6, 512, 1, 1000, False),
            (thousand + 8 * token / 0.8, 1, 8, 256, 1000, True),
            (1e15, 10 ** 6, 512, 512, 32768, True)):
        free(monkeypatch, bytes_free)
        fitted = machine.fitted(train_gsm8k.Settings(), model, longest, completions, fast)
        assert (fitted.slots, fitted.micro_tokens) == (slots, micro_tokens)
        assert model.keep_sampler == stays


def test_a_run_keeps_what_memory_held_when_it_began(quick, tmp_path, monkeypatch):
    """Otherwise a resumed run would draw other numbers and add in another order."""
    def fitted(file, flags):
        run_main(*quick, flags)
        settings = read_json(tmp_path / "run" / file)["settings"]
        return settings["slots"], settings["micro_tokens"]

    free(monkeypatch, 10 ** 6)
    begun = fitted("summary.json", "--steps 1")
    assert 1 < begun[0] < 256
    free(monkeypatch, 10 ** 9)
    assert fitted("eval.json", "--resume --eval-only") == begun
    assert fitted("summary.json", "--resume --steps 2") == begun


def test_blocks_keep_their_activations_where_memory_allows(model):
    """As few blocks as possible are recomputed; with a token more, one block more is."""
    model.blocks = torch.nn.ModuleList(list(model.blocks) * 20)
    for recomputed in (0, 3, 40):
        room = 1000 * machine.activations(model.config, 40, recomputed)
        machine.keep_activations(model, 1000, room)
        assert model.recompute_blocks == recomputed
        machine.keep_activations(model, 1001, room)
        assert model.recompute_blocks > recomputed or recomputed == 40


def test_free_memory_is_shared_by_processes_of_a_machine(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(machine, "HOST", str(tmp_path / "meminfo"))
    monkeypatch.setattr(machine, "Ranks", lambda: mock.Mock(here=3))
    assert machine.free_memory(cpu) == machine.UNKNOWN              # there is no such file
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 3000 kB\n")
    assert machine.free_memory(cpu) == 1000 * 1024
