"""What users can get wrong: one line, exit status 2, nothing lost."""
import ast
import datetime
import errno
import glob
import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

import methods
import qerl
import train_gsm8k
from common import LEARNING, QUICK, assert_learned, copied, files_below, killed_at, logged_steps
from common import refused, run_main, scored_by_letters, used_folder, without_times
import harness.run
from harness import data, folders
from harness.command import parse_flags
from harness.data import ChatText, check_tokens, math_questions
from harness.folders import choose_folder, read_jsonl, read_log, write_jsonl
from harness.ranks import Ranks
from harness.small_policy import ByteText, made_up_problems
from methods.parts import calibration
from methods.parts import quantizers
from test_qerl import HERE, break_tensor


def test_a_run_without_its_checkpoint_is_not_begun_anew(finished, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    (out / "checkpoint.safetensors").unlink()
    for kept in ("adapter", "metrics.jsonl", "samples.jsonl", "summary.json", "answers_after.jsonl"):
        before = files_below(out)
        error = refused(monkeypatch, capsys, *options)
        assert "has no checkpoint.safetensors" in error
        assert "another --out" in error
        assert files_below(out) == before
        shutil.rmtree(out / kept) if kept == "adapter" else (out / kept).unlink()


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "answers_now.jsonl",
    "adapter/adapter_config.json", "summary.json", "curve.png", "report.html", "eval.json",
    "checkpoint.safetensors"])
def test_no_file_of_a_run_is_overwritten(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine\n")
    with pytest.raises(qerl.UserError, match="already holds a run .* choose another folder"):
        folders.open_folder(str(tmp_path), resume=False)


def test_a_log_takes_no_nan(tmp_path):
    with pytest.raises(ValueError):
        harness.run.append_jsonl(tmp_path / "log.jsonl", {"kl": math.nan})
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_other_data_are_noticed_at_resume(finished, data, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    other = [json.loads(line) for line in open(f"{data}/train.jsonl")]
    other[3]["answer"] += "0"
    monkeypatch.setattr(train_gsm8k, "load_questions", lambda *_: (other, made_up_problems()[1][:6]))
    before = files_below(out)
    assert "other questions, answers or prompts" in refused(monkeypatch, capsys, *options)
    assert files_below(out) == before


def test_a_flipped_bit_in_a_checkpoint_is_noticed(finished, tmp_path, monkeypatch, capsys):
    """And a lost end; nothing else in the folder changes."""
    options, out = copied(finished, tmp_path)
    monkeypatch.setattr(train_gsm8k, "load_all", lambda *_: pytest.fail("it was believed"))
    path = out / "checkpoint.safetensors"
    stored = path.read_bytes()
    header = 8 + int.from_bytes(stored[:8], "little")
    # the spaces that end a header say nothing
    places = [*range(0, header - 8, 97), *range(header, len(stored), len(stored) // 40), -1]
    damaged = [stored[:1000]]
    for place in places:
        flipped = bytearray(stored)
        flipped[place] ^= 1
        damaged.append(flipped)
    for content in damaged:
        path.write_bytes(content)
        assert f"{path}: " in refused(monkeypatch, capsys, *options)
    path.write_bytes(stored)
    assert files_below(out) == files_below(finished[1])


def test_a_run_goes_on_by_its_own_settings(finished, tmp_path, monkeypatch, capsys):
    """Flags need not be typed again.

    A setting newer than the checkpoint takes its default, one that is no more is left out.
    """
    _, out = copied(finished, tmp_path)
    path = out / "checkpoint.safetensors"
    tensors, metadata = load_file(path), safe_open(path, "pt").metadata()
    settings = json.loads(metadata["settings"])
    del settings["start_seed"]
    metadata["settings"] = json.dumps(settings | {"no_more": 3})
    metadata["sha256"] = harness.run.content_hash({k: metadata[k] for k in ("state", "settings")},
        tensors)
    save_file(tensors, path, metadata)
    before = path.read_bytes()
    run_main(monkeypatch, "--resume", "--out", out)
    run_main(monkeypatch, "--resume", "--out", out, "--eval-only")
    assert path.read_bytes() == before and (out / "eval.json").exists()
    for more in ((), ("--eval-only",)):
        assert "was started with lora_rank = 2, now it is 3" in refused(
            monkeypatch, capsys, "--resume", "--out", out, "--lora-rank", 3, *more)


def test_a_lost_log_is_a_warning(finished, qwen, data, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    (out / "metrics.jsonl").unlink()
    run_main(monkeypatch, *options)
    assert "lacks 2 of the 2 steps" in capsys.readouterr().err
    adapter = "adapter/adapter_model.safetensors"
    assert (out / adapter).read_bytes() == (finished[1] / adapter).read_bytes()
    assert (out / "report.html").exists()
    assert read_log(str(out), 2) == []
    steps = logged_steps(1, 2, 3)
    write_jsonl(out / "metrics.jsonl", steps)
    with open(out / "metrics.jsonl", "a") as log:
        log.write('{"step": 4, "rew')                            # torn by a kill
    assert read_log(str(out), 2) == steps[:2] == read_jsonl(out / "metrics.jsonl")


def broken_model(folder, path, config=None, tokenizer=None, generation=None):
    """A copy of a model's folder whose json files are edited (a function) or replaced (anything
    else).
    """
    shutil.copytree(folder, path)
    edits = {"config.json": config, "tokenizer_config.json": tokenizer,
        "generation_config.json": generation}
    for name, edit in edits.items():
        if edit is not None:
            stored = json.loads((path / name).read_text())
            edited = edit if isinstance(edit, str) else json.dumps(stored | edit)
            (path / name).write_text(edited)
    return path

@pytest.mark.parametrize("files,message", [
    (dict(tokenizer={"chat_template": ""}), "different questions have the same prompt"),
    (dict(tokenizer={"chat_template": "{{ messages[1]['content'][:6] }}"}),
    "different questions have the same prompt"),
    (dict(tokenizer={"eos_token": None}, generation={"eos_token_id": None}),
    "eos_token_id None is no token"),
    (dict(generation={"eos_token_id": [[1]]}), "eos_token_id [[1]] is no token"),
    (dict(generation={"eos_token_id": 10 ** 6}), "to 1000000, its vocabulary has 262"),
    (dict(generation={"eos_token_id": -1}), "eos_token_id give tokens -1 to"),
    (dict(config={"num_attention_heads": 0}), "config.json cannot be used"),
    (dict(config="[" * 100_000), "recursion depth"),
])
def test_broken_model_files_are_named(qwen, data, tmp_path, monkeypatch, capsys, files, message):
    model = broken_model(qwen[0], tmp_path / "model", **files)
    assert message in refused(monkeypatch, capsys, "--model", model, "--data", data, *QUICK, "--out",
        tmp_path / "out")


def test_tokens_beyond_the_vocabulary_are_named():
    with pytest.raises(qerl.UserError, match="tokens 1 to 300, its vocabulary has 262"):
        check_tokens([{"question": "a", "prompt": [1, 2]}, {"question": "b", "prompt": [300]}],
            {256}, 262)


def template_of(model, text):
    """Give a folder's tokenizer this chat template and <|im_end|>, token 257."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = text
    tokenizer.save_pretrained(model)
    return tokenizer.convert_tokens_to_ids("<|im_end|>")


TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"


def test_an_end_of_turn_that_ends_no_completion_is_said(qwen, tmp_path, capsys):
    model = broken_model(qwen[0], tmp_path / "model")
    end = template_of(model, TURNS)
    ChatText(str(model), "Reason.")
    said = capsys.readouterr().out
    assert "ends an answer with <|im_end|>, which ends no completion" in said
    assert f"add {end} to eos_token_id" in said
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, end]}))
    ChatText(str(model), "Reason.")
    # a turn's, not an answer's
    template_of(model, "{{ messages[1].content }}<|im_end|>")
    ChatText(str(model), "Reason.")
    assert capsys.readouterr().out == ""


class Tomorrow(datetime.datetime):
    @classmethod
    def now(cls, *zone):
        return cls(2100, 1, 2)


def test_a_run_goes_on_tomorrow_whose_template_writes_the_date(qwen, data, tmp_path, cache,
        monkeypatch):
    model = broken_model(qwen[0], tmp_path / "model")
    today = ("{% if strftime_now is defined %}"
             "{% set today = strftime_now('%d %b %Y, %Y-%m-%d, %B') %}{% endif %}")
    template_of(model, "\n" + today + "Today: {{ today }}\n{{ messages[1].content }}")
    assert ChatText(str(model), "").tokenizer.decode(ChatText(str(model), "").prompt("1?")) == (
        "\nToday: 26 Jul 2024, 2024-07-26, July\n1?")
    options = ("--model", model, "--data", data, *QUICK, "--steps", 1, "--quantizer", "gptq",
        "--out", tmp_path / "run")
    run_main(monkeypatch, *options)
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Tomorrow)
    for more in ((), ("--eval-only",)):
        run_main(monkeypatch, *options, "--resume", *more)
    assert len(list(cache.glob("*gptq*"))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
def test_a_kill_at_any_rename_or_log_line_resumes_bit_for_bit(quiz, tmp_path):
    """A run of two steps is killed before and after each rename, and around each line of its logs.
    """
    importlib.import_module("matplotlib.pyplot")                        # once, not in each child
    options = ("--model", quiz, "--data", quiz, *QUICK, *LEARNING, "--steps", 2, "--save-every", 1,
               "--eval-questions", 2)
    rename, line = (os, "replace"), (harness.run, "append_jsonl")
    renames = killed_at(rename, 0, "before", *options, "--out", tmp_path / "whole")
    assert renames >= 12
    kills = [(rename, n, "before") for n in range(1, renames + 1)]
    kills += [(rename, n, "after") for n in (5, renames)]
    kills += [(line, n, when) for n in (1, 2) for when in ("before", "amid", "after")]
    whole = files_below(tmp_path / "whole")
    log = without_times(tmp_path / "whole" / "metrics.jsonl")
    assert_learned(log)
    expected = load_file(tmp_path / "whole" / "checkpoint.safetensors")
    for event, number, when in kills:
        out = tmp_path / f"{event[1]}-{number}-{when}"
        assert killed_at(event, number, when, *options, "--out", out) is None
        assert killed_at(rename, 0, "before", *options, "--out", out, "--resume") is not None, out
        again = files_below(out)
        assert again.keys() == whole.keys(), out
        for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json",
                "samples.jsonl", "answers_before.jsonl", "answers_after.jsonl"):
            assert again[name] == whole[name], (out, name)
        assert without_times(out / "metrics.jsonl") == log, out
        stored = load_file(out / "checkpoint.safetensors")
        assert all(torch.equal(stored[name], expected[name]) for name in expected), out


def held_open():
    """The files that this process has open or mapped into its memory."""
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:                                                 # the listing's own
            pass
    with open("/proc/self/maps") as maps:
        return opened + [line.split(maxsplit=5)[5].strip()
            for line in maps if line.count(" ") >= 5 and "/" in line]


@pytest.fixture
def windows(monkeypatch):
    """What Windows refuses: no open or mapped file is replaced, renamed or removed."""
    for name in ("replace", "rename", "remove", "unlink"):
        def strict(*paths, original=getattr(os, name), **options):
            for path in paths:
                if os.path.abspath(path) in held_open():
                    raise PermissionError(errno.EACCES, "The process cannot access the file",
                        str(path))
            return original(*paths, **options)
        monkeypatch.setattr(os, name, strict)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="sees open files by Linux's /proc")
def test_no_open_file_is_replaced(qwen, data, tmp_path, monkeypatch, capsys, windows):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1,
        "--eval-questions", 2)
    save = harness.run.save_checkpoint

    def stopped(folder, model, optimizer, generators, state, settings):
        save(folder, model, optimizer, generators, state, settings)
        if state["step"] == 2:
            raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(harness.run, "save_checkpoint", stopped)
        with pytest.raises(SystemExit) as stop:
            run_main(monkeypatch, *options, "--out", tmp_path / "run")
    assert stop.value.code == 130
    run_main(monkeypatch, *options, "--out", tmp_path / "run", "--resume")
    assert [m["step"] for m in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    run_main(monkeypatch, *options, "--out", tmp_path / "run", "--resume", "--eval-only")
    missing = refused(monkeypatch, capsys, *options, "--data", tmp_path / "none", "--out",
        tmp_path / "fails")
    assert "no such folder" in missing and not (tmp_path / "fails").exists()


WITHOUT = """
import os, sys
sys.modules["triton"] = None
import torch, transformers

*options, out = sys.argv[1:]
torch.set_num_threads(1)
for system in ("macos", "windows"):
    # torch and transformers are imported once, and what is the project's in each child.
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            sys.exit(system + " failed")
        continue
    if system == "windows":
        sys.modules["fcntl"] = sys.modules["resource"] = None
    import train_gsm8k
    print(system, train_gsm8k.arguments([]).device, flush=True)
    sys.argv[1:] = [*options, "--out", os.path.join(out, system)]
    train_gsm8k.main()
    sys.exit()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
def test_a_run_without_the_modules_of_linux(qwen, data, tmp_path):
    """macOS has no Triton, Windows no fcntl and resource either: the rest does without."""
    options = ["--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--eval-questions", 1,
        tmp_path]
    environment = {k: v for k, v in os.environ.items()
                   if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", WITHOUT, *map(str, options)], cwd=HERE,
        env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "macos cpu\n" in done.stdout and "windows cpu\n" in done.stdout
    peaks = {}
    for system in ("macos", "windows"):
        assert (tmp_path / system / "report.html").exists()
        peaks[system] = read_jsonl(tmp_path / system / "metrics.jsonl")[0]["peak_memory_gb"]
    assert peaks["macos"] > 0.05 and peaks["windows"] == 0


def test_long_prompts_are_counted_and_skipped(capsys):
    problems = [{"question": "q" * n, "answer": "#### 1"} for n in (5, 50, 500)]
    kept = train_gsm8k.with_prompts(problems, ByteText(), 60)
    assert [len(p["question"]) for p in kept] == [5, 50]
    assert "1 of 3 prompts" in capsys.readouterr().out


def test_every_setting_is_a_flag_and_its_help_tells_remark_and_defaults(monkeypatch, capsys):
    settings = fields(train_gsm8k.Settings)
    for f in settings:
        flag = "--" + f.name.replace("_", "-")
        value = (f.metadata["choices"]
            or {bool: [True], int: [7], float: [0.5], str: ["x"], list: [["x", "y"]]}[f.type])[0]
        values = value if f.type is list else [str(value)]
        argv = [flag] if f.type is bool else [flag, *values]
        assert parse_flags(train_gsm8k.Settings, "", {}, argv) == {f.name: value}
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, "--help")
    assert stop.value.code == 0
    entries = re.findall(r"^  --([\w-]+)(.*(?:\n {10,}.*)*)", capsys.readouterr().out, re.MULTILINE)
    told = {flag.replace("-", "_"): help_text for flag, help_text in entries}
    assert told.keys() == {f.name for f in settings}
    for f in settings:
        assert f.metadata["remark"] in told[f.name]
        if f.default is not None and f.type is not bool:
            assert re.search(rf"\(default {re.escape(str(f.default))}[;)]", told[f.name])
    for preset, values in train_gsm8k.PRESETS.items():
        for name, value in values.items():
            assert re.search(rf"[(; ]{preset} {re.escape(str(value))}[;)]", told[name])


# Of the paper.
TABLE_4 = dict(
    prompts=128, group=8, updates=4, lr=1e-5, lora_rank=32, sigma_start=1e-2, sigma_end=5e-4,
    max_new_tokens=4096, clip_low=0.2, clip_high=0.28, weights="nvfp4", schedule="exponential",
    quantizer="awq",
)


@pytest.mark.parametrize("argv,expected", [
    ([], dict(steps=50, lr=3e-3, prompts=16, beta=0.04, reward="paper", quantizer="rtn")),
    # given, though it is the default
    (["--prompts", "64", "--lr", "5e-5"], dict(prompts=64, lr=5e-5, steps=50)),
    (["--model", "Qwen2.5-3B"],
     dict(model="Qwen/Qwen2.5-3B-Instruct", prompts=64, lr=1e-4, beta=0.0, quantizer="gptq")),
    # there is nothing to choose
    (["--model", "a/b", "--weights", "nf4"], dict(lr=1e-4, quantizer="rtn")),
    (["--model", "a/b", "--shard"], dict(quantizer="rtn")),
    (["--model", "a/b", "--shard", "--quantizer", "awq"], dict(quantizer="awq")),
    (["--model", "a/b", "--preset", "paper"], TABLE_4),
    (["--model", "a/b", "--preset", "small"], dict(prompts=16, lr=3e-3)),
    # which chooses bf16
    (["--model", "a/b", "--preset", "paper", "--method", "flashrl"],
     dict(lr=5e-6, prompts=128, weights="bf16", quantizer="rtn")),
    (["--model", "a/b", "--preset", "paper", "--weights", "bf16", "--lr", "1e-3"], dict(lr=1e-3)),
    (["--algo", "dapo"], dict(beta=0.0, lr=3e-3)),
    (["--algo", "dapo", "--beta", "0.1"], dict(beta=0.1)),
])
def test_flags_win_over_the_preset_and_it_over_the_defaults(argv, expected):
    settings = train_gsm8k.arguments([*argv, "--device", "cpu"])
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize("options,fitted",
    [(["--quantizer", "gptq"], True), (["--method", "qat:sft"], True),
     (["--quantizer", "four-over-six"], False)])
def test_codes_fitted_to_questions_are_evaluated_with_the_same(monkeypatch, options, fitted):
    def read_saved(settings, must_agree):
        assert ("data" in must_agree) == fitted and "quantizer" in must_agree
    monkeypatch.setattr(train_gsm8k, "read_saved", read_saved)
    settings = train_gsm8k.arguments(["--device", "cpu", "--eval-only", "--resume", "--out", "run",
        *options])
    with pytest.raises(qerl.UserError, match="no checkpoint to evaluate"):
        train_gsm8k.evaluate_only(settings)


@pytest.mark.parametrize("name", methods.names()[1:])
def test_a_neighbour_opens_with_what_a_student_needs(name):
    """The problem, a formula, what differs from QeRL, a result and when to use it."""
    module = importlib.import_module(f"methods.{name}")
    words = module.__doc__.lower()
    assert all(part in words
        for part in ("problem", "formula", "what differs from qerl", "when would you use it?",
        "ours"))
    assert issubclass(module.Neighbour, methods.Method)


def test_folders_that_runs_choose_at_the_same_time_differ(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda _: choose_folder(f"{tmp_path}/small", resume=False),
            range(24)))
    assert len(set(chosen)) == 24 and all(map(os.path.isdir, chosen))


def test_advice_on_a_folder_in_use_can_be_followed(tmp_path):
    """A run that was stopped before its first checkpoint is begun anew with --resume."""
    (tmp_path / "answers_before.jsonl").write_text("a")
    with pytest.raises(qerl.UserError, match="add --resume"):
        folders.open_folder(str(tmp_path), resume=False)
    folders.open_folder(str(tmp_path), resume=True).release()


def test_ranks_differ_at_any_step_and_seed():
    ranks, drawn = Ranks(), set()
    ranks.main = False
    for rank, seed, step in itertools.product((1, 2), (0, 2 ** 62), (0, 2 ** 31)):
        ranks.rank = rank
        generator = torch.Generator()
        ranks.differ(generator, seed, step)
        drawn.add(generator.initial_seed())
    assert len(drawn) == 8


def test_codes_are_found_anew_once_the_calibration_has_changed(qwen, monkeypatch):
    keys = []
    monkeypatch.setattr(quantizers, "cached_folder",
                        lambda folder, name, key, make: keys.append(key))
    for source in ("a", "b"):
        monkeypatch.setattr(quantizers.inspect, "getsource",
            lambda part: source if part is calibration else "")
        monkeypatch.setattr(quantizers, "worked_sequences", lambda *_: [])
        quantizers.quantized_folder(qwen[0], "gptq", [], ByteText(), "cpu")
    assert keys[0] != keys[1]


def test_a_run_does_not_go_on_with_another_model(qwen, data, tmp_path, monkeypatch, capsys):
    """Other weights, another value in config.json, another EOS or another instruction."""
    model = tmp_path / "model"
    shutil.copytree(qwen[0], model)
    options = ("--model", model, "--data", data, *QUICK, "--steps", 1, "--out", tmp_path / "run")
    run_main(monkeypatch, *options)
    stored = files_below(model)
    tensors = load_file(model / "model.safetensors")

    def edited(name, **values):
        return json.dumps(json.loads(stored[name]) | values).encode()
    turned = {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}
    changes = [
        ("model.safetensors", save(turned, {"format": "pt"}), "other weights"),
        ("config.json", edited("config.json", rms_norm_eps=0.1), "another config.json"),
        ("generation_config.json", edited("generation_config.json", eos_token_id=[256, 65]),
         "another config.json"),
    ]
    for name, content, message in changes:
        (model / name).write_bytes(content)
        for more in ((), ("--eval-only",)):
            error = refused(monkeypatch, capsys, *options, "--resume", *more)
            assert f"was begun with {message}" in error
        (model / name).write_bytes(stored[name])
    run_main(monkeypatch, *options, "--resume")
    monkeypatch.setattr(train_gsm8k, "SYSTEM", dict.fromkeys(train_gsm8k.SYSTEM, "Sing."))
    error = refused(monkeypatch, capsys, *options, "--resume")
    assert "other questions, answers or prompts" in error


@pytest.mark.parametrize("program,arguments", [
    ("train_gsm8k", ["--steps", "1", "--out", ""]), ("bench", ["step", "--out", ""]),
    ("bench", ["claims", "--out", ""]), ("harness.report", [""]), ("methods.__main__", [""])])
def test_every_program_refuses_an_empty_value(monkeypatch, capsys, program, arguments):
    """As an unset variable of the shell leaves it: `--out ''` would write to the root of the file
    system.
    """
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(program).main()
    assert stop.value.code == 2 and "is empty; give a value" in capsys.readouterr().err


def test_a_damaged_model_of_the_cache_is_made_again(qwen, cache, capsys):
    def make(path):
        shutil.copy(f"{qwen[0]}/model.safetensors", path)
    folder = folders.cached_folder(qwen[0], "codes", ["key"], make)
    whole = open(f"{qwen[0]}/model.safetensors", "rb").read()
    for broken in (whole[:1000], whole[:-9000] + bytes(4000) + whole[-5000:]):
        with open(f"{folder}/model.safetensors", "wb") as f:
            f.write(broken)
        assert folders.cached_folder(qwen[0], "codes", ["key"], make) == folder
        assert "is made again" in capsys.readouterr().out
        assert open(f"{folder}/model.safetensors", "rb").read() == whole


def test_a_saved_model_has_the_tokenizer_of_now(qwen, data, tmp_path, cache, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(qwen[0], model)
    for name in ("first", "second"):
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, len(name)]}))
        run_main(monkeypatch, "--model", model, "--data", data, "--device", "cpu",
            "--save-quantized", tmp_path / name)
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert written["eos_token_id"] == [256, len(name)]
        assert "quantization_config" in json.loads((tmp_path / name / "config.json").read_text())


def test_an_index_names_no_file_elsewhere(qwen, tmp_path):
    shutil.copytree(qwen[0], tmp_path / "model")
    os.rename(tmp_path / "model/model.safetensors", tmp_path / "weights.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(tmp_path / "weights.safetensors"),
        "../weights.safetensors")}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(qerl.UserError,
            match="/weights.safetensors: cannot be read"):
        qerl.load_model(str(tmp_path / "model"))


def test_every_file_is_read_and_written_as_utf_8():
    """Whatever LANG says. /proc, which harness/machine.py reads, holds ASCII."""
    paths = [path
        for folder in ("", "harness/", "methods/") for path in glob.glob(f"{HERE}/{folder}*.py")]
    seen, wrong = 0, []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            calls = [node for node in ast.walk(ast.parse(f.read())) if isinstance(node, ast.Call)]
        for call in calls:
            opens = ast.unparse(call.func).rpartition(".")[2] in ("read_text", "write_text",
                "fdopen", "NamedTemporaryFile")
            if opens or ast.unparse(call.func) == "open":
                seen += 1
                if not re.search(r"utf-8|'[rwa]b\+?'",
                        ast.unparse(call)) and not path.endswith(("machine.py", "test_qerl.py")):
                    wrong.append((path, call.lineno))
    assert seen > 15 and wrong == []


@pytest.mark.parametrize("ending,output", [(">&-", ""), ("", "\\xfc\n"), ("| true", "")])
def test_a_run_ends_well_where_nobody_can_read_it(ending, output):
    """Standard output is closed, or of an encoding without a folder's letters, or no one reads on.
    """
    program = "from harness.command import one_line\nwith one_line():\n    print('\\xfc')"
    shell = ["bash", "-c", f"{shlex.join([sys.executable, '-c', program])} {ending}"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    ended = subprocess.run(shell, cwd=HERE, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", output)


def bad_data(folder, line="not JSON"):
    """A folder of questions whose second line to train on is this one."""
    good = '{"question": "q", "answer": "#### 1"}\n'
    (folder / "train.jsonl").write_text(good + line + "\n")
    (folder / "test.jsonl").write_text(good)
    return folder


@pytest.mark.parametrize("options,message", [
    (lambda t: ["--model", "./no/such/folder"], "model ./no/such/folder: no such folder"),
    (lambda t: ["--data", bad_data(t)], "train.jsonl:2: not a JSON object"),
    (lambda t: ["--data", bad_data(t, '{"question": "q", "answer": "#### 1,00"}')], "'1,00' behind"),
    (lambda t: ["--data", t], "no file matches"),
    (lambda t: ["--max-new-tokens", 600], "--max-new-tokens 600: the model has 512 positions"),
    (lambda t: ["--max-new-tokens", 511], "no prompt fits into 1 tokens"),
    (lambda t: ["--out", used_folder(t)], "already holds a run"),
    (lambda t: ["--resume"], "out: no such folder"),
    (lambda t: ["--step", 3], "unrecognized arguments: --step 3"),
    (lambda t: ["--device", "cuda:99"], "no such CUDA GPU here"),
    (lambda t: ["--device", "mps"], "--device mps: Apple's GPUs have no float8"),
    (lambda t: ["--group", 1], "--group 1"),
    (lambda t: ["--lr", -1], "--lr -1.0"),
    (lambda t: ["--lora-rank", 65], "--lora-rank 65: the smallest layer has 64 features"),
    (lambda t: ["--prompts", 3, "--updates", 2], "not divisible by --updates"),
    (lambda t: ["--sigma-end", 0], "needs both sigmas positive"),
])
def test_bad_input_is_one_line_and_exit_2(
        qwen, data, tmp_path, monkeypatch, capsys, options, message):
    base = ("--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "out")
    assert message in refused(monkeypatch, capsys, *base, *options(tmp_path))


def test_a_folder_in_use_is_refused(tmp_path):
    lock = folders.open_folder(str(tmp_path), resume=False)
    with pytest.raises(qerl.UserError, match="in use"):
        folders.open_folder(str(tmp_path), resume=False)
    lock.release()


@pytest.mark.parametrize("options,message,steps", [
    (["--lr", 1e30, "--updates", 1], "after this update a vector of logits holds NaN", 0),
    (["--lr", 1e30, "--updates", 2], "gradient norm nan", 0),
    (["--sigma-start", 1e38], "the policy's logits are NaN or infinite", 1),
])
def test_nan_ends_a_run_before_it_is_stored(
        qwen, data, tmp_path, monkeypatch, capsys, options, message, steps):
    """The checkpoint of the step before stays; of 1e38 the first stage without noise is that step.
    """
    scored_by_letters(monkeypatch)
    out = tmp_path / "out"
    base = ("--model", qwen[0], "--data", data, *QUICK, "--save-every", 1, "--out", out)
    assert message in refused(monkeypatch, capsys, *base, *options)
    stored = load_file(out / "checkpoint.safetensors")
    assert all(t.isfinite().all() for t in stored.values())
    assert len(read_jsonl(out / "metrics.jsonl")) == steps


def test_a_model_that_gives_nan_is_refused(qwen, data, tmp_path, monkeypatch, capsys):
    model = shutil.copytree(qwen[0], tmp_path / "model")
    break_tensor(qwen[0], model, lambda t: t["model.norm.weight"].fill_(math.inf))
    options = ("--model", model, "--data", data, *QUICK, "--out", tmp_path / "out")
    assert "model.norm.weight holds NaN, infinity" in refused(monkeypatch, capsys, *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("function,number,error,message", [
    ("fsync", 6, OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
    ("replace", 1, PermissionError(errno.EACCES, "Permission denied", "x"), "close the program"),
])
def test_what_the_system_cannot_write_is_one_line(
        qwen, data, tmp_path, monkeypatch, capsys, function, number, error, message):
    """The call of this number fails. The line never asks to remove a file of the run."""
    out = tmp_path / "out"
    calls = []
    original = getattr(os, function)

    def fails(*args):
        calls.append(args)
        if len(calls) >= number:
            raise error
        return original(*args)
    monkeypatch.setattr(os, function, fails)
    said = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--out", out)
    assert message in said
    assert f"--resume --out {out}" in said
    assert "remove" not in said


def test_an_error_of_the_system_leaves_no_empty_folder(
        qwen, data, tmp_path, monkeypatch, capsys):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied", data)
    monkeypatch.setattr(train_gsm8k, "load_questions", denied)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "run")
    assert "Permission denied" in refused(monkeypatch, capsys, *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("read,right,same", [
    (lambda folder: data.read_questions(folder, "train.jsonl"), "so\n#### {}", "3.0"),
    (lambda folder: math_questions(f"{folder}/train.jsonl"), "{}", "3"),
])
def test_questions_with_different_answers_are_left_out(tmp_path, capsys, read, right, same):
    """The two readers of questions. Of a number 3 and 3.0 are the same answer, 1 and 10 are not."""
    lines = [("a", "1"), ("b", "1"), ("a ", "2"), ("b", "10"), ("c", "3"), ("c", same)]
    rows = [{"question": question, "answer": right.format(n)} for question, n in lines]
    write_jsonl(tmp_path / "train.jsonl", rows)
    assert {q["question"] for q in read(tmp_path)} == {"c"}
    assert "questions stand there with different answers" in capsys.readouterr().out
    write_jsonl(tmp_path / "train.jsonl", rows[:4])
    with pytest.raises(qerl.UserError, match="holds no question with one answer"):
        read(tmp_path)


@pytest.mark.parametrize("name,content,message", [
    ("q.jsonl", '{"problem": "q", "answer": "so \\\\boxed{ }"}\n',
    "q.jsonl:1: no question or no answer"),
    ("q.csv", "question,answer", "none of .jsonl"),
    (".", None, "is a folder; name a file in it"),
])
def test_an_unfit_file_of_questions_is_refused(tmp_path, name, content, message):
    """With an empty box as the right answer, a completion with an empty box would be right."""
    if content:
        (tmp_path / name).write_text(content)
    with pytest.raises(qerl.UserError, match=message):
        math_questions(str(tmp_path / name))


def test_held_out_files_of_one_name_and_empty_questions_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "test.jsonl", [{"question": f"{folder}?", "answer": "5"}])
    with pytest.raises(qerl.UserError, match="two of them are called test.jsonl"):
        data.load_questions(None, [f"{tmp_path}/{name}/test.jsonl" for name in "ab"], None)
    write_jsonl(tmp_path / "train.jsonl", [{"question": " ", "answer": "#### 5"}])
    with pytest.raises(qerl.UserError, match="train.jsonl:1: not a line"):
        data.load_questions(str(tmp_path), None, None)


def test_the_question_of_a_chat_is_its_users(tmp_path):
    said = [{"role": "system", "content": "You are a bot."}, {"role": "user", "content": "1?"}]
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": said, "answer": "1"}])
    assert [q["question"] for q in math_questions(f"{tmp_path}/rows.jsonl")] == ["1?"]
