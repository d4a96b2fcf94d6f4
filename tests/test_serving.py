"""Saving, loading, merging: docs/serving.md."""
import errno
import itertools
import json
import math
import os
import re
import shlex

import pytest
import torch
import transformers
from safetensors import SafetensorError

import qerl
import train_gsm8k
from common import killed_at, refused, run_main, used_folder, widened
from harness import export
from harness.export import save_adapter
from methods.parts import quantizers
from test_qerl import HERE, SIZES, UP, break_tensor, compressed_tensors_nvfp4, make_folder
from test_qerl import relative, with_lora

FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
ALONE = ("self_attn.o_proj",), ("mlp.down_proj",)
TOKENS = torch.arange(30)[None]
SAVING = ("--device", "cpu", "--quantizer", "rtn", "--save-quantized")      # and the folder


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 60_000)


def tensors_of(folder):
    """{name: tensor} of all files of a folder, as its index has them."""
    return {name: file.get_tensor(name)
            for name, file in qerl.open_tensors(str(folder), "cpu").items()}


@torch.no_grad()
def logits_of(model):
    """What one of our models, or the folder of one, computes of TOKENS."""
    if not isinstance(model, torch.nn.Module):
        model = qerl.load_model(str(model))
    return model(TOKENS)


@torch.no_grad()
def library_logits(folder):
    """What transformers with compressed-tensors computes of TOKENS; the library decodes in 16 bit,
    the rest is in 32.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model(TOKENS[:, :1])                                              # decodes the weights
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.float()
    return model(TOKENS).logits


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_saved_folder_has_the_librarys_bytes_and_logits(tmp_path, monkeypatch, capsys, small_shards,
        name):
    source, theirs = make_folder(tmp_path / "source", name)
    out = tmp_path / "out"
    run_main(monkeypatch, "--model", source, *SAVING, out)
    assert capsys.readouterr().out.startswith(f"saved {out}, 0.000")
    stored, exact = tensors_of(out), theirs.state_dict()
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for i, leaves in itertools.product(range(2), FUSED + ALONE):
        names = [f"model.layers.{i}.{leaf}" for leaf in leaves]
        # Of layers that vLLM multiplies as one, the bytes are those of one weight, by the library.
        whole, _ = compressed_tensors_nvfp4(torch.cat([exact.pop(f"{n}.weight") for n in names]))
        for part in ("weight_packed", "weight_scale"):
            assert torch.equal(torch.cat([stored.pop(f"{n}.{part}").float() for n in names]),
                whole[part].float())
        for n in names:
            assert torch.equal(stored.pop(f"{n}.weight_global_scale"), whole["weight_global_scale"])
    if theirs.config.tie_word_embeddings:
        del exact["lm_head.weight"]
    assert stored.keys() == exact.keys() and all(torch.equal(stored[k], exact[k]) for k in exact)
    assert relative(logits_of(out), library_logits(out)) < 0.01
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert len(before.encode("12 pens")) == 7 and after.encode("12 pens") == before.encode("12 pens")
    assert not list(tmp_path.glob("*.tmp"))
    assert os.stat(out / files[0]).st_mode & 0o777 == os.stat(out / "config.json").st_mode & 0o777


@pytest.mark.parametrize("quantizer", quantizers.QUANTIZERS)
def test_saved_folder_is_what_a_quantizer_trains_on(qwen, data, tmp_path, cache, monkeypatch,
        quantizer):
    options = ("--model", qwen[0], "--data", data, "--quantizer", quantizer, "--device", "cpu")
    run_main(monkeypatch, *options, "--save-quantized", tmp_path / "out")
    settings = train_gsm8k.arguments([*options, "--max-new-tokens", "8"])
    model, *_ = train_gsm8k.load_all(settings, qerl)
    trained_on, saved = tensors_of(model.name_or_path), tensors_of(tmp_path / "out")
    assert trained_on.keys() == saved.keys() and len(list(cache.iterdir())) == 1
    assert all(torch.equal(saved[k].float(), trained_on[k].float()) for k in saved)
    for i, leaves in itertools.product(range(2), FUSED):
        scale = {saved[f"model.layers.{i}.{leaf}.weight_global_scale"].item() for leaf in leaves}
        assert len(scale) == 1
    # near: LoRA's zeros are summed, too
    assert relative(logits_of(tmp_path / "out"), logits_of(model)) < 1e-5
    assert relative(logits_of(model), library_logits(tmp_path / "out")) < 0.015


def test_a_sharded_folder_is_saved_as_a_whole_one(qwen, tmp_path, monkeypatch, data):
    """And what is trained on it is trained on the folder itself."""
    sharded, _ = make_folder(tmp_path / "sharded", max_shard_size="100KB")
    for source, out in ((sharded, "out"), (qwen[0], "whole")):
        run_main(monkeypatch, "--model", source, *SAVING, tmp_path / out)
    stored = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert stored[0] == stored[1]
    settings = train_gsm8k.arguments(["--model", str(tmp_path / "out"), "--data", data,
        "--device", "cpu", "--max-new-tokens", "8"])
    model, *_ = train_gsm8k.load_all(settings, qerl)
    assert model.name_or_path == str(tmp_path / "out")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
@pytest.mark.parametrize("event,number,when", [
    ((export.safetensors.torch, "save_file"), 2, "after"),
    ((os, "rename"), 1, "before"), ((export.shutil, "copy"), 1, "after"),
])
def test_a_kill_leaves_no_half_folder(qwen, tmp_path, small_shards, event, number, when):
    options = ("--model", qwen[0], *SAVING, tmp_path / "out")
    assert killed_at(event, number, when, *options) is None
    left, = tmp_path.iterdir()
    assert re.fullmatch(r"out\.\w{8}\.tmp", left.name)
    assert killed_at(event, 0, when, *options) >= number                      # it is no obstacle
    qerl.load_model(str(tmp_path / "out"))


def saved(qwen, tmp_path):
    export.save_packed(qwen[0], str(tmp_path / "packed"), "cpu")
    return tmp_path / "packed"


def adapter_of(folder, path, seed=1, **options):
    """The folder of a random adapter of this model, and the model with it."""
    model = with_lora(folder, seed, **options)
    save_adapter(model, str(path), str(folder))
    return str(path), model


def serving_blocks(kind):
    with open(f"{HERE}/docs/serving.md", encoding="utf-8") as f:
        return re.findall(rf"^```{kind}\n(.*?)^```$", f.read(), flags=re.MULTILINE | re.DOTALL)


SAMPLING = {"repetition_penalty": 1.1, "top_k": 3, "temperature": 0.3, "no_repeat_ngram_size": 2,
    "do_sample": True, "max_length": 9}


@pytest.mark.parametrize("stored",
    [SAMPLING | {"eos_token_id": [256, 7], "pad_token_id": 5, "bos_token_id": 4}, None])
def test_a_written_folder_samples_from_the_policy_that_was_evaluated(tmp_path, stored):
    """Greedy answers of a model with a repetition penalty and the like: ours ignore it, and so do
    those who read the folder.
    """
    source, _ = make_folder(tmp_path / "source", "llama")
    path = tmp_path / "source" / "generation_config.json"
    path.unlink()
    if stored:
        path.write_text(json.dumps(stored))
    export.save_packed(source, str(tmp_path / "saved"), "cpu")
    expected = {name: (stored or SIZES)[name]
        for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    assert json.loads((tmp_path / "saved/generation_config.json").read_text()) == expected
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path / "saved")
    prompts = torch.randint(0, 256, (6, 8), generator=torch.Generator().manual_seed(0))
    ours = qerl.generate(qerl.load_model(source, "bf16"), prompts.tolist(), 24, 1,
        0.0, 1.0, eos={256, 7})
    for prompt, completion, length in zip(prompts, ours.tokens, ours.length):
        answer = theirs.generate(prompt[None], max_new_tokens=24)[0, 8:]
        assert torch.equal(answer, completion[:length])


def test_serving_snippets_give_the_trained_policys_answer(qwen, tmp_path, capsys):
    out = saved(qwen, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(out)
    adapter, ours = adapter_of(str(out), tmp_path / "adapter", dtype=torch.bfloat16)
    snippet, merging = serving_blocks("python")
    places = {"qwen-32b-nvfp4": str(out), "runs/qwen-32b-nvfp4-nvfp4-grpo-1/adapter": adapter}
    for name in sorted(places, key=len, reverse=True):
        assert f'"{name}"' in snippet
        snippet = snippet.replace(f'"{name}"', repr(places[name]))
    variables = {}
    exec(compile(snippet, "docs/serving.md", "exec"), variables)
    assert "12 pens" in capsys.readouterr().out
    tokens = variables["inputs"]["input_ids"]
    question = variables["messages"][1]["content"]
    assert tokens[0].tolist() == train_gsm8k.ChatText(str(out),
        train_gsm8k.SYSTEM["answer"]).prompt(question)
    with torch.no_grad():
        theirs = variables["model"](tokens).logits.float()
        trained, frozen = ours(tokens).float(), qerl.load_model(str(out))(tokens)
    assert relative(theirs, trained) < 0.03 < relative(theirs, frozen)
    merging = merging.replace('"merged"', repr(str(tmp_path / "merged")))
    exec(compile(merging, "docs/serving.md", "exec"), variables)
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    merged = qerl.load_model(str(tmp_path / "merged"), "bf16")(tokens)
    assert relative(merged, trained) < 0.03 < relative(merged, frozen)


def test_serving_commands_are_known():
    commands = [shlex.split(line, comments=True)
        for block in serving_blocks("sh") for line in block.splitlines()
                if line.startswith(".venv")]
    trained = [train_gsm8k.arguments([*words[2:], "--device", "cpu"])
        for words in commands if words[1] == "train_gsm8k.py"]
    assert [s.save_quantized for s in trained] == ["qwen-32b-nvfp4", None]
    assert trained[1].model == "qwen-32b-nvfp4"
    curl, = (block for block in serving_blocks("sh") if "curl" in block)
    request = json.loads(shlex.split(curl.replace("\\\n", ""))[-1])
    assert request["messages"][0]["content"] == train_gsm8k.SYSTEM["answer"]
    assert request["model"] + "=" in curl


@pytest.mark.parametrize("module,name,error", [
    (export.safetensors.torch, "save_file", SafetensorError("No space left on device")),
    (os, "rename", PermissionError(errno.EACCES, "Permission denied")),
])
def test_what_cannot_be_written_is_one_line_and_leaves_nothing(
        qwen, tmp_path, monkeypatch, capsys, module, name, error):
    def fails(*_, **__):
        raise error
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails)
        said = refused(patch, capsys, "--model", qwen[0], *SAVING, out)
    assert f"{out}" in said
    assert "cannot be written" in said
    assert not list(tmp_path.iterdir())


def damaged(qwen, tmp_path, *edits):
    (tmp_path / "source").mkdir()
    return break_tensor(qwen[0], tmp_path / "source", *edits)


def not_a_number(tensors):
    tensors[UP].view(-1)[7] = math.nan


@pytest.mark.parametrize("options,message", [
    (lambda q, t: ["--weights", "bf16"], "saves NVFP4, not bf16; leave --weights bf16 out"),
    (lambda q, t: ["--resume"], "leave --resume and --eval-only out"),
    (lambda q, t: ["--method", "qat"], "leave --method qat out"),
    (lambda q, t: ["--save-quantized", f"{q[0]}/inside"], "lies in the model's own folder"),
    (lambda q, t: ["--save-quantized", used_folder(t)], "is not empty; choose another folder"),
    (lambda q, t: ["--save-quantized", HERE + "/qerl.py"], "is a file"),
    (lambda q, t: ["--model", saved(q, t)], "is in 4 bits already"),
    (lambda q, t: ["--model", damaged(q, t, not_a_number)], "holds NaN"),
    (lambda q, t: ["--model", damaged(q, t, lambda s: s.pop(UP))], f"tensor {UP} is missing"),
    (lambda q, t: ["--model", damaged(q, t, widened, lambda c: c.update(intermediate_size=200))],
     "block of 16"),
])
def test_what_is_not_saved_is_refused(qwen, tmp_path, monkeypatch, capsys, options, message):
    out = tmp_path / "new" / "out"
    base = ("--model", qwen[0], *SAVING, out)
    assert message in refused(monkeypatch, capsys, *base, *options(qwen, tmp_path))
    assert not out.exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_built_in_policy_is_not_saved(tmp_path, monkeypatch, capsys):
    error = refused(monkeypatch, capsys, "--save-quantized", tmp_path / "out")
    assert "name it with --model" in error
