"""Model folders, as a run reads them."""
import json

import pytest
import torch
from torch.testing import assert_close

from harness import fast
from harness.errors import UserError
from harness.data import ChatText
from test_loading import GATE, STORED, UP, break_tensor, packed_layer
from test_qerl import TOKENS


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


def test_all_layouts_of_nvfp4_are_one_model(qwen, tmp_path):
    def logits(edit, stored):
        break_tensor(qwen, tmp_path, edit, quantization_config=stored)
        return fast.load_model(str(tmp_path))(TOKENS)

    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert_close(logits(modelopt_layout, modelopt), logits(packed_layer, STORED), rtol=1e-5, atol=1e-5)
