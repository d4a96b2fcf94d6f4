"""Saving and serving: docs/serving.md."""
import json
import re
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers
from safetensors import SafetensorError
from torch.testing import assert_close

import train_gsm8k
from common import refused, run_main
from harness import export, fast, loading
from harness.data import ChatText
from harness.folders import read_json
from harness.policy import SYSTEM, load_all
from harness.ranks import Ranks
from methods import QUANTIZERS
from test_qerl import HERE, compressed_tensors, make_folder, relative, with_lora

# The linear layers of a block; those of one tuple are multiplied as one by vLLM.
FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@pytest.fixture
def saving(qwen, tmp_path, monkeypatch):
    """The command line that saves a model to tmp_path/out, in several files; flags behind it win."""
    monkeypatch.setattr(export, "SHARD_BYTES", 60_000)
    return ("--model", qwen, "--device", "cpu", "--quantizer", "rtn",
            "--save-quantized", str(tmp_path / "out"))


def tensors_of(folder):
    """{name: float tensor} of all files of a folder, as its index has them."""
    files = loading.open_tensors(str(folder), "cpu")
    return {name: file.get_tensor(name).float() for name, file in files.items()}


def global_scale(stored, leaves):
    """The one that the layers of a tuple of FUSED share."""
    scale, *others = (stored[f"model.layers.1.{leaf}.weight_global_scale"] for leaf in leaves)
    assert all(map(scale.equal, others))
    return scale


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_saved_folder_has_the_librarys_bytes(tmp_path, saving, name):
    source, _ = make_folder(tmp_path / "source", name, max_shard_size="100KB")
    out = tmp_path / "out"
    run_main(*saving, "--model", source)
    stored, exact = tensors_of(out), tensors_of(source)
    for leaves in FUSED:
        names = [f"model.layers.1.{leaf}.weight" for leaf in leaves]
        whole, _ = compressed_tensors(torch.cat([exact[name] for name in names]), "NVFP4")
        assert global_scale(stored, leaves).equal(whole["weight_global_scale"])
        for part in ("packed", "scale"):
            ours = torch.cat([stored[f"{name}_{part}"] for name in names])
            assert ours.equal(whole[f"weight_{part}"].float())
    kept = [name for name in exact if not name.endswith("_proj.weight")]
    assert all(stored[name].equal(exact[name]) for name in kept)
    assert len(stored) == len(exact) + 2 * 2 * 7                       # three parts of each layer
    assert len(list(out.glob("model-0000*.safetensors"))) > 2


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@torch.no_grad()
def test_saved_codes_are_those_of_training_and_nearer_than_rounding(
        data, tmp_path, cache, saving, quantizer):
    """Nearer to the 16-bit model, which has biases, by the logits of a question of its calibration.

    four-over-six is calibrated on none: its weights are nearer (test_quantizers.py).
    """
    folder, theirs = make_folder(tmp_path / "source", "llama")
    options = (*saving, "--model", folder, "--data", data, "--quantizer", quantizer, "--validation", "3")
    run_main(*options)
    settings = replace(train_gsm8k.arguments(options), max_new_tokens=8)
    model, _, loaded, _ = load_all(settings, None, Ranks())
    saved = tensors_of(tmp_path / "out")
    assert_close(saved, tensors_of(model.name_or_path), rtol=0, atol=0)
    for leaves in FUSED:
        global_scale(saved, leaves)
    tokens = torch.tensor([loaded.train[0]["prompt"]])
    error, rounding = (relative(fast.load_model(stored)(tokens), theirs(tokens).logits)
                       for stored in (str(tmp_path / "out"), folder))
    assert error < rounding or quantizer == "four-over-six"


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, saving):
    """The library's error is no OSError, of which test_bad_input.py has one."""
    full = mock.Mock(side_effect=SafetensorError("No space left on device"))
    monkeypatch.setattr(export.safetensors.torch, "save_file", full)
    assert refused(*saving).endswith("No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_written_folder_samples_from_the_policy_that_was_evaluated(qwen, tmp_path):
    """Ours ignores a repetition penalty and the like, and so do those who read the folder."""
    source = shutil.copytree(qwen, tmp_path / "source")
    ids = {"bos_token_id": 4, "eos_token_id": [256, 7], "pad_token_id": 5}
    sampling = {"repetition_penalty": 1.1, "top_k": 3, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(ids | sampling))
    export.save_packed(str(source), str(tmp_path / "saved"), "cpu")
    assert read_json(tmp_path / "saved/generation_config.json") == ids


@torch.no_grad()
def test_serving_snippets_give_the_trained_policys_answer(qwen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = "qwen-32b-nvfp4"
    export.save_packed(qwen, base, "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(base)
    policy = with_lora(base, dtype=torch.bfloat16, train_norms=True, lora_alpha=6)
    export.save_adapter(policy, f"runs/{base}-nvfp4-grpo-1/adapter", base)
    page = (HERE / "docs/serving.md").read_text(encoding="utf-8")
    serving, merging = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    names = {}
    exec(serving, names)
    tokens = names["inputs"]["input_ids"]
    text = ChatText(base, SYSTEM["answer"])
    assert tokens[0].tolist() == text.prompt(names["messages"][1]["content"])
    served = names["model"](tokens).logits.float()
    exec(merging, names)
    merged, frozen = (fast.load_model(*stored)(tokens) for stored in (("merged", "bf16"), (base,)))
    trained = policy(tokens).float()
    for found in (served, merged):
        assert relative(found, trained) < 0.03 < relative(found, frozen)
