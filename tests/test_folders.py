"""Model folders, as a run reads them and leaves its adapter beside them."""
import json

import pytest
import torch
from torch.testing import assert_close

from harness import fast
from harness.errors import UserError
from harness.data import ChatText
from harness.export import save_adapter
from test_loading import GATE, STORED, UP, break_tensor, packed_layer
from test_qerl import TOKENS, make_folder, relative
from test_qerl import with_lora


@pytest.mark.parametrize("name,train_norms", [("qwen2", False), ("qwen3", True)])
def test_adapter_loads_in_peft_with_the_same_logits(tmp_path, name, train_norms):
    from peft import PeftModel
    folder, theirs = make_folder(tmp_path / "base", name)
    ours = with_lora(folder, weights="bf16", train_norms=train_norms, lora_alpha=6)
    save_adapter(ours, str(tmp_path / "adapter"), folder)
    with torch.no_grad():
        assert relative(ours(TOKENS), theirs(TOKENS).logits) > 1e-2
        peft = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"))
        assert relative(ours(TOKENS), peft(TOKENS).logits) < 1e-4


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


def scalar_global_scales(tensors):
    packed_layer(tensors)
    for name in (GATE, UP):
        tensors[f"{name}_global_scale"] = tensors[f"{name}_global_scale"].reshape(())


def modelopt_layout(tensors):
    """NVIDIA's ModelOpt names the codes "weight" and stores what multiplies, not what divides."""
    scalar_global_scales(tensors)
    for name in (GATE, UP):
        tensors[name] = tensors.pop(f"{name}_packed")
        tensors[f"{name}_scale_2"] = 1 / tensors.pop(f"{name}_global_scale")
        tensors[name.replace("weight", "input_scale")] = torch.tensor(0.1)


@pytest.mark.parametrize("edit,stored", [
    (scalar_global_scales, STORED),
    (modelopt_layout, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
])
def test_all_layouts_of_nvfp4_are_one_model(qwen, tmp_path, edit, stored):
    def logits(edit, stored):
        break_tensor(qwen, tmp_path, edit, quantization_config=stored)
        return fast.load_model(str(tmp_path))(TOKENS)

    assert_close(logits(edit, stored), logits(packed_layer, STORED), rtol=1e-5, atol=1e-5)
