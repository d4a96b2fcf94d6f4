"""What other programs read: the adapter in PEFT's format, and a model's weights in NVFP4.

Any LoRA tool loads the adapter onto the original model or, closer to what it was trained on, onto
its NVFP4 version. A folder in NVFP4 is compressed-tensors' "nvfp4-pack-quantized", as llm-compressor
writes it and as qerl.load_model, vLLM and transformers read it.
"""
import glob
import json
import os
import shutil
from dataclasses import dataclass
from functools import partial

import safetensors.torch
import torch

import qerl
from harness.folders import atomic_write, check_new_folder, generation_config, load_with_progress
from harness.folders import new_folder, writing


def trained_norms(model):
    """The RMSNorms whose scales are trained, too (--train-norms)."""
    norms = [m for m in model.modules() if isinstance(m, qerl.RMSNorm)]
    return [norm for norm in norms if norm.weight.requires_grad]


def adapter_tensors(model):
    """PEFT's names -> the model's float32 tensors; stacked layers are taken apart."""
    tensors = {}
    for layer in model.quantized_layers():
        if layer.rank:
            pieces = zip(
                layer.names, layer.lora_A.split(layer.rank), layer.lora_B.split(layer.sizes)
            )
            for name, A, B in pieces:
                tensors[f"base_model.model.{name}.lora_A.weight"] = A
                tensors[f"base_model.model.{name}.lora_B.weight"] = B
    for norm in trained_norms(model):
        tensors[f"base_model.model.{norm.name}.weight"] = norm.weight
    return tensors


def save_adapter(model, folder, base_model):
    """Write adapter_config.json and adapter_model.safetensors, for PeftModel.from_pretrained."""
    os.makedirs(folder, exist_ok=True)
    layers = model.quantized_layers()
    adapted = {name.split(".")[-1] for layer in layers for name in layer.names}
    norms = {norm.name.split(".")[-1] for norm in trained_norms(model)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": layers[0].rank,
        "lora_alpha": layers[0].alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(adapted),
        "modules_to_save": sorted(norms) or None,
        "inference_mode": True,
    }
    tensors = {name: t.detach().cpu().contiguous() for name, t in adapter_tensors(model).items()}
    stored = safetensors.torch.save(tensors, metadata={"format": "pt"})
    atomic_write(f"{folder}/adapter_model.safetensors", stored)
    atomic_write(f"{folder}/adapter_config.json", json.dumps(config, indent=1))


# --------------------------------------------------------------------------------------------------
# Folders of a model's weights

SHARD_BYTES = 2 * 10 ** 9          # of a shard at most, unless one tensor alone is larger
INDEX = "model.safetensors.index.json"


class ShardWriter:
    """Keeps the tensors that it is given until they fill a shard, then writes them."""

    def __init__(self, folder):
        self.folder = folder
        self.shards = []           # a list of the names in each that is written
        self.waiting = {}          # {name: tensor on the CPU} of the next
        self.waiting_bytes = 0
        self.total_bytes = 0

    def add(self, name, tensor):
        """Take charge of a tensor of any device."""
        if self.waiting and self.waiting_bytes + tensor.nbytes > SHARD_BYTES:
            self.write_shard()
        self.waiting[name] = tensor.cpu().contiguous()
        self.waiting_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def path(self, number):
        """Where a shard is written before their count is known."""
        return f"{self.folder}/{number}.safetensors"

    def write_shard(self):
        path = self.path(len(self.shards))
        with writing(self.folder):
            safetensors.torch.save_file(self.waiting, path, {"format": "pt"})
            # The library gives a file to its owner alone; here whoever may enter the folder reads it.
            os.chmod(path, os.stat(self.folder).st_mode & 0o666)
            with open(path, "rb+") as f:
                os.fsync(f.fileno())
        self.shards.append(list(self.waiting))
        self.waiting = {}
        self.waiting_bytes = 0

    def close(self):
        """Write the last shard, give all their names, and write the index if there are several."""
        self.write_shard()
        count = len(self.shards)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        place = {}                                     # tensor name -> name of its file
        with writing(self.folder):
            for i, name in enumerate(names):
                os.rename(self.path(i), f"{self.folder}/{name}")
                place.update(dict.fromkeys(self.shards[i], name))
            if count > 1:
                index = {"metadata": {"total_size": self.total_bytes}, "weight_map": place}
                atomic_write(f"{self.folder}/{INDEX}", json.dumps(index, indent=1))


def size_gb(folder):
    """What the weights of a folder take on disk, in 10^9 bytes."""
    paths = glob.glob(f"{glob.escape(folder)}/*.safetensors")
    return sum(os.path.getsize(path) for path in paths) / 1e9


def copy_companions(source, folder, quantization=None):
    """Copy what stands beside the weights, with another quantization_config, or none.

    These are configs, tokenizer, chat template. The generation_config.json has the token ids alone:
    whoever serves the folder samples from the policy that was evaluated here, without a
    repetition_penalty, top_k and the like.
    """
    for path in sorted(glob.glob(f"{glob.escape(source)}/*")):
        companion = path.endswith((".json", ".txt", ".jinja", "tokenizer.model"))
        if companion and "safetensors" not in os.path.basename(path):
            shutil.copy(path, folder)
    stored = generation_config(source)
    ids = {name: getattr(stored, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    atomic_write(f"{folder}/generation_config.json", json.dumps(ids, indent=1))
    with open(f"{source}/config.json", "rb") as f:
        config = json.load(f)
    config.pop("quantization_config", None)
    if quantization:
        config["quantization_config"] = quantization
    atomic_write(f"{folder}/config.json", json.dumps(config, indent=1))


# --------------------------------------------------------------------------------------------------
# NVFP4

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
