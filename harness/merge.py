"""Merge a run's adapter into 16-bit weights, for programs that know no LoRA.

    python -m harness.merge runs/Qwen2.5-3B-Instruct-nvfp4-grpo-1/adapter OUT
    python -m harness.merge ADAPTER OUT --model FOLDER

OUT becomes a Hugging Face folder of W + (α/r) B A, and of the norms if they were trained. W is that
of the model that adapter_config.json names, or --model. Where that is in NVFP4, W is what its codes
stand for: the weights that LoRA was trained on. The adapter of a 16-bit model, which was rounded
while it was loaded, is added to the weights before rounding.
"""
import json
import math
import os
import re

import safetensors
import safetensors.torch
import torch
from tqdm import tqdm
from transformers import AutoConfig

import qerl
from harness.flags import Parser, full_name
from harness.folders import ShardWriter, copy_companions, new_folder, size_gb
from harness.stops import one_line

PREFIX = "base_model.model."       # before the model's own names in an adapter of PEFT
# What such an adapter may ask for and this file does not do.
FOREIGN = ("use_dora", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "lora_bias",
           "layer_replication", "target_parameters")


def read_adapter(folder):
    """(α/r, the model's name, {tensor name without PEFT's prefix: tensor}); raises UserError."""
    try:
        with open(f"{folder}/adapter_config.json", "rb") as f:
            config = json.load(f)
        tensors = safetensors.torch.load_file(f"{folder}/adapter_model.safetensors")
        kind = config["peft_type"]
        rank = config["r"]
        alpha = config["lora_alpha"]
        base = config["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError,
            safetensors.SafetensorError) as e:
        raise qerl.UserError(f"{folder}: is no readable adapter ({qerl.reason(e)}); give the folder "
                             "adapter of a run")
    check_adapter(folder, rank, alpha, tensors)
    asked = [name for name in FOREIGN if config.get(name)] + [kind] * (kind != "LORA")
    qerl.require(not asked, f"{folder}: its adapter_config.json asks for {', '.join(asked)}, which is "
                            "not done here; merge it by PEFT's merge_and_unload")
    return alpha / rank, base, {name.removeprefix(PREFIX): t for name, t in tensors.items()}


def check_adapter(folder, rank, alpha, tensors):
    """Refuse an adapter that would make other weights than the trained ones."""
    again = "take it from the run again"
    numbers = isinstance(rank, int) and isinstance(alpha, (int, float))
    qerl.require(numbers and rank > 0 and math.isfinite(alpha),
                 f"{folder}: its adapter_config.json has r = {rank}, lora_alpha = {alpha}; {again}")
    qerl.require(tensors, f"{folder}: its adapter_model.safetensors holds no tensor; {again}")
    for name, tensor in tensors.items():
        qerl.require(torch.isfinite(tensor.float()).all(),
                     f"{folder}: tensor {name} holds NaN or infinity; {again}")
        side = 0 if ".lora_A." in name else 1
        matrix = ".lora_A." in name or ".lora_B." in name
        qerl.require(not matrix or tensor.dim() == 2 and tensor.shape[side] == rank,
                     f"{folder}: tensor {name} has shape {tuple(tensor.shape)}, the rank is {rank}; {again}")


def find_model(base, given):
    """The folder of the model that the adapter names or, if there is one, of --model."""
    qerl.require(given or isinstance(base, str),
                 "the adapter's adapter_config.json names no model; name it by --model")
    try:
        return qerl.model_folder(given or base)
    except qerl.UserError as e:
        if given:
            raise
        if os.path.isabs(base):
            raise qerl.UserError(
                f"{base}: the weights that the adapter was trained on are gone; the run's command with "
                "--eval-only --resume --out RUN makes those of a cache again; or name the model by --model")
        raise qerl.UserError(f"{e}, or name the model by --model")


def check_norms(files, base, given):
    """Refuse a --model whose norms are not those of the one that was trained on, if that is here."""
    if not given:
        return
    if not isinstance(base, str) or not os.path.isdir(base):
        print(f"{base} is no folder here, so its norms are not compared with those of {given}")
        return
    trained_on = qerl.open_tensors(base, "cpu")
    for name in files.keys() & trained_on.keys():
        if name.endswith("norm.weight"):
            there = trained_on[name].get_tensor(name)
            here = files[name].get_tensor(name)
            same = there.shape == here.shape and torch.equal(there.float(), here.float())
            qerl.require(same, f"--model {given}: its {name} is not that of {base}, which the adapter "
                               "was trained on (another model, or AWQ, which changes norms); leave "
                               "--model out")


def weight_names(files):
    """The names that the model's tensors have in 16 bit."""
    scales = ("weight_scale", "_global_scale")             # the latter of activations, too (W4A4)
    return [name.removesuffix("_packed") for name in files if not name.endswith(scales)]


def check_targets(names, adapter, folder):
    """Refuse the adapter of another architecture, before anything is written."""
    adapted = {re.sub(r"\.lora_[AB]\.", ".", name) for name in adapter}
    lacking = sorted(adapted - set(names))
    halves = [{name.split(f".lora_{half}.")[0] for name in adapter if f".lora_{half}." in name}
              for half in "AB"]
    half = sorted(halves[0] ^ halves[1])
    qerl.require(not half, f"{folder}: {half[:1]} lacks LoRA's A or B; take it from the run again")
    qerl.require(not lacking, f"{folder}: adapts {', '.join(lacking[:1])}, which the model does not "
                              "have; name the model that it was trained on by --model")


def read_weight(files, name):
    """The tensor `name`; if it is stored in NVFP4, decoded to bfloat16."""
    if name in files:
        return files[name].get_tensor(name)
    parts = [f"{name}_{part}" for part in ("packed", "scale", "global_scale")]
    for part in parts:
        qerl.require(part in files, f"tensor {part} is missing; fetch the model again")
    stored = [files[part].get_tensor(part) for part in parts]
    return qerl.dequantize_nvfp4(*stored, torch.bfloat16)


def merged(name, weight, scaling, adapter):
    """weight [out, in] + α/r · B A in float32, or the trained norm; in the dtype of weight."""
    layer = name.removesuffix(".weight")
    new = adapter.get(name, weight)
    if f"{layer}.lora_A.weight" in adapter:
        A = adapter[f"{layer}.lora_A.weight"].float()                            # [r, in]
        B = adapter[f"{layer}.lora_B.weight"].float()                            # [out, r]
        new = B @ A * scaling
        if new.shape == weight.shape:
            new += weight
    qerl.require(new.shape == weight.shape,
                 f"the adapter's {name} is {tuple(new.shape)}, the model's {tuple(weight.shape)}; name "
                 "the model that it was trained on by --model")
    return new.to(weight.dtype)


def merge(folder, out, given=None):
    """Write the model with the adapter `folder` in its weights to the new folder `out`."""
    scaling, base, adapter = read_adapter(folder)
    source = find_model(base, given)
    qerl.check_config(AutoConfig.from_pretrained(source, trust_remote_code=False))
    files = qerl.open_tensors(source, "cpu")
    names = weight_names(files)
    check_targets(names, adapter, folder)
    check_norms(files, base, given)
    with new_folder(out, source) as temporary:
        writer = ShardWriter(temporary)
        for name in tqdm(names, desc="merging", unit="tensor", delay=2):
            writer.add(name, merged(name, read_weight(files, name), scaling, adapter))
        writer.close()
        copy_companions(source, temporary)
    print(f"merged {folder} into {source}: {out}, {size_gb(out):.3g} GB of weights")


def main(argv=None):
    with one_line():
        parser = Parser(__doc__, prog="python -m harness.merge")
        parser.add_argument("adapter", help="the folder adapter of a run")
        parser.add_argument("out", help="the new folder")
        parser.add_argument("--model", help="another folder or name of the model to merge into")
        given = parser.parse_args(argv)
        merge(given.adapter, given.out, full_name(given.model))


if __name__ == "__main__":
    main()
