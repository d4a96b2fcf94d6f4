"""Saving, loading, merging: docs/serving.md."""
import errno
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import qerl
import train_gsm8k
from common import killed_at, refused, run_main, used_folder, widened
from harness import export, merge
from harness.export import save_adapter
from methods.parts import quantizers
from test_qerl import HERE, INDEX, SIZES, UP, break_tensor, compressed_tensors_nvfp4, make_folder
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_quantised_as_one_whatever_the_pieces(dtype):
    torch.manual_seed(0)
    weights = [(torch.randn(rows, 64) * size).to(dtype)
               for rows, size in ((50, 1), (33, 0.1), (7, 1e-3))]
    for size in (64, 1000, 10 ** 6):
        pairs = zip(export.quantize_as_one(weights, size),
            qerl.quantize_nvfp4(torch.cat(weights)))
        assert all(torch.equal(ours.float(), whole.float()) for ours, whole in pairs)


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


MEMORY = """
import sys, threading, time
import torch
from harness import export


def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith("RssAnon"))

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

small, big, out = sys.argv[1:]
export.SHARD_BYTES = 10 ** 7
export.save_packed(small, out + "-small", "cpu")           # what imports and first uses take
before = anonymous()
peak = [before]
threading.Thread(target=watch, daemon=True).start()
export.save_packed(big, out, "cpu")
print("grown by", peak[0] - before)
"""


def folder_of_many_files(path, layers):
    """A folder of random bfloat16 weights, 7 MB a layer, each layer in a file of its own; returns
    its size in 2^20 bytes.
    """
    config = transformers.Qwen2Config(**{**SIZES, "hidden_size": 512, "intermediate_size": 2048,
        "num_hidden_layers": layers}, tie_word_embeddings=True)
    config.save_pretrained(path)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    values = {shape: (torch.randn(shape) * 0.02).bfloat16() for shape in set(shapes.values())}
    files = {}
    for name in shapes:
        number = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"{number}.safetensors", {})[name] = values[shapes[name]].clone()
    for file, tensors in files.items():
        save_file(tensors, path / file)
    place = {name: file for file, tensors in files.items() for name in tensors}
    (path / INDEX).write_text(json.dumps({"weight_map": place}))
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) / 2 ** 20


@pytest.mark.skipif(not os.path.exists("/proc/self/status"),
    reason="asks Linux what memory is in use")
def test_saving_takes_memory_for_a_part_of_the_model(tmp_path):
    """What is mapped from the files can be dropped at any time and does not count."""
    small, size = (folder_of_many_files(tmp_path / f"{layers}", layers) for layers in (3, 24))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   # glibc gives large blocks back at once
                   "MALLOC_MMAP_THRESHOLD_": "65536"}
    paths = [tmp_path / name for name in ("3", "24", "out")]
    done = subprocess.run([sys.executable, "-c", MEMORY, *paths], cwd=HERE, env=environment,
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown = float(done.stdout.split("grown by")[1])
    assert size > 7 * small > 140 and grown < size / 3, (grown, size)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
@pytest.mark.parametrize("event,number,when", [
    ((export.safetensors.torch, "save_file"), 2, "after"),
    ((os, "rename"), 2, "after"), ((export.shutil, "copy"), 1, "after"),
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


@pytest.mark.parametrize("train_norms", [False, True])
@pytest.mark.parametrize("name,dtype",
    [("qwen2", torch.float32), ("qwen3", torch.bfloat16), ("llama", torch.float16)])
def test_merged_weights_equal_pefts(tmp_path, small_shards, capsys, name, dtype, train_norms):
    peft = pytest.importorskip("peft")
    source = str(tmp_path / "source")
    make_folder(source, name)[1].to(dtype).save_pretrained(source, max_shard_size="100KB")
    os.remove(f"{source}/model.safetensors")
    adapter, ours = adapter_of(source, tmp_path / "adapter", weights="bf16", train_norms=train_norms)
    merge.main([adapter, str(tmp_path / "out")])
    assert f"merged {adapter} into {source}" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    theirs = peft.PeftModel.from_pretrained(theirs, adapter).merge_and_unload().state_dict()
    stored, before = tensors_of(tmp_path / "out"), tensors_of(source)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2 and stored.keys() == before.keys()
    for key in stored:
        assert stored[key].dtype == dtype
        limit = 0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps      # PEFT rounds twice
        torch.testing.assert_close(stored[key], theirs[key], rtol=limit, atol=limit * 0.1)
        changed = "_proj.weight" in key or train_norms and "norm" in key
        assert changed != torch.equal(stored[key], before[key]), key
    merged = qerl.load_model(str(tmp_path / "out"), "bf16")
    limit = 1e-5 if dtype == torch.float32 else 0.02
    assert relative(logits_of(merged), logits_of(ours)) < limit


def test_an_adapter_of_a_saved_folder_is_merged_into_what_its_codes_stand_for(qwen, tmp_path,
        monkeypatch):
    out = saved(qwen, tmp_path)
    adapter, ours = adapter_of(str(out), tmp_path / "adapter")
    command = [sys.executable, "-m", "harness.merge", adapter, tmp_path / "merged"]
    run = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    merged = qerl.load_model(str(tmp_path / "merged"), "bf16")
    trained = logits_of(ours)
    assert relative(logits_of(merged), trained) < 0.01 < relative(logits_of(out), trained)
    merge.main([adapter, str(tmp_path / "into-16-bit"), "--model", qwen[0]])
    for key, tensor in tensors_of(tmp_path / "into-16-bit").items():
        exact = tensors_of(qwen[0])[key]
        if "_proj.weight" in key:
            layer = key.removesuffix(".weight")
            A, B = (export.adapter_tensors(ours)[f"base_model.model.{layer}.lora_{half}.weight"]
                for half in "AB")
            exact = exact + B @ A
        torch.testing.assert_close(tensor, exact)


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
    adapter, _ = adapter_of(source, tmp_path / "adapter")
    export.save_packed(source, str(tmp_path / "saved"), "cpu")
    merge.merge(adapter, str(tmp_path / "merged"))
    expected = {name: (stored or SIZES)[name]
        for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    for name in ("saved", "merged"):
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert {k: v for k, v in written.items() if k != "transformers_version"} == expected
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged",
        dtype=torch.float32)
    prompts = torch.randint(0, 256, (6, 8), generator=torch.Generator().manual_seed(0))
    ours = qerl.generate(qerl.load_model(str(tmp_path / "merged"), "bf16"), prompts.tolist(), 24, 1,
        0.0, 1.0, eos={256, 7})
    for prompt, completion, length in zip(prompts, ours.tokens, ours.length):
        answer = theirs.generate(prompt[None], max_new_tokens=24)[0, 8:]
        assert torch.equal(answer, completion[:length])


def test_serving_snippet_gives_the_trained_policys_answer(qwen, tmp_path, capsys):
    out = saved(qwen, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(out)
    adapter, ours = adapter_of(str(out), tmp_path / "adapter", dtype=torch.bfloat16)
    snippet, = serving_blocks("python")
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


def test_serving_commands_are_known():
    commands = [shlex.split(line, comments=True)
        for block in serving_blocks("sh") for line in block.splitlines()
                if line.startswith(".venv")]
    trained = [train_gsm8k.arguments([*words[2:], "--device", "cpu"])
        for words in commands if words[1] == "train_gsm8k.py"]
    assert [s.save_quantized for s in trained] == ["qwen-32b-nvfp4", None]
    assert trained[1].model == "qwen-32b-nvfp4"
    assert [words[1:3] for words in commands if words[1] == "-m"] == [["-m", "harness.merge"]] * 2
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


def with_config(adapter, **values):
    """Give an adapter's config other values."""
    path = f"{adapter}/adapter_config.json"
    with open(path, encoding="utf-8") as f:
        config = json.load(f)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(config | values, f)
    return []


def with_tensors(adapter, edit):
    """Let edit(name, tensor) replace an adapter's tensors; None leaves one out."""
    path = f"{adapter}/adapter_model.safetensors"
    tensors = {name: edit(name, tensor) for name, tensor in load_file(path).items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, path)
    return []


def filled(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    return []


LAST_B = "layers.1.mlp.down_proj.lora_B"


@pytest.mark.parametrize("change,message", [
    (lambda q, t, a: shutil.rmtree(a) or [], "is no readable adapter"),
    (lambda q, t, a: os.truncate(f"{a}/adapter_model.safetensors", 100) or [],
     "is no readable adapter"),
    (lambda q, t, a: with_config(a, r=8), "the rank is"),
    (lambda q, t, a: with_config(a, use_dora=True), "asks for use_dora"),
    (lambda q, t, a: with_config(a, base_model_name_or_path=None), "names no model"),
    (lambda q, t, a: with_config(a, base_model_name_or_path="./gone"), "or name the model by"),
    (lambda q, t, a: ["--model", make_folder(t / "wide", "wide")[0]], "is not that of"),
    (lambda q, t, a: with_tensors(a, lambda n, v: v * math.nan if LAST_B in n else v), "holds NaN"),
    (lambda q, t, a: with_tensors(a, lambda n, v: None if LAST_B in n else v), "lacks LoRA's A"),
    (lambda q, t, a: filled(t / "out"), "is not empty"),
])
def test_what_is_not_merged_is_one_line_and_exit_2(qwen, tmp_path, capsys, change, message):
    adapter, _ = adapter_of(qwen[0], tmp_path / "adapter")
    options = change(qwen, tmp_path, adapter)
    with pytest.raises(SystemExit) as stop:
        merge.main([adapter, str(tmp_path / "out"), *map(str, options)])
    lines = capsys.readouterr().err.splitlines()
    error, = [line for line in lines if line.startswith("error: ")]
    assert stop.value.code == 2
    assert message in error
    assert not (tmp_path / "out" / "config.json").exists()
    assert not list(tmp_path.glob("*.tmp"))
