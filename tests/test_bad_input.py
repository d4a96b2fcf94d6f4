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
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from decimal import Decimal

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import bench
import fp4_kernels
import methods
import qerl
import train_gsm8k
from common import LEARNING, QUICK, assert_learned, command, copied
from common import files_below, killed_at, logged_steps
from common import refused, run_main, scored_by_letters, used_folder
from common import without_times
from harness import cache as cache_folder, checkpoint
from harness import keeper, math_data, memory, packed_folder, questions
from harness import report, run_folder, small_policy, stops
from harness.answers import final_number, is_right
from harness.batches import Batch
from harness.chat_text import ChatText, check_tokens
from harness.flags import full_name, parse_flags
from harness.math_data import math_questions
from harness.ranks import Ranks
from harness.run_folder import choose_folder, read_jsonl, read_log, write_jsonl
from harness.small_policy import ByteText, made_up_problems
from methods.parts import calibration
from methods.parts import quantizers
from studies import claims, entropy
from test_qerl import HERE, UP, break_tensor, with_lora


def test_a_run_without_its_checkpoint_is_not_begun_anew(finished, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    (out / "checkpoint.safetensors").unlink()
    for kept in ("adapter", "metrics.jsonl", "samples.jsonl", "summary.json", "answers_after.jsonl"):
        before = files_below(out)
        error = refused(monkeypatch, capsys, *options)
        assert "has no checkpoint.safetensors" in error and "another --out" in error and files_below(out) == before
        shutil.rmtree(out / kept) if kept == "adapter" else (out / kept).unlink()


def test_a_damaged_checkpoint_does_not_cost_the_adapter(finished, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    for stored in (b"", (out / "checkpoint.safetensors").read_bytes()[:-9]):
        (out / "checkpoint.safetensors").write_bytes(stored)
        before = files_below(out)
        error = refused(monkeypatch, capsys, *options)
        assert "not a readable checkpoint" in error and "another --out" in error and "remove" not in error
        assert files_below(out) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "answers_now.jsonl", "adapter/adapter_config.json", "summary.json",
                                  "curve.png", "report.html", "eval.json", "checkpoint.safetensors"])
def test_no_file_of_a_run_is_overwritten(data, tmp_path, monkeypatch, capsys, name):
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine\n")
    error = refused(monkeypatch, capsys, "--data", data, *QUICK, "--out", tmp_path / "out")
    assert "already holds a run" in error and "another folder" in error
    assert file.read_text() == "mine\n"


def losses_times(monkeypatch, *factors):
    """Multiply the first losses by these factors, the others by the last."""
    policy_loss, left = qerl.policy_loss, list(factors)

    def multiplied(*args):
        loss, kl = policy_loss(*args)
        return loss * (left.pop(0) if len(left) > 1 else left[0]), kl
    monkeypatch.setattr(qerl, "policy_loss", multiplied)


def test_float16_gradients_do_not_vanish(qwen, data, tmp_path, monkeypatch):
    """A loss of a 100,000th has gradients that float16 cannot hold; after a step they are a 100,000th of the others."""
    scored_by_letters(monkeypatch)
    norms = {}
    for dtype, factor in itertools.product(("float16", "float32"), (1, 1e-5)):
        with monkeypatch.context() as patch:
            losses_times(patch, factor)
            out = tmp_path / f"{dtype}-{factor}"
            run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--dtype", dtype, "--out", out)
        (logged,) = read_jsonl(out / "metrics.jsonl")
        norms[dtype, factor] = logged["gradient_norm"]
        assert logged.get("loss_scale") == (65536 if dtype == "float16" else None)
        assert json.loads((out / "summary.json").read_text())["settings"]["dtype"] == dtype
        trained = load_file(out / "adapter/adapter_model.safetensors")
        assert all(t.dtype == torch.float32 and t.isfinite().all() for t in trained.values())
        assert any(t.any() for name, t in trained.items() if "lora_B" in name)
    for (dtype, factor), norm in norms.items():
        assert norm == pytest.approx(factor * norms["float32", 1], rel=0.05), (dtype, factor)


def test_a_float16_gradient_that_overflows_costs_its_step_alone(qwen, data, tmp_path, monkeypatch):
    """The first gradient overflows. The run goes on with half the scale, and after a stop as if there had been none."""
    scored_by_letters(monkeypatch)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1, "--dtype", "float16")
    save, adapters = keeper.save_checkpoint, []

    def stopped(folder, model, optimizer, generators, state, settings):
        save(folder, model, optimizer, generators, state, settings)
        adapters.append([p.detach().clone() for p in qerl.trainable(model).values()])
        if state["step"] == stop_at:
            raise KeyboardInterrupt
    monkeypatch.setattr(keeper, "save_checkpoint", stopped)
    for stop_at, name in ((None, "whole"), (2, "cut")):
        with monkeypatch.context() as patch:
            losses_times(patch, 1e9, 1)
            if stop_at is None:
                run_main(monkeypatch, *options, "--out", tmp_path / name)
            else:
                with pytest.raises(SystemExit):
                    run_main(monkeypatch, *options, "--out", tmp_path / name)
    run_main(monkeypatch, *options, "--out", tmp_path / "cut", "--resume")
    logged = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert [m["loss_scale"] for m in logged] == [32768] * 3 and logged[0]["gradient_norm"] == 0 < logged[1]["gradient_norm"]
    before, first, second = adapters[:3]
    assert all(map(torch.equal, before, first)) and not all(map(torch.equal, first, second))
    assert without_times(tmp_path / "whole" / "metrics.jsonl") == without_times(tmp_path / "cut" / "metrics.jsonl")
    whole, cut = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert json.loads(safe_open(tmp_path / "cut/checkpoint.safetensors", "pt").metadata()["state"])["scaler"]["_growth_tracker"] == 2


def test_an_infinite_gradient_ends_a_run_that_scales_no_loss():
    for options in (dict(enabled=False), dict(init_scale=1.0)):
        with pytest.raises(qerl.UserError, match="gradient norm inf"):
            train_gsm8k.require_finite_update([(0.5, 0.0)], torch.tensor(math.inf), torch.amp.GradScaler("cpu", **options))
    train_gsm8k.require_finite_update([(0.5, 0.0)], torch.tensor(math.inf), torch.amp.GradScaler("cpu"))
    with pytest.raises(qerl.UserError, match="loss nan"):
        train_gsm8k.require_finite_update([(math.nan, 0.0)], torch.tensor(1.0), torch.amp.GradScaler("cpu"))


def test_the_dtype_that_suits_the_device(monkeypatch):
    def chosen(*argv):
        return train_gsm8k.arguments([*argv, "--device", "cpu"]).dtype
    assert chosen() == "float32" and chosen("--dtype", "bfloat16") == "bfloat16"
    monkeypatch.setattr(fp4_kernels, "default_dtype", lambda device: torch.float16)
    assert chosen() == "float16"


def test_weights_stay_decoded_where_there_is_room(qwen, data, tmp_path, monkeypatch):
    """With room each weight is decoded once, as it is loaded; without for each token. The results are the same."""
    scored_by_letters(monkeypatch)
    monkeypatch.setattr(train_gsm8k, "keep_decoded", lambda model, collect: memory.keep_decoded(model, collect, small=0))
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 2, "--slots", 4)
    decoded, adapters = {}, {}
    for name, free in (("room", 10 ** 9), ("none", 10 ** 5)):
        monkeypatch.setattr(memory, "free_memory", lambda device: free)
        counted, dequantize = [], qerl.dequantize_nvfp4
        monkeypatch.setitem(qerl.FORMATS, "nvfp4", replace(qerl.FORMATS["nvfp4"], dequantize=lambda *a: counted.append(1) or dequantize(*a)))
        run_main(monkeypatch, *options, "--out", tmp_path / name)
        decoded[name] = len(counted)
        adapters[name] = (tmp_path / name / "adapter/adapter_model.safetensors").read_bytes()
    assert decoded["room"] == 8 and decoded["none"] > 500 and adapters["room"] == adapters["none"]
    assert without_times(tmp_path / "room/metrics.jsonl") == without_times(tmp_path / "none/metrics.jsonl")


@pytest.mark.parametrize("weights,kept", [("nvfp4", 3), ("nf4", 3), ("bf16", 0)])
def test_what_is_kept_decoded_is_weighed(qwen, monkeypatch, weights, kept):
    model = qerl.load_model(qwen[0], weights, dtype=torch.bfloat16)
    before = {id(layer): layer.weight for layer in model.quantized_layers()}
    size = sum(2 * layer.weight.dequantize(torch.bfloat16).numel() for layer in model.quantized_layers())
    for free in (2 * size - 2, 2 * size):
        monkeypatch.setattr(memory, "free_memory", lambda device: free)
        memory.keep_decoded(model)                                                        # it is small: it stays as it is
        assert all(layer.weight is before[id(layer)] for layer in model.quantized_layers())
        memory.keep_decoded(model, small=0)
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
    monkeypatch.setattr(memory, "free_memory", lambda device: size)
    assert memory.slots_that_fit(model, 100, share=1.0) == 3
    assert "--slots 3: so many sequences of 100 tokens" in capsys.readouterr().out
    assert memory.slots_that_fit(model, 10 ** 6) == 1 and memory.slots_that_fit(model, 1, share=1.0) == 256


def test_a_run_keeps_its_slots(qwen, data, tmp_path, monkeypatch):
    """What memory held when it began; otherwise a resumed run would draw other numbers and add in another order."""
    used, generate = [], qerl.generate
    budgets, cut = set(), Batch.micro_batches
    monkeypatch.setattr(Batch, "micro_batches", lambda batch, budget: budgets.add(budget) or cut(batch, budget))

    def watched(*args, **options):
        used.append(options["slots"])
        return generate(*args, **options)
    monkeypatch.setattr(qerl, "generate", watched)
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--out", tmp_path / "run")
    monkeypatch.setattr(memory, "free_memory", lambda device: 10 ** 6)
    run_main(monkeypatch, *options)
    first = used[0]
    assert 1 < first < 256 and set(used) == {first} and budgets == {512}
    monkeypatch.setattr(memory, "free_memory", lambda device: 10 ** 9)
    for more, slots in ((["--eval-only"], first), ([], first), (["--slots", 5], 5)):
        used.clear()
        run_main(monkeypatch, *options, "--resume", *more)
        assert set(used) == {slots} and budgets == {512}, more


def test_pieces_are_what_memory_holds(family, monkeypatch, capsys):
    model = with_lora(family[0])
    config = model.config
    trained = 12 * sum(p.numel() for p in qerl.trainable(model).values())                 # two moments and a gradient, float32
    logits = 3 * 2048 * config.vocab_size * 4
    d, wide, blocks = config.hidden_size, config.intermediate_size, len(model.blocks)
    kept, recomputed = blocks * (6 * d + 3 * wide), blocks * d + 10 * d + 5 * wide
    for recompute_blocks, values in ((0, kept), (blocks, recomputed)):
        model.recompute_in_backward(recompute_blocks)
        monkeypatch.setattr(memory, "free_memory", lambda device: trained + logits + 1000 * 4 * values)
        assert memory.micro_tokens_that_fit(model, share=1.0) == 1000
        assert "--micro-tokens 1000: so many tokens" in capsys.readouterr().out
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    assert memory.micro_tokens_that_fit(model) == 512
    monkeypatch.setattr(memory, "free_memory", lambda device: 1e15)
    assert memory.micro_tokens_that_fit(model) == 16384 and not capsys.readouterr().out.endswith("16384")


def test_blocks_keep_their_activations_where_memory_allows(family, monkeypatch):
    model = with_lora(family[0])
    d, wide = model.config.hidden_size, model.config.intermediate_size
    model.blocks = torch.nn.ModuleList(list(model.blocks) * 20)
    blocks = len(model.blocks)
    for recomputed in (0, 3, 7, blocks):
        values = blocks * d + (blocks - recomputed) * (5 * d + 3 * wide) + (10 * d + 5 * wide) * bool(recomputed)
        monkeypatch.setattr(memory, "room_for_updates", lambda model: 1000 * values)
        memory.keep_activations(model, 1000)
        assert model.recompute_blocks == recomputed
        memory.keep_activations(model, 1001)
        assert model.recompute_blocks > recomputed or recomputed == blocks


def test_free_memory_is_shared_by_processes_of_a_machine(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "HOST", str(tmp_path / "meminfo"))
    assert memory.free_memory(cpu) == memory.UNKNOWN                                    # there is no such file
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 3000 kB\n")
    assert memory.free_memory(cpu) == 3000 * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert memory.free_memory(cpu) == 1000 * 1024


NO_NUMBER = re.compile("NaN|Infinity")


@pytest.mark.parametrize("options,message,steps", [
    (["--lr", 1e30, "--steps", 1, "--updates", 1], "after this update a vector of logits holds NaN or infinity", 0),
    (["--lr", 1e30, "--steps", 1, "--updates", 2], "gradient norm nan", 0),
    (["--sigma-start", 1e38], "the policy's logits are NaN or infinite", 1),
    (["--lora-alpha", "inf"], "--lora-alpha inf: must be positive and finite", None),
])
def test_nan_ends_a_run_before_it_is_stored(qwen, data, tmp_path, monkeypatch, capsys, options, message, steps):
    out = tmp_path / "out"
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, number, scheme: (float(sum(map(ord, text)) % 7), 0.0))
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--save-every", 1, *options, "--out", out)
    assert message in error
    if steps is None:
        assert not out.exists()
        return
    stored = load_file(out / "checkpoint.safetensors")
    assert all(t.isfinite().all() for t in stored.values())
    log = out / "metrics.jsonl"
    assert len(read_jsonl(log)) == steps and (steps == 0 or not NO_NUMBER.search(log.read_text()))


@pytest.mark.parametrize("options", [(), ("--eval-only",)])
def test_a_model_that_gives_nan_is_refused(qwen, data, tmp_path, monkeypatch, capsys, options):
    (tmp_path / "model").mkdir()
    folder = break_tensor(qwen[0], tmp_path / "model", lambda t: t["model.norm.weight"].fill_(3e38))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{qwen[0]}/{file}", folder)
    out = tmp_path / "out"
    error = refused(monkeypatch, capsys, "--model", folder, "--data", data, *QUICK, "--out", out, *options)
    assert "model.norm.weight holds NaN, infinity, a number above" in error and not out.exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_log_takes_no_nan(tmp_path, value):
    with pytest.raises(ValueError):
        keeper.append_jsonl(tmp_path / "log.jsonl", {"kl": value})
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_other_data_are_noticed_at_resume(finished, data, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    other = [json.loads(line) for line in open(f"{data}/train.jsonl")]
    other[3]["answer"] += "0"
    monkeypatch.setattr(train_gsm8k, "load_questions", lambda *_: (other, made_up_problems()[1][:6]))
    before = files_below(out)
    assert "other questions, answers or prompts" in refused(monkeypatch, capsys, *options) and files_below(out) == before


def test_a_flipped_bit_in_a_checkpoint_is_noticed(finished, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    monkeypatch.setattr(train_gsm8k, "load_all", lambda *_: pytest.fail("it was believed"))
    path = out / "checkpoint.safetensors"
    stored = path.read_bytes()
    header = 8 + int.from_bytes(stored[:8], "little")
    places = [*range(0, header - 8, 97), *range(header, len(stored), len(stored) // 40), len(stored) - 1]
    for place in places:                                                # the spaces that end a header say nothing
        path.write_bytes(stored[:place] + bytes([stored[place] ^ 1]) + stored[place + 1:])
        assert f"{path}: " in refused(monkeypatch, capsys, *options)
    path.write_bytes(stored)
    settings = json.loads(safe_open(path, "pt").metadata()["settings"])
    assert checkpoint.read_checkpoint(str(out), settings)[0]["step"] == 2


def test_a_run_goes_on_by_its_own_settings(finished, tmp_path, monkeypatch, capsys):
    """Flags need not be typed again. A setting newer than the checkpoint takes its default, one that is no more is left out."""
    _, out = copied(finished, tmp_path)
    path = out / "checkpoint.safetensors"
    tensors, metadata = load_file(path), safe_open(path, "pt").metadata()
    settings = json.loads(metadata["settings"])
    del settings["start_seed"]
    metadata["settings"] = json.dumps(settings | {"no_more": 3})
    metadata["sha256"] = checkpoint.content_hash({k: metadata[k] for k in ("state", "settings")}, tensors)
    save_file(tensors, path, metadata)
    before = path.read_bytes()
    run_main(monkeypatch, "--resume", "--out", out)
    run_main(monkeypatch, "--resume", "--out", out, "--eval-only")
    assert path.read_bytes() == before and (out / "eval.json").exists()
    for more in ((), ("--eval-only",)):
        assert "was started with lora_rank = 2, now it is 3" in refused(
            monkeypatch, capsys, "--resume", "--out", out, "--lora-rank", 3, *more)


def test_a_log_line_nested_too_deeply_is_left_out(tmp_path):
    first, second = logged_steps(1, 2)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(first) + "\n" + "[" * 100_000 + "\n" + json.dumps(second) + "\n")
    assert read_log(str(tmp_path), 2) == [first, second]


def test_a_lost_log_is_a_warning(finished, qwen, data, tmp_path, monkeypatch, capsys):
    options, out = copied(finished, tmp_path)
    (out / "metrics.jsonl").unlink()
    run_main(monkeypatch, *options)
    assert "lacks 2 of the 2 steps" in capsys.readouterr().err
    adapter = "adapter/adapter_model.safetensors"
    assert (out / adapter).read_bytes() == (finished[1] / adapter).read_bytes() and (out / "report.html").exists()
    assert read_log(str(out), 2) == []
    steps = logged_steps(1, 2, 3)
    write_jsonl(out / "metrics.jsonl", steps)
    with open(out / "metrics.jsonl", "a") as log:
        log.write('{"step": 4, "rew')                            # torn by a kill
    assert read_log(str(out), 2) == steps[:2] == read_jsonl(out / "metrics.jsonl")


def broken_model(folder, path, config=None, tokenizer=None, generation=None):
    """A copy of a model's folder whose json files are edited (a function) or replaced (anything else)."""
    shutil.copytree(folder, path)
    edits = {"config.json": config, "tokenizer_config.json": tokenizer, "generation_config.json": generation}
    for name, edit in edits.items():
        if edit is not None:
            stored = json.loads((path / name).read_text())
            edited = edit if isinstance(edit, str) else json.dumps(stored | edit)
            (path / name).write_text(edited)
    return path

YARN = dict(rope_type="yarn", rope_theta=1e4, factor="four", original_max_position_embeddings=128)


@pytest.mark.parametrize("files,message", [
    (dict(tokenizer={"chat_template": ""}), "different questions have the same prompt"),
    (dict(tokenizer={"chat_template": "{{ messages[0]['content'] }}"}), "different questions have the same prompt"),
    (dict(tokenizer={"chat_template": "{{ messages[1]['content'][:6] }}"}), "different questions have the same prompt"),
    (dict(tokenizer={"eos_token": None}, generation={"eos_token_id": None}), "eos_token_id None is no token"),
    (dict(generation={"eos_token_id": [[1]]}), "eos_token_id [[1]] is no token"),
    (dict(generation={"eos_token_id": 2.5}), "eos_token_id 2.5 is no token"),
    (dict(generation={"eos_token_id": 10 ** 6}), "to 1000000, its vocabulary has 262"),
    (dict(generation={"eos_token_id": -1}), "eos_token_id give tokens -1 to"),
    (dict(config={"num_attention_heads": 0}), "config.json cannot be used"),
    (dict(config={"rope_parameters": YARN}), "config.json cannot be used"),
    (dict(config="[" * 100_000), "recursion depth"),
])
def test_broken_model_files_are_named(qwen, data, tmp_path, monkeypatch, capsys, files, message):
    model = broken_model(qwen[0], tmp_path / "model", **files)
    assert message in refused(monkeypatch, capsys, "--model", model, "--data", data, *QUICK, "--out", tmp_path / "out")


def test_tokens_beyond_the_vocabulary_are_named():
    with pytest.raises(qerl.UserError, match="tokens 1 to 300, its vocabulary has 262"):
        check_tokens([{"question": "a", "prompt": [1, 2]}, {"question": "b", "prompt": [300]}], {256}, 262)


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
    assert f"ends an answer with <|im_end|>, which ends no completion; add {end} to eos_token_id" in capsys.readouterr().out
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, end]}))
    ChatText(str(model), "Reason.")
    template_of(model, "{{ messages[1].content }}<|im_end|>")                          # a turn's, not an answer's
    ChatText(str(model), "Reason.")
    assert capsys.readouterr().out == ""


class Tomorrow(datetime.datetime):
    @classmethod
    def now(cls, *zone):
        return cls(2100, 1, 2)


@pytest.mark.parametrize("quantizer", ["rtn", "gptq"])
def test_a_run_goes_on_tomorrow_whose_template_writes_the_date(qwen, data, tmp_path, cache, monkeypatch, quantizer):
    model = broken_model(qwen[0], tmp_path / "model")
    today = "{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y, %Y-%m-%d, %B') %}{% endif %}"
    template_of(model, "\n" + today + "Today: {{ today }}\n{{ messages[1].content }}")
    assert ChatText(str(model), "").tokenizer.decode(ChatText(str(model), "").prompt("1?")) == (
        "\nToday: 26 Jul 2024, 2024-07-26, July\n1?")
    options = ("--model", model, "--data", data, *QUICK, "--steps", 1, "--quantizer", quantizer, "--out", tmp_path / "run")
    run_main(monkeypatch, *options)
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Tomorrow)
    for more in ((), ("--eval-only",)):
        run_main(monkeypatch, *options, "--resume", *more)
    assert len(list(cache.glob("*gptq*"))) == (quantizer == "gptq")


def test_deeply_nested_data_is_one_line(qwen, tmp_path, monkeypatch, capsys):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("[" * 100_000 + "\n")
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", tmp_path, *QUICK, "--out", tmp_path / "out")
    assert "nested too deeply" in error or "train.jsonl:1" in error


def test_odd_names_of_folders(tmp_path, monkeypatch, capsys):
    assert "holds a NUL" in refused(monkeypatch, capsys, "--out", "a\0b")
    for name in ("small-1", "small-1²", "small-2x"):
        (tmp_path / name).mkdir()
    assert choose_folder(f"{tmp_path}/small", resume=False) == f"{tmp_path}/small-2"


@pytest.mark.parametrize("edit,message", [
    (lambda t: t.update({"model.layers.0.mlp.up_proj.weight_packed": torch.zeros(192, 64, dtype=torch.uint8)}), "not in 16 bit"),
    (lambda t: [t.pop(name) for name in list(t) if "_proj" in name], "not in 16 bit"),
    (lambda t: t.update({UP: t[UP][:, :127]}), "(192, 127), not divisible by a block of 64"),
])
def test_bench_formats_names_what_it_cannot_measure(qwen, tmp_path, monkeypatch, edit, message):
    folder = break_tensor(qwen[0], tmp_path, edit)
    monkeypatch.setattr(bench, "gaussian_layers", lambda: [torch.randn(64, 64)])
    with pytest.raises(qerl.UserError, match=re.escape(message)):
        list(bench.bench_formats(types.SimpleNamespace(model=[folder], device="cpu")))


def test_a_closed_pipe_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command("--help"), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""


def test_a_full_disk_is_called_so(qwen, data, tmp_path, monkeypatch, capsys):
    written = []

    def fsync(file):
        written.append(file)
        if len(written) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", fsync)
    out = tmp_path / "out"
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--out", out)
    assert f"{out}" in error and "the disk is full" in error and f"--resume --out {out}" in error and "remove" not in error
    assert not list(out.rglob("*.tmp"))


def test_a_broken_warm_start_is_made_again(qwen, tmp_path, monkeypatch, capsys):
    made = []

    def train_policy(seed):
        made.append(seed)
        return qwen[1]
    monkeypatch.setattr(cache_folder, "CACHE", str(tmp_path))
    monkeypatch.setattr(small_policy, "train_policy", train_policy)
    monkeypatch.setattr(small_policy.inspect, "getsource", lambda maker: "source")
    folder = small_policy.warm_start()
    assert small_policy.warm_start() == folder and len(made) == 1
    weights = os.path.join(folder, "model.safetensors")
    whole = open(weights, "rb").read()
    for broken in (b"", whole[:-5], whole[:-4096] + bytes(4096), None):
        os.remove(weights)
        if broken is not None:
            open(weights, "wb").write(broken)
        assert small_policy.warm_start() == folder and "is made again" in capsys.readouterr().out
        qerl.load_model(folder)
    assert len(made) == 5 and os.listdir(tmp_path) == [os.path.basename(folder)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
def test_a_kill_at_any_rename_or_log_line_resumes_bit_for_bit(quiz, tmp_path):
    """A run of two steps is killed before and after each rename, and around each line of its logs."""
    importlib.import_module("matplotlib.pyplot")                        # once, not in each child
    options = ("--model", quiz, "--data", quiz, *QUICK, *LEARNING, "--steps", 2, "--save-every", 1,
               "--eval-questions", 2)
    rename, line = (os, "replace"), (keeper, "append_jsonl")
    renames = killed_at(rename, 0, "before", *options, "--out", tmp_path / "whole")
    assert renames >= 12
    kills = [(rename, n, "before") for n in range(1, renames + 1)] + [(rename, n, "after") for n in (2, 5, 7, renames)]
    kills += [(line, n, when) for n in (1, 2) for when in ("before", "amid", "after")]
    whole = files_below(tmp_path / "whole")
    assert_learned(read_jsonl(tmp_path / "whole" / "metrics.jsonl"))
    for event, number, when in kills:
        out = tmp_path / f"{event[1]}-{number}-{when}"
        assert killed_at(event, number, when, *options, "--out", out) is None
        assert killed_at(rename, 0, "before", *options, "--out", out, "--resume") is not None, out
        again = files_below(out)
        for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "samples.jsonl",
                     "answers_before.jsonl", "answers_after.jsonl"):
            assert again[name] == whole[name], (out, name)
        assert without_times(out / "metrics.jsonl") == without_times(tmp_path / "whole" / "metrics.jsonl"), out
        assert again.keys() == whole.keys(), out
        stored, expected = (load_file(f / "checkpoint.safetensors") for f in (out, tmp_path / "whole"))
        assert all(torch.equal(stored[name], expected[name]) for name in expected), out


def test_the_lock_is_released_at_the_end(monkeypatch, tmp_path):
    locks = []
    open_run = train_gsm8k.open_run
    monkeypatch.setattr(train_gsm8k, "open_run", lambda settings: locks.append(open_run(settings)) or locks[-1])
    monkeypatch.setattr(train_gsm8k, "train", lambda settings: None)
    run_main(monkeypatch, "--out", tmp_path / "run")
    monkeypatch.setattr(train_gsm8k, "train", lambda settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_main(monkeypatch, "--out", tmp_path / "run")
    assert [lock.is_locked for lock in locks] == [False, False]


def held_open():
    """The files that this process has open or mapped into its memory."""
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:                                                 # the listing's own
            pass
    with open("/proc/self/maps") as maps:
        return opened + [line.split(maxsplit=5)[5].strip() for line in maps if line.count(" ") >= 5 and "/" in line]


@pytest.fixture
def windows(monkeypatch):
    """What Windows refuses: no open or mapped file is replaced, renamed or removed."""
    for name in ("replace", "rename", "remove", "unlink"):
        def strict(*paths, original=getattr(os, name), **options):
            for path in paths:
                if os.path.abspath(path) in held_open():
                    raise PermissionError(errno.EACCES, "The process cannot access the file", str(path))
            return original(*paths, **options)
        monkeypatch.setattr(os, name, strict)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="sees open files by Linux's /proc")
def test_no_open_file_is_replaced(qwen, data, tmp_path, monkeypatch, capsys, windows):
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--save-every", 1, "--eval-questions", 2)
    save = keeper.save_checkpoint

    def stopped(folder, model, optimizer, generators, state, settings):
        save(folder, model, optimizer, generators, state, settings)
        if state["step"] == 2:
            raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "save_checkpoint", stopped)
        with pytest.raises(SystemExit) as stop:
            run_main(monkeypatch, *options, "--out", tmp_path / "run")
    assert stop.value.code == 130
    run_main(monkeypatch, *options, "--out", tmp_path / "run", "--resume")
    assert [m["step"] for m in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    run_main(monkeypatch, *options, "--out", tmp_path / "run", "--resume", "--eval-only")
    missing = refused(monkeypatch, capsys, *options, "--data", tmp_path / "none", "--out", tmp_path / "fails")
    assert "no such folder" in missing and not (tmp_path / "fails").exists()


def test_a_file_system_without_locks_ends_no_run(tmp_path, monkeypatch, capsys):
    def acquire(*_, **options):
        raise NotImplementedError("FileSystem does not appear to support flock")
    monkeypatch.setattr(run_folder.FileLock, "acquire", acquire)
    run_folder.open_folder(str(tmp_path / "run"), False)
    assert "run: cannot be locked; start no second run there" in capsys.readouterr().err


def test_a_file_that_may_not_be_written_is_not_to_be_removed(qwen, data, tmp_path, monkeypatch, capsys):
    def denied(*paths):
        raise PermissionError(errno.EACCES, "Permission denied", str(paths[1]))
    monkeypatch.setattr(os, "replace", denied)
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "run")
    assert "answers_before.jsonl" in error and "close the program" in error and "remove" not in error


def test_a_file_that_may_not_be_read_is_to_be_read(tmp_path, monkeypatch):
    path = tmp_path / "train.jsonl"
    path.write_text("")
    error = PermissionError(errno.EACCES, "Permission denied", str(path))
    assert "let it be written" in stops.what_failed(error, None)
    monkeypatch.setattr(os, "access", lambda file, mode: mode != os.R_OK)
    assert stops.what_failed(error, None).endswith("train.jsonl'; let it be read")


def test_an_error_of_the_system_leaves_no_empty_folder(qwen, data, tmp_path, monkeypatch, capsys):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied", str(data))
    monkeypatch.setattr(train_gsm8k, "load_questions", denied)
    error = refused(monkeypatch, capsys, "--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "run")
    assert "Permission denied" in error and "--resume" not in error and not (tmp_path / "run").exists()


def test_questions_with_different_answers_are_left_out(tmp_path, capsys):
    lines = [("a", "so\n#### 1"), ("b", "#### 1"), ("a ", "#### 2"), ("b", "#### 10"), ("c", "#### 3"), ("c", "or\n#### 3.0")]
    write_jsonl(tmp_path / "train.jsonl", [{"question": question, "answer": answer} for question, answer in lines])
    kept = questions.read_questions(str(tmp_path), "train*.jsonl")
    assert [q["question"] for q in kept] == ["c", "c"] and "4 of 6 questions stand there with different" in capsys.readouterr().out
    write_jsonl(tmp_path / "train.jsonl", [{"question": question, "answer": answer} for question, answer in lines[:4]])
    with pytest.raises(qerl.UserError, match="each question stands there with different answers"):
        questions.read_questions(str(tmp_path), "train*.jsonl")


def bad_jsonl(tmp_path, line='{"question": "q"}'):
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n' + line + "\n")
    (tmp_path / "test.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')
    return tmp_path


@pytest.mark.parametrize("options,message", [
    (lambda t: ["--model", "./no/such/folder"], "model ./no/such/folder: no such folder"),
    (lambda t: ["--data", bad_jsonl(t)], "train.jsonl:2: not a line of"),
    (lambda t: ["--data", bad_jsonl(t, '{"question": "q", "answer": "#### 1,00"}')], "train.jsonl:2: '1,00' behind"),
    (lambda t: ["--data", t], "no file matches"),
    (lambda t: ["--max-new-tokens", 600], "--max-new-tokens 600: the model has 512 positions"),
    (lambda t: ["--max-new-tokens", 511], "no prompt fits into 1 tokens"),
    (lambda t: ["--sigma-start", "inf"], "--sigma-start inf: must not be"),
    (lambda t: ["--out", used_folder(t)], "already holds a run"),
    (lambda t: ["--resume"], "out: no such folder"),
    (lambda t: ["--step", 3], "unrecognized arguments: --step 3"),
    (lambda t: ["--device", "cuda:99"], "no such CUDA GPU here"),
    (lambda t: ["--device", "mps"], "--device mps: Apple's GPUs have no float8"),
    (lambda t: ["--device", "mps:0"], "use --device cpu"),
    (lambda t: ["--device", "meta"], "--device meta: unknown"),
    (lambda t: ["--device", "cpu:5"], "--device cpu:5: a CPU has no number; use --device cpu"),
    (lambda t: ["--eval-only", "--out", used_folder(t)], "already holds a run"),
    (lambda t: ["--weights", "int3"], "invalid choice: 'int3'"),
    (lambda t: ["--group", 1], "--group 1"),
    (lambda t: ["--device", "gpu"], "--device gpu: unknown"),
    (lambda t: ["--lr", -1], "--lr -1.0"),
    (lambda t: ["--lora-rank", 65], "--lora-rank 65: the smallest layer has 64 features"),
    (lambda t: ["--seed", 2 ** 70], "below 2**63"),
    (lambda t: ["--prompts", 3, "--updates", 2], "not divisible by --updates"),
    (lambda t: ["--sigma-end", 0], "needs both sigmas positive"),
    (lambda t: ["--lr", 1e30], "lower --lr"),
])
def test_bad_input_is_one_line_and_exit_2(qwen, data, tmp_path, monkeypatch, capsys, options, message):
    base = ["--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "out"]
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, *base, *options(tmp_path))
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert stop.value.code == 2 and len(error) == 1 and message in error[0]

WITHOUT = """
import os, sys
sys.modules["triton"] = None
import torch, transformers

*options, out = sys.argv[1:]
torch.set_num_threads(1)
for system in ("macos", "windows"):
    child = os.fork()                  # torch and transformers are imported once; what is the project's, in each child
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
    options = ["--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--eval-questions", 1, tmp_path]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", WITHOUT, *map(str, options)], cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "macos cpu\n" in done.stdout and "windows cpu\n" in done.stdout
    peaks = {}
    for system in ("macos", "windows"):
        assert (tmp_path / system / "report.html").exists()
        peaks[system] = read_jsonl(tmp_path / system / "metrics.jsonl")[0]["peak_memory_gb"]
    assert peaks["macos"] > 0.05 and peaks["windows"] == 0


def test_a_folder_in_use_is_refused(qwen, data, tmp_path, monkeypatch, capsys):
    settings = train_gsm8k.arguments(["--out", str(tmp_path / "run")])
    lock = train_gsm8k.open_run(settings)
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--out", tmp_path / "run")
    assert stop.value.code == 2 and "in use" in capsys.readouterr().err
    lock.release()


def test_long_prompts_are_counted_and_skipped(capsys):
    problems = [{"question": "q" * n, "answer": "#### 1"} for n in (5, 50, 500)]
    kept = train_gsm8k.with_prompts(problems, ByteText(), 60)
    assert [len(p["question"]) for p in kept] == [5, 50] and "1 of 3 prompts" in capsys.readouterr().out


def test_paper_defaults_with_model():
    settings = train_gsm8k.arguments(["--model", "Qwen/Qwen2.5-3B-Instruct", "--preset", "paper", "--device", "cpu"])
    table4 = dict(prompts=128, group=8, updates=4, lr=1e-5, lora_rank=32, sigma_start=1e-2, sigma_end=5e-4, max_new_tokens=4096,
                  clip_low=0.2, clip_high=0.28, weights="nvfp4", schedule="exponential")
    assert {k: getattr(settings, k) for k in table4} == table4
    assert train_gsm8k.arguments(["--model", "Qwen2.5-3B"]).model == "Qwen/Qwen2.5-3B-Instruct"
    paper_bf16 = ["--model", "Qwen2.5-3B", "--preset", "paper", "--weights", "bf16"]
    assert train_gsm8k.arguments(paper_bf16).lr == 5e-6


def test_every_setting_is_a_flag_and_its_help_tells_remark_and_defaults(monkeypatch, capsys):
    settings = fields(train_gsm8k.Settings)
    for f in settings:
        flag = "--" + f.name.replace("_", "-")
        value = (f.metadata["choices"] or {bool: [True], int: [7], float: [0.5], str: ["x"], list: [["x", "y"]]}[f.type])[0]
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


@pytest.mark.parametrize("argv,expected", [
    ([], dict(steps=50, lr=3e-3, prompts=16, beta=0.04, reward="paper", quantizer="rtn")),
    (["--steps", "7", "--lr", "5e-5"], dict(steps=7, lr=5e-5, prompts=16)),
    (["--prompts", "64", "--beta", "0"], dict(prompts=64, beta=0.0, steps=50)),       # given, though it is the default
    (["--model", "a/b"], dict(prompts=64, steps=300, lr=1e-4, beta=0.0, reward="answer", quantizer="gptq")),
    (["--model", "a/b", "--weights", "bf16"], dict(lr=1e-4, quantizer="rtn")),        # there is nothing to choose
    (["--model", "a/b", "--weights", "nf4"], dict(quantizer="rtn")),
    (["--model", "a/b", "--shard"], dict(quantizer="rtn")),
    (["--model", "a/b", "--shard", "--quantizer", "awq"], dict(quantizer="awq")),
    (["--model", "a/b", "--method", "flashrl"], dict(quantizer="rtn", weights="bf16")),
    (["--model", "a/b", "--method", "awq"], dict(quantizer="awq")),
    (["--model", "a/b", "--preset", "paper"], dict(quantizer="awq", lr=1e-5)),
    (["--model", "a/b", "--preset", "small"], dict(prompts=16, lr=3e-3)),
    (["--model", "a/b", "--preset", "paper", "--weights", "bf16"], dict(lr=5e-6, beta=0.0, prompts=128, quantizer="rtn")),
    (["--model", "a/b", "--preset", "paper", "--weights", "bf16", "--lr", "1e-3"], dict(lr=1e-3, prompts=128)),
    (["--model", "a/b", "--preset", "paper", "--method", "fp16", "--weights", "bf16"], dict(lr=5e-6)),
    (["--model", "a/b", "--preset", "paper", "--method", "flashrl"], dict(lr=5e-6, weights="bf16")),      # which chooses bf16
    (["--algo", "dapo"], dict(beta=0.0, lr=3e-3)),
    (["--algo", "dapo", "--beta", "0.1"], dict(beta=0.1)),
    (["--algo", "dapo", "--preset", "paper", "--model", "a/b"], dict(beta=0.0, prompts=128)),
])
def test_flags_win_over_the_preset_and_it_over_the_defaults(argv, expected):
    settings = train_gsm8k.arguments([*argv, "--device", "cpu"])
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize("options,fitted", [(["--quantizer", "gptq"], True), (["--method", "awq"], True), (["--method", "qat:sft"], True),
                                            (["--quantizer", "four-over-six"], False), ([], False)])
def test_codes_fitted_to_questions_are_evaluated_with_the_same(monkeypatch, options, fitted):
    def read_saved(settings, must_agree):
        assert ("data" in must_agree) == fitted and "quantizer" in must_agree
    monkeypatch.setattr(train_gsm8k, "read_saved", read_saved)
    settings = train_gsm8k.arguments(["--device", "cpu", "--eval-only", "--resume", "--out", "run", *options])
    with pytest.raises(qerl.UserError, match="no checkpoint to evaluate"):
        train_gsm8k.evaluate_only(settings)


# A question with whatever ends a line or a record somewhere, and what JSON has to escape.
AWKWARD = 'one\ntwo\r\nthree\u2028four\u2029five\x85six\x0b\x0c\x1c\x1d\x1eseven\t---\n{"step": 9}\\ "eight" \x00 ##'


def test_samples_jsonl_holds_a_group_and_is_cut_at_resume(qwen, tmp_path, monkeypatch, capsys):
    for name, question in (("train", AWKWARD), ("test", "another")):
        problem = json.dumps({"question": question, "answer": "#### 1"}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(problem * 2)
    options = ("--model", qwen[0], "--data", tmp_path, *QUICK, "--prompts", 4, "--group", 4)
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, number, scheme: (float(len(text) % 2),) * 2)
    run_main(monkeypatch, *options, "--out", tmp_path / "whole")
    assert_learned(read_jsonl(tmp_path / "whole" / "metrics.jsonl"))
    stored = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    samples = [json.loads(line) for line in stored.decode().splitlines()]
    assert [s["step"] for s in samples] == [1, 2, 4, 5] and samples == read_jsonl(tmp_path / "whole" / "samples.jsonl")
    for sample in samples:
        assert sample["question"] == AWKWARD and sample["number"] == "1"
        assert len(sample["completions"]) == 4
        assert len({c["reward"] for c in sample["completions"]}) == 2
        for c in sample["completions"]:
            parts = ("tokens", "entropy", "rollout_logprobs", "training_logprobs")
            assert 1 <= len(c["tokens"]) <= 8 and len({len(c[part]) for part in parts}) == 1
            assert c["reward"] == float(c["correct"]) and all(isinstance(t, str) for t in c["tokens"])
            assert min(c["entropy"]) > 0 and max(c["rollout_logprobs"] + c["training_logprobs"]) < 0
        assert abs(sum(c["advantage"] for c in sample["completions"])) < 1e-3

    def stopped(folder, model, optimizer, generators, state, settings):
        if state["step"] == 5:
            raise KeyboardInterrupt
        save(folder, model, optimizer, generators, state, settings)
    save = keeper.save_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "save_checkpoint", stopped)
        with pytest.raises(SystemExit) as stop:
            run_main(monkeypatch, *options, "--out", tmp_path / "cut")
    assert stop.value.code == 130 and f"--resume --out {tmp_path / 'cut'}" in capsys.readouterr().err
    log = tmp_path / "cut" / "samples.jsonl"
    assert [s["step"] for s in read_jsonl(log)] == [1, 2, 4, 5]                          # the last checkpoint is of step 4
    with log.open("a") as f:
        f.write('{"step": 9, "quest')
    run_main(monkeypatch, *options, "--out", tmp_path / "cut", "--resume")
    assert log.read_bytes() == stored


def test_answers_before_and_after_and_the_report(qwen, data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    reported = []
    monkeypatch.setattr(keeper, "report_on", lambda folder: reported.append((folder, sorted(os.listdir(folder)))))
    run_main(monkeypatch, "--model", qwen[0], "--data", data, *QUICK, "--steps", 1, "--eval-questions", 5, "--out", out)
    summary = json.loads((out / "summary.json").read_text())
    held_out = made_up_problems()[1][:5]
    for when in ("before", "after"):
        answers = read_jsonl(out / f"answers_{when}.jsonl")
        assert [a["question"] for a in answers] == [p["question"] for p in held_out]
        assert [a["number"] for a in answers] == [str(final_number(p)) for p in held_out]
        for kind in ("accuracy", "greedy"):
            for answer in answers:
                assert answer[kind]["correct"] == is_right(answer[kind]["text"], Decimal(answer["number"]), anywhere=True)
            assert summary[f"{kind}_{when}"] == sum(a[kind]["correct"] for a in answers) / 5
    (folder, files), = reported                                                          # once, when all else is there
    assert folder == str(out) and {"summary.json", "answers_after.jsonl", "samples.jsonl", "metrics.jsonl"} <= set(files)


@pytest.mark.parametrize("name", methods.names()[1:])
def test_a_neighbour_opens_with_what_a_student_needs(name):
    """The problem, a formula, what differs from QeRL, a result and when to use it."""
    module = importlib.import_module(f"methods.{name}")
    words = module.__doc__.lower()
    assert all(part in words for part in ("problem", "formula", "what differs from qerl", "when would you use it?", "ours"))
    assert issubclass(module.Neighbour, methods.Method)


def test_ctrl_c_in_bench_is_one_line(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt
    monkeypatch.setattr(bench, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["bench.py", "step", "--device", "cpu"])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == 130 and capsys.readouterr().err == "\nstopped\n"


def test_the_same_question_with_two_answers_is_left_out(tmp_path, capsys):
    path = tmp_path / "mixed.jsonl"
    write_jsonl(path, [{"question": "a?", "answer": "5"}, {"question": "b?", "answer": "7"}, {"question": "a?", "answer": "6"},
                       {"question": "b?", "answer": "7"}])
    kept = math_questions(str(path))
    assert [q["question"] for q in kept] == ["b?"]
    assert "1 of 2 questions stand there with different answers" in capsys.readouterr().out


def test_a_number_of_many_digits_is_no_answer(tmp_path):
    path = tmp_path / "large.jsonl"
    path.write_text('{"question": "a?", "answer": 1' + 400 * "0" + "}\n")
    with pytest.raises(qerl.UserError, match="no question or no answer"):
        math_questions(str(path))


def test_an_empty_question_is_no_question(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": " ", "answer": "#### 5"}\n')
    with pytest.raises(qerl.UserError, match="train.jsonl:1: not a line"):
        questions.load_questions(str(tmp_path), None, None)


def test_two_held_out_files_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "test.jsonl", [{"question": f"{folder}?", "answer": "5"}])
    with pytest.raises(qerl.UserError, match="two of them are called test.jsonl"):
        questions.load_questions(None, [str(tmp_path / "a" / "test.jsonl"), str(tmp_path / "b" / "test.jsonl")], None)


def test_the_report_of_changed_files_is_one_line(tmp_path, monkeypatch):
    def broken(folder):
        raise KeyError("accuracy")
    monkeypatch.setattr(report, "write_report", broken)
    with pytest.raises(qerl.UserError, match="its files are not those of a run"):
        report.report_on(str(tmp_path))


def test_entropy_of_one_question_has_no_standard_error(tmp_path):
    options = ["--prompts", "1", "--draws", "1", "--weights", "nvfp4", "nvfp4", "--slots", "8", "--sigmas", "0.01", "--device", "cpu"]
    assert entropy.main([*options, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "entropy.json").read_text())["rows"]
    assert [row["standard_error"] for row in rows] == [None]


def test_an_empty_box_is_no_answer(tmp_path):
    """Else a completion with an empty box would be right."""
    for answer in ("\\\\boxed{}", "so \\\\boxed{ }"):
        (tmp_path / "q.jsonl").write_text(f'{{"problem": "q", "answer": "{answer}"}}\n')
        with pytest.raises(qerl.UserError, match="q.jsonl:1: no question or no answer"):
            math_data.math_questions(str(tmp_path / "q.jsonl"))


def test_a_folder_is_no_file_of_questions(tmp_path):
    with pytest.raises(qerl.UserError, match="is a folder; name a file in it"):
        math_data.math_questions(str(tmp_path))


def test_entropy_without_noise(tmp_path):
    options = ["--prompts", "1", "--draws", "1", "--weights", "bf16", "--sigmas", "0", "--device", "cpu", "--out", str(tmp_path)]
    assert entropy.main(options) == 0
    assert (tmp_path / "entropy.png").exists()
    with pytest.raises(qerl.UserError, match="--prompts 100000: there are .* questions; lower it"):
        entropy.main([*options, "--prompts", "100000"])
    with pytest.raises(qerl.UserError, match="--data '': is empty"):
        entropy.main([*options, "--data", ""])


def test_folders_that_runs_choose_at_the_same_time_differ(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda _: choose_folder(f"{tmp_path}/small", resume=False), range(24)))
    assert len(set(chosen)) == 24 and all(map(os.path.isdir, chosen))


def test_advice_on_a_folder_in_use_can_be_followed(tmp_path):
    (tmp_path / "answers_now.jsonl").write_text("")
    with pytest.raises(qerl.UserError, match="already holds a run .*; choose another folder"):
        run_folder.open_folder(str(tmp_path), resume=False)
    with pytest.raises(qerl.UserError, match="has no checkpoint.safetensors"):
        run_folder.open_folder(str(tmp_path), resume=True)
    (tmp_path / "answers_now.jsonl").unlink()
    (tmp_path / "answers_before.jsonl").write_text("a")                                  # stopped before its first checkpoint
    with pytest.raises(qerl.UserError, match="add --resume"):
        run_folder.open_folder(str(tmp_path), resume=False)
    run_folder.open_folder(str(tmp_path), resume=True).release()


@pytest.mark.parametrize("flag", ["--model", "--data", "--out", "--eval", "--save-quantized"])
def test_an_empty_value_is_refused(monkeypatch, capsys, flag):
    assert f"{flag} '': is empty" in refused(monkeypatch, capsys, "--steps", 1, flag, "")


def test_a_short_name_is_explained_once_by_several_processes(monkeypatch, capsys):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert full_name("Qwen2.5-3B") == "Qwen/Qwen2.5-3B-Instruct"
    assert capsys.readouterr().out.count("means") == 1


def test_models_of_one_name_are_no_study(tmp_path):
    with pytest.raises(qerl.UserError, match="--model same: is what two of them are called"):
        claims.main(["--model", "a/same", "b/same", "--out", str(tmp_path)])


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
    monkeypatch.setattr(quantizers, "cached_folder", lambda folder, name, key, make: keys.append(key))
    for source in ("a", "b"):
        monkeypatch.setattr(quantizers.inspect, "getsource", lambda part: source if part is calibration else "")
        monkeypatch.setattr(quantizers, "worked_sequences", lambda *_: [])
        quantizers.quantized_folder(qwen[0], "gptq", [], ByteText(), "cpu")
    assert keys[0] != keys[1]


def test_the_question_of_a_chat_is_its_users(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": [{"role": "system", "content": "You are a bot."},
                                                      {"role": "user", "content": f"{k}?"}], "answer": str(k)} for k in range(2)])
    assert [q["question"] for q in math_questions(str(tmp_path / "rows.jsonl"))] == ["0?", "1?"]
    (tmp_path / "rows.csv").write_text("question,answer")
    with pytest.raises(qerl.UserError, match="none of .jsonl"):
        math_questions(str(tmp_path / "rows.csv"))


def test_a_run_does_not_go_on_with_other_weights_or_another_chat_template(qwen, data, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    shutil.copytree(qwen[0], model)
    options = ("--model", model, "--data", data, *QUICK, "--steps", 1, "--quantizer", "rtn", "--out", tmp_path / "run")
    run_main(monkeypatch, *options)
    tensors = load_file(model / "model.safetensors")
    save_file({name: t.flip(0).contiguous() for name, t in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    for more in ((), ("--eval-only",)):
        assert "was begun with other weights" in refused(monkeypatch, capsys, *options, "--resume", *more)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(train_gsm8k, "SYSTEM", dict.fromkeys(train_gsm8k.SYSTEM, "Sing."))
    assert "other questions, answers or prompts" in refused(monkeypatch, capsys, *options, "--resume")


@pytest.mark.parametrize("program,arguments", [
    ("bench", ["step", "--device", "cpu", "--out", ""]), ("bench", ["entropy", "--out", ""]), ("bench", ["claims", "--out", ""]),
    ("bench", ["methods", "--data", ""]), ("harness.report", [""]), ("methods.__main__", [""])])
def test_every_program_refuses_an_empty_value(monkeypatch, capsys, program, arguments):
    """As an unset variable of the shell leaves it: `--out ''` would write to the root of the file system."""
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(program).main()
    assert stop.value.code == 2 and "is empty; give a value" in capsys.readouterr().err


def test_a_run_does_not_go_on_with_another_config(qwen, data, tmp_path, monkeypatch, capsys):
    """A model computes something else with other values in config.json, and completions end elsewhere with another EOS."""
    model = tmp_path / "model"
    shutil.copytree(qwen[0], model)
    options = ("--model", model, "--data", data, *QUICK, "--steps", 1, "--quantizer", "rtn", "--out", tmp_path / "run")
    run_main(monkeypatch, *options)
    for name, key, value in (("config", "rms_norm_eps", 0.1), ("config", "rope_parameters", {"rope_type": "default", "rope_theta": 500.0}),
                             ("generation_config", "eos_token_id", [256, 65])):
        path = model / f"{name}.json"
        stored = path.read_text()
        path.write_text(json.dumps({**json.loads(stored), key: value}))
        for more in ((), ("--eval-only",)):
            assert "was begun with another config.json" in refused(monkeypatch, capsys, *options, "--resume", *more)
        path.write_text(stored)
    run_main(monkeypatch, *options, "--resume")


def test_a_damaged_model_of_the_cache_is_made_again(qwen, cache, capsys):
    def make(path):
        shutil.copy(f"{qwen[0]}/model.safetensors", path)
    folder = packed_folder.cached_folder(qwen[0], "codes", ["key"], make)
    whole = open(f"{qwen[0]}/model.safetensors", "rb").read()
    for broken in (whole[:1000], whole[:-9000] + bytes(4000) + whole[-5000:]):
        with open(f"{folder}/model.safetensors", "wb") as f:
            f.write(broken)
        assert packed_folder.cached_folder(qwen[0], "codes", ["key"], make) == folder
        assert "is made again" in capsys.readouterr().out
        assert open(f"{folder}/model.safetensors", "rb").read() == whole


def test_a_saved_model_has_the_tokenizer_of_now(qwen, data, tmp_path, cache, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(qwen[0], model)
    for name in ("first", "second"):
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, len(name)]}))
        run_main(monkeypatch, "--model", model, "--data", data, "--device", "cpu", "--save-quantized", tmp_path / name)
        assert json.loads((tmp_path / name / "generation_config.json").read_text())["eos_token_id"] == [256, len(name)]
        assert "quantization_config" in json.loads((tmp_path / name / "config.json").read_text())


def test_an_index_names_no_file_elsewhere(qwen, tmp_path):
    shutil.copytree(qwen[0], tmp_path / "model")
    os.rename(tmp_path / "model/model.safetensors", tmp_path / "weights.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(tmp_path / "weights.safetensors"), "../weights.safetensors")}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(qerl.UserError, match="names ../weights.safetensors, which is no file of this folder"):
        qerl.load_model(str(tmp_path / "model"))


def test_torchruns_variables_half_set_are_one_process(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    for name, value in (("WORLD_SIZE", "x"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        assert Ranks().count == 1
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Ranks().count == 2


def test_every_file_is_read_and_written_as_utf_8():
    """Whatever LANG says. /proc, which harness/memory.py reads, holds ASCII."""
    paths = [path for folder in ("", "harness/", "methods/") for path in glob.glob(f"{HERE}/{folder}*.py")]
    seen, wrong = 0, []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            calls = [node for node in ast.walk(ast.parse(f.read())) if isinstance(node, ast.Call)]
        for call in calls:
            opens = ast.unparse(call.func).rpartition(".")[2] in ("read_text", "write_text", "fdopen", "NamedTemporaryFile")
            if opens or ast.unparse(call.func) == "open":
                seen += 1
                if not re.search(r"utf-8|'[rwa]b\+?'", ast.unparse(call)) and not path.endswith(("memory.py", "test_qerl.py")):
                    wrong.append((path, call.lineno))
    assert seen > 15 and wrong == []


def test_a_config_with_other_letters_is_saved_in_any_locale(qwen, tmp_path):
    model = broken_model(qwen[0], tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"author": "Müller 数学"}
    (model / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    command = [sys.executable, "train_gsm8k.py", "--model", model, "--device", "cpu", "--quantizer", "rtn", "--save-quantized"]
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    ended = subprocess.run([*command, tmp_path / "out"], cwd=HERE, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))["author"] == "Müller 数学"


@pytest.mark.parametrize("closed", [True, False])
def test_a_run_ends_well_where_nobody_can_read_it(closed):
    """Standard output closed before the start, or of an encoding without a folder's letters."""
    program = "from harness.stops import one_line\nwith one_line():\n    print('\\xfc')"
    command = [sys.executable, "-c", program]
    if closed:
        command = ["bash", "-c", f"{shlex.join(command)} >&-"]
    ended = subprocess.run(command, cwd=HERE, env=os.environ | {"PYTHONIOENCODING": "ascii:strict"}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout == ("" if closed else "\\xfc\n")
