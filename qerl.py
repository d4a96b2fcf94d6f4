"""QeRL in one file: reinforcement learning for LLMs on frozen 4-bit weights.

Equations, tables and algorithms cited here are those of "QeRL: Beyond Efficiency -
Quantization-enhanced Reinforcement Learning for LLMs", arXiv 2510.11696. The file reads top to
bottom, from a weight's 4 bits up to the loss:

    1. Formats            NVFP4: 4-bit codes, block scales, one global scale               Eq. 6
    2. Quantised linear   a frozen packed weight with trainable LoRA                       Eq. 2
    3. Noisy RMSNorm      quantisation noise as annealed exploration, merged in the norm   Eq. 7-10
    4. Transformer        Qwen2/2.5, Qwen3 and Llama 3
    5. Sampler            KV cache, groups of completions for each prompt
    6. Objectives         GRPO and five others: advantages, loss; mismatch                 Eq. 3-4

    and what a first reading may skip:
    7. Log-probabilities of a batch, in which a prompt that completions share is computed once
    8. Loading

Letters in shape comments: B sequences, T tokens, S tokens packed in a line, V vocabulary, d model
width, P prompts, G samples per prompt, N = P * G completions, and C tokens, the longest completion.
In section 2 A and B are LoRA's matrices, r their rank, n tokens of any sequences, one a row, and
layers the number of linear layers that are stacked into one.
"""
import contextlib
import functools
import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import huggingface_hub
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute        # gradient checkpointing
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

try:
    import fp4_kernels as kernels
except ImportError:            # the file is not there, or Triton is not, or the GPU is not NVIDIA's
    kernels = None


def use_kernels(x):
    """Whether this tensor is for a Triton kernel; if not, PyTorch computes the same.

    A function that has a kernel asks this in its first line. What follows is its PyTorch.
    """
    return kernels is not None and kernels.runs_on(x.device, x.dtype)


# --------------------------------------------------------------------------------------------------
# 1. Formats                                     Ŵ = S_FP32 · (S_E4M3 ⊙ W̃)                (Eq. 6)
#
# In NVFP4 a weight is 4 bits: a sign and one of eight magnitudes (E2M1: 2 exponent bits, 1
# mantissa bit). Each 16 neighbours along the input dimension share an FP8 (E4M3) scale, and each
# tensor one FP32 scale: 4 + 8/16 = 4.5 bits a weight. Rounding here is to nearest, as in the paper's
# public checkpoints. Its experiments choose codes by calibration, AWQ's (methods/awq.py); training a
# real model here does so by GPTQ (methods/gptq.py), and reads the codes from a folder (section 8).

E2M1_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])  # the value of each code; bit 3 is the sign
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# Halfway points between neighbouring magnitudes, point i between codes i and i + 1. bucketize gives
# a value on point i the lower code, i. A tie must go to the even code: at the points of odd index
# (0.75, 1.75, 3.5) that is the upper one, so they are moved down by the smallest possible step.
E2M1_BOUNDS = (E2M1_MAGNITUDES[1:] + E2M1_MAGNITUDES[:-1]) / 2
E2M1_BOUNDS[1::2] = torch.nextafter(E2M1_BOUNDS[1::2], torch.zeros(3))

# QLoRA's NF4 (arXiv 2305.14314, appendix E): quantiles of N(0, 1), 7 below and 8 above an exact
# 0, divided by the largest.
NF4 = torch.tensor([
    -1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1,
])


def pack_nibbles(codes):
    """4-bit codes uint8 [out, in] -> bytes uint8 [out, in/2], the even index in the low nibble."""
    return codes[:, ::2] | codes[:, 1::2] << 4


@functools.lru_cache
def table_on(table, device):
    """A constant table on a device, copied there once."""
    return table.to(device)


def dequantize_blocks(packed, table, scale, dtype):
    """Bytes uint8 [out, in/2] -> weight [out, in]: the table's value of each code, times its scale.

    table: float32 [16]; scale: float32 [out, in/block].
    """
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).int()                # [out, in/2, 2]
    values = table_on(table, packed.device)[codes]
    return (values.view(*scale.shape, -1) * scale[..., None]).flatten(1).to(dtype)


def encode_e2m1(weight, scale):
    """Round weight [out, in] / scale float32 [out, in/block] to E2M1 -> packed uint8 [out, in/2].

    To the nearest magnitude, ties to the even code; what is beyond 6 becomes 6.
    """
    if use_kernels(weight):
        return kernels.encode_e2m1(weight, scale)
    blocks = weight.unflatten(1, (scale.shape[1], -1)).float()
    x = (blocks / scale[..., None]).flatten(1)
    magnitude = torch.bucketize(x.abs(), E2M1_BOUNDS.to(x.device))
    return pack_nibbles((magnitude + 8 * (x < 0)).to(torch.uint8))


def quantize_nvfp4(weight):
    """Round to NVFP4, byte for byte as compressed-tensors' "nvfp4-pack-quantized" (weights only).

    weight [out, in], in divisible by 16. Returns packed uint8 [out, in/2], block_scale
    float8_e4m3fn [out, in/16] and global_scale float32 [1], which by that format's convention is
    the reciprocal of Eq. 6's S_FP32. As in compressed-tensors, what the scales are made of is
    computed in the weight's own dtype.
    """
    if weight.dtype == torch.float16:
        weight = weight.float()                        # float16 cannot hold every global scale
    amax = weight.unflatten(1, (-1, 16)).abs().amax(-1)                          # [out, in/16]
    # The largest block scale becomes 448, and the largest weight of a block 6.
    global_scale = (E4M3_MAX * E2M1_MAX / amax.max()).float()
    global_scale = global_scale.nan_to_num(nan=1.0, posinf=1.0).reshape(1)       # inf: all are zeros
    scale = (global_scale * (amax / E2M1_MAX)).clamp(max=E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float()
    # By that format (nearly) empty blocks get E4M3's epsilon, 0.125.
    scale = torch.where(scale == 0, torch.finfo(torch.float8_e4m3fn).eps, scale)
    packed = encode_e2m1(weight, scale / global_scale)
    return packed, scale.to(torch.float8_e4m3fn), global_scale


def powers_of_two(e8m0):
    """What the bytes of the format E8M0 stand for, float32."""
    return torch.exp2(e8m0.float() - 127)


def quantize_mxfp4(weight):
    """OCP Microscaling FP4: E2M1 codes, a power of two (E8M0) as the scale of each 32 weights.

    weight [out, in], in divisible by 32 -> packed uint8 [out, in/2], block_scale uint8 [out,
    in/32], global_scale [1], which is 1.
    """
    amax = weight.unflatten(1, (-1, 32)).float().abs().amax(-1)
    # amax = mantissa * 2^exponent with 0.5 <= mantissa < 1, and the largest code is 6 = 1.5 * 2^2: the
    # scale is 2^(exponent - 3), stored with a bias of 127. What would round to 8 = 2^3 takes the next.
    mantissa, exponent = torch.frexp(amax)
    e8m0 = (127 + exponent - 3 + (mantissa >= 0.875)).clamp(0, 254).to(torch.uint8)
    packed = encode_e2m1(weight, powers_of_two(e8m0))
    return packed, e8m0, amax.new_ones(1)


def quantize_nf4(weight):
    """QLoRA's NF4: the nearest of 16 normal quantiles, times the largest magnitude of 64 weights.

    weight [out, in], in divisible by 64 -> packed uint8 [out, in/2], block_scale float32 [out,
    in/64], global_scale [1], which is 1.
    """
    blocks = weight.unflatten(1, (-1, 64)).float()
    absmax = blocks.abs().amax(-1)
    scaled = blocks * (1 / absmax.clamp_min(1e-38))[..., None]            # as bitsandbytes rounds
    bounds = ((NF4[1:] + NF4[:-1]) / 2).to(weight.device)
    codes = torch.bucketize(scaled, bounds).to(torch.uint8)
    return pack_nibbles(codes.flatten(1)), absmax, absmax.new_ones(1)


def keep_16_bit(weight):
    """Not quantised: the weight, and two scales that nothing reads.

    "bf16" is whatever the model computes in: bfloat16 on a GPU, float32 on a CPU.
    """
    one = weight.new_ones(1)
    return weight, one, one


@dataclass(eq=False)
class Format:
    """A way to store a weight [out, in] as (packed, block_scale, global_scale).

    One whose codes have more than 4 bits has a `dequantize` of its own, in a subclass.
    """
    quantize: Callable               # weight -> the three
    block: int                       # input features that share a scale; `in` is divisible by it
    table: torch.Tensor = None       # float32 [16], the value of each code; None: there are no codes
    scale: Callable = torch.Tensor.float         # block_scale -> float32 [out, in/block]
    tiled: bool = False              # whether fp4_kernels knows its codes

    def pack(self, weight):
        """A weight [out, in] as an object that can multiply."""
        return PackedWeight(self, *self.quantize(weight))

    def dequantize(self, packed, block_scale, global_scale, dtype):
        """Eq. 6: the three -> weight [out, in] in dtype; global_scale may be [1] or [out, 1]."""
        if self.table is None:
            return packed.to(dtype)
        scale = self.scale(block_scale) / global_scale
        return dequantize_blocks(packed, self.table, scale, dtype)

    def tile(self, packed, block_scale, global_scale):
        """The three in the order in which the GPU's kernels read them (fp4_kernels.py, section 2).

        NVFP4's and MXFP4's are kept exactly; NF4's scales are rounded to bfloat16.
        """
        scale = self.scale(block_scale)
        if self.block == 32:
            scale = scale.repeat_interleave(2, 1)                     # one for each 16
        return kernels.tile(packed, scale, 1 / global_scale, self.table, nf4=self.block == 64)


FORMATS = {
    "nvfp4": Format(quantize_nvfp4, 16, E2M1, tiled=True),
    "mxfp4": Format(quantize_mxfp4, 32, E2M1, powers_of_two, tiled=True),
    "nf4": Format(quantize_nf4, 64, NF4, tiled=True),
    "bf16": Format(keep_16_bit, 1),
}


# --------------------------------------------------------------------------------------------------
# 2. Quantised linear with LoRA                  y = x Ŵᵀ + b + (α/r) · (x Aᵀ) Bᵀ          (Eq. 2)
#
# Ŵ is frozen and stays packed; only A [r, in] and B [out, r] are trained. B starts at zero, so
# that training starts at the quantised model. Layers that read the same input (q, k, v; gate, up)
# are stacked into one: one product with one packed weight instead of three, each piece with its
# own A, B and global scale.

class PackedWeight:
    """A frozen weight [out, in] as its format stores it. To multiply, it is dequantised whole.

    On a GPU that computes in bfloat16 fp4_kernels.TiledWeight takes its place if the sizes fit its
    tiles: it multiplies the codes without that detour.
    """
    # Only TiledWeight has True here. It stores its columns in the order in which the GPU's threads
    # take them, and so the columns of x have to be in that order, too. In decoding the kernels of norm,
    # attention and silu_mul write x "interleaved" for it. On a CPU it is always False.
    interleaved = False

    def __init__(self, format, *parts):
        self.format = format
        self.parts = parts         # packed, block_scale, global_scale

    def dequantize(self, dtype):
        """The whole weight [out, in], a temporary."""
        return self.format.dequantize(*self.parts, dtype)

    def multiply(self, x, bias=None, residual=None, lora=None):
        """x [n, in] -> x Ŵᵀ + bias + LoRA + residual, [n, out]; without gradient.

        lora: (A, B'), see QuantLinear.lora.
        """
        h = x @ lora[0].T if lora else None
        weight = self.dequantize(x.dtype)
        if residual is None:
            y = F.linear(x, weight, bias)
        else:
            y = torch.addmm(residual, x, weight.T)
            if bias is not None:
                y += bias
        return y if h is None else y.addmm_(h, lora[1].T)


class FrozenLinear(torch.autograd.Function):
    """x [n, in] and LoRA's A and B' (QuantLinear.lora) -> y = x Ŵᵀ + b + (x Aᵀ) B'ᵀ, [n, out].

    layer: the QuantLinear; A and B' are None without LoRA.

    Autograd alone would keep the dequantised Ŵ of every layer until backward. This dequantises it
    again there, unless the block is recomputed just before (Transformer.recompute_in_backward). Ŵ
    has no gradient.

    LoRA's products are thin: they take the time of reading and writing x and y. The wider of the two
    is therefore not written twice: LoRA joins the product with Ŵ, as [x, h] [Ŵ, B']ᵀ with h = x Aᵀ.
    """

    @staticmethod
    def forward(ctx, x, A, B, layer):
        weight = layer.weight.dequantize(x.dtype)
        h = None if A is None else x @ A.T                                       # [n, layers * r]
        ctx.layer = layer
        ctx.save_for_backward(x, h, A, B, weight if layer.keep_dequantized else None)
        # The second forward of recompute_in_backward (the first has no gradients) only saves anew what
        # backward needs. `down` is a block's last product, whose value nobody reads then.
        if layer.output_unread and ctx.needs_input_grad[0]:
            return x.new_zeros(len(x), len(weight))
        if h is not None and weight.shape[0] > weight.shape[1]:
            return F.linear(torch.cat([x, h], 1), torch.cat([weight, B], 1), layer.bias)
        y = F.linear(x, weight, layer.bias)
        return y if h is None else y.addmm_(h, B.T)

    @staticmethod
    def backward(ctx, grad):
        x, h, A, B, weight = ctx.saved_tensors
        if weight is None:
            weight = ctx.layer.weight.dequantize(grad.dtype)
        if h is None:
            return grad @ weight, None, None, None
        grad_h = grad @ B
        if weight.shape[0] > weight.shape[1]:
            grad_x = (grad @ weight).addmm_(grad_h, A)
        else:
            grad_x = torch.cat([grad, grad_h], 1) @ torch.cat([weight, A])
        return grad_x, grad_h.T @ x, grad.T @ h, None


class QuantLinear(nn.Module):
    """Linear layers over one input, frozen, with LoRA (Eq. 2): x [..., in] -> [..., out].

    names: the layers' names in the checkpoint; sizes: their out_features; weight: those of all
    layers, stacked along out, a PackedWeight or fp4_kernels.TiledWeight; bias [out] or None. lora_A
    [layers * r, in] and lora_B [out, r] are float32 and move with .to(); weight and bias are no
    buffers and stay on the device that they were made on. lora_alpha defaults to the rank.
    """

    # Both are set by Transformer.recompute_in_backward.
    keep_dequantized = False       # from a block's second forward to its backward
    output_unread = False          # True of the MLP's down

    def __init__(self, names, sizes, in_features, weight, bias, lora_rank=0, lora_alpha=None):
        super().__init__()
        self.names = names
        self.sizes = sizes
        self.weight = weight
        self.bias = bias
        self.rank = lora_rank
        self.alpha = lora_rank if lora_alpha is None else lora_alpha
        self.use_adapter = lora_rank > 0
        if lora_rank:
            # As PEFT starts A: kaiming_uniform(a=√5). Drawn on the CPU, so that a seed gives the same
            # A on any device.
            bound = in_features ** -0.5
            A = torch.empty(len(sizes) * lora_rank, in_features).uniform_(-bound, bound)
            self.lora_A = nn.Parameter(A)
            self.lora_B = nn.Parameter(torch.zeros(sum(sizes), lora_rank))

    def lora(self, dtype):
        """(A, B') for one product (x Aᵀ) B'ᵀ; None, None without LoRA.

        A [layers * r, in] is multiplied by α/r; in B' [out, layers * r] each layer's piece of
        B [out, r] is a block on the diagonal.
        """
        if not self.use_adapter:
            return None, None
        A = self.lora_A if self.alpha == self.rank else self.alpha / self.rank * self.lora_A
        B = self.lora_B.to(dtype)
        if len(self.sizes) > 1:
            B = torch.block_diag(*B.split(self.sizes))
        return A.to(dtype), B

    def forward(self, x):
        rows = x.flatten(0, -2)
        return FrozenLinear.apply(rows, *self.lora(x.dtype), self).unflatten(0, x.shape[:-1])

    def prepare_decoding(self, dtype):
        """Before each rollout: bring LoRA into the form in which `decode` takes it."""
        if not self.use_adapter:
            self.decode_lora = None
        elif self.weight.interleaved:
            self.decode_lora = self.weight.prepare_lora(
                self.lora_A, self.lora_B, self.sizes, self.alpha / self.rank, dtype)
        else:
            self.decode_lora = self.lora(dtype)

    def decode(self, x, residual=None):
        """forward(x) + residual, without gradient; x [slots, in], interleaved if the weight is."""
        return self.weight.multiply(x, self.bias, residual, self.decode_lora)


# --------------------------------------------------------------------------------------------------
# 3. RMSNorm with Adaptive Quantization Noise                                           (Eq. 7-10)
#
#    RMSNorm_noise(x) = w_noise ⊙ x / √(mean(x²) + δ),     w_noise = w + Z,     Z ~ N(0, σ²)
#    σ_k = σ_start (σ_end / σ_start)^((k-1) / (K-1))        in noisy stage k of K          (Eq. 8)
#
# w + Z scales the input channels of the layers that read the norm (q, k, v; gate, up), which is
# the same as multiplying each input channel of their weights by 1 + Z/w (appendix G): parameter
# noise, for one addition per rollout. The paper's text names the two norms of a block; its code
# takes every RMSNorm of Qwen2 and Llama, the final one, too. Ours takes every RMSNorm: that
# Qwen3's norms of q and k are noisy is our choice.

class RMSNorm(nn.Module):
    """x [..., size] -> normalised x, same dtype; computed in float32.

    noisy_weight is w + Z during a rollout, else None.
    """

    def __init__(self, name, weight, eps, trainable=False):
        super().__init__()
        self.name = name
        self.eps = eps
        self.noisy_weight = None
        self.weight = nn.Parameter(weight.float(), requires_grad=trainable)

    @property
    def scale(self):
        return self.weight if self.noisy_weight is None else self.noisy_weight

    def forward(self, x, interleaved=False):
        """interleaved: for a layer that reads the result so, see PackedWeight."""
        if use_kernels(x):
            return kernels.rms_norm(x, self.scale, self.eps, interleaved)
        return F.rms_norm(x.float(), x.shape[-1:], self.scale, self.eps).to(x.dtype)

    def branch(self, x, added=None):
        """(x + added, its norm)."""
        if use_kernels(x):
            return kernels.norm_branch(x, added, self.scale, self.eps)
        x = x if added is None else x + added
        return x, self(x)


@contextlib.contextmanager
def adaptive_quantization_noise(model, sigma, generator=None):
    """AQN: inside, every RMSNorm scale carries one fresh draw of noise, w + N(0, sigma²).

    Eq. 10. Wrap one rollout in it, as Algorithm 1 does in line 9 (the text before Eq. 7 draws anew
    for each forward pass); log-probabilities and updates run outside. Not to be nested. generator:
    on the CPU.
    """
    norms = [m for m in model.modules() if isinstance(m, RMSNorm)]
    for norm in norms:
        z = torch.randn(norm.weight.shape, generator=generator).to(norm.weight.device)
        norm.noisy_weight = norm.weight.detach() + sigma * z
    try:
        yield
    finally:
        for norm in norms:
            norm.noisy_weight = None


# σ of a noisy stage (Figure 9): p is 0 in the first of the K noisy stages and 1 in the last.
SCHEDULES = {
    "exponential": lambda start, end, p, K: start * (end / start) ** p,                        # Eq. 8
    "linear": lambda start, end, p, K: start + (end - start) * p,
    "cosine": lambda start, end, p, K: start + (end - start) * (1 - math.cos(math.pi * p)) / 2,
    "logarithmic": lambda start, end, p, K:
        start + (end - start) * math.log(1 + p * (K - 1)) / math.log(max(K, 2)),
}


def noise_sigma(step, steps, stages=10, start=1e-2, end=5e-4, schedule="exponential"):
    """σ of 0-based `step`: training is cut into `stages` equal parts, and the first has no noise.

    The K = stages - 1 others fall from start to end by a name in SCHEDULES. Ten stages have 0, 0.01,
    0.0069, 0.0047, ..., 0.0005. Of two stages the noisy one has `start`. With fewer steps than stages
    some are skipped, perhaps that of `start` or `end`. "exponential" needs start and end positive, or
    both 0.
    """
    # Eq. 8's K is here the number of noisy stages, so that the last has `end`, as in the authors' code.
    # Algorithm 1's line 7 takes all stages, and would stop short of it; appendix F ends at σ_start.
    stage = step * stages // steps
    if stage == 0:
        return 0.0
    if start == end:
        return start
    K = stages - 1
    return SCHEDULES[schedule](start, end, (stage - 1) / max(K - 1, 1), K)


# --------------------------------------------------------------------------------------------------
# 4. Transformer: Qwen2/Qwen2.5, Qwen3, Llama 3
#
# A module's `forward` (the whole model's: `hidden`) takes whole sequences, to train on and as
# prompts. `decode` takes one new token of every slot of the sampler, without gradient. Both
# compute the same, from the same packed weights. checkpoint.linear and checkpoint.norm hand out the
# layers with their weights (section 8).

# cuDNN's attention needs 0.1 s to prepare a new shape [B, T], and hardly two batches have the same one.
# PyTorch takes another of its attention kernels instead.
torch.backends.cuda.enable_cudnn_sdp(False)


def rope_frequencies(config, head_dim):
    """(frequencies [head_dim/2] in radians per position, a factor on cos and sin)."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device="cpu")
    return rope["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim), 1.0


def rotary(x, cos, sin):
    """Rotary embedding of x [..., T, heads, D]; cos, sin [T, D].

    Each pair (x[i], x[i + D/2]) is turned by an angle of its own.
    """
    if use_kernels(x):
        return kernels.rotary(x, cos, sin)
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]


def silu_mul(gate_up, interleaved=False):
    """gate_up [..., 2n] -> silu(gate) * up [..., n]."""
    if use_kernels(gate_up):
        return kernels.silu_mul(gate_up, interleaved)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def causal_attention(q, k, v, layer=None):
    """q [B, T, heads, D], k and v [B, T, kv_heads, D] -> y [B, T, heads, D].

    Each token attends to those up to itself in its row. KVCache.prefill, which asks for the number
    of the layer, and packed_attention take the place of this function.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def decode_attention(qkv, cos, sin, cache, layer, interleaved=False):
    """Put one token of each slot into a layer's cache and attend to all that are there.

    qkv [slots, (heads + 2 kv_heads) * D] of the new tokens; cos, sin [slots, D] of their positions.
    Returns [slots, heads * D].
    """
    kv_cache = cache.layers[layer]
    filled = cache.filled
    if use_kernels(qkv):
        return kernels.decode_attention(qkv, cos, sin, kv_cache, filled, interleaved)
    _, slots, kv_heads, _, D = kv_cache.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    q, k, v = qkv.view(slots, -1, D).split([heads, kv_heads, kv_heads], 1)       # [slots, heads, D]
    slot = torch.arange(slots, device=qkv.device)
    kv_cache[0, slot, :, filled] = rotary(k, cos, sin)
    kv_cache[1, slot, :, filled] = v

    length = filled + 1
    k, v = kv_cache[:, :, :, :length.max()]                                      # of all tokens so far
    there = length_mask(length, k.shape[2])[:, None, None]                       # [slots, 1, 1, longest]
    q = rotary(q, cos, sin)[:, :, None]                                          # [slots, heads, 1, D]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=there, enable_gqa=True)
    return y.flatten(1)


class Attention(nn.Module):
    """Grouped-query attention: several heads of q share one of k and v."""

    def __init__(self, config, checkpoint, name, index):
        super().__init__()
        self.index = index
        d = config.hidden_size
        self.head_dim = getattr(config, "head_dim", None) or d // config.num_attention_heads
        q = config.num_attention_heads * self.head_dim
        kv = config.num_key_value_heads * self.head_dim
        bias = getattr(config, "attention_bias", False)
        qkv_bias = bias or config.model_type == "qwen2"
        self.qkv = checkpoint.linear(name, ["q_proj", "k_proj", "v_proj"], [q, kv, kv], d, qkv_bias)
        self.o = checkpoint.linear(name, ["o_proj"], [d], q, bias)
        norm = checkpoint.norm if config.model_type == "qwen3" else nn.Identity
        # Qwen3 alone has these two norms; Identity takes any arguments.
        self.q_norm = norm(f"{name}.q_norm", self.head_dim, config.rms_norm_eps)
        self.k_norm = norm(f"{name}.k_norm", self.head_dim, config.rms_norm_eps)

    def heads(self, qkv):
        """q, k, v [..., heads, head_dim] of the stacked projections [..., q + k + v]."""
        return (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.split(self.qkv.sizes, -1))

    def forward(self, x, rope, attend=causal_attention):
        """x [B, T, d] -> [B, T, d]; rope = (cos, sin), each [T, head_dim]."""
        q, k, v = self.heads(self.qkv(x))                                # [B, T, heads, head_dim]
        q = rotary(self.q_norm(q), *rope)
        k = rotary(self.k_norm(k), *rope)
        return self.o(attend(q, k, v, self.index).flatten(2))

    def decode(self, x, rope, cache, residual):
        """forward(x) + residual for one new token of each slot, [slots, d], which enters the cache."""
        qkv = self.qkv.decode(x)
        if isinstance(self.q_norm, RMSNorm):
            q, k, v = self.heads(qkv)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], 1).flatten(1)
        # Turns q and k by rope, puts k and v at place cache.filled, and attends to all up to it.
        y = decode_attention(qkv, *rope, cache, self.index, self.o.weight.interleaved)
        return self.o.decode(y, residual)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config, checkpoint, name):
        super().__init__()
        d = config.hidden_size
        inner = config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_up = checkpoint.linear(name, ["gate_proj", "up_proj"], [inner, inner], d, bias)
        self.down = checkpoint.linear(name, ["down_proj"], [d], inner, bias)

    def forward(self, x):
        return self.down(silu_mul(self.gate_up(x)))

    def decode(self, x, residual):
        """forward(x) + residual for one new token of each slot, [slots, d]."""
        gate_up = self.gate_up.decode(x)
        y = silu_mul(gate_up, self.down.weight.interleaved)
        return self.down.decode(y, residual)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config, checkpoint, name, index):
        super().__init__()
        d = config.hidden_size
        eps = config.rms_norm_eps
        self.attention_norm = checkpoint.norm(f"{name}.input_layernorm", d, eps)
        self.attention = Attention(config, checkpoint, f"{name}.self_attn", index)
        self.mlp_norm = checkpoint.norm(f"{name}.post_attention_layernorm", d, eps)
        self.mlp = MLP(config, checkpoint, f"{name}.mlp")

    def forward(self, x, rope, attend=causal_attention):
        x, y = self.attention_norm.branch(x)
        x, y = self.mlp_norm.branch(x, self.attention(y, rope, attend))
        return x + self.mlp(y)

    def decode(self, x, rope, cache):
        """forward for one new token of each slot, x [slots, d].

        On Hopper these are eight kernels (Qwen2.5, to 128 slots and rank 128).
        """
        y = self.attention_norm(x, self.attention.qkv.weight.interleaved)
        x = self.attention.decode(y, rope, cache, residual=x)
        y = self.mlp_norm(x, self.mlp.gate_up.weight.interleaved)
        return self.mlp.decode(y, residual=x)


class Transformer(nn.Module):
    """model(tokens int64 [B, T]) -> logits [B, T, V]. config: transformers'; checkpoint: a Checkpoint."""

    def __init__(self, config, checkpoint):
        check_config(config)
        super().__init__()
        self.config = config
        self.recompute_blocks = 0                      # how many, from the first on
        shape = (config.vocab_size, config.hidden_size)
        self.register_buffer("embedding", checkpoint.tensor("model.embed_tokens.weight", shape))
        tied = config.tie_word_embeddings
        self.register_buffer(
            "lm_head", self.embedding if tied else checkpoint.tensor("lm_head.weight", shape))
        self.blocks = nn.ModuleList(
            Block(config, checkpoint, f"model.layers.{i}", i) for i in range(config.num_hidden_layers)
        )
        self.norm = checkpoint.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.reference = {name: p.detach().clone() for name, p in trainable(self).items()
                          if "lora" not in name}       # see adapters_off
        frequencies, self.rope_factor = rope_frequencies(config, self.blocks[0].attention.head_dim)
        self.register_buffer("frequencies", frequencies.to(self.device))

    def rope(self, positions, dtype):
        """cos and sin of int64 positions [...], each [..., head_dim]."""
        angles = positions[..., None] * self.frequencies
        angles = torch.cat([angles, angles], -1)
        cos = angles.cos() * self.rope_factor
        sin = angles.sin() * self.rope_factor
        return cos.to(dtype), sin.to(dtype)

    def hidden(self, tokens, attend=causal_attention, position=None):
        """tokens int64 [B, T] -> final hidden states [B, T, d].

        attend: causal_attention or what takes its place. position: int64 [T]; by default 0, 1, ...
        """
        recomputing = self.recompute_blocks if torch.is_grad_enabled() else 0
        x = F.embedding(tokens, self.embedding)
        if recomputing:
            x.requires_grad_()     # reentrant recomputation gives a gradient only if its input asks
        if position is None:
            position = torch.arange(tokens.shape[1], device=tokens.device)
        rope = self.rope(position, x.dtype)
        for i, block in enumerate(self.blocks):
            if i < recomputing:
                # use_reentrant=False, today's default, hooks every tensor: twice the host's work.
                x = recompute(
                    block, x, rope, attend, use_reentrant=True, preserve_rng_state=False)
            else:
                x = block(x, rope, attend)
        return self.norm(x)

    def decode(self, tokens, cache):
        """The next token of every slot, int64 [slots], at cache.filled -> hidden states [slots, d]."""
        x = F.embedding(tokens, self.embedding)
        rope = self.rope(cache.filled, x.dtype)
        for block in self.blocks:
            x = block.decode(x, rope, cache)
        return self.norm(x)

    def recompute_in_backward(self, blocks=None):
        """Gradient checkpointing: the first `blocks`, or all, keep only their input.

        In backward a block runs forward again, is differentiated and freed. Its dequantised
        weights live from this second forward to the end of its backward, so that each is
        dequantised once a pass. Gradients then come from .backward() without `inputs`, not from
        autograd.grad. Nobody reads the last product of the second forward, that of `down`: no
        gradient depends on it, and it is left out.
        """
        self.recompute_blocks = len(self.blocks) if blocks is None else blocks
        for i, block in enumerate(self.blocks):
            recomputed = i < self.recompute_blocks
            block.mlp.down.output_unread = recomputed
            for layer in (block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down):
                layer.keep_dequantized = recomputed

    def quantized_layers(self):
        return [m for m in self.modules() if isinstance(m, QuantLinear)]

    def forward(self, tokens):
        return F.linear(self.hidden(tokens), self.lm_head)

    @property
    def device(self):
        return self.embedding.device


def trainable(model):
    """{name: parameter} of what the optimiser moves, in a fixed order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# --------------------------------------------------------------------------------------------------
# 5. Sampler
#
# This is continuous batching. All slots decode together, a completion each. One that is done leaves
# its slot idle: it decodes on from an empty cache, and what it writes goes to a spare row. Once G
# slots are idle the next prompt takes them: its keys and values are computed once and copied to all.
# Once no prompt waits and half of the slots are idle, the other half goes on alone (from 32 slots
# on). Everything that a decode step needs lives in tensors of fixed shape on the device, so that on a
# GPU the whole step is one recorded CUDA graph (all its kernels, started by one launch), and the host
# looks at the slots only every 8 tokens.

IDLE = -1                  # in place of a slot's completion; as an index it is the spare last row
PREFILL_TOKENS = 32768     # of prompts that enter together, in one pass


class KVCache:
    """Keys and values of every slot; filled int64 [slots]: how many positions each holds.

    layers: of each layer a tensor [2, slots, kv_heads, max_len, head_dim], keys then values.
    """

    def __init__(self, model, slots, max_len):
        head_dim = model.blocks[0].attention.head_dim
        shape = 2, slots, model.config.num_key_value_heads, max_len, head_dim
        self.layers = [model.embedding.new_zeros(shape) for _ in model.blocks]
        self.filled = torch.zeros(slots, dtype=torch.long, device=model.device)

    def prefill(self, q, k, v, layer, into_slots):
        """causal_attention of P prompts; k and v of prompt p go to into_slots[p * G:(p + 1) * G].

        The padding of shorter prompts lies behind `filled`, where nothing looks.
        """
        groups = into_slots.view(len(k), -1)                                     # [P, G]
        kv = torch.stack([k, v]).transpose(2, 3)               # [2, P, kv_heads, T, head_dim]
        self.layers[layer][:, groups, :, :k.shape[1]] = kv[:, :, None]           # the same for each of G
        return causal_attention(q, k, v)

    def keep(self, slots):
        """Forget all slots but these, int64 [fewer]; layer by layer, so there is never a second cache."""
        self.filled = self.filled[slots]
        for i, kv in enumerate(self.layers):
            self.layers[i] = kv[:, slots]


@dataclass
class Rollout:
    """N completions, padded to C tokens, in the order of the prompts, group_size of each."""
    tokens: torch.Tensor           # int64 [N, C]
    logprobs: torch.Tensor         # float32 [N, C], of the tokens, at the sampling temperature
    entropy: torch.Tensor          # float32 [N, C], of the policy at each token, in nats
    length: torch.Tensor           # int64 [N]
    finished: torch.Tensor         # bool [N]: ended by an EOS token

    @property
    def mask(self):
        """bool [N, C], True at sampled tokens (the EOS included)."""
        return length_mask(self.length, self.tokens.shape[1])


def length_mask(length, longest):
    """length int64 [N] -> bool [N, longest], True at the first `length` places of each row."""
    return torch.arange(longest, device=length.device) < length[:, None]


def nucleus(probs, top_p, count=1024):
    """Zero all but the smallest set of tokens whose probability reaches top_p; probs [B, V].

    To sort all tokens would take most of a rollout's time: the `count` likeliest mostly suffice.
    """
    ordered, index = probs.topk(min(count, probs.shape[1]))
    total = ordered.cumsum(-1)
    if count < probs.shape[1] and (total[:, -1] < top_p).any():
        return nucleus(probs, top_p, probs.shape[1])
    ordered[total - ordered >= top_p] = 0              # where all likelier tokens have top_p already
    return torch.zeros_like(probs).scatter(-1, index, ordered)


def sample(logits, temperature=1.0, top_p=1.0, generator=None):
    """logits [B, V] -> token int64 [B], its log-probability and the entropy, float32 [B] in nats.

    Log-probability and entropy belong to softmax(logits / temperature), before top_p cuts it. At
    temperature 0 the likeliest token is taken, and they belong to temperature 1. A token is drawn by
    an exponential race: for E_i ~ Exp(1), argmax p_i / E_i is i with probability p_i / Σ p (in
    logarithms this is the Gumbel-max trick). Unlike torch.multinomial it does not make the host wait
    for the GPU. The kernel draws so, too, from a random stream of its own.
    """
    if logits.is_cuda and temperature > 0 and top_p == 1 and use_kernels(logits):
        seed = torch.randint(2 ** 62, (1,), device=logits.device, generator=generator)
        return kernels.sample(logits, temperature, seed)
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).sum(-1)
    if temperature == 0:
        token = logprobs.argmax(-1)
    else:
        candidates = nucleus(probs, top_p) if top_p < 1 else probs
        token = (candidates / torch.empty_like(probs).exponential_(generator=generator)).argmax(-1)
    return token, logprobs.gather(-1, token[:, None])[:, 0], entropy


def to_device(numbers, device):
    """(Lists of) ints as an int64 tensor; the host does not wait for the GPU, as with torch.tensor."""
    tensor = torch.as_tensor(numbers, dtype=torch.long)
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


class Sampler:
    """The state of one `generate` call: what each slot is at, and the completions so far.

    Made anew for each call, and with it the CUDA graph, which holds the call's cache and noisy norms.
    """

    fewest = 16                # slots that `shrink` may leave

    def __init__(self, model, count, slots, max_len, max_new_tokens, temperature, top_p, eos,
                 generator):
        device = model.device
        self.model = model
        self.temperature = temperature
        self.top_p = top_p
        self.generator = generator
        self.eos = torch.tensor(sorted(eos), dtype=torch.long, device=device)

        # Of each slot; how many keys and values it has is cache.filled.
        self.completion = torch.full((slots,), IDLE, device=device)    # what it continues, a row below
        self.position = torch.zeros_like(self.completion)              # its next token's column there
        self.token = torch.zeros_like(self.completion)                 # the next input
        self.logits = None                                             # float [slots, V], of this step
        self.cache = KVCache(model, slots, max_len)

        # Of each completion, and of one more, into which idle slots write.
        self.logprobs = torch.zeros(count + 1, max_new_tokens, device=device)
        self.entropy = torch.zeros_like(self.logprobs)
        self.tokens = torch.zeros_like(self.logprobs, dtype=torch.long)
        self.length = torch.zeros_like(self.tokens[:, 0])
        self.limit = torch.full_like(self.length, max_new_tokens)      # methods/deep_grpo.py lowers some
        self.finished = torch.zeros_like(self.length, dtype=torch.bool)
        for layer in model.quantized_layers():
            layer.prepare_decoding(model.embedding.dtype)
        self.record()

    def record(self):
        """On a GPU with kernels `replay` runs a recorded CUDA graph of `step`; elsewhere it is None.

        With top-p the graph is of `forward` alone: one of all would keep the sort's temporaries.
        Without kernels PyTorch's operations run, and some wait for the GPU, which a graph cannot. (None,
        not self.step: a sampler that refers to itself would keep its cache after the call.)
        """
        self.replay = None
        if self.model.device.type == "cuda" and use_kernels(self.model.embedding):
            recorded = self.step if self.top_p == 1 else self.forward
            self.replay = kernels.record_graph(recorded, self.generator)

    def admit(self, prompts, slots, completions):
        """Let idle slots [P * G] begin the completions [P * G] of `prompts` (P lists of token ids).

        All but the last token of a prompt are prefilled, about PREFILL_TOKENS at a time; the last
        is the slot's first decode input.
        """
        device = self.model.device
        group = len(slots) // len(prompts)
        padded = to_device(pad_sequence(list(map(torch.tensor, prompts)), batch_first=True), device)
        last = to_device([len(p) - 1 for p in prompts], device)
        longest = padded.shape[1]
        if longest > 1:                                # a single token needs no prefill
            at_once = max(1, PREFILL_TOKENS // longest)
            for tokens, chosen in zip(padded[:, :-1].split(at_once), slots.split(at_once * group)):
                self.model.hidden(tokens, functools.partial(self.cache.prefill, into_slots=chosen))
        first_input = padded.gather(1, last[:, None])[:, 0]
        self.token[slots] = first_input.repeat_interleave(group)
        self.cache.filled[slots] = last.repeat_interleave(group)
        self.completion[slots] = completions
        self.position[slots] = 0

    def steps(self, count):
        """`count` tokens for every slot; nothing waits for the device."""
        for _ in range(count):
            if self.replay is None:
                self.step()
            else:
                self.replay()
                if self.top_p != 1:
                    self.pick()                        # not in the graph, see record

    def step(self):
        """One token for every slot."""
        self.forward()
        self.pick()

    def forward(self):
        hidden = self.model.decode(self.token, self.cache)                       # [slots, d]
        self.logits = F.linear(hidden, self.model.lm_head)                       # [slots, V]

    def draw(self):
        return sample(self.logits, self.temperature, self.top_p, self.generator)

    def pick(self):
        """Draw the tokens, write them down, and go on; in place, for the graph's sake."""
        token, logprob, entropy = self.draw()
        row = self.completion                          # [slots]; IDLE, -1, is the spare last row
        column = self.position                         # [slots]
        self.tokens[row, column] = token
        self.logprobs[row, column] = logprob
        self.entropy[row, column] = entropy
        so_far = column + 1
        ended = (token[:, None] == self.eos).any(1)
        self.length[row] = so_far
        self.finished[row] = ended
        self.token.copy_(token)
        # Every slot moves one token on; those that stop are idle and empty.
        stopped = ended | (so_far >= self.limit[row]) | (row == IDLE)
        self.completion.masked_fill_(stopped, IDLE)
        self.position.add_(1).masked_fill_(stopped, 0)
        self.cache.filled.add_(1).masked_fill_(stopped, 0)

    def shrink(self):
        """Keep the busy half of the slots when the other is idle: the last completions are then faster."""
        busy_first = (self.completion == IDLE).int().argsort(stable=True)
        kept = busy_first[:len(self.completion) // 2]
        self.completion = self.completion[kept]
        self.position = self.position[kept]
        self.token = self.token[kept]
        self.replay = None                             # gives the old graph's memory back
        self.cache.keep(kept)
        self.record()

    def rollout(self):
        """The completions, without the spare row, cut to the longest."""
        longest = int(self.length[:-1].max())
        cut = [t[:-1, :longest] for t in (self.tokens, self.logprobs, self.entropy)]
        return Rollout(*cut, self.length[:-1], self.finished[:-1])


def generate(model, prompts, max_new_tokens, group_size=1, temperature=1.0, top_p=1.0, eos=(),
             slots=256, generator=None, sampler_class=Sampler):
    """Sample group_size completions for each prompt -> Rollout of N = P * group_size, on model.device.

    prompts: P >= 1 lists of token ids, of any lengths but 0; eos: token ids that end a completion;
    slots: sequences decoded at once, at least group_size (memory grows with them); generator: on
    model.device. max_new_tokens and group_size are at least 1. temperature 0 is greedy; top_p 1
    keeps all tokens. Raises a ValueError that names an argument that is out of range.
    """
    possible = {
        "prompts": len(prompts) and all(map(len, prompts)),
        "max_new_tokens": max_new_tokens >= 1,
        "group_size": group_size >= 1,
        "temperature": temperature >= 0,
        "top_p": top_p > 0,
    }
    for name, ok in possible.items():
        if not ok:
            raise ValueError(f"generate: {name} is out of range")
    count = len(prompts) * group_size
    slots = max(group_size, min(slots, count))
    max_len = max(map(len, prompts)) + max_new_tokens
    check_every = 8 if model.device.type == "cuda" else 1      # steps; each look waits for the GPU
    with torch.no_grad():
        sampler = sampler_class(model, count, slots, max_len, max_new_tokens, temperature, top_p, eos,
                                generator)
        entered = 0                                                # prompts that have had their slots
        while True:
            idle = (sampler.completion == IDLE).nonzero()[:, 0]
            busy = len(sampler.completion) - len(idle)
            admitted = min(len(idle) // group_size, len(prompts) - entered)
            if not busy and not admitted:
                return sampler.rollout()
            many = len(sampler.completion) >= 2 * sampler.fewest
            if many and entered == len(prompts) and busy <= len(idle):
                sampler.shrink()                                # `idle` is stale now: no prompt waits
            if busy:            # first, so that the GPU decodes while the host issues the prefill
                sampler.steps(check_every)
            if admitted:        # slots that were idle have stayed so
                first = entered * group_size
                completions = torch.arange(first, first + admitted * group_size, device=model.device)
                sampler.admit(prompts[entered:entered + admitted], idle[:len(completions)], completions)
                entered += admitted


# --------------------------------------------------------------------------------------------------
# 6. Objectives
#
#    A_i = (r_i - mean(r)) / std(r)     over the G samples of a prompt                     (Eq. 4)
#    J   = E[ min(ρ A, clip(ρ, 1-ε_low, 1+ε_high) A) - β KL(π_θ || π_ref) ],
#    ρ   = π_θ / π_old per token                                                           (Eq. 3)
#
# E is the mean over the tokens of a completion, then over completions; in DAPO over all tokens.
# ε_high > ε_low is DAPO's "clip higher", here the default of GRPO, too; Eq. 3 has them equal.
#
#    π_θ         is trained
#    π_old       π_θ before the updates of this step, without noise
#    π_rollout   π_old with AQN, by the arithmetic of decode: it sampled the completions
#    π_ref       the policy that training began with
#
# Algorithm 1 calls the noisy policy π_old. Here, as in the paper's code, ρ divides by the policy
# without noise. How far the two are apart is logged (`mismatch`), and `truncated_importance` may
# correct it.
# π_ref is that of Algorithm 1 with a single iteration of its outer loop.

@contextlib.contextmanager
def adapters_off(model):
    """Inside, the model is Eq. 3's π_ref: what is trained has the values that it began with.

    They are in model.reference, {name: tensor}. LoRA that began as zero is not stored, and
    is switched off; an adapter from which training began is stored. Not to be nested in AQN.
    """
    trained = trainable(model)
    layers = [layer for layer in model.quantized_layers() if layer.use_adapter]

    def put(values, use_adapter):
        for name, value in values.items():
            trained[name].data = value
        for layer in layers:
            layer.use_adapter = use_adapter
    now = {name: trained[name].data for name in model.reference}
    put(model.reference, use_adapter=any("lora" in name for name in model.reference))
    try:
        yield
    finally:
        put(now, use_adapter=True)


def has_signal(rewards):
    """rewards [P, G] -> bool [P]: do a group's rewards differ? If not, it teaches nothing."""
    return (rewards != rewards[:, :1]).any(1)


def own_length(mask, limit=None):
    return mask.sum(1, keepdim=True).clamp_min(1)


def deviation(rewards):
    """The standard deviation of each group, with the divisor G - 1, plus 1e-4 as in TRL."""
    return rewards.std(1, keepdim=True) + 1e-4


@dataclass(frozen=True)
class Objective:
    """What tells one objective from another; the defaults are GRPO's.

    The loss of a token is divided by `length` of its completion, and by count(mask), which is summed
    over all processes. With clip_low = clip_high = 0 weighted_logprob makes REINFORCE. Only grpo has a
    KL term unless --beta is given.
    """
    length: Callable = own_length   # mask float32 [N, C] and the limit of its tokens -> [N, 1] or 1
    count: Callable = len           # mask -> a number
    divisor: Callable = deviation   # rewards [P, G] -> what r - mean(r) is divided by
    log_ratio: Callable = None      # log ρ of tokens [B, C], mask -> log ρ of completions [B, 1]
    weighted_logprob: bool = False  # the gain is clip(ρ) A log π, without a gradient of ρ
    redraw: bool = False            # groups without a signal are replaced by others
    drop_truncated: bool = False    # a completion that was cut off gives no gradient
    defaults: dict = field(default_factory=dict)           # of the training's settings


OBJECTIVES = {
    # Eq. 3: the mean over completions of the mean over their tokens
    "grpo": Objective(),
    # arXiv 2503.14476: the mean over all tokens
    "dapo": Objective(length=lambda mask, limit: 1, count=torch.sum, redraw=True, drop_truncated=True),
    # Dr. GRPO, arXiv 2503.20783: a constant length, so that long wrong answers do not weigh less
    "dr-grpo": Objective(length=lambda mask, limit: limit, divisor=lambda rewards: 1),
    # arXiv 2507.18071: the ratio of a completion is the geometric mean of its tokens'
    "gspo": Objective(log_ratio=lambda x, mask: x.sum(1, keepdim=True) / own_length(mask),
                      defaults=dict(clip_low=3e-4, clip_high=4e-4)),
    # MiniMax-M1, arXiv 2506.13585: a token whose ratio is clipped keeps its gradient
    "cispo": Objective(length=lambda mask, limit: 1, count=torch.sum, weighted_logprob=True,
                       defaults=dict(clip_low=1.0, clip_high=4.0)),
    # arXiv 2402.14740: the baseline is the mean of the others, (r - mean(r)) G / (G - 1), and the
    # ratio of a completion is the product of its tokens'
    "rloo": Objective(divisor=lambda rewards: 1 - 1 / rewards.shape[1],
                      log_ratio=lambda x, mask: x.sum(1, keepdim=True)),
}


def group_advantages(rewards, objective="grpo"):
    """rewards [P, G] -> advantages [P, G] (Eq. 4), exactly 0 in groups without signal.

    objective: a name in OBJECTIVES.
    """
    advantages = (rewards - rewards.mean(1, keepdim=True)) / OBJECTIVES[objective].divisor(rewards)
    return torch.where(has_signal(rewards)[:, None], advantages, 0)


def token_weights(mask, objective="grpo", limit=None):
    """The weight of each token in the loss: mask bool [N, C] of a (mini)batch -> float32 [N, C].

    objective: a name in OBJECTIVES; limit: the most tokens of a completion, which dr-grpo asks for.
    """
    objective = OBJECTIVES[objective]
    mask = mask.float()
    count = torch.as_tensor(objective.count(mask)).clamp_min(1)
    return mask / objective.length(mask, limit) / count


def bounded(log_ratio):
    """log_ratio cut at ±20, so that its exponential is finite: infinity times 0 would be NaN."""
    return log_ratio.clamp(-20, 20)


def policy_loss(logprobs, old_logprobs, advantages, weights, clip_low=0.2, clip_high=0.28,
                ref_logprobs=None, beta=0.0, rollout_logprobs=None, tis=0.0, objective="grpo"):
    """-J of Eq. 3 for B sequences -> (loss, KL to the reference; 0 without ref_logprobs).

    logprobs, old_logprobs, ref_logprobs, rollout_logprobs [B, C]; advantages [B] or [B, C];
    clip_low, clip_high: both numbers or both [B, C]; weights [B, C]: how much each token counts, by
    token_weights. Over a whole minibatch they add up to 1, so that the losses of its micro-batches
    simply add up to its loss. KL is Schulman's estimate e^x - x - 1 with x = log π_ref - log π_θ:
    never negative, and unbiased if π_θ drew the tokens (here π_rollout did). With tis, the cap of
    truncated_importance, that multiplies the gain, not the KL. objective: a name in OBJECTIVES.
    """
    objective = OBJECTIVES[objective]
    advantage = advantages.view(len(logprobs), -1)                               # [B, 1] or [B, C]
    if tis:
        advantage = advantage * truncated_importance(old_logprobs, rollout_logprobs, tis)
    log_ratio = logprobs - old_logprobs
    if objective.log_ratio:
        log_ratio = objective.log_ratio(log_ratio, weights > 0)
    ratio = bounded(log_ratio).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if objective.weighted_logprob:
        gain = clipped.detach() * advantage * logprobs
    else:
        gain = torch.minimum(ratio * advantage, clipped * advantage)
    x = torch.zeros_like(logprobs) if ref_logprobs is None else bounded(ref_logprobs - logprobs)
    kl = x.exp() - x - 1
    return ((beta * kl - gain) * weights).sum(), (kl * weights).sum().detach()


def mismatch(old_logprobs, rollout_logprobs, mask):
    """How far π_old is from π_rollout: (KL(π_rollout || π_old) in nats per token, largest ratio).

    The ratio is of the two policies at a token, either way. With AQN the noise is part of it;
    without, only rounding is (decoding and training add in different orders).
    """
    x = bounded((old_logprobs - rollout_logprobs)[mask])
    return (x.exp() - x - 1).mean().item(), x.abs().max().exp().item()


def truncated_importance(old_logprobs, rollout_logprobs, cap=2.0):
    """min(π_old / π_rollout, cap), float32 [N, C]: corrects the mismatch (TIS; FlashRL).

    The cap keeps one token from dominating.
    """
    return (old_logprobs - rollout_logprobs).exp().clamp(max=cap)


# --------------------------------------------------------------------------------------------------
# 7. Log-probabilities of a batch                                  (a first reading may skip this)
#
# The completions of a group share their prompt. So a batch goes through the layers as one line of
# tokens, in which a shared prompt stands once and padding never (as in Prefix Grouper, arXiv
# 2506.05433). test_qerl.py says in few lines what token_logprobs gives: one_by_one.

class Packing(NamedTuple):
    """A line of S tokens: P prompts, then B completions. See pack."""
    sizes: list                # tokens of each prompt, then of each completion
    owner: list                # of each completion: the number of its prompt
    position: torch.Tensor     # int64 [S], of a token in its prompt + completion
    before: torch.Tensor       # int64: the token of the line before each token of the completions
    ends: torch.Tensor         # int32 [1 + P + B]: 0, and where each prompt and completion ends
    group_ends: torch.Tensor   # int32 [1 + P]: 0, and where the completions of each prompt end,
                               # counted from the first completion


def pack(prompts, length):
    """B prompts (lists) and int64 [B], the lengths of their completions -> Packing.

    Neighbours with equal prompts share one. Rows "p q a" and "p q b c" -> line "p q a b c", position
    [0, 1, 2, 2, 3], before [1, 1, 3].
    """
    groups = [(len(prompt), len(list(rows))) for prompt, rows in itertools.groupby(prompts)]
    P = len(groups)
    owner = [p for p, (_, count) in enumerate(groups) for _ in range(count)]
    sizes = [size for size, _ in groups] + length.tolist()
    starts = [0] * P + list(map(len, prompts))         # the position of each one's first token
    position = torch.cat([torch.arange(n, n + size) for n, size in zip(starts, sizes)])
    ends = torch.tensor([0, *itertools.accumulate(sizes)])
    places = ends[P:] - ends[P]                        # where completions begin, and the last ends
    before = torch.arange(ends[P], ends[-1]) - 1
    before[places[:-1]] = ends[1:][owner] - 1          # a first token follows its prompt's last
    group_ends = places[[0, *itertools.accumulate(count for _, count in groups)]]
    position, before, ends, group_ends = (
        to_device(t, length.device) for t in (position, before, ends, group_ends))
    return Packing(sizes, owner, position, before, ends.int(), group_ends.int())


def packed_attention(q, k, v, layer, packing):
    """q [1, S, heads, D], k and v [1, S, kv_heads, D] of a line of tokens -> y [1, S, heads, D].

    A prompt attends to itself, and a completion to its prompt and to itself.
    """
    if kernels is not None and kernels.flash_runs_on(q):
        return kernels.packed_attention(q[0], k[0], v[0], packing)[None]
    sizes, owner = packing.sizes, packing.owner
    P = len(sizes) - len(owner)

    def rows(x):
        """The line [1, S, heads, D] as padded rows of prompt + completion [B, T, heads, D]."""
        parts = x[0].split(sizes)
        joined = [torch.cat([parts[p], parts[P + i]]) for i, p in enumerate(owner)]
        return pad_sequence(joined, batch_first=True)

    y = causal_attention(rows(q), rows(k), rows(v))
    prompts = [y[owner.index(p)][:sizes[p]] for p in range(P)]
    completions = [y[i][sizes[p]:sizes[p] + sizes[P + i]] for i, p in enumerate(owner)]
    return torch.cat(prompts + completions)[None]


def token_logprob(logits, tokens, gradient=False):
    """logits [n, V], tokens int64 [n] -> log-probability of each token, float32 [n].

    gradient: put its gradient [n, V], 1[token] - softmax(logits), in the place of the logits.
    """
    if use_kernels(logits):
        return kernels.token_logprob(logits, tokens, gradient)
    logprobs = logits.float().log_softmax(-1)
    if gradient:
        logits.copy_(F.one_hot(tokens, logits.shape[1]) - logprobs.exp())
    return logprobs.gather(-1, tokens[:, None])[:, 0]


class OutputLogprobs(torch.autograd.Function):
    """hidden [n, d], lm_head [V, d], tokens int64 [n] -> log π(token) float32 [n], `chunk` at a time.

    The output layer is frozen, so that hidden alone needs a gradient. Forward computes it while the
    logits are there: they are not kept, and not computed again in backward.
    """

    @staticmethod
    def forward(ctx, hidden, lm_head, tokens, chunk):
        logprobs = []
        gradients = []
        for h, t in zip(hidden.split(chunk), tokens.split(chunk)):
            logits = F.linear(h, lm_head)
            logprobs.append(token_logprob(logits, t, ctx.needs_input_grad[0]))
            if ctx.needs_input_grad[0]:
                gradients.append(logits @ lm_head)
        ctx.save_for_backward(*gradients)
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx, grad):
        gradient = torch.cat(ctx.saved_tensors)
        return (grad[:, None] * gradient).to(gradient.dtype), None, None, None


def token_logprobs(model, prompts, completions, length, temperature=1.0, chunk=2048):
    """log π(token) of completions int64 [B, C] after their prompts (B lists) -> float32 [B, C].

    Of softmax(logits / temperature); 0 at padding. length: int64 [B], of the completions. The output
    layer runs on `chunk` tokens at a time: [tokens, V] logits never exist whole.
    """
    device = completions.device
    packing = pack(prompts, length)
    mask = length_mask(length, completions.shape[1])
    tokens = completions[mask]                             # [n], in the line's order
    shared = [token for prompt, _ in itertools.groupby(prompts) for token in prompt]
    line = torch.cat([to_device(shared, device), tokens])
    attend = functools.partial(packed_attention, packing=packing)
    hidden = model.hidden(line[None], attend, packing.position)[0]                          # [S, d]
    # The token before predicts a token. This is hidden[packing.before], but as an embedding lookup:
    # the gradient of indexing is slow on a GPU, and on several CPU threads adds up in any order, so that
    # no run could be repeated exactly.
    hidden = F.embedding(packing.before, hidden)
    if temperature != 1:
        hidden = hidden / temperature                      # and so the logits
    logprobs = OutputLogprobs.apply(hidden, model.lm_head, tokens, chunk)
    return torch.zeros(completions.shape, device=device).masked_scatter(mask, logprobs)


# --------------------------------------------------------------------------------------------------
# 8. Loading                                                       (a first reading may skip this)

class UserError(Exception):
    """Something the user can mend. Its text is one line that names the thing and the remedy."""


def require(ok, message):
    """Raise a UserError with this message unless ok."""
    if not ok:
        raise UserError(message)


def require_blocks(layer, in_features, weights):
    """Refuse a layer whose input features do not fill the blocks of a format, a name in FORMATS."""
    block = FORMATS[weights].block
    require(in_features % block == 0, f"layer {layer} has {in_features} input features, not divisible "
                                      f"by {weights}'s block of {block}; use other --weights")


def reason(error):
    """Another exception's text as one short line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def open_tensors(folder, device):
    """{tensor name: the open safetensors file that holds it} of a Hugging Face folder.

    The files are model.safetensors or, where there is an index, those that it names. A tensor then
    comes from the file that it has there, whatever else lies in the folder.
    """
    path = f"{folder}/model.safetensors.index.json"
    files = {}
    place = {}                                         # tensor name -> name of its file
    try:
        if os.path.exists(path):
            with open(path, "rb") as f:
                place = json.load(f)["weight_map"]
        for name in sorted(set(place.values())) or ["model.safetensors"]:
            path = f"{folder}/{os.path.basename(name)}"                # never one of another folder
            file = safe_open(path, "pt", str(device))
            files |= {tensor: file for tensor in file.keys() if place.get(tensor, name) == name}
    except Exception as e:
        raise UserError(f"{path}: cannot be read ({reason(e)}); fetch the model again (weights that are "
                        "pickled, .bin or .pt, are never loaded)")
    return files


LARGEST = 1e9              # above every weight and global scale of a model; damage makes 1e30 and more
IN_4_BITS = (".weight_packed", ".weight_scale_2")      # of compressed-tensors' layers, of ModelOpt's
# Names of tensors that a model may have and nothing here reads: what is computed, or scales of
# activations and of the KV cache, which stay in 16 bit.
UNUSED = (".inv_freq", ".input_global_scale", ".input_scale", ".k_scale", ".v_scale")


@dataclass
class Checkpoint:
    """Hands a model its tensors one layer at a time, read, checked and quantised; see load_model.

    So of the quantised layers no more than one is ever held in full precision. files: see
    open_tensors. Override `read` to make a model without files (random weights).
    """
    files: dict
    weights: str = "nvfp4"
    lora_rank: int = 0
    lora_alpha: float = None
    train_norms: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        self.unread = set(self.files)
        # The layers that the folder has in NVFP4, as compressed-tensors or NVIDIA's ModelOpt writes it.
        self.in_4_bits = {name.rpartition(".")[0] for name in self.files if name.endswith(IN_4_BITS)}

    def read(self, name, shape, dtypes=(torch.float32, torch.bfloat16, torch.float16)):
        """The stored tensor `name`, checked to be of `shape` and a dtype, and undamaged."""
        require(name in self.files, f"tensor {name} is missing; fetch the model again or check config.json")
        tensor = torch.atleast_1d(self.files[name].get_tensor(name))
        require(tensor.shape == shape and tensor.dtype in dtypes,
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, not of the shape {list(shape)} in "
                "16 bit or NVFP4; use the config.json that belongs to the weights")
        largest = tensor.float().abs().max()                         # NaN if one number is
        require(largest < LARGEST and (largest > 0 or name.endswith(".bias")),
                f"tensor {name} holds NaN, infinity, a number above {LARGEST:.0e} or zeros alone; fetch "
                "the model again")
        self.unread.discard(name)
        return tensor

    def tensor(self, name, shape):
        return self.read(name, shape).to(self.dtype)

    def norm(self, name, size, eps):
        return RMSNorm(name, self.read(f"{name}.weight", (size,)), eps, self.train_norms)

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

    def quantized(self, name, out_features, in_features, weights):
        """(packed, block_scale, global_scale [out, 1]) of a layer, read as NVFP4 or quantised here."""
        require_blocks(name, in_features, weights)
        quantize = FORMATS[weights].quantize
        if name not in self.in_4_bits:
            weight = self.read(f"{name}.weight", (out_features, in_features))
            # A weight is quantised in the dtype that it has.
            parts = quantize(weight.to(self.dtype) if weights == "bf16" else weight)
        else:
            parts = self.read_nvfp4(name, out_features, in_features)
            if weights != "nvfp4":
                parts = quantize(FORMATS["nvfp4"].dequantize(*parts, self.dtype))
        packed, scale, global_scale = parts
        return packed, scale, global_scale.expand(out_features, 1)

    def stacked(self, names, sizes, in_features):
        """The weight of several layers, one below the other, as an object that can multiply."""
        weights = self.weights
        if self.in_4_bits and not self.in_4_bits.issuperset(names):
            weights = "bf16"                           # the folder leaves one of these layers in 16 bit
        layers = [self.quantized(name, size, in_features, weights) for name, size in zip(names, sizes)]
        parts = [torch.cat(part) for part in zip(*layers)]
        format = FORMATS[weights]
        device = torch.device(self.device)
        if format.tiled and kernels and kernels.tiles_fit(device, self.dtype, in_features, sizes):
            return format.tile(*parts)
        return PackedWeight(format, *parts)

    def linear(self, prefix, leaves, sizes, in_features, bias):
        """One QuantLinear of the layers prefix.leaf (leaves: names; sizes: their out_features)."""
        names = [f"{prefix}.{leaf}" for leaf in leaves]
        weight = self.stacked(names, sizes, in_features)
        stored = None
        if bias:
            biases = [self.tensor(f"{name}.bias", (size,)) for name, size in zip(names, sizes)]
            stored = torch.cat(biases)
        layer = QuantLinear(names, sizes, in_features, weight, stored, self.lora_rank, self.lora_alpha)
        return layer.to(self.device)

    def require_all_read(self):
        """Refuse a tensor that was not read, unless it is UNUSED or a copy of the embedding."""
        for name in sorted(self.unread):
            if name.endswith(UNUSED):
                continue
            pair = [self.files[n].get_tensor(n) for n in (name, "model.embed_tokens.weight")]
            require(name == "lm_head.weight" and torch.equal(*pair),
                    f"tensor {name} is not one that config.json asks for (by tie_word_embeddings, "
                    "attention_bias and the like); use the config that belongs to the weights")


def model_folder(name):
    """A local folder as it is, or the cached snapshot of a Hugging Face name (downloaded once)."""
    if os.path.isdir(name):
        return name
    try:
        return huggingface_hub.snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
    except Exception as e:
        raise UserError(f"model {name}: no such folder, and Hugging Face does not give it "
                        f"({reason(e)}); check the name and the connection")


def check_config(config):
    """Refuse, with the reason, what this transformer does not compute."""
    rope_type = config.rope_parameters["rope_type"]
    stored = getattr(config, "quantization_config", None) or {}
    format = stored.get("format") or stored.get("quant_method")
    supported = {
        f"architecture {config.model_type}": config.model_type in ("qwen2", "qwen3", "llama"),
        f"rope scaling {rope_type}": rope_type in ("default", "linear", "llama3", "yarn"),
        "sliding-window attention": not getattr(config, "use_sliding_window", False),
        f"activation {config.hidden_act}": config.hidden_act == "silu",
        f"quantisation {format}": format in (None, "nvfp4-pack-quantized", "modelopt"),
        "a transform_config (rotated weights)": not stored.get("transform_config"),
    }
    for what, computed in supported.items():
        require(computed, f"config.json asks for {what}, which is not supported; use a Qwen2, Qwen2.5, "
                          "Qwen3 or Llama 3 model in 16 bit or NVFP4A16")


def default_dtype(device):
    """bfloat16 on a GPU that can compute in it (from 2020 on), float16 on others, float32 on a CPU."""
    if torch.device(device).type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def load_model(path, weights="nvfp4", lora_rank=0, device="cpu", dtype=None, lora_alpha=None,
               train_norms=False, checkpoint_class=Checkpoint):
    """Read a Hugging Face folder or name into a Transformer, quantising layer by layer on the device.

    weights: a name in FORMATS. dtype of activations, embeddings and lm_head: bfloat16 on a GPU
    (float16 on one from before 2020, which cannot compute in bfloat16), float32 on a CPU unless
    given. Gradients go to LoRA (rank 0: none; lora_alpha defaults to the rank) and, with train_norms,
    to the norms' scales. A folder in NVFP4 (compressed-tensors' or ModelOpt's) is read as it is with
    weights="nvfp4", and dequantised first for the others. Of several GPUs choose one by
    torch.cuda.set_device first: kernels start on the current one. Raises UserError.
    """
    require(weights in FORMATS, f"weights {weights} are unknown; choose {', '.join(FORMATS)}")
    folder = model_folder(path)
    dtype = dtype or default_dtype(device)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        files = open_tensors(folder, device)
        checkpoint = checkpoint_class(files, weights, lora_rank, lora_alpha, train_norms, device, dtype)
        model = Transformer(config, checkpoint)
        checkpoint.require_all_read()
        return model
    except (UserError, RuntimeError):                  # RuntimeError: out of memory
        raise
    except Exception as e:
        raise UserError(f"model {path}: config.json cannot be used ({reason(e)}); give the folder of "
                        "a Qwen2.5, Qwen3 or Llama 3 model") from e
