"""Model folders, as a run reads them and leaves its adapter beside them."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import qerl
from harness import command
from harness.data import ChatText
from harness.export import save_adapter, save_packed
from test_qerl import STORED, break_tensor, make_folder, packed_layer, relative, with_lora


@pytest.mark.parametrize("train_norms", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_adapter_loads_in_peft_with_the_same_logits(tmp_path, name, train_norms):
    from peft import PeftModel
    folder, theirs = make_folder(tmp_path / "base", name)
    ours = with_lora(folder, weights="bf16", train_norms=train_norms, lora_alpha=6)
    save_adapter(ours, str(tmp_path / "adapter"), folder)
    tokens = torch.randint(0, 262, (2, 30))
    with torch.no_grad():
        assert relative(ours(tokens), theirs(tokens).logits) > 1e-2
        peft = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"))
        assert relative(ours(tokens), peft(tokens).logits) < 1e-4


def test_code_of_a_model_never_runs(qwen, tmp_path, monkeypatch):
    """Nor is the user asked: transformers would ask, for a model_type that it does not know."""
    own = {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None]}
    folder = break_tensor(
        qwen[0], tmp_path, lambda t: None, lambda c: c.update(model_type="own", auto_map=own))
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": own}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (qerl.load_model, lambda path: ChatText(path, "")):
        with pytest.raises(qerl.UserError, match="cannot be"):
            load(folder)
    assert not ran.exists()


@pytest.mark.parametrize("activations,said", [
    (None, False), ({"num_bits": 4, "type": "float"}, True),
])
def test_quantised_activations_are_said_to_stay(qwen, tmp_path, capsys, activations, said):
    group = {"targets": ["Linear"], "input_activations": activations}
    stored = STORED | {"config_groups": {"group_0": group}}
    folder = break_tensor(
        qwen[0], tmp_path, packed_layer, lambda c: c.update(quantization_config=stored))
    command.say_what_stays(qerl.load_model(folder).config)
    assert ("activations stay 16 bit" in capsys.readouterr().out) == said


@pytest.mark.parametrize("layout", ["ModelOpt", "scalar global scales"])
def test_both_layouts_of_nvfp4_are_one_model(qwen, tmp_path, layout):
    """NVIDIA's ModelOpt names the codes "weight" and stores what multiplies, not what divides."""
    save_packed(qwen[0], str(tmp_path / "ours"), "cpu")
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "ours", other)
    (path,) = other.glob("*.safetensors")
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(".weight_global_scale")]:
        layer = name.removesuffix("_global_scale")
        scale = tensors[name].reshape(())
        tensors[name] = scale
        if layout == "ModelOpt":
            del tensors[name]
            tensors[layer] = tensors.pop(f"{layer}_packed")
            tensors[f"{layer}_scale_2"] = 1 / scale
            tensors[layer.removesuffix("weight") + "input_scale"] = torch.tensor(0.1)
    save_file(tensors, path)
    config = json.loads((other / "config.json").read_text())
    if layout == "ModelOpt":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (other / "config.json").write_text(json.dumps(config))
    tokens = torch.arange(5, 12)[None]
    with torch.no_grad():
        ours, theirs = (qerl.load_model(str(tmp_path / name))(tokens) for name in ("ours", "other"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
