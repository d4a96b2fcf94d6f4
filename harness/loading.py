"""Careful loading of more kinds of folders than qerl.py reads; it looks for damage.

fast.load_model loads by these. It takes folders in which some layers are in 16 bit and others in
NVFP4, and NVFP4 as NVIDIA's ModelOpt writes it, too. What cannot be used is a UserError that names
the thing and the remedy.
"""
import glob
import os

import huggingface_hub
import torch
from safetensors import safe_open
from transformers import AutoConfig

import qerl
from harness.errors import UserError, reason, require
from harness.folders import CACHE, read_json

# Between them are the largest weight of every tensor, and global scales. Damage makes 1e30 and more,
# and of a tensor below them a format's scales are lost.
SMALLEST, LARGEST = 1e-30, 1e9
# The cache holds the built-in policy and the codes that --quantizer has found.
MEND = f"fetch the model again, or delete its folder in {CACHE} to have it made anew"
IN_4_BITS = (".weight_packed", ".weight_scale_2")      # of compressed-tensors' layers, of ModelOpt's
# Names of tensors that a folder may have and nothing here reads: scales of activations and of the KV cache.
SCALES = (".input_global_scale", ".input_scale", ".k_scale", ".v_scale")
SINGLE = "model.safetensors"
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size")              # of a config


def model_folder(name):
    """A local folder as it is, or the cached snapshot of a Hugging Face name (downloaded once).

    It holds one model, whole, that qerl.Transformer computes: what is checked before any engine loads it.
    """
    folder = name
    try:
        if not os.path.isdir(name):
            folder = huggingface_hub.snapshot_download(name, allow_patterns=qerl.MODEL_FILES)
    except Exception as e:
        raise UserError(f"model {name}: no such folder, and Hugging Face does not give it "
                        f"({reason(e)}); check the name and the connection")
    read_config(folder)
    open_tensors(folder, "cpu")
    return folder


def read_config(folder):
    """The transformers config of a folder or name; of a model that qerl.Transformer computes."""
    require(not glob.glob(f"{glob.escape(folder)}/adapter_*"),
            f"model {folder}: holds an adapter, adapter_*; give that by --adapter, and by --model a folder "
            "with the whole model alone")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        smallest = min(getattr(config, name) for name in SIZES)
    except Exception as e:
        raise UserError(f"model {folder}: its config.json cannot be read ({reason(e)}); give the folder or "
                        "the name of a Qwen2.5, Qwen3 or Llama 3 model")
    require(smallest > 0, f"model {folder}: its config.json has a size of {smallest}; it must be positive")
    qerl.check_config(config, (None, "nvfp4-pack-quantized", "modelopt"))
    return config


def default_dtype(device):
    """bfloat16 on a GPU that can compute in it (from 2020 on), float16 on others, float32 on a CPU."""
    if torch.device(device).type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def open_tensors(folder, device):
    """{tensor name: the open safetensors file that holds it} of a Hugging Face folder.

    The files are model.safetensors or, where there is an index, those that it names. A tensor then
    comes from the file that it has there, whatever else lies in the folder.
    """
    path = f"{folder}/{SINGLE}.index.json"
    place = {}                                 # {tensor name: name of its file} of the index
    files = {}
    try:
        if os.path.exists(path):
            stored = read_json(path)["weight_map"]
            place = {tensor: os.path.basename(name) for tensor, name in stored.items()}
        names = set(place.values()) or {SINGLE}
        for name in sorted(names):
            path = f"{folder}/{name}"
            file = safe_open(path, "pt", str(device))
            files |= {tensor: file for tensor in file.keys() if place.get(tensor, name) == name}
    except Exception as e:
        raise UserError(f"{path}: cannot be read ({reason(e)}); {MEND} (weights that are pickled, .bin or "
                        ".pt, are never loaded)")
    require(SINGLE in names or not os.path.exists(f"{folder}/{SINGLE}"),
            f"{folder}: {SINGLE} and the index with its files are two models; remove one of them")
    return files


class WeightReader(qerl.WeightReader):
    """qerl.WeightReader, which refuses damaged tensors and reads ModelOpt's and mixed folders.

    Override `read` to make a model without files (random weights).
    """

    def read(self, name, shape, dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16)):
        """The stored tensor `name`, checked to be of `shape` and a dtype, and undamaged."""
        tensor = super().read(name, shape)
        require(tensor.dtype in dtypes,
                f"tensor {name} is {tensor.dtype}, not in 16 bit or NVFP4; use another model")
        largest = tensor.float().abs().max()                         # NaN if one number is
        may_be_zero = name.endswith(("_proj.weight", "_proj.weight_packed", ".bias"))
        require(SMALLEST < largest < LARGEST or largest == 0 and may_be_zero,
                f"tensor {name} is damaged: its largest number is {largest:.3g}, not between {SMALLEST:g} "
                f"and {LARGEST:g}; {MEND}")
        return tensor

    def read_nvfp4(self, name, out_features, in_features):
        """(packed, block_scale, global_scale [1]) of a layer that the folder has in NVFP4."""
        codes = f"{name}.weight_packed"
        if codes in self.files:                                        # of compressed-tensors
            global_scale = self.read(f"{name}.weight_global_scale", (1,))
        else:                                                          # of ModelOpt, which has S_FP32
            codes = f"{name}.weight"
            global_scale = 1 / self.read(f"{name}.weight_scale_2", (1,))
        packed = self.read(codes, (out_features, in_features // 2), [torch.uint8])
        scale = self.read(
            f"{name}.weight_scale", (out_features, in_features // 16), [torch.float8_e4m3fn])
        require(scale.float().min() >= 0 and global_scale > 1 / LARGEST,
                f"layer {name}: NVFP4's block scales are at least 0 and its global scale is above 1e-9, "
                "these are not; quantise it again")
        return packed, scale, global_scale

    def quantize(self, name, weight, weights):
        """As qerl's; a FORMATS entry that does not do what it should is named."""
        parts = super().quantize(name, weight, weights)
        format = self.formats[weights]
        if format.table is None:
            return parts
        rows, columns = weight.shape
        shapes = [list(part.shape) for part in parts]
        wanted = [[rows, columns // 2], [rows, columns // format.block], [1]]
        entry = f"FORMATS['{weights}']"
        require(shapes == wanted, f"{entry}.quantize gave shapes {shapes} for a weight of {[rows, columns]}, "
                                  f"wanted are {wanted}")
        packed, scale, global_scale = parts
        error = format.dequantize(packed, scale, global_scale, torch.float32) - weight
        require(error.norm() <= weight.float().norm() / 2,
                f"{entry} does not dequantise to the weight that it was given; compare its quantize, table "
                "and scale")
        return parts

    def check_all_read(self):
        """Refuse a tensor that was not read, unless it is computed, of SCALES or a copy of the embedding."""
        scales = {name for name in self.unread if name.endswith(SCALES)}
        if scales:
            print(f"{min(scales)} and the like are not used: activations and KV cache stay in 16 bit here; a "
                  "program that uses them computes another policy")
        for name in sorted(self.unread - scales):
            if name.endswith(".inv_freq"):
                continue
            pair = "lm_head.weight", "model.embed_tokens.weight"
            require(name == pair[0] and torch.equal(*(self.files[n].get_tensor(n) for n in pair)),
                    f"tensor {name} is not one that config.json asks for (by tie_word_embeddings, "
                    "attention_bias and the like); use the config that belongs to the weights")

    def in_4_bits(self, name):
        return any(f"{name}{ending}" in self.files for ending in IN_4_BITS)

    def stacked(self, names, sizes, in_features):
        """As qerl's; of layers some of which the folder has in 16 bit, others not, all stay in 16 bit."""
        weights = self.weights
        if any(name.endswith(IN_4_BITS) for name in self.files) and not all(map(self.in_4_bits, names)):
            weights = "bf16"
        layers = [self.quantized(name, size, in_features, weights) for name, size in zip(names, sizes)]
        return self.weight(self.formats[weights], sizes, *qerl.stack_parts(layers))

    def weight(self, format, sizes, *parts):
        """The parts of stacked layers as a weight that can multiply."""
        return qerl.PackedWeight(format, *parts)
