"""Measure this project. Each command prints its table and writes it as JSON.

    python bench.py formats [--model FOLDER_OR_NAME] [--out results]     relative error of each 4-bit format
"""
import argparse
import json
import os
import sys

import torch

import qerl
from train_gsm8k import environment, fail, warm_start

LABELS = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "nf4": "NF4", "nf4 double": "NF4, double quantisation", "bf16": "BF16"}
FORMATS = {**{name: (quantize, dequantize) for name, (quantize, dequantize, _) in qerl.FORMATS.items()},
           "nf4 double": (lambda weight: qerl.quantize_nf4(weight, double_quant=True), qerl.dequantize_nf4)}


def gaussian_layers(count=8, size=2048):
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        yield f"layer {i}", torch.randn(size, size, generator=generator)


def model_layers(folder):
    """(name, weight float32) of every linear layer of a Hugging Face folder."""
    files = qerl.Checkpoint(folder).files
    for name in files:
        if name.endswith("_proj.weight"):
            yield name, files[name].get_tensor(name).float()


def relative_errors(layers, device):
    """{format: (‖Ŵ - W‖ / ‖W‖ over all layers, stored bits a weight)}."""
    error, norm, bits, weights = dict.fromkeys(FORMATS, 0.0), 0.0, dict.fromkeys(FORMATS, 0), 0
    for _, weight in layers:
        weight = weight.to(device)
        norm, weights = norm + weight.double().square().sum().item(), weights + weight.numel()
        for name, (quantize, dequantize) in FORMATS.items():
            stored = quantize(weight.bfloat16() if name == "bf16" else weight)
            error[name] += (dequantize(*stored, torch.float32) - weight).double().square().sum().item()
            bits[name] += 8 * sum(t.nbytes for t in stored)
    return {name: ((error[name] / norm) ** 0.5, bits[name] / weights) for name in FORMATS}


def bench_formats(args):
    folder = qerl.model_folder(args.model) if args.model else warm_start()
    label = os.path.basename(os.path.normpath(args.model)) if args.model else "the built-in policy"
    gaussian, real = relative_errors(gaussian_layers(), args.device), relative_errors(model_layers(folder), args.device)
    rows = [{"format": name, "bits": gaussian[name][1], "gaussian": gaussian[name][0], "model": real[name][0]} for name in LABELS]
    print(f"| format | bits a weight | Gaussian | {label} |\n|---|---|---|---|")
    for row in rows:
        print(f"| {LABELS[row['format']]} | {row['bits']:.2f} | {row['gaussian']:.4f} | {row['model']:.4f} |")
    command = f"python bench.py formats --model {label}" if args.model else "python bench.py formats"
    return {"what": "relative error of quantised weights", "command": command, "model": label, "rows": rows}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["formats"])
    p.add_argument("--model")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", default="results")
    args = p.parse_args()
    try:
        result = {**bench_formats(args), **environment(args.device)}
        os.makedirs(args.out, exist_ok=True)
        qerl.atomic_write(f"{args.out}/{args.what}.json", json.dumps(result, indent=1))
    except qerl.UserError as e:
        sys.exit(fail(str(e)))


if __name__ == "__main__":
    main()
