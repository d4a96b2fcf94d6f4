"""Hugging Face folders of NVFP4 weights that are made once and kept in the cache.

Such a folder is compressed-tensors' "nvfp4-pack-quantized", as llm-compressor writes it and as
qerl.load_model, vLLM and transformers read it.
"""
import contextlib
import glob
import hashlib
import json
import os
import shutil
import tempfile

import safetensors.torch

import qerl
from harness import run_folder

# What compressed-tensors calls NVFP4A16: weights in NVFP4, activations as they are.
NVFP4A16 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "symmetric": True, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn",
    }}},
}


def require_16_bit(folder, flag):
    """Refuse a folder of which a layer is in 4 bits: `flag` needs the weights before that."""
    packed = any(name.endswith(".weight_packed") for name in qerl.open_tensors(folder, "cpu"))
    qerl.require(not packed, f"{flag}: {folder} is in 4 bits already; give the model before it was "
                             "quantised, or leave the flag out")


def named_parts(name, packed, block_scale, global_scale):
    """What quantize_nvfp4 returns of the layer `name`, under compressed-tensors' names."""
    return {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": block_scale,
        f"{name}.weight_global_scale": global_scale,
    }


def write_packed_folder(source, found, folder):
    """Write the model of the 16-bit folder `source` with other tensors in their place.

    found: {name: tensor}; a layer's "NAME.weight_packed" stands for its "NAME.weight".
    """
    files = qerl.open_tensors(source, "cpu")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in found.items()}
    for name, file in files.items():
        if name not in found and f"{name}_packed" not in found:
            tensors[name] = file.get_tensor(name)
    safetensors.torch.save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    for path in glob.glob(f"{glob.escape(source)}/*"):
        if path.endswith((".json", ".txt", ".jinja")) and "safetensors" not in path:
            shutil.copy(path, folder)
    with open(f"{source}/config.json") as f:
        config = json.load(f)
    with open(f"{folder}/config.json", "w") as f:
        json.dump({**config, "quantization_config": NVFP4A16}, f, indent=1)


def weights_of(folder):
    """What tells the weights of one folder from another's, without reading them: JSON."""
    paths = sorted(glob.glob(f"{glob.escape(folder)}/*.safetensors"))
    status = [os.stat(path) for path in [*paths, f"{folder}/config.json"]]
    return [os.path.realpath(folder), *([s.st_size, s.st_mtime_ns] for s in status)]


def cached_folder(name, key, make):
    """The folder that make(path) filled when it was first asked for with this key (JSON)."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    folder = os.path.join(run_folder.CACHE, f"{name}-{digest[:12]}")
    if os.path.exists(folder):
        return folder
    os.makedirs(run_folder.CACHE, exist_ok=True)
    temporary = tempfile.mkdtemp(dir=run_folder.CACHE)
    try:
        make(temporary)
        with contextlib.suppress(OSError):      # another run was faster
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
