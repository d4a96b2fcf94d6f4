"""Loading: a folder is read as it is, and what cannot be right is refused in one line."""
import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import qerl
import train_gsm8k
from harness import fast
from harness.data import ChatText
from harness.engines import find_engine
from harness.errors import UserError
from harness.export import save_packed
from harness.policy import load_policy
from harness.ranks import Ranks
from test_qerl import TOKENS, compressed_tensors, make_folder, relative

UP = "model.layers.1.mlp.up_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
STORED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


def break_tensor(folder, tmp_path, edit, **settings):
    """A copy of a model folder in tmp_path, with its tensors and its config edited."""
    tensors = load_file(f"{folder}/model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads(Path(folder, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    return str(tmp_path)


def packed_layer(tensors):
    """Store two layers that are stacked as NVFP4."""
    for name in (GATE, UP):
        parts = qerl.quantize_nvfp4(tensors.pop(name))
        tensors.update(zip((f"{name}_packed", f"{name}_scale", f"{name}_global_scale"), parts))


ENGINES = [[], ["--engine", "plain"]]


def load(folder, *flags):
    """The model of a run, by the engine that the flags choose; its LoRA is still zero."""
    settings = train_gsm8k.arguments(["--device", "cpu", *flags])
    return load_policy(settings, find_engine(settings), str(folder), Ranks())


def refused(folder, message):
    """A run refuses a folder with one line, by either engine."""
    for flags in ENGINES:
        with pytest.raises((UserError, AssertionError), match=message) as error:
            load(folder, *flags)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("sharding", [{}, dict(max_shard_size="200KB")])
def test_a_tensor_comes_from_the_file_that_the_index_says(qwen, tmp_path, sharding):
    """In every other file, a shard or one that does not belong here, the tensor is wrong."""
    folder, theirs = make_folder(tmp_path, **sharding)
    state = theirs.state_dict()
    wrong = {name: torch.full_like(state[name], 9) for name in state if name != "lm_head.weight"}
    for shard in tmp_path.glob("*.safetensors"):
        save_file(wrong | load_file(shard), shard)
    for stray in "az":
        save_file(wrong, tmp_path / f"{stray}.safetensors")
    assert fast.load_model(folder)(TOKENS).equal(fast.load_model(qwen)(TOKENS))
    shard.unlink()
    torch.save(wrong, tmp_path / "pytorch_model.bin")
    refused(folder, f"{shard}: cannot be read.*fetch the model again, or .*pickled.*never loaded")


def test_a_new_file_beside_an_old_index_is_not_the_index(qwen, tmp_path):
    """qerl.py refuses a name in two files."""
    folder, _ = make_folder(tmp_path, seed=1, max_shard_size="200KB")
    shutil.copy(f"{qwen}/model.safetensors", tmp_path)
    refused(folder, "model.safetensors and the index with its files are two models")
    with pytest.raises(AssertionError, match="is in another file, too"):
        qerl.load_model(folder)


def dead_head(tensors):
    """The first rows of a weight, of which a part alone was judged, are as good as zero."""
    tensors["model.layers.0.self_attn.k_proj.weight"][:16] *= 1e-7


def in_float64(tensors):
    tensors.update({name: t.double() for name, t in tensors.items()})


def zeros(tensors):
    tensors[DOWN] = torch.zeros_like(tensors[DOWN])


def output_alone(tensors):
    """Of a model whose output layer is the embedding, by its other name."""
    tensors["lm_head.weight"] = tensors.pop(EMBEDDING)


def copies(tensors):
    """What is computed or scales the KV cache, and the embedding once more."""
    for name in ("rotary_emb.inv_freq", "k_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(1)
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("edit", [dead_head, in_float64, zeros, output_alone, copies])
def test_what_transformers_loads_a_run_loads(qwen, tmp_path, edit, engine):
    """Sliding windows that no layer has, a bias that Qwen2 does not read, another name of silu, too."""
    folder = break_tensor(qwen, tmp_path, edit, use_sliding_window=True, sliding_window=8,
                          attention_bias=True, hidden_act="swish")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        ours = load(folder, *engine, "--weights", "bf16")(TOKENS)
        assert relative(ours, theirs(TOKENS).logits) < 1e-4
        assert load(folder, *engine)(TOKENS).isfinite().all()                       # in NVFP4, too


@pytest.mark.parametrize("quantize,message", [
    (qerl.quantize_mxfp4, r"gave shapes .*\[128, 8\]"),                         # another block
    (lambda weight: qerl.quantize_nvfp4(weight.abs()), "does not dequantise to the weight"),
])
def test_a_wrong_format_is_told_by_its_name(qwen, monkeypatch, quantize, message):
    wrong = qerl.Format(quantize, 16, qerl.E2M1)
    for formats in (qerl.FORMATS, fast.FORMATS):
        monkeypatch.setitem(formats, "mine", wrong)
    with pytest.raises(UserError, match=r"FORMATS\['mine'\].*" + message):
        fast.load_model(qwen, "mine")


def test_compressed_tensors_folder_is_read_as_it_is(made_qwen, tmp_path):
    """NVFP4A16 made with the library: each layer with its own global scale, two left in 16 bit.

    One of them, UP, is stacked with GATE in 4 bits.
    """
    folder, theirs = made_qwen
    decoded = copy.deepcopy(theirs)

    def compress(tensors):
        for name, weight in decoded.named_parameters():
            if name.endswith("_proj.weight") and name not in (DOWN, UP):
                state, weight.data = compressed_tensors(tensors.pop(name), "NVFP4")
                prefix = name.removesuffix("weight")
                tensors.update({prefix + part: state[part] for part in state if part != "weight"})

    model = fast.load_model(break_tensor(folder, tmp_path, compress, quantization_config=STORED))
    codes, _, _ = model.blocks[0].attention.qkv.weight.parts
    stored = load_file(tmp_path / "model.safetensors")
    assert codes[:128].equal(stored["model.layers.0.self_attn.q_proj.weight_packed"])
    with torch.no_grad():
        # The library decodes in 16 bit.
        assert relative(model(TOKENS), decoded.float()(TOKENS).logits) < 5e-3


@pytest.mark.parametrize("name,edit,message", [
    (DOWN, lambda t: t / 0,
     "is damaged: its largest number is (inf|nan).*, or delete its folder in .* to have it made anew"),
    (NORM, None, "is missing"),
    (NORM, torch.zeros_like, "is damaged: its largest number is 0, "),
    (DOWN, lambda t: t[:, :64].contiguous(), r"\[128, 64\].*\[128, 192\]"),
    (DOWN, torch.Tensor.char, "is torch.int8"),
    # of what is stored as NVFP4
    (f"{UP}_scale", torch.Tensor.float, "is torch.float32"),
    (f"{UP}_scale", lambda t: (-t.float()).to(t.dtype), "block scales are at least 0"),
    (f"{UP}_global_scale", torch.neg, "global scale is above 1e-9"),
    (f"{UP}_global_scale", torch.zeros_like, "is damaged: its largest number is"),
    # too many: the output layer is the embedding here, which an lm_head.weight may only repeat
    *((name, lambda _: torch.ones(128), "is not one that config.json asks for")
      for name in (UP.replace("weight", "bias"), "lm_head.weight")),
])
def test_a_tensor_that_cannot_be_right_is_named(qwen, tmp_path, name, edit, message):
    def damage(tensors):
        packed_layer(tensors)
        tensor = tensors.pop(name, None)
        if edit:
            tensors[name] = edit(tensor)

    layer, _, _ = name.partition(".weight")
    refused(break_tensor(qwen, tmp_path, damage), f"{layer}.* {message}")


@pytest.mark.parametrize("message,config", {
    "config.json cannot be read": dict(model_type="own"),
    "config.json cannot be read .*num_attention_heads": dict(num_attention_heads="four"),
    "architecture gpt2, which is not supported": dict(model_type="gpt2"),
    "quantisation gptq": dict(quantization_config={"quant_method": "gptq"}),
    "transform_config": dict(quantization_config={**STORED, "transform_config": {"R4": {}}}),
    "sliding-window": dict(layer_types=["full_attention", "sliding_attention"]),
    "chunked attention": dict(layer_types=["chunked_attention"] * 2),
    "rope on a part of a head": dict(partial_rotary_factor=0.5),
    "activation gelu": dict(hidden_act="gelu"),
}.items())
def test_unusable_configs_are_named(qwen, tmp_path, message, config):
    refused(break_tensor(qwen, tmp_path, lambda t: None, **config), message)


def test_code_of_a_model_never_runs(qwen, tmp_path, monkeypatch):
    """Nor is the user asked: transformers would ask, for a model_type that it does not know."""
    own = {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None]}
    folder = break_tensor(qwen, tmp_path, lambda t: None, model_type="own", auto_map=own)
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": own}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (fast.load_model, lambda path: ChatText(path, "")):
        with pytest.raises(UserError, match="cannot be"):
            load(folder)
    assert not ran.exists()


def modelopt_layout(tensors):
    """NVIDIA's ModelOpt names the codes "weight" and stores what multiplies, a scalar."""
    packed_layer(tensors)
    for name in (GATE, UP):
        tensors[name] = tensors.pop(f"{name}_packed")
        tensors[f"{name}_scale_2"] = 1 / tensors.pop(f"{name}_global_scale").reshape(())
        tensors[name.replace("weight", "input_scale")] = torch.tensor(0.1)


def test_all_layouts_of_nvfp4_are_one_model(qwen, tmp_path, capsys):
    """Where activations are to be in 4 bits, too, it is said that they stay."""
    def logits(edit, stored):
        folder = break_tensor(qwen, tmp_path, edit, quantization_config=stored)
        return fast.load_model(folder)(TOKENS)

    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    packed = logits(packed_layer, STORED)
    assert "stay in 16 bit" not in capsys.readouterr().out
    assert_close(logits(modelopt_layout, modelopt), packed, rtol=1e-5, atol=1e-5)
    assert "proj.input_scale and the like are not used" in capsys.readouterr().out


def test_qerl_reads_a_folder_in_nvfp4_as_fast_does(qwen, tmp_path):
    """Or, if layers of it are in 16 bit, refuses it."""
    folder = str(tmp_path / "packed")
    save_packed(qwen, folder, "cpu")
    assert_close(qerl.load_model(folder)(TOKENS), fast.load_model(folder)(TOKENS), rtol=1e-4, atol=1e-4)
    mixed = break_tensor(qwen, tmp_path, packed_layer)                 # which fast leaves in 16 bit
    with pytest.raises(AssertionError, match="is in 16 bit, others are in NVFP4"):
        qerl.load_model(mixed)
