"""Several processes, and weights cut over them."""
import json
import math
import os
import socket
import subprocess
import sys
import types

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import distributed

import bench
import qerl
import train_gsm8k
from common import QUICK, assert_same_run, refused, run_main
from harness import layers
from harness.folders import read_jsonl
from harness.ranks import Ranks
from harness.run import read_checkpoint
from studies.step import speed_ups
from test_qerl import CONFIGS, HERE, WIDE, gpu, gradient, make_folder, relative
from test_qerl import with_lora

# Runs of train_gsm8k.py, one after the other, "cut" with --shard. A completion is greedy, and its
# length depends on the prompt alone, so that it does not matter who samples it, in how many slots.
SAME_COMPLETIONS = """
import sys
from dataclasses import replace
from functools import partial
import torch
import qerl, train_gsm8k
from harness.ranks import Ranks
from studies.step import CutSampler
from torch import distributed


def generate(model, prompts, max_new_tokens, group, *_, **__):
    lengths = [1 + (sum(prompt) + 3 * i) % 8 for prompt in prompts for i in range(group)]
    sampler_class = partial(CutSampler, torch.tensor(lengths))
    slots = max(group, 8 - 4 * Ranks().rank)
    rollout = sample(model, prompts, max_new_tokens, group, temperature=0.0, slots=slots,
                     sampler_class=sampler_class)
    return replace(rollout, finished=rollout.length < 8)

def meet(backend):
    if not distributed.is_initialized():                        # processes cannot meet twice
        meet_once(backend)

meet_once = distributed.init_process_group
distributed.init_process_group = meet
stop = Ranks.stop
Ranks.stop = lambda self: None
sample = qerl.generate
qerl.generate = generate
*command, out, names = sys.argv
for name in names.split():
    flags = ["--shard"] if name == "cut" else []
    sys.argv = [*command, *flags, "--out", f"{out}/{name}"]
    train_gsm8k.main()
stop(Ranks())       # without Python's own end, in which gloo's threads may abort
"""


@pytest.fixture
def several(qwen, data):
    """The flags of a run of two processes, but for --out."""
    return ("--model", qwen[0], "--data", data, *QUICK, "--prompts", 8, "--group", 4,
            "--updates", 2, "--lr", 1e-2, "--reward", "random", "--save-every", 1,
            "--skip-eval-before", "--eval-questions", 5)


def torchrun(machines, *args):
    """Start torchrun as on so many machines, two processes on each -> its processes."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        place = f"localhost:{s.getsockname()[1]}"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        f"--nnodes={machines}", "--rdzv-backend=c10d", f"--rdzv-endpoint={place}",
        "--local-addr=localhost", *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": HERE}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return [subprocess.Popen(command, env=environment, cwd=HERE, **pipes) for _ in range(machines)]


def run_two(*args):
    """(exit status, standard error) of two processes of a script."""
    (agent,) = torchrun(1, *args)
    _, err = agent.communicate(timeout=300)
    return agent.returncode, err


def script_of(folder, text):
    (folder / "script.py").write_text(text)
    return folder / "script.py"


def run_alone(monkeypatch, *args):
    """SAME_COMPLETIONS in this process; what the script replaces is put back at the end."""
    monkeypatch.setattr(sys, "argv", ["train_gsm8k.py", *map(str, args)])
    for module, name in (
            (qerl, "generate"), (Ranks, "stop"), (distributed, "init_process_group")):
        monkeypatch.setattr(module, name, getattr(module, name))
    exec(SAME_COMPLETIONS, {})


def adapter_of(out):
    """All LoRA's B, which start at zero, as one vector."""
    tensors = load_file(out / "adapter/adapter_model.safetensors")
    return torch.cat([t.flatten() for name, t in tensors.items() if "lora_B" in name])


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of several blocks: with two each would keep a buffer of its own."""
    with pytest.MonkeyPatch.context() as patch:
        config = transformers.Qwen2Config(**{**WIDE, "num_hidden_layers": 3})
        patch.setitem(CONFIGS, "deep", lambda: config)
        return make_folder(tmp_path_factory.mktemp("deep"), "deep")[0]


@pytest.mark.parametrize("machines,names,flags", [
    (1, ["whole", "cut"], ("--steps", 2, "--beta", 0.1, "--micro-tokens", 500)),
    # DAPO, whose further draws and token counts cross the machines, too.
    (2, ["whole"], ("--algo", "dapo", "--steps", 1)),
])
def test_processes_take_the_steps_of_one(
        deep, several, tmp_path, monkeypatch, machines, names, flags):
    """The same global batch: the same adapter, figures and answers within rounding.

    Cut weights train as whole ones bit for bit, though one rank decodes in fewer slots.
    """
    script = script_of(tmp_path, SAME_COMPLETIONS)
    options = (*several, "--model", deep, *flags, tmp_path)
    agents = torchrun(machines, script, *options, " ".join(names))
    run_alone(monkeypatch, *options, "one")
    outputs = [agent.communicate(timeout=300) for agent in agents]
    # What the run wrote and said counts, not torchrun's exit status: of two agents on a busy host
    # one may be gone before the other has taken its leave. One process of all speaks.
    said = "".join(out for out, _ in outputs)
    assert said.count("accuracy_after ") == len(names), outputs
    one, several_ranks = tmp_path / "one", tmp_path / "whole"
    expected, found = map(adapter_of, (one, several_ranks))
    assert expected.abs().max() > 1e-3              # there was something to learn
    assert relative(found, expected) < 1e-3
    logs = [read_jsonl(out / "metrics.jsonl") for out in (one, several_ranks)]
    assert len(logs[0]) == len(logs[1]) > 0
    for a, b in zip(*logs):
        assert a.keys() == b.keys()
        for name in ("reward", "accuracy", "length", "kl", "gradient_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-7), name
    answers = [(out / "answers_after.jsonl").read_text() for out in (one, several_ranks)]
    assert answers[0] == answers[1]
    state = read_checkpoint(several_ranks)["state"]
    assert state["drawn"] > 8                       # for DAPO: questions were replaced
    if "cut" in names:
        assert_same_run(several_ranks, tmp_path / "cut")


# train_gsm8k.py of which rank 1 is killed in the second update of step 3. Rank 0 has been with it
# in the first one, so step 2 is saved.
DYING_RANK = """
import os, signal
import train_gsm8k
from harness.ranks import Ranks

add_gradients, calls = Ranks.add_gradients, []

def die(self, trained):
    calls.append(self)
    if self.rank == 1 and len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    add_gradients(self, trained)

Ranks.add_gradients = die
train_gsm8k.main()
"""


def test_a_rank_that_dies_ends_the_run_which_goes_on_with_another_number(several, tmp_path, capsys):
    out = tmp_path / "run"
    options = (*several, "--steps", 4, "--out", out)
    status, err = run_two(script_of(tmp_path, DYING_RANK), *options)
    assert status != 0 and err.count("error: ") <= 1
    assert "go on with --resume" in err or "SIGKILL" in err
    assert [m["step"] for m in read_jsonl(out / "metrics.jsonl")] == [1, 2]
    run_main(*options, "--resume")
    assert f"resumed {out} after step 2" in capsys.readouterr().out
    assert [m["step"] for m in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3, 4]


def test_an_error_of_several_ranks_is_one_line_each(several, tmp_path):
    """After they have met; gloo's threads add no "terminate called"."""
    status, err = run_two("train_gsm8k.py", *several, "--data", tmp_path, "--out", tmp_path / "run")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status != 0 and 1 <= len(errors) <= 2 and "terminate called" not in err
    assert all(f"--data {tmp_path}: no " in error for error in errors)


def as_rank(monkeypatch, rank, collect=None, local_rank=0):
    """Ranks of which this is `rank` of four, without processes."""
    ranks = Ranks()
    monkeypatch.setattr(ranks, "collect", collect)
    ranks.count, ranks.rank, ranks.local_rank = 4, rank, local_rank
    return ranks


def test_ranks_have_the_flags_of_the_first_and_the_same_content(monkeypatch):
    """Machines may name their folders differently."""
    first = train_gsm8k.Settings(lr=1e-3, model="/there", out="runs/1")
    ranks = as_rank(monkeypatch, 2, lambda own: [first, *own])
    settings = ranks.settings_of_first(train_gsm8k.Settings(lr=1e-2, model="/here"))
    assert (settings.lr, settings.model, settings.out) == (1e-3, "/here", "runs/1")
    ranks = as_rank(monkeypatch, 2, lambda facts: [{"weights": "a"}, *facts])
    with pytest.raises(qerl.UserError, match="weights: b in rank 2 is a in rank 0; give all machines"):
        ranks.agree({"weights": "b"})


def passes_of(model, temperature):
    """A model's logits, a rollout's tokens and a gradient."""
    tokens = torch.arange(60, device=model.device).view(2, 30) + 5
    torch.manual_seed(3)
    with torch.no_grad():
        logits = model(tokens)
    rollout = qerl.generate(model, tokens.tolist(), 12, 4, temperature=temperature)
    model(tokens).square().mean().backward()
    return logits, rollout.tokens, gradient(model)


@pytest.mark.parametrize("device,backend,temperature,tolerance", [
    ("cpu", "gloo", 1.0, 0),
    # With the kernels; a decode step, its vote and its gatherings are recorded as one CUDA graph.
    pytest.param("cuda", "nccl", 0.0, 1e-3, marks=gpu),
])
def test_gathered_weights_compute_the_same(deep, tmp_path, device, backend, temperature, tolerance):
    """No layer keeps its own weight between passes."""
    distributed.init_process_group(
        backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        whole = with_lora(deep, device=device)
        whole.recompute_in_backward()
        cut = with_lora(deep, device=device, checkpoint_class=layers.ShardedCheckpoint)
        passes = layers.SharedPasses(cut, 1)
        packed = [layers.packed_tensors(layer.weight)[0] for layer in cut.quantized_layers()]
        assert len({t.untyped_storage().data_ptr() for t in packed}) == 2        # for three blocks
        torch.testing.assert_close(
            passes_of(cut, temperature), passes_of(whole, temperature),
            rtol=tolerance, atol=tolerance / 100)
        passes.serve()                              # nobody wants a pass
    finally:
        distributed.destroy_process_group()


def test_ranks_keep_equal_pieces_of_a_layer(qwen, monkeypatch):
    """None has more than its share, but for padding."""
    def loaded_by(rank):
        monkeypatch.setattr(layers, "Ranks", lambda: types.SimpleNamespace(rank=rank, count=3))
        model = qerl.load_model(qwen[0], checkpoint_class=layers.ShardedCheckpoint)
        return model.quantized_layers()

    whole = qerl.load_model(qwen[0]).quantized_layers()
    for layer, *parts in zip(whole, *map(loaded_by, range(3))):
        share = sum(t.nbytes for t in layers.packed_tensors(layer.weight)) / 3
        for part in parts:
            assert share <= len(part.piece) < share + 2 * layers.ALIGNMENT
            assert not any(t.numel() for t in layers.packed_tensors(part.weight))


def test_only_torchrun_makes_several_processes(monkeypatch):
    """Some clusters set all but the last."""
    counts = []
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "2")
        counts.append(Ranks().count)
    assert counts == [1, 1, 1, 2]


@pytest.mark.parametrize("count,options,message", [
    (2, ["--prompts", 6], "--updates 2 in 2 process"),
    (2, ["--method", "fp16"], "the neighbours run in one process"),
    (2, ["--device", "cpu:0"], "is none of"),
    (2, ["--shard", "--weights", "bf16", "--lora-rank", 0, "--beta", 0], "leave --shard out"),
    (1, ["--shard"], "start by torchrun"),
])
def test_what_processes_cannot_do_is_one_line(
        several, tmp_path, monkeypatch, count, options, message):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun sets it")
    for name, value in (("WORLD_SIZE", count), ("RANK", 0), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    options = (*several, "--out", tmp_path / "run", *options)
    assert message in refused(*options)
    assert not (tmp_path / "run").exists()


def test_a_machine_with_too_few_gpus_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(qerl.UserError, match="--nproc-per-node 2: only 1 GPUs are here"):
        as_rank(monkeypatch, 1, local_rank=1).start("cuda")


def test_each_process_needs_a_held_out_question(several, monkeypatch):
    settings = train_gsm8k.arguments([*map(str, several), "--eval-questions", "3"])
    with pytest.raises(qerl.UserError, match="held-out questions: 3, fewer than the 4 processes"):
        train_gsm8k.load_all(settings, qerl, as_rank(monkeypatch, 2, lambda items: items))


# --------------------------------------------------------------------------------------------------
# Measuring

def test_bench_scaling_measures_processes(tmp_path, capsys):
    """Two gloo processes, each with as many prompts as one, or sharing them."""
    out = tmp_path / "scaling"
    run_main("scaling", "--device", "cpu", "--out", out, "--processes", 2,
             "--weights", "nvfp4", "--repeats", 1, program=bench)
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [(r["processes"], r["prompts"], r["group"]) for r in rows] == [(2, 4, 8), (2, 2, 8)]
    for row in rows:
        parts = [row[name] for name in ("rollout", "reward", "update")]
        assert 0.6 * row["step"] < sum(parts) <= 1.001 * row["step"]
    assert out.with_suffix(".png").exists()
    assert "| tiny, nvfp4 | 2 | 32 |" in capsys.readouterr().out
    # Two processes that make twice as many completions in the same time; nothing to compare with.
    alone = {**rows[0], "processes": 1, "prompts": 2}
    assert [line["times one"] for line in speed_ups([alone, rows[0]])] == pytest.approx([1, 2])
    assert math.isnan(next(speed_ups(rows))["times one"])


@pytest.mark.parametrize("options,message", [
    (["kernels"], "--device cpu: the kernels run on a GPU alone"),
    (["step", "--sizes", "4x1"], "invalid size value: '4x1'"),
])
def test_bench_refuses(tmp_path, options, message):
    options = (*options, "--device", "cpu", "--out", tmp_path / "bench")
    assert message in refused(*options, program=bench)
