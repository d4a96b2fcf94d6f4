"""What a run is resumed from (checkpoint.safetensors), and its adapter in PEFT's format.

Any LoRA tool loads the adapter onto the original model or, closer to what it was trained on, onto
its NVFP4 version.
"""
import hashlib
import json
import os
from dataclasses import fields

import safetensors.torch
import torch
from safetensors import safe_open

import qerl
from harness.run_folder import atomic_write
from qerl import UserError


NEW_RUN = "start a new run in another --out, and keep this folder's adapter"


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


def content_hash(metadata, tensors):
    """SHA-256 of all that a checkpoint holds, so that a single flipped bit is noticed."""
    digest = hashlib.sha256()
    for key in ("state", "settings"):
        digest.update(f"{key} {metadata[key]}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def fingerprint(questions):
    """SHA-256 of the questions, their answers and their prompts, in their order."""
    asked = [(q["question"], q["answer"], q["prompt"]) for q in questions]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def weights_checksum(model):
    """The sum of all bytes of a model, which another model's hardly ever is."""
    tensors = list(model.state_dict().values())
    for layer in model.quantized_layers():
        tensors += weight_tensors(layer.weight)
    sums = [tensor.flatten().view(torch.uint8).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(sums).sum().item()


def weight_tensors(weight):
    """The tensors of a qerl.PackedWeight or fp4_kernels.TiledWeight."""
    if isinstance(weight, qerl.PackedWeight):
        return list(weight.parts)
    return [getattr(weight, f.name) for f in fields(weight)]


def save_checkpoint(folder, model, optimizer, generators, state, settings):
    """Write the adapter, if there is one, then all that the next step depends on, as one file.

    generators: list of torch.Generator; state and settings: what JSON can hold.
    """
    tensors = {f"rng.{i}": generator.get_state() for i, generator in enumerate(generators)}
    for name, p in qerl.trainable(model).items():
        tensors[f"model.{name}"] = p.detach()
        for key, value in optimizer.state[p].items():
            tensors[f"optimizer.{name}.{key}"] = value
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    metadata = {
        "state": json.dumps(state, allow_nan=False),
        "settings": json.dumps(settings, allow_nan=False),
    }
    metadata["sha256"] = content_hash(metadata, tensors)
    # Not before the first step: an adapter without a checkpoint is one that lost it.
    if state["step"] and model.quantized_layers()[0].rank:
        save_adapter(model, f"{folder}/adapter", model.name_or_path)
    stored = safetensors.torch.save(tensors, metadata=metadata)
    atomic_write(f"{folder}/checkpoint.safetensors", stored)


def stored_settings(folder):
    """The settings that the run in `folder` was begun with; none without a sound checkpoint."""
    try:
        with safe_open(f"{folder}/checkpoint.safetensors", framework="pt") as f:
            return json.loads(f.metadata()["settings"])
    except Exception:                   # read_checkpoint will say what is wrong
        return {}


def read_checkpoint(folder, settings, must_agree=None):
    """(state, tensors) of the last checkpoint, or None where there is none.

    Refuses one that was made with other settings; must_agree: the names that count (default: all).
    A setting that is newer than the checkpoint, or that it alone knows, does not count.
    """
    path = f"{folder}/checkpoint.safetensors"
    if not os.path.exists(path):
        return None
    with open(path, "rb"):              # of a file that may not be read safetensors says "not there"
        pass
    try:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata() or {}
            # Copies, because Windows replaces no file from which tensors are still mapped.
            tensors = {name: f.get_tensor(name).clone() for name in f.keys()}
    except Exception as e:              # whatever a damaged header may lead to
        raise UserError(f"{path}: not a readable checkpoint ({qerl.reason(e)}); {NEW_RUN}")
    if not {"state", "settings", "sha256"} <= metadata.keys():
        raise UserError(f"{path}: not a checkpoint of this version of the program; {NEW_RUN}")
    if metadata["sha256"] != content_hash(metadata, tensors):
        raise UserError(f"{path}: damaged, its content does not match its hash; {NEW_RUN}")
    state = json.loads(metadata["state"])
    then = json.loads(metadata["settings"])
    counted = set(must_agree or settings) & settings.keys() & then.keys()
    for name in sorted(counted):
        if settings[name] != then[name]:
            raise UserError(
                f"--resume: {folder} was started with {name} = {then[name]}, "
                f"now it is {settings[name]}; give the same settings or another --out"
            )
    return state, tensors


@torch.no_grad()
def restore(tensors, model, optimizer=None, generators=()):
    """Put a checkpoint's tensors where save_checkpoint took them from."""
    for i, generator in enumerate(generators):
        generator.set_state(tensors[f"rng.{i}"])
    for name, p in qerl.trainable(model).items():
        p.copy_(tensors[f"model.{name}"])
        prefix = f"optimizer.{name}."
        for key in [k for k in tensors if optimizer and k.startswith(prefix)]:
            value = tensors[key]
            if value.dim() > 0:             # AdamW's moments; its step count stays on the CPU
                value = value.to(p.device)
            optimizer.state[p][key.removeprefix(prefix)] = value
