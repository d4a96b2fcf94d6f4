"""LoRA as tensors that come and go, its start by SVD, and a format coarse enough to need a start.

For methods/rilq.py.
"""
import torch

import qerl


def adapter(model):
    """A copy of what is trained: {name: tensor}."""
    return {name: p.detach().clone() for name, p in qerl.trainable(model).items()}


@torch.no_grad()
def put_adapter(model, tensors):
    for name, p in qerl.trainable(model).items():
        p.copy_(tensors[name])


def low_bit_format(bits):
    """A Format of 2 or 3 bits: 2^bits evenly spaced values of both signs, one scale to 16 weights.

    Half a step beside 0, as -3, -1, 1, 3 at 2 bits. A code takes a byte.
    """
    levels = 2 ** bits

    def quantize(weight):
        blocks = weight.unflatten(1, (-1, 16)).float()
        scale = blocks.abs().amax(-1).clamp_min(1e-12) / (levels - 1)
        codes = ((blocks / scale[..., None] + levels - 1) / 2).round().clamp(0, levels - 1)
        return codes.flatten(1).to(torch.uint8), scale, scale.new_ones(1)

    def dequantize(codes, scale, _global_scale, dtype):
        values = 2 * codes.float().unflatten(1, (-1, 16)) - (levels - 1)
        return (values * scale[..., None]).flatten(1).to(dtype)

    return qerl.Format(quantize, dequantize, block=16)


@torch.no_grad()
def svd_start(model, teacher):
    """Set each layer's LoRA to the best approximation of its own W - Ŵ (truncated SVD)."""
    for layer, exact in zip(model.quantized_layers(), teacher.quantized_layers()):
        error = exact.weight.dequantize(torch.float32) - layer.weight.dequantize(torch.float32)
        for i, rows in enumerate(error.split(layer.sizes)):
            U, S, Vh = torch.linalg.svd(rows, full_matrices=False)
            root = (S[:layer.rank] / (layer.alpha / layer.rank)).sqrt()
            first = sum(layer.sizes[:i])
            layer.lora_B[first:first + len(rows)] = U[:, :layer.rank] * root
            layer.lora_A[i * layer.rank:(i + 1) * layer.rank] = root[:, None] * Vh[:layer.rank]
