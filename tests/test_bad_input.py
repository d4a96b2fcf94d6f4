"""What users can get wrong, and what may happen to a run: one line, exit status 2, nothing lost."""
import errno
import importlib
import io
import itertools
import json
import os
import re
import shutil
import sys
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from harness.errors import UserError
import train_gsm8k
from common import LEARNING, QUICK, assert_same_run, files_below, killed_at, needs_fork, refused, run_main
from common import by_both_engines, run_python, stop_at, tensors_of_checkpoint, without_times
from harness import export, fast, folders
from harness.command import one_line
from harness.data import ChatText
from harness.folders import cut_log, open_folder, read_json, read_jsonl
from harness.run import read_checkpoint, write_checkpoint
from studies import peers
from test_answers import chat_text


# --------------------------------------------------------------------------------------------------
# Flags

@pytest.mark.parametrize("argv,message", {
    "--step 3": "unrecognized arguments: --step 3",
    "--device cuda:99": "--device cuda:99: is none of cpu",
    "--lr 1e38": r"--lr 1e\+38: must be from 1e-30 to 1e\+30",      # AdamW multiplies it
    "--prompts 3 --updates 2": "--prompts 3: is not divisible by --updates 2",
    "--sigma-end 0": "--sigma-end 0.0: an exponential schedule needs both sigmas positive",
    "--lora-rank 0": "--lora-rank 0: trains the weights themselves; use --weights bf16",
    "--eval-every 2": "--eval-every 2: needs questions to evaluate on; give --validation",
    "--clip-low 2": "--clip-low 2.0: must be from 0 to 1",
    "--eval-temperature 1e-5": "--eval-temperature 1e-05: must be 0 or at least 0.001",
    "--reward good": "good: good is unknown.* choose answer, paper, random or FILE.py:FUNCTION",
    "--reward answer+": r"--reward answer\+: an empty term is unknown",
    "--reward 1e99*answer": r"--reward 1e99\*answer: answer is .* or its weight is not below 1e30",
    "--reward none.py:f": "No such file or directory: .*none.py",
    "--dry-run --model m --shard": "without --shard",
    "--model m --shard": "start by torchrun",
    "--save-quantized out": "saves a real model .* name it with --model",
    # What nothing reads.
    "--save-quantized out --model m --lora-rank 8 --train-norms --out run":
        "--lora-rank --train-norms --out: changes nothing",
    "--weights bf16 --lora-rank 0 --beta 0 --lora-alpha 8": "--lora-alpha: changes nothing",
    "--chat-template-kwargs {}": "--chat-template-kwargs: changes nothing",
    "--model m --start-seed 3": "--start-seed: changes nothing",
    "--gpu H100": "--gpu: changes nothing",
    "--validation 3 --validation-samples 4": "--validation-samples: changes nothing",
    "--eval-only --temperature .3 --top-p .5": "--temperature --top-p: changes nothing",
}.items())
def test_flags_that_cannot_be_meant_are_named(argv, message):
    with pytest.raises(UserError, match=message):
        train_gsm8k.arguments(["--device", "cpu", *argv.split()])


@pytest.mark.parametrize("program,arguments,message", [
    # As an unset variable leaves it: `--out ''` would write to the root of the file system.
    ("bench", [""], "'': a value is empty"),
    ("bench", ["kernels", "--device", "cpu"], "the kernels run on a GPU alone"),
    ("bench", ["step", "--sizes", "4x1"], "invalid size value: '4x1'"),
    ("bench", ["step", "--peers", "--device", "cpu"], "no_such_package cannot be imported; pip install"),
])
def test_every_program_refuses_in_one_line(monkeypatch, program, arguments, message):
    monkeypatch.setattr(peers, "PACKAGES", ["no_such_package"])
    assert message in refused(*arguments, program=importlib.import_module(program))


@pytest.mark.parametrize("program", [["train_gsm8k.py", "--help"], ["bench.py"], ["-c", "import qerl"]])
def test_python_without_assertions_starts_no_program(program):
    done = run_python(*program, PYTHONOPTIMIZE="1")
    *traceback, last = done.stderr.splitlines()
    assert "python -O leaves out " in last and done.stdout == ""
    if program[0] != "-c":
        assert last.startswith("error: ") and (done.returncode, traceback) == (2, [])


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    """Behind "=", where a shell leaves it; lists that are given twice are joined."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "own.py").write_text("def f(completion, question):\n    return 1\n")
    flags = "--device cpu --out=~/x --eval a ~/b.jsonl --eval=~/c.jsonl --reward=answer+0.1*~/own.py:f"
    settings = train_gsm8k.arguments(flags.split())
    assert settings.out == f"{tmp_path}/x"
    assert settings.eval == ["a", f"{tmp_path}/b.jsonl", f"{tmp_path}/c.jsonl"]
    assert train_gsm8k.find_reward(settings.reward)("", {"right": 1}) == pytest.approx(0.1)


def test_help_tells_the_defaults(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit, match="0"):
        run_main("--help")
    said = capsys.readouterr().out
    assert "prompts: int = 64               # questions a step" in said
    assert "--preset paper: {'prompts': 128" in said


# Of the paper.
TABLE_4 = dict(
    prompts=128, group=8, updates=4, lr=1e-5, lora_rank=32, sigma_start=1e-2, sigma_end=5e-4,
    max_new_tokens=4096, clip_low=0.2, clip_high=0.28, weights="nvfp4", schedule="exponential",
    quantizer="awq",
)


@pytest.mark.parametrize("argv,expected", {
    "": dict(steps=30, quantizer="rtn"),
    "--algo cispo --lr 5e-5": dict(beta=0.0, lr=5e-5, clip_low=1.0, clip_high=4.0),
    "--clip-low 0 --clip-high 0": dict(clip_low=0.0, clip_high=0.0),
    "--model Qwen2.5-3B": dict(model="Qwen/Qwen2.5-3B-Instruct", lr=1e-4, quantizer="gptq"),
    "--model a/b --weights nf4": dict(quantizer="rtn"),
    "--model a/b --preset paper": TABLE_4,
    "--model a/b --preset paper --method flashrl": dict(lr=5e-6, prompts=128, weights="bf16"),
}.items())
def test_flags_win_over_the_preset_and_it_over_the_defaults(argv, expected):
    settings = train_gsm8k.arguments(["--device", "cpu", *argv.split()])
    assert {name: getattr(settings, name) for name in expected} == expected


# --------------------------------------------------------------------------------------------------
# Models and questions

@pytest.fixture
def bad_things(qwen, tmp_path, monkeypatch):
    """What the table below names, in the current folder: models with an edited file, and data."""
    monkeypatch.chdir(tmp_path)
    for name, file, values in (
            ("no-heads", "config.json", {"num_attention_heads": 0}),
            ("no-questions", "tokenizer_config.json", {"chat_template": "Hello."}),
            ("no-end", "tokenizer_config.json", {"eos_token": None}),
            ("far-end", "generation_config.json", {"eos_token_id": 9999}),
            ("text-end", "generation_config.json", {"eos_token_id": [256, "</s>"]}),
            ("no-token-end", "generation_config.json", {"eos_token_id": -1})):
        shutil.copytree(qwen, name)
        stored = read_json(Path(name, file))
        Path(name, file).write_text(json.dumps(stored | values))
    Path("no-end/generation_config.json").write_text("{}")
    export.save_packed(qwen, "packed", "cpu")
    Path("used").mkdir()
    Path("used/metrics.jsonl").write_text("{}\n")
    Path("used/answers.pandas").touch()


@pytest.mark.parametrize("argv,message", {
    "--model ./no/such": "model ./no/such: no such folder",
    "--model no-heads": "config.json has a size of 0",
    "--model no-questions": "different questions have the same prompt",
    "--model no-end": "has no eos_token_id",
    "--model far-end": "to 9999, its vocabulary has 262",
    "--model text-end": "eos_token_id is [256, '</s>'], not a token's number or a list of such",
    "--model no-token-end": "eos_token_id is -1, not",
    "--data used": "no file matches",
    "--eval none.jsonl": "No such file or directory: 'none.jsonl'",
    "--eval used": "used: is a folder; name a file in it",
    "--eval used/answers.pandas": "is no .jsonl, .json or .parquet",      # the library unpickles it
    "--validation 64": "has 64 training questions that are not held out",
    "--dry-run --model used": "its config.json cannot be read",
    "--max-new-tokens 511": "no prompt fits into 1 tokens",
    "--chat-template-kwargs [1]": "invalid JSON_object value",
    '--chat-template-kwargs {"enable_thinkin":true}': "its chat template reads no enable_thinkin of --chat",
    '--chat-template-kwargs {".*":true}': "its chat template reads no .* of --chat",
    "--out used": "used: is not empty",
    "--out used/metrics.jsonl": "used/metrics.jsonl: is a file",
    "--resume": "run: no checkpoint is there",
}.items())
@by_both_engines
def test_bad_input_is_one_line_and_leaves_no_empty_folder(
        bad_things, tmp_path, quick, argv, message):
    line = refused(*quick, argv)
    assert message in line and "; go on with" not in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("argv,message", {
    "--save-quantized new --model packed": "is in 4 bits already",
    "--save-quantized no-end": "no-end: is there already",
    "--save-quantized empty": "empty: is there already",
    "--save-quantized link": "link: is there already",
    "--save-quantized used/metrics.jsonl/new": "Not a directory: '",
}.items())
def test_a_model_is_saved_to_a_new_folder_alone(bad_things, qwen, tmp_path, monkeypatch, argv, message):
    """It is refused before the work."""
    monkeypatch.setattr(export, "write_folder", None)
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    assert message in refused("--model", qwen, "--device cpu --quantizer rtn", argv)
    assert not list(tmp_path.glob("*.tmp")) and not Path("new").exists()


@pytest.fixture
def chatty(qwen, tmp_path):
    """(folder of a model whose template writes the date and ends turns, the token that ends them)"""
    template = ("{{ strftime_now('%d %b %Y, %Y-%m-%d, %B') }}: "
                "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}")
    text = chat_text(qwen, tmp_path / "chatty", template, added=["<|im_end|>"])
    return tmp_path / "chatty", text.tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_an_end_of_turn_that_ends_no_completion_is_said(chatty, capsys):
    folder, end = chatty
    ChatText(str(folder), "")
    said = capsys.readouterr().out
    assert "ends an answer with <|im_end|>, which ends no completion" in said
    assert f"add {end} to eos_token_id" in said
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, end]}))
    ChatText(str(folder), "")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("end,special,kept", [
    ("<|im_end|>", True, ""),
    ("<|im_end|>", False, ""),
    ("!", False, ""),                          # one of the vocabulary
    ("</answer>", False, "</answer>"),         # a reward looks for it
])
def test_the_token_that_ended_a_completion_is_not_in_its_text(qwen, tmp_path, end, special, kept):
    folder = tmp_path / "model"
    tokenizer = chat_text(qwen, folder, added=[end], special=special).tokenizer
    end = tokenizer.convert_tokens_to_ids(end)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    text = ChatText(str(folder), "")
    assert end in text.eos and text.decode([*tokenizer.encode("5"), end]) == f"5{kept}"


def test_of_templates_with_names_the_default_is_used_and_all_are_saved(qwen, tmp_path):
    """As tokenizer_config.json lists them, and as transformers saves them today."""
    templates = {name: f"{name} {{{{ messages[-1]['content'] }}}}" for name in ("tool_use", "default")}
    listed = tmp_path / "listed"
    shutil.copytree(qwen, listed)
    config = read_json(listed / "tokenizer_config.json")
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (listed / "tokenizer_config.json").write_text(json.dumps(config))
    saved = shutil.copytree(listed, tmp_path / "saved")
    transformers.AutoTokenizer.from_pretrained(listed).save_pretrained(saved)
    for folder in (listed, saved):
        packed = f"{folder}-packed"
        export.save_packed(folder, packed, "cpu")
        text = ChatText(packed, "")
        assert text.shown(text.prompt("1?")).startswith("default ")
        assert text.tokenizer.chat_template == templates


def test_a_run_goes_on_tomorrow_whose_template_writes_the_date(chatty, cache, monkeypatch, quick):
    text = ChatText(str(chatty[0]), "")
    assert text.decode(text.prompt("1?")).startswith("26 Jul 2024, 2024-07-26, July: ")
    options = (*quick, "--model", chatty[0], "--steps 1 --quantizer gptq")
    run_main(*options)
    tomorrow = SimpleNamespace(now=lambda: datetime(2100, 1, 2))
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", tomorrow)
    run_main(*options, "--resume")
    assert len(list(cache.glob("*gptq*"))) == 1


# --------------------------------------------------------------------------------------------------
# The folder of a run

def test_a_folder_that_is_used_is_refused(tmp_path):
    """By another run; what one left that was killed before its first step is none."""
    for name in (".lock", "checkpoint.tmp"):
        (tmp_path / name).touch()
    with open_folder(str(tmp_path), resume=False):
        with pytest.raises(UserError, match="in use"):
            open_folder(str(tmp_path), resume=False)


def test_what_a_killed_run_logged_after_its_checkpoint_is_cut(tmp_path):
    """And a log that was lost ends no run."""
    log = tmp_path / "metrics.jsonl"
    cut_log(tmp_path, 2)
    assert read_jsonl(log) == []
    torn = '{"step": 4, "rew'
    log.write_text('{"step": 1}\n{}\n[1]\n{"step": "2"}\n{"step": 2}\n{"step": 3}\n' + torn)
    cut_log(tmp_path, 2)
    assert read_jsonl(log) == [{"step": 1}, {"step": 2}]


# --------------------------------------------------------------------------------------------------
# Resume

def test_a_flipped_bit_in_a_checkpoint_is_noticed(finished, tmp_path):
    """And a lost end."""
    stored = (finished / "checkpoint").read_bytes()
    flipped = bytearray(stored)
    flipped[len(stored) // 2] ^= 1
    for content in (flipped, stored[:1000]):
        (tmp_path / "checkpoint").write_bytes(content)
        with pytest.raises(UserError, match="checkpoint: "):
            read_checkpoint(tmp_path)


def test_a_finished_run_goes_on_longer_by_its_own_settings(finished, tmp_path, monkeypatch):
    """The newest where --out does not name one, and by the schedules of the longer run: its learning
    rate is that of an own run of four steps.
    """
    monkeypatch.chdir(tmp_path)
    assert "no run under runs/ has a checkpoint" in refused("--resume")
    for name in ("old", "new"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    os.utime("runs/old/checkpoint", (0, 0))
    assert train_gsm8k.arguments(["--resume"]).exact is False      # its version had no such setting
    stop_at(4, "--resume --steps 4")                    # before the next checkpoint
    for flags in ((), ("--eval-only",)):
        run_main("--resume", *flags)
        assert "was started with " in refused("--resume --lora-rank 3", *flags)
    log = without_times(tmp_path / "runs/new/metrics.jsonl")
    assert log[:2] == without_times(finished / "metrics.jsonl")
    assert [m["step"] for m in log[2:]] == [3, 4]
    assert [m["lr"] for m in log[2:]] == pytest.approx([7.5e-4, 2.5e-4])       # of four steps
    summary = read_json(tmp_path / "runs/new/summary.json")
    assert (summary["steps"], summary["settings"]["save_every"]) == (4, 2)
    assert "has done 4; give more" in refused("--resume --steps 3")
    assert "was started with preset = None" in refused("--resume --preset paper")


@by_both_engines
def test_a_run_does_not_go_on_with_what_has_changed(qwen, data, tmp_path, quick):
    folder = tmp_path / "all"
    for source in (qwen, data):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    (folder / "own.py").write_text("def short(completion, question):\n    return len(completion)\n")
    options = (*quick, "--model", folder, "--data", folder, "--reward", f"{folder}/own.py:short",
               "--steps", 1)
    run_main(*options)
    last = (folder / "model.safetensors").read_bytes()[-4:]
    for name, old, new, flag, message in (
            ("model.safetensors", last, bytes(4), "--resume", "the weights or 4-bit codes changed"),
            ("config.json", b"1e-06", b"0.1", "--eval-only", "the config.json or"),
            ("generation_config.json", b"256", b"65", "--resume", "the EOS tokens changed"),
            ("train.jsonl", b"#### ", b"#### 1", "--resume", "questions, answers or prompts"),
            ("own.py", b"len", b"-len", "--resume", "the file of --reward changed")):
        stored = (folder / name).read_bytes()
        (folder / name).write_bytes(stored.replace(old, new))
        assert message in refused(*options, "--resume", flag)
        (folder / name).write_bytes(stored)
    run_main(*options, "--resume")


@pytest.mark.parametrize("quick", ["plain"], indirect=True)
def test_a_run_does_not_go_on_with_another_file_of_method(tmp_path, quick):
    path = tmp_path / "own.py"
    path.write_text("x = 1\n")
    options = (*quick, "--steps 1 --method", path)
    run_main(*options)
    path.write_text("x = 2\n")
    assert "the file of --method changed" in refused(*options, "--resume")


@pytest.mark.parametrize("change,message", [
    (lambda saved: saved["made_of"].popitem(), "since .* was begun"),
    (lambda saved: saved["model"].update(more=torch.ones(1)), "checkpoint: .* of another version"),
    (lambda saved: saved.pop("machine"), "checkpoint: .* of another version"),
    (lambda saved: saved["settings"].update(algo="ppo"), "--algo ppo: is none of grpo"),
])
def test_a_checkpoint_of_another_version_is_refused(finished, tmp_path, change, message):
    run = shutil.copytree(finished, tmp_path / "run")
    saved = read_checkpoint(run)
    change(saved)
    write_checkpoint(run, saved)
    assert re.search(message, refused("--resume --out", run))


@needs_fork
def test_a_kill_at_any_rename_resumes_bit_for_bit(quiz, tmp_path):
    """Adapter, AdamW's moments, both generators, the questions drawn, the log: all go on."""
    importlib.import_module("matplotlib.figure")                        # once, not in each child
    flags = ("--steps 2 --save-every 1 --eval-questions 2 --algo dapo --train-norms --tis 2 "
             "--sigma-start 0.2 --sigma-end 0.1 --stages 2")
    options = ("--model", quiz, "--data", quiz, *QUICK, LEARNING, flags)
    rename = os, "replace"
    whole = tmp_path / "whole"
    renames = killed_at(rename, 0, *options, "--out", whole)
    assert renames > 9
    for number in range(1, renames + 1):
        out = tmp_path / str(number)
        assert killed_at(rename, number, *options, "--out", out) is None
        begun = (out / "checkpoint").exists()
        killed_at(rename, 0, *options, "--out", out, *["--resume"] * begun)
        assert all(m["gradient_norm"] > 0 for m in assert_same_run(whole, out))
        assert files_below(out).keys() == files_below(whole).keys()


# --------------------------------------------------------------------------------------------------
# What the system does

WITHOUT = """
import sys, torch, transformers
sys.modules.update(dict.fromkeys(("triton", "fcntl")))
import train_gsm8k
train_gsm8k.main()
"""


def test_a_run_on_windows_out_of_a_notebook(tmp_path, quick):
    """Without Triton and fcntl, with the backend that notebooks hand to "!python ..."."""
    done = run_python("-c", WITHOUT, *quick, "--steps", 1, CUDA_VISIBLE_DEVICES="",
                      MPLBACKEND="module://matplotlib_inline.backend_inline")
    assert done.returncode == 0, done.stderr
    step, = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert step["peak_memory_gb"] == 0
    assert "<img" in (tmp_path / "run/report.html").read_text(encoding="utf-8"), done.stderr


def test_a_run_ends_well_where_nobody_can_read_it(monkeypatch):
    """Standard output is closed, or of an encoding without a folder's letters, or not read on."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as unread, io.TextIOWrapper(io.BytesIO(), "ascii") as narrow:
        for output, ends in ((None, nullcontext()), (narrow, nullcontext()),
                             (unread, pytest.raises(SystemExit, match="141"))):
            monkeypatch.setattr(sys, "stdout", output)
            with ends, one_line():
                print("\xfc")
        assert narrow.buffer.getvalue() == b"\\xfc\n"


@pytest.mark.parametrize("flags,message,steps", [
    ("--lr 1e30", "after this update the logits are NaN", 0),
    ("--lr 1e30 --updates 2", "step 1: the values of", 0),
    ("--sigma-start 1e38", "the policy's logits are NaN or infinite", 1),
])
@by_both_engines
def test_nan_ends_a_run_before_it_is_stored(tmp_path, quick, flags, message, steps):
    """The checkpoint of the step before stays; of 1e38 that is the first, which has no noise."""
    assert message in refused(*quick, LEARNING, "--reward random --save-every 1", flags)
    assert all(t.isfinite().all() for t in tensors_of_checkpoint(tmp_path / "run"))
    assert len(read_jsonl(tmp_path / "run/metrics.jsonl")) == steps


@pytest.mark.parametrize("place,name,number,error,message", [
    (folders.FileLock, "acquire", 1, OSError(errno.EOPNOTSUPP, "No locks"), "No locks: '{run}/.lock'"),
    (os, "fsync", 6, OSError(errno.ENOSPC, "No space left on device"), "No space left on device: '/"),
    (torch.optim.AdamW, "step", 1, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
     "out of memory; lower --slots (rollout) or --micro-tokens"),
    (fast, "generate", 3, RuntimeError("DefaultCPUAllocator: can't allocate memory"),
     "out of memory; lower --slots (rollout) or --micro-tokens"),
])
def test_what_the_system_refuses_is_one_line(
        tmp_path, monkeypatch, quick, place, name, number, error, message):
    """From the call of this number on it fails; half a file is not left."""
    original, calls = getattr(place, name), itertools.count(1)

    def fails(*given, **options):
        if next(calls) >= number:
            raise error
        return original(*given, **options)

    monkeypatch.setattr(place, name, fails)
    said = refused(*quick)
    assert message.format(run=tmp_path / "run") in said
    goes_on = name != "acquire"                        # without its lock a run does not begin
    assert (f"--resume --out {tmp_path}/run" in said) == goes_on
    assert not list(tmp_path.rglob("*.tmp"))
