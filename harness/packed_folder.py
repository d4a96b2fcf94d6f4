"""Hugging Face folders of NVFP4 weights, to be served or made once and kept in the cache.

Such a folder is compressed-tensors' "nvfp4-pack-quantized", as llm-compressor writes it and as
qerl.load_model, vLLM and transformers read it.
"""
import hashlib
import inspect
import json
import os
import shutil
from dataclasses import dataclass
from functools import partial

import torch

import qerl
from harness.cache import made_once
from harness.loading import load_with_progress
from harness.shards import ShardWriter, check_new_folder, copy_companions, files_fingerprint
from harness.shards import new_folder, size_gb

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


def is_packed(folder):
    """Whether a layer of this folder is in 4 bits."""
    return qerl.Checkpoint(qerl.open_tensors(folder, "cpu")).is_packed


def require_16_bit(folder, flag):
    """Refuse a folder of which a layer is in 4 bits: `flag` needs the weights before that."""
    qerl.require(not is_packed(folder), f"{flag}: {folder} is in 4 bits already; give the model before it "
                                        "was quantised, or leave the flag out")


def named_parts(name, packed, block_scale, global_scale):
    """What quantize_nvfp4 returns of the layer `name`, under compressed-tensors' names."""
    return {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": block_scale,
        f"{name}.weight_global_scale": global_scale,
    }


def stacked_parts(names, sizes, packed, block_scale, global_scale):
    """The same, on the CPU, of layers that were quantised as one, stacked along out.

    They share a global scale: vLLM multiplies q, k, v and gate, up as one weight and keeps the largest
    of their global scales for all, so different ones would decode to other weights than those stored.
    """
    rows = zip(names, packed.split(sizes), block_scale.split(sizes))
    found = {}
    for name, codes, scales in rows:
        found.update(named_parts(name, codes.cpu(), scales.cpu(), global_scale.cpu().clone()))
    return found


def write_packed_folder(source, found, folder):
    """Write the model of the 16-bit folder `source` with other tensors in their place.

    found: {name: tensor}; a layer's "NAME.weight_packed" stands for its "NAME.weight".
    """
    files = qerl.open_tensors(source, "cpu")
    writer = ShardWriter(folder)
    for name, tensor in found.items():
        writer.add(name, tensor)
    for name, file in files.items():
        if name not in found and f"{name}_packed" not in found:
            writer.add(name, file.get_tensor(name))
    writer.close()
    copy_companions(source, folder, NVFP4A16)


def quantize_as_one(weights, size=2 ** 20):
    """quantize_nvfp4 of weights [out, in] stacked along out, so many numbers at a time.

    So that it takes little memory. A last row with the largest number of all gives each of these
    pieces the global scale of the whole.
    """
    rows = max(1, size // weights[0].shape[1])
    last = torch.zeros_like(weights[0][:1])
    last[0, 0] = max(weight.abs().max() for weight in weights)
    codes = []
    scales = []
    for piece in torch.cat(weights).split(rows):
        packed, block_scale, global_scale = qerl.quantize_nvfp4(torch.cat([piece, last]))
        codes.append(packed[:-1])
        scales.append(block_scale[:-1])
    return torch.cat(codes), torch.cat(scales), global_scale


@dataclass
class Packer(qerl.Checkpoint):
    """Writes what a model reads, its linear layers in NVFP4, and keeps nothing of it.

    The layers that QeRL stacks are those that vLLM multiplies as one: see stacked_parts.
    """
    writer: ShardWriter = None

    def tensor(self, name, shape):
        self.writer.add(name, self.read(name, shape))
        return torch.empty(shape, device="meta")

    def norm(self, name, size, eps):
        return self.tensor(f"{name}.weight", (size,))

    def linear(self, prefix, leaves, sizes, in_features, bias):
        names = [f"{prefix}.{leaf}" for leaf in leaves]
        qerl.require(in_features % 16 == 0, f"layer {names[0]} has {in_features} input features, not "
                                            "divisible by NVFP4's block of 16; it cannot be saved so")
        weights = [self.read(f"{name}.weight", (size, in_features)) for name, size in zip(names, sizes)]
        parts = quantize_as_one(weights)
        for name, tensor in stacked_parts(names, sizes, *parts).items():
            self.writer.add(name, tensor)
        if bias:
            for name, size in zip(names, sizes):
                self.tensor(f"{name}.bias", (size,))


def write_rounded_folder(source, folder, device):
    """Write the model of the 16-bit folder `source`, its layers rounded to NVFP4 one after the other.

    device: where they are rounded; neither it nor the host ever holds the whole model.
    """
    writer = ShardWriter(folder)
    load_with_progress(source, device=device, desc="quantising",
                       checkpoint_class=partial(Packer, writer=writer))
    writer.close()
    copy_companions(source, folder, NVFP4A16)


def save_packed(source, out, device, calibrated=None):
    """Write the 16-bit folder `source` in NVFP4 to the new folder `out`, and say so.

    calibrated(): a folder of NVFP4 weights to be copied; without it they are rounded, on device.
    """
    check_new_folder(out, source)
    require_16_bit(source, "--save-quantized")
    made = calibrated() if calibrated else None
    with new_folder(out, source) as temporary:
        if made:
            for name in os.listdir(made):
                if "safetensors" in name:       # the weights; the tokenizer is the source's of now
                    shutil.copyfile(f"{made}/{name}", f"{temporary}/{name}")
            copy_companions(source, temporary, NVFP4A16)
        else:
            write_rounded_folder(source, temporary, device)
    print(f"saved {out}, {size_gb(out):.3g} GB of weights; docs/serving.md says who reads it")


def cached_folder(source, name, key, make):
    """The folder that make(path) filled when it was first asked for with this key (JSON).

    It is made of the weights in the folder `source`, and named after it and `name`. It is made
    again once these weights, or the code of make's module, have changed.
    """
    code = inspect.getsource(inspect.getmodule(make))
    made_of = json.dumps([policy_fingerprints(source, ()), code, *key])
    digest = hashlib.sha256(made_of.encode()).hexdigest()
    name = f"{model_name(source)}-{name}-{digest[:12]}"
    return made_once(name, make, source)


def model_name(folder):
    """What a folder's model is called; in Hugging Face's cache its own name is only a hash."""
    path = os.path.realpath(folder)
    above, name = os.path.split(path)
    if os.path.basename(above) == "snapshots":
        name = os.path.basename(os.path.dirname(above)).rpartition("--")[2]
    return name


def policy_fingerprints(folder, eos):
    """What a policy is made of: {"weights": of the folder's files, "config": of config.json and eos}.

    Each a SHA-256; of the weights that of pieces of them, which other weights or codes do not share.
    """
    with open(f"{folder}/config.json", "rb") as f:
        config = hashlib.sha256(f.read() + repr(sorted(eos)).encode())
    return {"weights": files_fingerprint(folder), "config": config.hexdigest()}
