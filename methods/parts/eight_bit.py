"""Linear layers that multiply 8-bit codes, weights and activations, for rollouts without gradient.

    t_n = max_i |x_ni| / M      p = round(x / t)     a scale for each row

M = 127 and integer sums ("int8"), or M = 448 and E4M3 with float sums ("fp8"); see
methods/flashrl.py, whose formulas these are.
"""
import contextlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import qerl
from harness.layers import TrainedLinear, replace_layers

LARGEST = {"int8": 127.0, "fp8": qerl.E4M3_MAX}
PLAIN = qerl.PackedWeight(None)        # attention and MLP ask a layer's weight for `interleaved`


def quantize_rows(x, format):
    """x [rows, columns] -> codes int8 or float8_e4m3fn of its shape, scale float32 [rows, 1]."""
    x = x.float()
    scale = (x.abs().amax(1, keepdim=True) / LARGEST[format]).clamp_min(1e-30)
    codes = (x / scale).clamp(-LARGEST[format], LARGEST[format])
    if format == "int8":
        return codes.round().to(torch.int8), scale
    return codes.to(torch.float8_e4m3fn), scale


def multiply_codes(x, x_scale, weight, weight_scale):
    """Codes [n, in] and [out, in] with scales [n, 1] and [out, 1] -> float32 or bfloat16 [n, out].

    A GPU's tensor cores multiply the codes as they are, integers with a sum of 32 bits. On a CPU
    the products are float64's, in which integers up to 2^53 are exact.
    """
    if not x.is_cuda:
        return (x.double() @ weight.double().T).float() * x_scale * weight_scale.T
    if x.dtype == torch.float8_e4m3fn:
        return torch._scaled_mm(x, weight.T, scale_a=x_scale, scale_b=weight_scale.T,
                                out_dtype=torch.bfloat16)
    padded = F.pad(x, (0, 0, 0, max(0, 32 - len(x))))          # the product takes more than 16 rows
    return torch._int_mm(padded, weight.T)[:len(x)] * x_scale * weight_scale.T


def current_weight(layer):
    """The weight [out, in] with which a QuantLinear trains now, LoRA merged, float32."""
    if isinstance(layer, TrainedLinear):
        return layer.master.detach()
    weight = layer.weight.dequantize(torch.float32)
    A, B = layer.lora(torch.float32)
    return weight if A is None else weight + (B @ A).detach()


class EightBitLinear(nn.Module):
    """A QuantLinear's layers, quantised as they are now: x [..., in] -> [..., out], no gradient."""
    weight = PLAIN

    def __init__(self, layer, format):
        super().__init__()
        self.sizes = layer.sizes
        self.bias = None if layer.bias is None else layer.bias.detach().float()
        self.format = format
        self.codes, self.scale = quantize_rows(current_weight(layer), format)
        whole = self.codes.shape[0] % 16 == 0 and self.codes.shape[1] % 16 == 0
        qerl.require(whole or not self.codes.is_cuda,
                     f"layer {layer.names[0]}: a GPU's 8-bit products need features divisible by "
                     "16; use --method qerl with this model")

    def forward(self, x):
        rows = x.flatten(0, -2)
        y = multiply_codes(*quantize_rows(rows, self.format), self.codes, self.scale).float()
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).unflatten(0, x.shape[:-1])

    def decode(self, x, residual=None):
        return self(x) if residual is None else self(x) + residual


@contextlib.contextmanager
def eight_bit(model, format):
    """Inside, the linear layers are the current ones quantised to "int8" or "fp8"."""
    places = replace_layers(model, partial(EightBitLinear, format=format))
    try:
        yield
    finally:
        for parent, name, layer in places:
            setattr(parent, name, layer)


def require_fp8_products(device, method, remedy):
    """Refuse a --method that multiplies in FP8 on a GPU that does not."""
    device = torch.device(device)
    able = device.type != "cuda" or (
        not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9))
    qerl.require(able, f"--method {method}: this GPU has no FP8 products, NVIDIA's have them from "
                       f"Ada and Hopper on; {remedy}")
