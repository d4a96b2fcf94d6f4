"""What several test files use."""
import contextlib
import io
import multiprocessing
import os
import signal
import sys
import types
from unittest import mock

import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import methods
import qerl
from harness import fast
import train_gsm8k
import harness.run
from harness.engines import find_method
from harness.folders import read_jsonl
from harness.layers import TrainedLinear, replace_layers
from test_qerl import run_python, scales              # noqa: F401

# A vocabulary in which a policy that knows nothing answers, and now and then rightly: 1 or 2, in a
# box or in the paper's format.
QUIZ_EOS = 4
QUIZ_TOKENS = ["a", "b", "c", "1", "<eos>", r"\boxed{1}", r"\boxed{2}",
               "<think></think><answer>1</answer>", "<think></think><answer>2</answer>"]

# The flags of a run of a second or two.
QUICK = ("--prompts 2 --group 2 --updates 1 --steps 5 --max-new-tokens 8 --lora-rank 2 --lr 1e-3 "
         "--save-every 2 --device cpu --quantizer rtn").split()
LEARNING = "--prompts 4 --group 4 --lr 0.02"                # behind QUICK: each step has a signal
# Of a test with the fixture `quick`: it runs by either engine.
by_both_engines = pytest.mark.parametrize("quick", ["plain", "fast"], indirect=True)


# --------------------------------------------------------------------------------------------------
# Runs and what they are made of

def run_main(*args, program=train_gsm8k):
    """Run a program with this command line. A string that begins with a flag may hold several words."""
    words = []
    for arg in map(str, args):
        words += arg.split() if arg.startswith("--") else [arg]
    with mock.patch.object(sys, "argv", [f"{program.__name__}.py", *words]):
        program.main()


def refused(*args, program=train_gsm8k):
    """The one line with which a command ends, exit status 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit, match="^2$"):
        run_main(*args, program=program)
    (line,) = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    return line


def neighbour(name, **settings):
    """A method as --method NAME finds it, with its defaults."""
    values = {"method": name, **methods.defaults(name), **settings}
    return find_method(train_gsm8k.Settings(**values))


def all_trained(folder):
    """A model whose weights, biases and norms are all trained."""
    model = fast.load_model(folder, "bf16", train_norms=True)
    replace_layers(model, TrainedLinear)
    return model


# --------------------------------------------------------------------------------------------------
# Runs that are stopped, and other processes

def stop_at(step, *args):
    """Run until the checkpoint of this step is due, and stop there as Ctrl-C does."""
    write = harness.run.write_checkpoint

    def stop(folder, content):
        if content["state"]["step"] == step:
            raise KeyboardInterrupt
        write(folder, content)
    patched = mock.patch.object(harness.run, "write_checkpoint", stop)
    with patched, pytest.raises(SystemExit, match="130"):
        run_main(*args)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")


def killed_at(event, number, *args):
    """Run the training in a child that a SIGKILL ends before call `number` of a function.

    event: the function's (module, name). Returns how often it was called; None if the child was
    killed.
    """
    original = getattr(*event)
    fork = multiprocessing.get_context("fork")
    calls = fork.Value("i")

    def counted(*given, **options):
        calls.value += 1
        if calls.value == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given, **options)

    def train():
        sys.stdout = sys.stderr = open(os.devnull, "w")
        torch.set_num_threads(1)
        setattr(*event, counted)
        run_main(*args)

    child = fork.Process(target=train)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return None if child.exitcode else calls.value


# --------------------------------------------------------------------------------------------------
# What a run did

def recorded(monkeypatch, engine):
    """A list that fills with each call of `generate`: the policy, its noise, what was drawn how."""
    calls = []
    generate = engine.generate
    draw = engine.sample

    def recorded_sample(logits, temperature, top_p, generator):
        calls[-1].drawn_with.add((temperature, top_p))
        return draw(logits, temperature, top_p, generator)

    def recorded_generate(model, prompts, *args, **options):
        policy = {name: p.detach().clone() for name, p in qerl.trainable(model).items()}
        noise = [norm.noisy_weight - norm.weight.detach()
                 for norm in scales(model) if norm.noisy_weight is not None]
        calls.append(types.SimpleNamespace(
            number=len(calls), prompts=prompts, policy=policy, noise=noise, drawn_with=set()))
        calls[-1].rollout = generate(model, prompts, *args, **options)
        return calls[-1].rollout

    monkeypatch.setattr(engine, "sample", recorded_sample)
    monkeypatch.setattr(engine, "generate", recorded_generate)
    return calls


def files_below(folder):
    """{name: bytes} of all files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def without_times(path):
    """The steps of a metrics.jsonl without what the clock and the machine decide."""
    return [{name: value for name, value in step.items()
             if name not in ("seconds", "tokens_per_s", "peak_memory_gb")} for step in read_jsonl(path)]


def tensors_of_checkpoint(out):
    """What a run's checkpoint holds of the policy, AdamW and the generators, in one order."""
    saved = harness.run.read_checkpoint(out)
    kept = [saved[name] for name in ("model", "optimizer", "generators")]
    return [leaf for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor)]


def assert_same_run(one, other):
    """Two runs' folders hold the same to the last bit, but for times -> their metrics."""
    log, other_log = (without_times(out / "metrics.jsonl") for out in (one, other))
    assert log == other_log
    files, other_files = map(files_below, (one, other))
    for name in files:
        if name.startswith(("adapter", "samples", "answers")):
            assert files[name] == other_files[name], name
    assert_close(*map(tensors_of_checkpoint, (one, other)), rtol=0, atol=0)
    state, other_state = (harness.run.read_checkpoint(out)["method_state"] for out in (one, other))
    assert state == other_state
    return log
