"""Several processes, and weights cut over them."""
import json
import os
import socket
import subprocess
import sys
import types

import pytest
import torch
import transformers
from safetensors.torch import load_file

import bench
import qerl
import train_gsm8k
from common import refused, run_main
import harness.layers
import harness.run
from harness.folders import read_jsonl
from harness.ranks import Ranks
from harness.run import read_checkpoint
from studies import step as step_of
from test_qerl import CONFIGS, HERE, SIZES, gpu, make_folder, with_lora

# train_gsm8k.py with completions that depend on the prompt alone, so that it does not matter who
# samples them, and a reward with a signal.
SAME_COMPLETIONS = """
import sys
import torch
import qerl, train_gsm8k


def generate(model, prompts, max_new_tokens, group_size=1, *rest, **options):
    rows = []
    for prompt in prompts:
        generator = torch.Generator().manual_seed(sum(i * token for i, token in enumerate(prompt)))
        for _ in range(group_size):
            length = int(torch.randint(2, 9, (), generator=generator))
            rows.append(torch.randint(20, 250, (length,), generator=generator))
    length = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logprobs = -torch.ones(tokens.shape) * qerl.length_mask(length, tokens.shape[1])
    return qerl.Rollout(tokens, logprobs, -logprobs, length, length < 8)

def reward(text, *_):
    value = sum(text.encode()) % 3
    return float(value), float(value == 2)

qerl.generate = generate
train_gsm8k.reward = reward
train_gsm8k.main()
"""


def torchrun(*args):
    """torchrun with these arguments, started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": HERE}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*command, *map(str, args)], env=environment, cwd=HERE, **pipes)


def run_two(script, *args):
    """(exit status, standard output, standard error) of two processes of a script."""
    agent = torchrun("--standalone", script, *args)
    out, err = agent.communicate(timeout=300)
    return agent.returncode, out, err


SEVERAL = ("--prompts", 8, "--group", 4, "--updates", 2, "--steps", 3, "--max-new-tokens", 8,
    "--lora-rank", 2, "--lr", 1e-2, "--quantizer", "rtn", "--save-every", 1, "--device", "cpu",
    "--beta", 0.1, "--eval-questions", 5)


def run_alone(*args):
    """SAME_COMPLETIONS in this process, whose environment is that of a single one under torchrun."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RUN_ID", "torchrun sets it"), ("MAX_RESTARTS", "0")):
            patch.setenv(f"TORCHELASTIC_{name}", value)
        for name, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "1")):
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["train_gsm8k.py", *map(str, args)])
        for module, name in ((qerl, "generate"), (train_gsm8k, "reward")):
            # put back what the script replaces
            patch.setattr(module, name, getattr(module, name))
        exec(SAME_COMPLETIONS, {})


def assert_same_steps(one, several, steps):
    """Two runs' folders, of so many steps, hold the same adapter, figures and answers within
    rounding.
    """
    adapters, logs, answers = [], [], []
    for out in (one, several):
        adapters.append(load_file(out / "adapter" / "adapter_model.safetensors"))
        logs.append(read_jsonl(out / "metrics.jsonl"))
        answers.append(read_jsonl(out / "answers_after.jsonl"))
    moved = max(t.abs().max() for name, t in adapters[0].items() if "lora_B" in name)
    # there was something to learn
    assert moved > 1e-3
    for name, tensor in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], tensor, rtol=1e-3, atol=1e-4 * moved.item())
    assert len(logs[0]) == len(logs[1]) == steps
    for a, b in zip(*logs):
        assert a.keys() == b.keys()
        for name in ("reward", "accuracy", "length", "kl", "gradient_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-7), name
    assert answers[0] == answers[1]


def test_two_processes_take_the_steps_of_one(qwen, data, tmp_path, capsys):
    """The same global batch: the same adapter and figures within rounding."""
    script = tmp_path / "same.py"
    script.write_text(SAME_COMPLETIONS)
    options = ("--model", qwen[0], "--data", data, *SEVERAL, "--out")
    run_alone(*options, tmp_path / "1")
    status, out, err = run_two(script, *options, tmp_path / "2")
    assert status == 0, err
    for output in (out, capsys.readouterr().out):
        # one of them speaks
        assert output.count("held-out pass@1") == 1
    assert_same_steps(tmp_path / "1", tmp_path / "2", steps=3)

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


def test_a_rank_that_dies_ends_the_run_which_goes_on_with_another_number(qwen, data, tmp_path,
        monkeypatch, capsys):
    out = tmp_path / "run"
    script = tmp_path / "dying.py"
    script.write_text(DYING_RANK)
    options = ("--model", qwen[0], "--data", data, *SEVERAL, "--steps", 4, "--skip-eval-before",
        "--out", out)
    status, _, err = run_two(script, *options)
    assert status != 0 and not (out / "summary.json").exists()
    assert err.count("error: ") <= 1
    assert "go on with --resume" in err or "SIGKILL" in err
    assert [m["step"] for m in read_jsonl(out / "metrics.jsonl")] == [1, 2]
    run_main(monkeypatch, *options, "--resume")
    assert f"resumed {out} after step 2" in capsys.readouterr().out
    assert [m["step"] for m in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3, 4]


def test_ranks_share_each_minibatch():
    one, questions = Ranks(), list(range(24))
    assert one.share(questions, 3) == questions
    assert one.collect([5]) == [5]
    assert one.total(torch.tensor(2.5)) == 2.5
    shares = []
    for rank in range(2):
        ranks = Ranks()
        ranks.count, ranks.rank = 2, rank
        shares.append(ranks.share(questions, 3))
    assert shares == [[0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19],
        [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]]


def test_bench_scaling_measures_processes(tmp_path, monkeypatch, capsys):
    """Two gloo processes share the prompts."""
    here = tmp_path / "cpu" / "scaling.json"
    options = ["--device", "cpu", "--out", str(tmp_path), "--processes", "2", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["bench.py", "scaling", *options])
    bench.main()
    rows = json.loads(here.read_text())["rows"]
    assert [(r["processes"], r["prompts"], r["group"]) for r in rows] == [(2, 4, 2), (2, 2, 2)]
    for row in rows:
        phases = [row[name] for name in ("rollout", "reward", "update", "waiting", "exchange")]
        assert all(seconds >= 0 for seconds in phases) and row["exchange"] > 0
        # parts of a mean, and the slowest's
        assert 0.6 * row["step"] < sum(phases) <= 1.001 * row["step"]
    assert (here.parent / "scaling.png").read_bytes()[:4] == b"\x89PNG"
    assert "| tiny, nvfp4 | 2 | 4 | all |" in capsys.readouterr().out


def test_bench_scaling_compares_with_one_process():
    """Two processes make 1.9 x the completions if each has as many, 1.6 x if they share them."""
    def row(processes, prompts, step):
        return {"model": "tiny", "weights": "nvfp4", "processes": processes, "prompts": prompts,
                "group": 8, "step": step}

    rows = [row(1, 32, 10.0), row(2, 64, 20 / 1.9), row(2, 32, 10 / 1.6)]
    lines = list(step_of.speed_ups(rows))
    assert [line["times one"] for line in lines] == pytest.approx([1, 1.9, 1.6])
    assert [line["shared"] for line in lines] == ["each", "each", "all"]
    assert next(step_of.speed_ups(rows[1:]))["times one"] is None      # nothing to compare with


def test_bench_step_cuts_the_weights(tmp_path):
    """Two gloo processes take part in each other's passes."""
    options = ("--device", "cpu", "--weights", "nvfp4", "--sizes", "4x3", "--out", tmp_path)
    status, _, err = run_two("bench.py", "step", "--shard", *options)
    assert status == 0, err
    found = json.loads((tmp_path / "cpu" / "step-2-processes-sharded.json").read_text())
    assert [row["processes"] for row in found["rows"]] == [2]
    assert found["command"].startswith("torchrun --nproc_per_node=2 bench.py step --shard")


def test_ranks_divide_the_lengths_of_one_process():
    """So 32 x 8 completions are the same work on one GPU and on four, of which one has more than
    another.
    """
    ranks = [types.SimpleNamespace(rank=rank, count=4) for rank in range(4)]
    parts = [step_of.cut_lengths(64, 512, rank) for rank in ranks]
    assert torch.equal(torch.cat(parts), step_of.cut_lengths(256, 512, Ranks()))
    assert len({part.sum().item() for part in parts}) == 4


def two_machines(script, *args):
    """Start torchrun twice, as on two machines, which meet at a port of this one."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    meeting = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}",
        "--local-addr=localhost")
    return [torchrun(*meeting, script, *args) for _ in range(2)]


def test_two_machines_take_the_step_of_one_process(qwen, data, tmp_path):
    """Two processes on each; DAPO, whose further draws and token counts cross the machines, too."""
    script = tmp_path / "same.py"
    script.write_text(SAME_COMPLETIONS)
    options = ("--model", qwen[0], "--data", data, *SEVERAL, "--algo", "dapo", "--beta", 0,
        "--steps", 1, "--skip-eval-before", "--out")
    agents = two_machines(script, *options, tmp_path / "2 x 2")
    run_alone(*options, tmp_path / "alone")
    outputs = [agent.communicate(timeout=300) for agent in agents]
    # What the run wrote and said counts, not torchrun's exit status: of two agents on a busy host
    # one may be gone before the other has taken its leave. One process of four speaks.
    assert "".join(out for out, _ in outputs).count("pass@1 after: ") == 1, outputs
    assert_same_steps(tmp_path / "alone", tmp_path / "2 x 2", steps=1)
    state, _ = read_checkpoint(str(tmp_path / "2 x 2"), {}, must_agree=["none"])
    # questions were replaced
    assert state["drawn"] > 8


def as_rank(monkeypatch, rank, others, local_rank=0):
    """Ranks of which this is `rank`, without processes: collect gives what `others` returns."""
    ranks = Ranks()
    monkeypatch.setattr(ranks, "collect", others)
    ranks.count, ranks.rank, ranks.local_rank = 4, rank, local_rank
    return ranks


def test_ranks_agree_on_flags_data_and_model(qwen, monkeypatch, tmp_path):
    """Machines may name their folders differently; what they hold, and the other flags, must be the
    same.
    """
    settings = train_gsm8k.Settings(lr=1e-3, model="/here")
    theirs = []
    ranks = as_rank(monkeypatch, 2, lambda facts: [theirs[0], facts[0]])
    theirs.append({f"--{name.replace('_', '-')}": value
                   for name, value in vars(settings).items()} | {"--model": "/there"})
    ranks.agree_on_flags(settings)
    theirs[0]["--lr"] = 1e-2
    with pytest.raises(qerl.UserError,
            match="--lr 0.001 of rank 2 is 0.01 in rank 0; give all machines the same"):
        ranks.agree_on_flags(settings)


def test_a_rank_says_that_another_is_gone(monkeypatch):
    ranks = as_rank(monkeypatch, 2, None)
    with pytest.raises(qerl.UserError, match="rank 2 waited for another"), ranks.together():
        raise RuntimeError("Connection reset by peer")


# train_gsm8k.py with a flag that one rank or all have wrong; rank 0 comes later to it than the
# others.
ERRONEOUS_RANK = """
import os, sys, time
import train_gsm8k

rank, erroneous, moment = os.environ["RANK"], sys.argv.pop(1), sys.argv.pop(1)
if erroneous in (rank, "all"):
    sys.argv += ["--lr", "-5"] if moment == "before" else ["--data", "."]
if rank == "0":
    time.sleep(1)
train_gsm8k.main()
"""


@pytest.mark.parametrize("erroneous,moment,message",
    [("1", "before", "--lr -5.0: must be positive"), ("all", "after", "--data .: no ")])
def test_an_error_of_several_ranks_is_one_line_each(qwen, data, tmp_path, erroneous, moment,
        message):
    """Before or after the ranks have met; what one of them alone sees is said, too."""
    script = tmp_path / "erroneous.py"
    script.write_text(ERRONEOUS_RANK)
    status, _, err = run_two(script, erroneous, moment, "--model", qwen[0], "--data", data,
        *SEVERAL, "--out", tmp_path / "run")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert 1 <= len(errors) <= 2
    assert all(message in error for error in errors)
    assert status != 0
    # by gloo's threads, after the line
    assert "terminate called" not in err


# A model of several blocks: with two each would keep a buffer of its own.
DEEP = {**SIZES, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    CONFIGS["deep"] = lambda: transformers.Qwen2Config(**DEEP, tie_word_embeddings=True)
    try:
        return make_folder(tmp_path_factory.mktemp("deep"), "deep")[0]
    finally:
        del CONFIGS["deep"]


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0,
        world_size=1)
    yield
    torch.distributed.destroy_process_group()


def passes_of(model, temperature):
    """{name: tensor} of a model's logits, rollout and gradients."""
    tokens = torch.arange(60, device=model.device).view(2, 30) + 5
    torch.manual_seed(3)
    with torch.no_grad():
        logits = model(tokens)
    rollout = qerl.generate(model, tokens.tolist(), 12, 4, temperature=temperature)
    model(tokens).square().mean().backward()
    gradients = {name: p.grad for name, p in qerl.trainable(model).items()}
    return {"logits": logits, "tokens": rollout.tokens, "logprobs": rollout.logprobs, **gradients}


@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
def test_gathered_weights_compute_the_same(deep, alone, weights):
    """Logits, a rollout and gradients, bit for bit; no layer keeps its own between passes."""
    whole = with_lora(deep, weights=weights)
    whole.recompute_in_backward()
    cut = with_lora(deep, weights=weights, checkpoint_class=harness.layers.ShardedCheckpoint)
    assert all(t.numel() == 0
        for layer in cut.quantized_layers() for t in harness.layers.packed_tensors(layer.weight))
    passes = harness.layers.SharedPasses(cut, Ranks())
    storages = {layer.weight.parts[0].untyped_storage().data_ptr()
                for layer in cut.quantized_layers()}
    # buffers, for three blocks
    assert len(storages) == 2
    results = [passes_of(model, temperature=1.0) for model in (whole, cut)]
    for name, tensor in results[0].items():
        assert torch.equal(results[1][name], tensor), name
    # nobody wants a pass
    passes.serve()


@gpu
def test_gpu_gathered_weights_compute_the_same(tmp_path):
    """The same with the kernels, and with a decode step, its vote and its gatherings by NCCL,
    recorded as one CUDA graph.
    """
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0,
        world_size=1)
    try:
        folder = make_folder(tmp_path / "wide", "wide")[0]
        whole = with_lora(folder, device="cuda")
        whole.recompute_in_backward()
        cut = with_lora(folder, device="cuda", checkpoint_class=harness.layers.ShardedCheckpoint)
        passes = harness.layers.SharedPasses(cut, Ranks())
        results = [passes_of(model, temperature=0.0) for model in (whole, cut)]
        for name in results[0].keys() - {"logprobs"}:
            torch.testing.assert_close(
                results[1][name], results[0][name], rtol=1e-3, atol=1e-5, msg=name)
        passes.serve()
    finally:
        torch.distributed.destroy_process_group()


def loaded_by(monkeypatch, rank, count, folder):
    """A folder's model as this rank of so many keeps it."""
    monkeypatch.setattr(harness.layers, "Ranks", lambda: types.SimpleNamespace(rank=rank, count=count))
    return qerl.load_model(str(folder), checkpoint_class=harness.layers.ShardedCheckpoint)


def test_ranks_keep_equal_pieces_of_a_layer(qwen, monkeypatch):
    """Three pieces, none with more than its share but for padding; together they are the layer."""
    model = qerl.load_model(qwen[0])
    pieces = []
    for rank in range(3):
        layers = loaded_by(monkeypatch, rank, 3, qwen[0]).quantized_layers()
        pieces.append([layer.piece for layer in layers])
    for whole, layer, *parts in zip(model.quantized_layers(), layers, *pieces):
        packed = harness.layers.packed_tensors(whole.weight)
        share = sum(t.nbytes for t in packed) / 3
        assert all(share <= len(part) < share + 2 * harness.layers.ALIGNMENT for part in parts)
        again = harness.layers.tensors_in(torch.cat(parts), layer.layout, 3 * harness.layers.ALIGNMENT)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                   for a, b in zip(again, packed))

# Two trainings by the same processes, the second with cut weights. The ranks get completions of
# different lengths.
WHOLE_AND_CUT = """
import sys
from functools import partial
import torch
import qerl, train_gsm8k
from harness.ranks import Ranks
from studies.step import CutSampler
from torch import distributed


def generate(model, prompts, max_new_tokens, group_size=1, *rest, **options):
    slots = max(group_size, 4 - 2 * Ranks().rank)
    lengths = torch.arange(len(prompts) * group_size) % 4 + 1 + 4 * Ranks().rank
    sampler_class = partial(CutSampler, lengths)
    options = {**options, "slots": slots, "sampler_class": sampler_class}
    return original(model, prompts, max_new_tokens, group_size, *rest, **options)

def meet(backend):
    if not distributed.is_initialized():                        # processes cannot meet twice
        meet_once(backend)

meet_once = distributed.init_process_group
distributed.init_process_group = meet
stop = Ranks.stop
Ranks.stop = lambda self: None
original = qerl.generate
qerl.generate = generate
command, out = sys.argv[:-1], sys.argv[-1]
for name, flags in (("whole", []), ("cut", ["--shard"])):
    sys.argv = [*command, *flags, "--out", f"{out}/{name}"]
    train_gsm8k.main()
# Without Python's own end, in which gloo's threads may abort.
stop(Ranks())
"""


def test_two_processes_train_on_cut_weights_as_on_whole_ones(deep, data, tmp_path):
    """Bit for bit, though one rank decodes more tokens in fewer slots and trains on more pieces
    than the other.
    """
    script = tmp_path / "both.py"
    script.write_text(WHOLE_AND_CUT)
    flags = ("--reward", "random", "--steps", 2, "--micro-tokens", 500, "--skip-eval-before")
    status, _, err = run_two(script, "--model", deep, "--data", data, *SEVERAL, *flags, tmp_path)
    assert status == 0, err
    whole, cut = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "cut"))
    assert max(t.abs().max() for name, t in whole.items() if "lora_B" in name) > 1e-3
    assert all(torch.equal(cut[name], tensor) for name, tensor in whole.items())
    for a, b in zip(*(read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))):
        same = a.keys() - {"seconds", "tokens_per_s", "peak_memory_gb"}
        assert a["length"] == 4.5
        assert {name: a[name] for name in same} == {name: b[name] for name in same}


@pytest.mark.parametrize("options,message", [
    (["scaling", "--processes", "0"], "0: must be at least 1"),
    (["kernels"], "--device cpu: the kernels run on a GPU alone"),
    (["step", "--sizes", "4x1"], "invalid size value: '4x1'"),
    (["step", "--shard"], "--nproc_per_node=2 or more"),
])
def test_bench_refuses(tmp_path, monkeypatch, capsys, options, message):
    arguments = ["bench.py", *options, "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("error,ends", [
    (torch.OutOfMemoryError("CUDA out of memory.\nGPU 0 has"), SystemExit),
    (RuntimeError("shapes cannot be multiplied"), RuntimeError),
])
def test_bench_says_in_a_line_that_memory_ran_out(monkeypatch, capsys, error, ends):
    """A fault of ours keeps its traceback."""
    def fails(_):
        raise error
    monkeypatch.setattr(bench, "run", fails)
    monkeypatch.setattr(sys, "argv", ["bench.py", "step", "--device", "cpu"])
    with pytest.raises(ends):
        bench.main()
    assert capsys.readouterr().err.count("\n") == (ends is SystemExit)


def test_only_torchrun_makes_several_processes(monkeypatch):
    """Neither WORLD_SIZE alone, as some clusters set it, nor a part of torchrun's variables."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Ranks().count == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "0")
    assert Ranks().count == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert Ranks().count == 2


def test_a_machine_with_too_few_gpus_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(qerl.UserError, match="--nproc-per-node 2: only 1 GPUs are here"):
        as_rank(monkeypatch, 1, None, 1).start("cuda")


@pytest.mark.parametrize("count,options,message", [
    (2, ["--prompts", 6], "--updates 2 times 2 processes"),
    (2, ["--method", "fp16"], "the neighbours run in one process"),
    (2, ["--device", "cpu:0"], "use"),
    (2, ["--shard", "--keep-activations"], "--keep-activations: with --shard"),
    (2, ["--shard", "--weights", "bf16", "--lora-rank", 0, "--beta", 0], "which --shard cuts"),
    (2, ["--save-quantized", "packed"], "start without torchrun"),
    (1, ["--shard"], "start by torchrun"),
    (1, ["--shard", "--save-quantized", "packed"], "leave --shard out"),
])
def test_what_processes_cannot_do_is_one_line(
        qwen, data, tmp_path, monkeypatch, capsys, count, options, message):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun sets it")
    for name, value in (("WORLD_SIZE", count), ("RANK", 0), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    base = ("--model", qwen[0], "--data", data, *SEVERAL, "--out", tmp_path / "run")
    assert message in refused(monkeypatch, capsys, *base, *options)
    assert not (tmp_path / "run").exists()


def test_each_process_needs_a_held_out_question(qwen, data, monkeypatch):
    settings = train_gsm8k.Settings(
        model=qwen[0], data=data, device="cpu", dtype="float32", quantizer="rtn", lora_rank=2,
        max_new_tokens=8, eval_questions=3)
    ranks = as_rank(monkeypatch, 2, None)
    with pytest.raises(qerl.UserError, match="held-out questions: 3, fewer than the 4 processes"):
        train_gsm8k.load_all(settings, qerl, ranks)
