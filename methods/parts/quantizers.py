"""NVFP4 codes other than the nearest: what methods/four_over_six.py, awq.py and gptq.py share.

Each of them has choose_codes(model, sequences), which finds the tensors that replace a 16-bit
model's. This file calls it once, writes the tensors to the cache as a compressed-tensors folder, and
reads them from there. Meanwhile the device holds one block of the 16-bit model. In that folder q, k
and v share a global scale, and so do gate and up, because vLLM wants it. (Where layers are rounded to
nearest while loading, each has its own.)
"""
import importlib
import inspect
import json
from pathlib import Path

import torch

import methods
import qerl
from harness import fast
from harness.export import is_packed, write_folder
from harness.folders import fingerprint, made_once, policy_fingerprints
from harness.small_policy import WordText
from methods.parts import calibration
from methods.parts.worked import worked_sequences

CALIBRATION_TOKENS = 256 * 2048
SMALL_CALIBRATION = 2 ** 16        # for the built-in policy


def model_name(folder):
    """The name of a folder's model; in Hugging Face's cache the folder's own name is only a hash."""
    path = Path(folder).resolve()
    if path.parent.name == "snapshots":                # in models--OWNER--NAME
        return path.parents[1].name.rpartition("--")[2]
    return path.name


def cached_folder(source, name, key, make):
    """The folder that make(path) fills when it is first asked for with this key (JSON).

    It is made of the weights in the folder `source`, and has the names of both. If these weights or the
    code of make's module change, another folder is made.
    """
    code = inspect.getsource(inspect.getmodule(make))
    made_of = json.dumps([policy_fingerprints(source, ()), code, *key])
    digest = fingerprint([made_of.encode()])
    name = f"{model_name(source)}-{name}-{digest[:12]}"
    return made_once(name, make)


@torch.no_grad()
def quantized_folder(folder, quantizer, questions, tokenizer, device, seed=0):
    """The compressed-tensors folder, kept in the cache, of a 16-bit folder's model in 4 bits.

    quantizer: a name in methods.QUANTIZERS; questions, tokenizer, seed: see worked.worked_sequences. A folder
    that is in 4 bits already stays as it is.
    """
    if is_packed(folder):
        print(f"{folder} is in 4 bits already: its codes stay, --quantizer {quantizer} chooses none")
        return folder
    tokens = SMALL_CALIBRATION if isinstance(tokenizer, WordText) else CALIBRATION_TOKENS
    asks = quantizer != "four-over-six"                  # which needs no data
    sequences = worked_sequences(questions, tokenizer, tokens, seed) if asks else []
    module = importlib.import_module(f"methods.{methods.QUANTIZERS[quantizer]}")

    def make(path):
        print(f"finding NVFP4 codes by {quantizer}, once")
        model = fast.load_model(
            folder, "bf16", device=device, reader_class=calibration.LeftInFiles)
        write_folder(folder, module.choose_codes(model, sequences), path)

    code = [inspect.getsource(part) for part in (module, calibration, qerl.quantize_nvfp4)]
    key = [quantizer, sequences, torch.device(device).type, *code]
    stored = cached_folder(folder, quantizer, key, make)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()             # a run's log is of its steps
    return stored
