"""Merge a run's adapter into 16-bit weights, for programs that know no LoRA.

    python -m harness.merge runs/Qwen2.5-3B-Instruct-nvfp4-grpo-1/adapter OUT
    python -m harness.merge ADAPTER OUT --model FOLDER

OUT becomes a Hugging Face folder of W + (α/r) B A, and of the norms if they were trained. W is that
of the model that adapter_config.json names, or --model. Where that is in NVFP4, W is what its codes
stand for: the weights that LoRA was trained on. The adapter of a 16-bit model, which was rounded
while it was loaded, is added to the weights before rounding. PEFT's merge_and_unload does the same
for a model in 16 bit, but not for one in NVFP4.
"""
import json
import os

import safetensors
import torch
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoConfig

import qerl
from harness.command import Parser, full_name, one_line
from harness.export import ShardWriter, copy_companions, size_gb
from harness.folders import new_folder

PREFIX = "base_model.model."       # before the model's own names in an adapter of PEFT
# What an adapter of PEFT may ask for beyond W + (α/r) B A.
FOREIGN = ("use_dora", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern")


def read_adapter(folder):
    """A run's adapter: (adapter_config.json's object, {tensor name without PEFT's prefix: tensor})."""
    try:
        with open(f"{folder}/adapter_config.json", "rb") as f:
            config = json.load(f)
        tensors = load_file(f"{folder}/adapter_model.safetensors")
    except (OSError, ValueError, safetensors.SafetensorError) as e:
        raise qerl.UserError(f"{folder}: is no readable adapter ({qerl.reason(e)}); give the folder "
                             "adapter of a run")
    asked = [name for name in FOREIGN if config.get(name)]
    qerl.require(not asked,
                 f"{folder}: its adapter_config.json asks for {', '.join(asked)}, which is not done "
                 "here; merge it by PEFT's merge_and_unload")
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def find_model(base, given):
    """The folder of the model that the adapter names or, if there is one, of --model."""
    qerl.require(given or base, "the adapter's adapter_config.json names no model; name it by --model")
    try:
        return qerl.model_folder(given or base)
    except qerl.UserError as e:
        raise qerl.UserError(f"{e}, or name the model by --model; what was in the cache is made again "
                             "by the run's command with --eval-only --resume --out RUN")


def check_norms(files, base, given):
    """Refuse a --model whose norms are not those of the one that was trained on, if that is here."""
    if not os.path.isdir(base or ""):
        print(f"{base} is no folder here, so its norms are not compared with those of {given}")
        return
    trained_on = qerl.open_tensors(base, "cpu")
    for name in files.keys() & trained_on.keys():
        if name.endswith("norm.weight"):
            here = files[name].get_tensor(name).float()
            there = trained_on[name].get_tensor(name).float()
            qerl.require(torch.equal(here, there),
                         f"--model {given}: its {name} is not that of {base}, which the adapter was "
                         "trained on (another model, or AWQ, which changes norms); leave --model out")


def read_weight(files, name):
    """The tensor `name`; if it is stored in NVFP4, decoded to bfloat16."""
    if name in files:
        return files[name].get_tensor(name)
    parts = [f"{name}_{part}" for part in ("packed", "scale", "global_scale")]
    stored = [files[part].get_tensor(part) for part in parts]
    return qerl.dequantize_nvfp4(*stored, torch.bfloat16)


def merged(name, weight, config, adapter):
    """weight [out, in] + α/r · B A in float32, or the trained norm; in the dtype of weight.

    What is used is taken out of `adapter`.
    """
    new = adapter.pop(name, weight)
    layer = name.removesuffix(".weight")
    A = adapter.pop(f"{layer}.lora_A.weight", None)                              # [r, in]
    B = adapter.pop(f"{layer}.lora_B.weight", None)                              # [out, r]
    qerl.require((A is None) == (B is None),
                 f"the adapter lacks LoRA's A or B of {layer}; take it from the run again")
    if A is not None:
        qerl.require(len(A) == config["r"],
                     f"the adapter's A of {layer} has {len(A)} rows, by adapter_config.json the rank is "
                     f"{config['r']}; take it from the run again")
        new = B.float() @ A.float() * (config["lora_alpha"] / config["r"])
        if new.shape == weight.shape:
            new += weight
    qerl.require(new.shape == weight.shape,
                 f"the adapter's {name} is {tuple(new.shape)}, the model's {tuple(weight.shape)}; name "
                 "the model that it was trained on by --model")
    qerl.require(torch.isfinite(new).all(),
                 f"{name} holds NaN or infinity once it is merged; take the adapter from the run again")
    return new.to(weight.dtype)


def merge(folder, out, given=None):
    """Write the model with the adapter `folder` in its weights to the new folder `out`."""
    config, adapter = read_adapter(folder)
    base = config["base_model_name_or_path"]
    source = find_model(base, given)
    qerl.check_config(AutoConfig.from_pretrained(source, trust_remote_code=False))
    files = qerl.open_tensors(source, "cpu")
    if given:
        check_norms(files, base, given)
    # The last is of activations, too, where these are in 4 bits.
    scales = ("weight_scale", "_global_scale")
    names = [name.removesuffix("_packed") for name in files if not name.endswith(scales)]
    with new_folder(out, source) as temporary:
        writer = ShardWriter(temporary)
        for name in tqdm(names, desc="merging", unit="tensor", delay=2):
            writer.add(name, merged(name, read_weight(files, name), config, adapter))
        qerl.require(not adapter,
                     f"{folder}: adapts {', '.join(list(adapter)[:1])}, which the model does not have; "
                     "name the model that it was trained on by --model")
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
