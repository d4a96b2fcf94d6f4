"""Several processes, and weights cut over them."""
import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import distributed

from harness.errors import UserError
import train_gsm8k
from common import assert_same_run, needs_fork, refused, run_main, run_python
from harness import fast, layers, policy
from harness.folders import read_json, read_jsonl
from harness.ranks import Ranks
from harness.run import read_checkpoint
from test_qerl import CONFIGS, CUDA, SIZES, WIDE, gpu, gradient_of, make_folder, relative
from test_qerl import with_lora


@pytest.fixture
def several(quick):
    """The flags of a run of two processes."""
    flags = ("--prompts 8 --group 4 --updates 2 --lr 1e-2 --reward random --save-every 1 "
             "--skip-eval-before --eval-questions 5")
    return (*quick, *flags.split())


def numbers_of(rank, count):
    """The environment that torchrun gives a process."""
    numbers = {"WORLD_SIZE": count, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count,
               "TORCHELASTIC_RUN_ID": "any"}
    return {name: str(value) for name, value in numbers.items()}


def run_ranks(count, out, *args):
    """Train in so many processes -> (the exit status of each, what each of them said)."""
    def train(rank):
        sys.stdout = sys.stderr = open(f"{out}.{rank}", "w")
        torch.set_num_threads(1)
        os.environ |= numbers_of(rank, count)
        distributed.init_process_group = partial(
            distributed.init_process_group, init_method=f"file://{out}.store", rank=rank,
            world_size=count)
        run_main(*args, "--out", out)

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=train, args=[rank], daemon=True) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
    said = [Path(f"{out}.{rank}").read_text() for rank in range(count)]
    return [process.exitcode for process in processes], said


def same_completions(generate, model, prompts, max_new_tokens, group, *_, **__):
    """Greedy completions whose length depends on the prompt alone.

    So it does not matter who samples them, and in how many slots.
    """
    lengths = [1 + (sum(prompt) + 3 * i) % 8 for prompt in prompts for i in range(group)]
    slots = max(group, 8 - 4 * Ranks().rank)
    rollout = generate(model, prompts, max_new_tokens, group, temperature=0.0, slots=slots,
                       limits=torch.tensor(lengths))
    return replace(rollout, finished=rollout.length < 8)


def adapter_of(out):
    """All LoRA's B, which start at zero, as one vector."""
    tensors = load_file(out / "adapter/adapter_model.safetensors")
    return torch.cat([t.flatten() for name, t in tensors.items() if "lora_B" in name])


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of three blocks: of two each would keep a buffer of its own."""
    sizes = (WIDE if CUDA else SIZES) | {"num_hidden_layers": 3}
    with mock.patch.dict(CONFIGS, deep=lambda: transformers.Qwen2Config(**sizes)):
        return make_folder(tmp_path_factory.mktemp("deep"), "deep")[0]


@needs_fork
@pytest.mark.parametrize("count,flags", [
    (2, "--steps 2 --beta 0.1 --micro-tokens 500"),
    # DAPO, whose further draws and token counts are of all processes, too.
    (4, "--algo dapo --steps 1 --seed 2"),
])
def test_processes_take_the_steps_of_one(deep, several, tmp_path, monkeypatch, count, flags):
    """The same global batch: the same adapter, figures and answers within rounding.

    Cut weights train as whole ones bit for bit, though one rank decodes in fewer slots.
    """
    monkeypatch.setattr(fast, "generate", partial(same_completions, fast.generate))
    options = (*several, "--model", deep, flags)
    one, whole, cut = (tmp_path / name for name in ("one", "whole", "cut"))
    run_main(*options, "--out", one)
    for out, shard in ((whole, []), (cut, ["--shard"])):
        statuses, said = run_ranks(count, out, *options, *shard)
        assert statuses == [0] * count, said
        assert "".join(said).count("accuracy_after ") == 1           # one process of all speaks
    assert_same_run(whole, cut)
    expected, found = map(adapter_of, (one, whole))
    assert expected.abs().max() > 1e-3              # there was something to learn
    assert relative(found, expected) < 1e-3
    figures = ("reward", "accuracy", "length", "kl", "gradient_norm")
    for a, b in zip(*(read_jsonl(out / "metrics.jsonl") for out in (one, whole)), strict=True):
        assert a.keys() == b.keys()
        assert [b[name] for name in figures] == pytest.approx(
            [a[name] for name in figures], rel=1e-3, abs=1e-7)
    answers = "answers_after.jsonl"
    assert (one / answers).read_text() == (whole / answers).read_text()
    assert read_checkpoint(whole)["state"]["drawn"] > 8     # for DAPO: questions were replaced


TEACHES_LATE = """
import os
calls = []
def late(completion, question):
    calls.append(0)
    return float(len(calls) > 5 and len(calls) % 2 and os.environ["RANK"] == os.environ["TEACHER"])
"""


@needs_fork
@pytest.mark.parametrize("count", [1, 2])
def test_float16_waits_for_the_minibatch_and_the_process_that_teach(
        several, tmp_path, monkeypatch, count):
    """The first minibatch teaches nothing, and in the first of two processes no other does."""
    (tmp_path / "own.py").write_text(TEACHES_LATE)
    monkeypatch.setenv("TEACHER", str(count - 1))
    flags = f"--prompts {4 * count} --group 2 --steps 1 --dtype float16 --reward"
    statuses, said = run_ranks(
        count, tmp_path / "run", *several, flags, f"{tmp_path}/own.py:late")
    assert statuses == [0] * count, said
    step, = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert step["loss_scale"] == 65536 and step["gradient_norm"] > 0


@needs_fork
def test_a_rank_that_dies_ends_the_run_which_goes_on_with_another_number(
        several, tmp_path, capsys):
    """Killed in the second update of step 3. Rank 0 has seen the first one, so step 2 is saved."""
    out = tmp_path / "run"
    options = (*several, "--steps 4")
    add_gradients = Ranks.add_gradients
    updates = []

    def die(ranks, trained):
        updates.append(ranks.rank)
        if updates == [1] * 6:
            os.kill(os.getpid(), signal.SIGKILL)
        add_gradients(ranks, trained)

    with mock.patch.object(Ranks, "add_gradients", die):
        statuses, said = run_ranks(2, out, *options)
    assert statuses == [1, -signal.SIGKILL], said
    run_main(*options, "--resume")
    assert f"resumed {out} after step 2" in capsys.readouterr().out
    assert [m["step"] for m in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3, 4]


TORCHRUN = "-m torch.distributed.run --standalone --local-addr=localhost --nproc_per_node=2"


def test_torchrun_starts_ranks_of_which_one_says_an_error_of_all_in_one_line(several, tmp_path):
    """After they have met; gloo's threads add no "terminate called"."""
    ended = run_python(*TORCHRUN.split(), "train_gsm8k.py", *several, "--data", tmp_path)
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.returncode and len(errors) == 1, ended.stderr
    assert f"--data {tmp_path}: no " in errors[0]
    assert "terminate called" not in ended.stderr


def as_rank(rank, collect=None):
    """One of four ranks, without processes."""
    with mock.patch.dict(os.environ, numbers_of(rank, 4)):
        ranks = Ranks()
    ranks.collect = collect
    return ranks


def test_ranks_have_the_flags_of_the_first_and_the_same_content():
    """Machines may name their folders differently."""
    first = train_gsm8k.Settings(lr=1e-3, model="/there", out="runs/1")
    ranks = as_rank(2, lambda own: [first, *own])
    settings = ranks.settings_of_first(train_gsm8k.Settings(lr=1e-2, model="/here"))
    assert (settings.lr, settings.model, settings.out) == (1e-3, "/here", "runs/1")
    ranks = as_rank(2, lambda facts: [{"weights": "a"}, *facts])
    with pytest.raises(UserError, match="weights: b in rank 2 is a in rank 0; give all machines"):
        ranks.agree({"weights": "b"})


def passes_of(model):
    """A model's logits, a rollout's tokens and a gradient."""
    tokens = torch.arange(60, device="cuda").view(2, 30) + 5
    with torch.no_grad():
        logits = model(tokens)
    rollout = fast.generate(model, tokens.tolist(), 12, 4, temperature=0.0)
    return logits, rollout.tokens, gradient_of(model, model(tokens).square().mean())


@gpu
def test_gpu_gathers_weights_inside_a_graph(deep, tmp_path):
    """A decode step, its vote and its gatherings are one; it computes what whole weights do."""
    distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        whole = with_lora(deep, device="cuda")
        whole.recompute_in_backward()
        cut = with_lora(deep, device="cuda", reader_class=layers.ShardedReader)
        passes = layers.SharedPasses(cut, 1)
        torch.testing.assert_close(passes_of(cut), passes_of(whole), rtol=1e-3, atol=1e-5)
        passes.serve()                              # nobody wants a pass
    finally:
        distributed.destroy_process_group()


def test_ranks_keep_equal_pieces_of_a_layer(deep):
    """None has more than its share, but for padding."""
    def loaded_by(rank):
        with mock.patch.dict(os.environ, numbers_of(rank, 3)):
            return fast.load_model(deep, reader_class=layers.ShardedReader)

    cut = list(map(loaded_by, range(3)))
    stacks = [model.quantized_layers() for model in (fast.load_model(deep), *cut)]
    for layer, *parts in zip(*stacks):
        share = sum(t.nbytes for t in layers.packed_tensors(layer.weight)) / 3
        for part in parts:
            assert share <= part.piece.untyped_storage().nbytes() < share + 2 * layers.ALIGNMENT
            assert not any(t.numel() for t in layers.packed_tensors(part.weight))


def test_only_torchrun_makes_several_processes(monkeypatch):
    """Some clusters set all but the last, now and then to 0."""
    for name in numbers_of(0, 0):
        assert (Ranks().count, Ranks().here) == (1, 1)
        monkeypatch.setenv(name, "0")
    assert (Ranks().count, Ranks().here) == (0, 0)


@pytest.mark.parametrize("flags,message", {
    "--prompts 6 --updates 2": "--updates 2 in 2 process",
    "--method maspo": "the neighbours run in one process",
    "--shard --weights bf16 --lora-rank 0 --beta 0": "leave --shard out",
}.items())
def test_what_processes_cannot_do_is_one_line(tmp_path, flags, message):
    with mock.patch.dict(os.environ, numbers_of(0, 2)):
        assert message in refused(flags, "--device cpu --out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_four_processes_lack_is_named(several, monkeypatch):
    """Weights that are cut over them are rounded: no rank holds what other codes need."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="--nproc-per-node 4: only 1 GPUs are here"):
        as_rank(1).start("cuda")
    settings = train_gsm8k.arguments([*map(str, several), "--eval-questions", "3"])
    with pytest.raises(UserError, match="held-out questions: 3, fewer than the 4 processes"):
        policy.load_all(settings, None, as_rank(2, lambda items: items))
    cut = train_gsm8k.arguments(["--model", "a/b", "--device", "cpu", "--shard"], 4)
    assert cut.quantizer == "rtn"


# --------------------------------------------------------------------------------------------------
# Measuring

def test_a_step_is_measured_over_processes(tmp_path):
    """Two gloo processes, each with as many prompts as one, or sharing them."""
    flags = "step --device cpu --sizes 4x8 2x8 --weights nvfp4 --repeats 1 --out"
    done = run_python(*TORCHRUN.split(), "bench.py", *flags.split(), tmp_path / "step")
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / "step.json")["rows"]
    assert [(r["processes"], r["prompts"], r["group"]) for r in rows] == [(2, 4, 8), (2, 2, 8)]
    for row in rows:
        parts = row["rollout"] + row["reward"] + row["update"]
        assert 0.6 * row["step"] < parts <= 1.001 * row["step"]
