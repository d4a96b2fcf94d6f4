"""What other programs read: the adapter in PEFT's format, and a model's weights in NVFP4.

Any LoRA tool loads the adapter onto the original model or, closer to what it was trained on, onto
its NVFP4 version. A folder in NVFP4 is compressed-tensors' "nvfp4-pack-quantized", as llm-compressor
writes it and as qerl.load_model, vLLM and transformers read it.
"""
import json
import os
import shutil
from pathlib import Path

import safetensors.torch
import torch
from huggingface_hub import save_torch_state_dict

import qerl
from harness import loading
from harness.command import require_flag
from harness.folders import atomic_write, generation_config, new_folder, read_json, write_json
from harness.errors import UserError, reason, require


def trained_norms(model):
    """The RMSNorms whose scales are trained, too (--train-norms)."""
    return [m for m in model.modules() if isinstance(m, qerl.RMSNorm) and m.weight.requires_grad]


def trained_copy(model):
    """A copy of the trained tensors: {name: tensor}."""
    return {name: p.detach().clone() for name, p in qerl.trainable(model).items()}


def adapter_tensors(model):
    """{PEFT's name: a float32 tensor of the model}; stacked layers are taken apart."""
    tensors = {}
    for layer in model.quantized_layers():
        pieces = layer.lora_A.split(layer.rank), layer.lora_B.split(layer.sizes)
        for name, A, B in zip(layer.names, *pieces):
            tensors[f"base_model.model.{name}.lora_A.weight"] = A
            tensors[f"base_model.model.{name}.lora_B.weight"] = B
    for norm in trained_norms(model):
        tensors[f"base_model.model.{norm.name}.weight"] = norm.weight
    return tensors


def shapes(tensors):
    return {name: tensor.shape for name, tensor in tensors.items()}


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
    write_json(f"{folder}/adapter_config.json", config)


# The fields of PEFT's adapter_config.json that plain LoRA may have, beside r and lora_alpha.
# Which layers have an adapter is seen by its tensors; dropout is of training, and ours has none.
ANY_VALUE = {"auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type",
             "inference_mode", "target_modules", "exclude_modules", "modules_to_save", "lora_dropout",
             "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"}
# Others change the base model's weights ("pissa", "olora") when the adapter is loaded.
ONE_VALUE = {"peft_type": ["LORA"], "bias": ["none"], "init_lora_weights": [True, False, "gaussian"]}


def adapter_settings(folder, given={}):
    """{"lora_rank", "lora_alpha"} of an adapter's folder in PEFT's format; raises UserError.

    given: {setting: value} of the flags.
    """
    path = f"{folder}/adapter_config.json"
    try:
        config = read_json(path)
        found = {"lora_rank": int(config.pop("r")), "lora_alpha": float(config.pop("lora_alpha"))}
    except Exception as e:
        raise UserError(f"--adapter {folder}: {path} cannot be read ({reason(e)}); name a folder in PEFT's "
                        "format, such as runs/NAME/adapter")
    require(found["lora_rank"] > 0, f"--adapter {folder}: its r is {found['lora_rank']}, must be positive")
    for name, value in found.items():
        require_flag(given.get(name, value) == value, name, given.get(name),
                     f"is {value} in --adapter {folder}; leave it out")
    for name, value in config.items():
        # PEFT's other defaults are all empty.
        require(not value or name in ANY_VALUE or value in ONE_VALUE.get(name, []),
                f"--adapter {folder}: has {name} = {json.dumps(value)}, which plain LoRA has not; use an "
                "adapter without it")
    return found


def warn_of_another_base(folder, base):
    """Say so if an adapter was trained on another model than this base, or on other codes of it."""
    trained_on = str(read_json(f"{folder}/adapter_config.json").get("base_model_name_or_path"))
    if os.path.basename(os.path.normpath(trained_on)) not in base:
        print(f"warning: --adapter {folder}: was trained on {trained_on}, not on {base}")


@torch.no_grad()
def load_adapter(model, folder):
    """Start from an adapter in PEFT's format, as save_adapter writes it; it has to fit the model.

    model.reference, its tensors, is then what Eq. 3's KL compares with.
    """
    try:
        stored = safetensors.torch.load_file(f"{folder}/adapter_model.safetensors")
    except Exception as e:
        raise UserError(f"--adapter {folder}: its adapter_model.safetensors cannot be read ({reason(e)}); "
                        "copy it again")
    ours = adapter_tensors(model)
    require(shapes(stored) == shapes(ours),
            f"--adapter {folder}: does not fit; use an adapter of this model, on all of its linear "
            "layers, without --lora-rank, and with --train-norms if its norms were trained")
    for name, tensor in ours.items():
        tensor.copy_(stored[name])
    model.reference = trained_copy(model)
    print(f"starting from {folder}, with which --beta compares")


# --------------------------------------------------------------------------------------------------
# A folder in NVFP4

SHARD_BYTES = 2 * 10 ** 9          # of a file at most, unless one tensor alone is larger

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
    return any(name.endswith(loading.IN_4_BITS) for name in loading.open_tensors(folder, "cpu"))


def require_16_bit(folder, flag):
    """Refuse a folder of which a layer is in 4 bits: `flag` needs the weights before that."""
    require(not is_packed(folder), f"{flag}: {folder} is in 4 bits already; give the model before it was "
                                   "quantised, or leave the flag out")


def stacked_parts(names, sizes, packed, block_scale, global_scale):
    """What quantize_nvfp4 returns of layers that are stacked along out, by compressed-tensors' names.

    global_scale: [1], of layers that were quantised as one, or [out, 1]. vLLM multiplies q, k, v and
    gate, up as one weight and keeps the largest of their global scales for all, so that different ones
    would decode to other weights than those stored.
    """
    rows = [packed, block_scale, global_scale.expand(len(packed), 1)]
    found = {}
    for name, codes, scales, global_scales in zip(names, *(part.split(sizes) for part in rows)):
        found[f"{name}.weight_packed"] = codes
        found[f"{name}.weight_scale"] = scales
        found[f"{name}.weight_global_scale"] = global_scales[0]
    return {name: tensor.cpu() for name, tensor in found.items()}


def copy_companions(source, folder, quantization=NVFP4A16):
    """Copy what stands beside the weights, with this quantization_config.

    These are configs, tokenizer, chat templates. The generation_config.json has the token ids alone:
    whoever serves the folder samples from the policy that was evaluated here, without a
    repetition_penalty, top_k and the like.
    """
    for path in Path(source).iterdir():
        if path.suffix in (".json", ".txt", ".jinja", ".model") and "safetensors" not in path.name:
            shutil.copy(path, folder)
    templates = "additional_chat_templates"
    if os.path.isdir(f"{source}/{templates}"):
        shutil.copytree(f"{source}/{templates}", f"{folder}/{templates}")
    stored = generation_config(source)
    ids = {name: getattr(stored, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(f"{folder}/generation_config.json", ids)
    config = read_json(f"{source}/config.json")
    write_json(f"{folder}/config.json", config | {"quantization_config": quantization})


def write_folder(source, found, folder, quantization=NVFP4A16):
    """Write the model of the folder `source` with other tensors in their place.

    found: {name: tensor}; a layer's "NAME.weight_packed" stands for its "NAME.weight", or this for that.
    """
    files = loading.open_tensors(source, "cpu")
    replaced = {name.partition(".weight")[0] for name in found}
    kept = {name: file.get_tensor(name) for name, file in files.items()
            if name.partition(".weight")[0] not in replaced}
    # Copies, because tensors that share a storage are not saved.
    found = {name: tensor.cpu().clone() for name, tensor in found.items()}
    save_torch_state_dict(kept | found, folder, max_shard_size=SHARD_BYTES)
    copy_companions(source, folder, quantization)


@torch.no_grad()
def save_trained(model, folder):
    """Write a model whose weights are trained themselves (--lora-rank 0), in the dtype of its activations."""
    found = {f"{norm.name}.weight": norm.weight for norm in trained_norms(model)}
    for layer in model.quantized_layers():
        for kind, tensor in layer.named_parameters():
            names = [f"{name}.{kind.replace('master', 'weight')}" for name in layer.names]
            found |= zip(names, tensor.to(model.embedding.dtype).split(layer.sizes))
    shutil.rmtree(folder, ignore_errors=True)                  # of the run before it became longer
    with new_folder(folder) as temporary:
        write_folder(loading.model_folder(model.name_or_path), found, temporary, None)


def rounded(folder, device):
    """{tensor name: tensor on the CPU} of the linear layers of a 16-bit folder, rounded to NVFP4."""
    from harness import fast                   # which a run without it does not need
    found = {}

    class Packer(fast.WeightReader):
        def stacked(self, names, sizes, in_features):
            weights = [
                self.read(f"{name}.weight", (size, in_features)) for name, size in zip(names, sizes)]
            parts = self.quantize(names[0], torch.cat(weights), "nvfp4")
            found.update(stacked_parts(names, sizes, *parts))

    fast.load_model(folder, device=device, reader_class=Packer)
    return found


def save_packed(source, out, device, calibrated=None):
    """Write the 16-bit folder `source` in NVFP4 to the new folder `out`, and say so.

    calibrated(): a folder of NVFP4 weights to be copied; without it they are rounded, on device.
    """
    require_16_bit(source, "--save-quantized")
    with new_folder(out) as temporary:
        if calibrated:
            # The weights are copied alone: the tokenizer is the source's of now.
            for path in Path(calibrated()).glob("*safetensors*"):
                shutil.copy(path, temporary)
            copy_companions(source, temporary)
        else:
            write_folder(source, rounded(source, device), temporary)
    size = sum(path.stat().st_size for path in Path(out).glob("*.safetensors"))
    print(f"saved {out}, {size / 1e9:.3g} GB of weights; docs/serving.md says who reads it")
