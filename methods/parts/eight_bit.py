"""Linear layers that multiply 8-bit codes, both of the weights and of their inputs.

    x ≈ p t,    t_n = max_i |x_ni| / M,    p = round(x / t)        a scale for each row
    y_no = t_n s_o Σ_i p_ni q_oi                                   W ≈ q s, likewise

"int8" has M = 127 and integer sums, "fp8" M = 448, E4M3 codes and float sums. methods/flashrl.py and
methods/qurl.py sample with such layers, methods/jetrl.py also trains with them. On a GPU cuBLAS
multiplies, and Triton quantises to FP8.
"""
import contextlib
from functools import partial

import torch
import torch.nn.functional as F

import qerl
from harness import fast
from harness.errors import require
from harness.layers import TrainedLinear, replace_layers

LARGEST = {"int8": 127.0, "fp8": qerl.E4M3_MAX}
SMALLEST_SCALE = 1e-30         # of a row of zeros, which is then not divided by 0


def quantize(x, format, whole=False):
    """x [rows, columns] -> codes int8 or float8_e4m3fn of its shape, scale float32 [rows, 1].

    whole: the scale is one, [1, 1], so that the transpose has the same codes.
    """
    if format == "fp8" and not whole and fast.use_kernels(x):
        return quantize_rows_fused(x)
    x = x.float()
    largest = x.abs().amax((0, 1) if whole else 1, keepdim=True)
    scale = (largest / LARGEST[format]).clamp_min(SMALLEST_SCALE)
    codes = (x / scale).clamp(-LARGEST[format], LARGEST[format])
    if format == "int8":
        return codes.round().to(torch.int8), scale
    return codes.to(torch.float8_e4m3fn), scale


def multiply(x, weight):
    """Codes and scales of x [n, in] and of weight [out, in] -> float32 or bfloat16 [n, out].

    A GPU's tensor cores multiply the codes themselves. They sum integers in 32 bits, and FP8 by fast
    accumulation, which keeps fewer bits. A CPU multiplies in float64, in which both sums are exact.
    """
    codes, scale = x
    weight_codes, weight_scale = weight
    weight_scale = weight_scale.T                                              # [1, out] or [1, 1]
    if not codes.is_cuda:
        return (codes.double() @ weight_codes.double().T).float() * scale * weight_scale
    if codes.dtype == torch.float8_e4m3fn:
        weight_scale = weight_scale.expand(1, len(weight_codes)).contiguous()
        return torch._scaled_mm(codes, weight_codes.T, scale, weight_scale, out_dtype=torch.bfloat16,
                                use_fast_accum=True)
    padded = F.pad(codes, (0, 0, 0, max(0, 32 - len(codes))))  # the product takes more than 16 rows
    return torch._int_mm(padded, weight_codes.T)[:len(codes)] * scale * weight_scale


class CodedWeight(fast.PackedWeight):
    """A weight [out, in] in "int8" or "fp8" that multiplies activations in the same format.

    parts: its codes and scales; see quantize. On a GPU both sizes have to be divisible by 16.
    """

    def __init__(self, weight, format, whole=False):
        super().__init__(format, *quantize(weight, format, whole))

    def multiply(self, x, bias=None, lora=None):
        y = multiply(quantize(x, self.format), self.parts).to(x.dtype)
        y = y if bias is None else y + bias.to(x.dtype)
        return y if lora is None else y.addmm_(x @ lora[0].T, lora[1].T)


# --------------------------------------------------------------------------------------------------
# Layers for rollouts

def current_weight(layer):
    """The weight [out, in] with which a QuantLinear trains now, LoRA merged, float32."""
    if isinstance(layer, TrainedLinear):
        return layer.master.detach()
    weight = layer.weight.dequantize(torch.float32)
    A, B = layer.lora(torch.float32)
    return weight if A is None else weight + (B @ A).detach()


class EightBitLinear(fast.QuantLinear):
    """The layers of a QuantLinear as they are now, in 8 bits: x [..., in] -> [..., out], no gradient."""

    def __init__(self, layer, format):
        weight = current_weight(layer)
        super().__init__(
            layer.names, layer.sizes, weight.shape[1], CodedWeight(weight, format), layer.bias)

    def forward(self, x):
        return self.weight.multiply(x.flatten(0, -2), self.bias).unflatten(0, x.shape[:-1])


@contextlib.contextmanager
def eight_bit(model, format):
    """Inside, the linear layers are the current ones quantised to "int8" or "fp8"."""
    places = replace_layers(model, partial(EightBitLinear, format=format))
    try:
        yield
    finally:
        for parent, name, layer in places:
            setattr(parent, name, layer)


def require_fp8_products(settings):
    """Refuse a GPU that has no FP8 products, which this --method needs."""
    device = torch.device(settings.device)
    able = device.type != "cuda" or (
        not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9))
    require(able, f"--method {settings.method}: this GPU has no FP8 products, NVIDIA's have them "
                       "from Ada and Hopper on; use --method flashrl:int8 or qerl")


# --------------------------------------------------------------------------------------------------
# On a GPU: one pass through memory, where PyTorch takes several

def quantize_rows_fused(x, dtype=torch.float8_e4m3fn):
    """quantize to FP8 with a scale for each row; the lines there are its twin.

    dtype: float32 leaves the codes unrounded, since Triton's interpreter rounds wrongly.
    """
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(len(x), 1, device=x.device)
    quantize_kernel[(len(x),)](x.contiguous(), codes, scale, x.shape[1], SMALLEST=SMALLEST_SCALE,
                               BLOCK=4096, num_warps=8)
    return codes, scale


if fast.kernels is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def quantize_kernel(x, codes, scale, columns, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
        """Each program reads a row twice: for its scale, and from the cache for its codes."""
        row = tl.program_id(0).to(tl.int64)
        x += row * columns
        codes += row * columns
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            v = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(v))
        s = tl.maximum(tl.div_rn(tl.max(largest, 0), 448.0), SMALLEST)
        tl.store(scale + row, s)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            v = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
            v = tl.div_rn(v, tl.zeros_like(v) + s)
            tl.store(codes + column, v.to(codes.dtype.element_ty), mask=column < columns)
