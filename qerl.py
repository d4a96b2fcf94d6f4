"""QeRL in one file: reinforcement learning for LLMs on frozen 4-bit weights.

Equations, tables and algorithms cited here are those of "QeRL: Beyond Efficiency -
Quantization-enhanced Reinforcement Learning for LLMs", arXiv 2510.11696. The file reads top to
bottom, from a weight's 4 bits up to the loss:

    1. Formats              NVFP4: 4-bit codes, block scales, one global scale             Eq. 6
    2. Quantised linear     a frozen packed weight with trainable LoRA                     Eq. 2
    3. Noisy RMSNorm        noise for exploration, annealed, merged in the norm            Eq. 7-10
    4. Transformer          Qwen2/2.5, Qwen3 and Llama 3
    5. Sampler              KV cache, a group of completions for each prompt
    6. Objectives           GRPO and five others: advantages, loss; mismatch               Eq. 3-4
    7. Log-probabilities    of completions, with the gradient
    8. Loading              a Hugging Face folder, quantised layer by layer

This file is plain PyTorch. harness/fast.py computes the same, faster; the tests compare the two.

Letters in shapes: B sequences, T tokens, V vocabulary, d model width, D head width, P prompts, G
samples per prompt, N = P * G completions, C tokens of the longest completion, r LoRA's rank.
"""
import contextlib
import glob
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import huggingface_hub
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if not __debug__:
    raise ImportError("qerl.py: python -O leaves out its checks; start Python without -O")


# --------------------------------------------------------------------------------------------------
# 1. Formats                                     Ŵ = S_FP32 · (S_E4M3 ⊙ W̃)                (Eq. 6)
#
# In NVFP4 a weight is 4 bits: a sign and one of eight magnitudes (E2M1: 2 exponent bits, 1
# mantissa bit). 16 neighbours along the input dimension share an FP8 (E4M3) scale, and a tensor has
# one FP32 scale: 4 + 8/16 = 4.5 bits a weight. This file rounds to nearest, as the paper's public
# checkpoints do. The paper's experiments choose the codes by AWQ, train_gsm8k.py those of real
# models by GPTQ before training; section 8 then reads them from a folder.

E2M1_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])  # the value of each code; bit 3 is the sign
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# Halfway points between neighbouring magnitudes. bucketize gives a value on such a point the lower
# code, but a tie must go to the even one. Where that is the upper code (0.75, 1.75, 3.5) the point
# moves down by the smallest possible step.
E2M1_BOUNDS = (E2M1_MAGNITUDES[1:] + E2M1_MAGNITUDES[:-1]) / 2
E2M1_BOUNDS[1::2].nextafter_(torch.zeros(3))

# QLoRA's NF4 (2305.14314, appendix E): quantiles of N(0, 1), 7 below, 8 above an exact 0, over the largest.
NF4 = torch.tensor([
    -1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1,
])


def pack_nibbles(codes):
    """4-bit codes uint8 [out, in] -> bytes uint8 [out, in/2], the even index in the low nibble."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def dequantize_blocks(packed, table, scale, dtype):
    """Bytes uint8 [out, in/2], table float32 [16], scale float32 [out, in/block] -> [out, in]."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).int()                # [out, in/2, 2]
    values = table.to(packed.device)[codes]
    return (values.view(*scale.shape, -1) * scale[..., None]).flatten(1).to(dtype)           # Eq. 6


def encode_e2m1(weight, scale):
    """Round weight [out, in] / scale float32 [out, in/block] to E2M1 -> packed uint8 [out, in/2].

    To the nearest magnitude, ties to the even code; what is beyond 6 becomes 6.
    """
    blocks = weight.unflatten(1, (scale.shape[1], -1)).float()
    x = (blocks / scale[..., None]).flatten(1)
    magnitude = torch.bucketize(x.abs(), E2M1_BOUNDS.to(x.device))
    return pack_nibbles((magnitude + 8 * (x < 0)).to(torch.uint8))


def quantize_nvfp4(weight):
    """Round to NVFP4, byte for byte as compressed-tensors' "nvfp4-pack-quantized" (weights only).

    weight [out, in], in divisible by 16 -> packed uint8 [out, in/2], block_scale float8_e4m3fn
    [out, in/16], global_scale float32 [1], which is the reciprocal of Eq. 6's S_FP32.
    """
    if weight.dtype == torch.float16:
        weight = weight.float()                        # float16 cannot hold every global scale
    amax = weight.unflatten(1, (-1, 16)).abs().amax(-1)                          # [out, in/16]
    # The largest block scale becomes 448, and the largest weight of a block 6.
    global_scale = (E4M3_MAX * E2M1_MAX / amax.max()).float()
    global_scale = global_scale.nan_to_num(posinf=1.0).reshape(1)       # inf: all are zeros
    scale = (global_scale * (amax / E2M1_MAX)).clamp(max=E4M3_MAX)     # amax / 6 in weight's dtype
    scale = scale.to(torch.float8_e4m3fn).float()
    scale[scale == 0] = 0.125          # by that format (nearly) empty blocks have E4M3's epsilon
    return encode_e2m1(weight, scale / global_scale), scale.to(torch.float8_e4m3fn), global_scale


def powers_of_two(e8m0):
    """What the bytes of the format E8M0 stand for, float32."""
    return torch.exp2(e8m0.float() - 127)


def quantize_mxfp4(weight):
    """OCP Microscaling FP4: E2M1 codes, a power of two (E8M0) as the scale of each 32 weights.

    weight [out, in] -> packed uint8 [out, in/2], block_scale uint8 [out, in/32], global_scale [1]: 1.
    """
    amax = weight.unflatten(1, (-1, 32)).float().abs().amax(-1)
    # amax = mantissa * 2^exponent with 0.5 <= mantissa < 1, and the largest value is 6 = 1.5 * 2^2:
    # the scale is 2^(exponent - 3), stored with a bias of 127. Where amax / scale would round to 8
    # it is doubled. OCP's rule cuts to 6: Gaussian weights have an error of 0.115, here 0.112.
    mantissa, exponent = torch.frexp(amax)
    e8m0 = (127 + exponent - 3 + (mantissa >= 0.875)).clamp(0, 254).to(torch.uint8)
    return encode_e2m1(weight, powers_of_two(e8m0)), e8m0, amax.new_ones(1)


def quantize_nf4(weight):
    """QLoRA's NF4: the nearest of 16 normal quantiles, times the largest magnitude of 64 weights.

    weight [out, in] -> packed uint8 [out, in/2], block_scale float32 [out, in/64], global_scale [1]: 1.
    """
    blocks = weight.unflatten(1, (-1, 64)).float()
    absmax = blocks.abs().amax(-1)
    scaled = blocks * (1 / absmax.clamp_min(1e-38))[..., None]            # as bitsandbytes rounds
    bounds = ((NF4[1:] + NF4[:-1]) / 2).to(weight.device)
    codes = torch.bucketize(scaled, bounds).to(torch.uint8)
    return pack_nibbles(codes.flatten(1)), absmax, absmax.new_ones(1)


def quantize_bf16(weight):
    """Not quantised: the weight keeps the dtype of the model, and its scales are 1."""
    return weight, weight.new_ones(1), weight.new_ones(1)


@dataclass(eq=False)
class Format:
    """A way to store a weight [out, in] as (packed, block_scale, global_scale)."""
    quantize: Callable               # weight -> the three
    block: int                       # input features that share a scale; `in` is divisible by it
    table: torch.Tensor = None       # float32 [16], the value of each code; None: no codes
    scale: Callable = torch.Tensor.float         # block_scale -> float32 [out, in/block]

    def dequantize(self, packed, block_scale, global_scale, dtype):
        """The three -> weight [out, in] in dtype; global_scale may be [1] or [out, 1]."""
        if self.table is None:
            return packed.to(dtype)
        scale = self.scale(block_scale) / global_scale                         # S_FP32 · S_E4M3
        return dequantize_blocks(packed, self.table, scale, dtype)


FORMATS = {
    "nvfp4": Format(quantize_nvfp4, 16, E2M1),
    "mxfp4": Format(quantize_mxfp4, 32, E2M1, powers_of_two),
    "nf4": Format(quantize_nf4, 64, NF4),
    "bf16": Format(quantize_bf16, 1),
}


# --------------------------------------------------------------------------------------------------
# 2. Quantised linear with LoRA                  y = x Ŵᵀ + b + (α/r) · (x Aᵀ) Bᵀ          (Eq. 2)
#
# Ŵ is frozen and stays packed; only A [r, in] and B [out, r] are trained. B starts at zero, so
# that training starts at the quantised model. Layers that read the same input (q, k, v; gate, up)
# are stacked into one: one product with one packed weight instead of three, each piece with its
# own A, B and global scale.

class PackedWeight:
    """A frozen weight [out, in] as its format stores it. To multiply, it is dequantised whole."""

    def __init__(self, format, *parts):
        self.format = format
        self.parts = parts         # packed, block_scale, global_scale

    def dequantize(self, dtype):
        """The whole weight [out, in], a temporary."""
        return self.format.dequantize(*self.parts, dtype)

    def multiply(self, x, bias=None):
        """x [..., in], bias [out] -> x Ŵᵀ + bias [..., out]."""
        y = FrozenProduct.apply(x, self)
        return y if bias is None else y + bias


class FrozenProduct(torch.autograd.Function):
    """x Ŵᵀ, with a gradient for x alone.

    Autograd would keep the dequantised Ŵ of every layer until backward. This dequantises it again.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.dequantize(x.dtype).T

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.dequantize(grad.dtype), None


def lora_linear(x, weight, bias, A, B, scale):
    """x [..., in], a PackedWeight, bias [out] or None, A [R, in], B [out, R] -> y [..., out].

    R is r, or r times the layers that are stacked; scale is α/r.
    """
    return weight.multiply(x, bias) + scale * (x @ A.T) @ B.T                            # Eq. 2


class QuantLinear(nn.Module):
    """Linear layers over one input, frozen, with LoRA (Eq. 2): x [..., in] -> [..., out].

    names: the layers' names in the folder; sizes: their out_features; weight: a PackedWeight of all
    of them, stacked along out; bias [out] or None. lora_A [layers * r, in] and lora_B [out, r] are
    float32. Only they move with .to(). lora_alpha defaults to the rank.
    """

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
            # As PEFT starts A, kaiming_uniform(a=√5). On the CPU: a seed gives the same A everywhere.
            bound = in_features ** -0.5
            A = torch.empty(len(sizes) * lora_rank, in_features).uniform_(-bound, bound)
            self.lora_A = nn.Parameter(A)
            self.lora_B = nn.Parameter(torch.zeros(sum(sizes), lora_rank))

    def forward(self, x):
        if not self.use_adapter:
            return self.weight.multiply(x, self.bias)
        # Each stacked layer has its own A and B: one A below the other, the Bs on a diagonal.
        B = torch.block_diag(*self.lora_B.split(self.sizes))
        A, B = self.lora_A.to(x.dtype), B.to(x.dtype)
        return lora_linear(x, self.weight, self.bias, A, B, self.alpha / self.rank)


# --------------------------------------------------------------------------------------------------
# 3. RMSNorm with Adaptive Quantization Noise                                           (Eq. 7-10)
#
#    RMSNorm_noise(x) = w_noise ⊙ x / √(mean(x²) + δ),     w_noise = w + Z,     Z ~ N(0, σ²)
#    σ_k = σ_start (σ_end / σ_start)^((k-1) / (K-1))        in noisy stage k of K          (Eq. 8)
#
# w + Z scales the input channels of the layers that read the norm (q, k, v; gate, up), which is
# the same as multiplying each input channel of their weights by 1 + Z/w (appendix G): parameter
# noise, for one addition per rollout. The paper's text names the two norms of a block; its code
# looks for every RMSNorm of Qwen2 and Llama, also the final one, which scales the columns of
# lm_head. So does ours. That Qwen3's norms of q and k are noisy, too, is our choice.

class RMSNorm(nn.Module):
    """x [..., size] -> normalised x in x's dtype; computed in float32."""

    def __init__(self, name, weight, eps, trainable=False):
        super().__init__()
        self.name = name
        self.eps = eps
        self.noisy_weight = None               # w + Z during a rollout
        self.weight = nn.Parameter(weight.float(), requires_grad=trainable)

    @property
    def scale(self):
        return self.weight if self.noisy_weight is None else self.noisy_weight

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], self.scale, self.eps).to(x.dtype)


@contextlib.contextmanager
def adaptive_quantization_noise(model, sigma, generator=None):
    """AQN: inside, every RMSNorm scale carries one fresh draw of noise, w + N(0, sigma²).

    Run one rollout inside, as line 9 of Algorithm 1 does (the text before Eq. 7 draws anew for each
    forward pass), log-probabilities and updates outside. Do not nest it. generator: on the CPU.
    """
    norms = [m for m in model.modules() if isinstance(m, RMSNorm)]
    for norm in norms:
        z = torch.randn(norm.weight.shape, generator=generator).to(norm.weight.device)
        norm.noisy_weight = norm.weight.detach() + sigma * z                   # Eq. 10, Z of Eq. 7
    try:
        yield
    finally:
        for norm in norms:
            norm.noisy_weight = None


# σ of a noisy stage (Figure 9): p goes from 0 in the first of K to 1 in the last; if K is 1, p is 0.
SCHEDULES = {
    "exponential": lambda start, end, p, K: start * (end / start) ** p,                      # Eq. 8
    "linear": lambda start, end, p, K: start + (end - start) * p,
    "cosine": lambda start, end, p, K: start + (end - start) * (1 - math.cos(math.pi * p)) / 2,
    "logarithmic": lambda start, end, p, K:
        start + (end - start) * math.log(1 + p * (K - 1)) / math.log(max(K, 2)),
}


def noise_sigma(step, steps, stages=10, start=1e-2, end=5e-4, schedule="exponential"):
    """σ of 0-based `step`: training is cut into `stages` equal parts, and the first has no noise.

    In the K = stages - 1 others σ falls from start to end by a SCHEDULES entry; ten stages have 0,
    0.01, 0.0069, 0.0047, ..., 0.0005. With fewer steps than stages some stages are skipped. K counts
    noisy stages, as in the authors' code: if it counted all, as in line 7 of Algorithm 1, σ would not
    reach `end`. "exponential" needs start and end positive, or both 0.
    """
    assert 0 <= step < steps, f"noise_sigma: step {step} is none of the {steps} steps"
    stage = step * stages // steps
    if stage == 0 or start == end == 0:
        return 0.0
    K = stages - 1
    return SCHEDULES[schedule](start, end, (stage - 1) / max(K - 1, 1), K)


# --------------------------------------------------------------------------------------------------
# 4. Transformer: Qwen2/Qwen2.5, Qwen3, Llama 3
#
# One pass, Transformer.hidden, serves training, prompts and decoding. With a cache (section 5) the
# tokens follow those that it holds. A WeightReader (section 8) builds the layers.

def rope_frequencies(config, head_dim):
    """(frequencies [D/2] in radians per position, a factor on cos and sin)."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device="cpu")
    return rope["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim), 1.0


def rotary(x, cos, sin):
    """Rotary embedding of x [B, T, heads, D]; cos, sin [T, D] or [B, T, D].

    Each pair (x[i], x[i + D/2]) is turned by an angle of its own.
    """
    left, right = x.chunk(2, -1)
    return x * cos.unsqueeze(-2) + torch.cat([-right, left], -1) * sin.unsqueeze(-2)


def attention(q, k, v, mask=None):
    """q [B, T, heads, D], k and v of S keys [B, S, kv_heads, D] -> y [B, T, heads, D].

    mask: bool [B, 1, T, S], True where a token attends. Without it each attends up to itself.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    return y.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention: several heads of q share one of k and v."""
    def __init__(self, config, reader, name, index):
        super().__init__()
        self.index = index
        d = config.hidden_size
        self.head_dim = getattr(config, "head_dim", None) or d // config.num_attention_heads
        q = config.num_attention_heads * self.head_dim
        kv = config.num_key_value_heads * self.head_dim
        qwen2 = config.model_type == "qwen2"                   # always has biases for q, k and v
        bias = getattr(config, "attention_bias", False) and not qwen2
        self.qkv = reader.linear(
            name, ["q_proj", "k_proj", "v_proj"], [q, kv, kv], d, bias or qwen2)
        self.o = reader.linear(name, ["o_proj"], [d], q, bias)
        norm = reader.norm if config.model_type == "qwen3" else nn.Identity
        # Qwen3 alone has these two norms; Identity takes any arguments.
        self.q_norm = norm(f"{name}.q_norm", self.head_dim, config.rms_norm_eps)
        self.k_norm = norm(f"{name}.k_norm", self.head_dim, config.rms_norm_eps)

    def heads(self, qkv):
        """q, k, v [..., heads, D] of the stacked projections [..., q + k + v]."""
        return (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.split(self.qkv.sizes, -1))

    def forward(self, x, rope, cache=None):
        """x [B, T, d] -> [B, T, d]; rope = (cos, sin), see rotary."""
        q, k, v = self.heads(self.qkv(x))                                # [B, T, heads, D]
        q = rotary(self.q_norm(q), *rope)
        k = rotary(self.k_norm(k), *rope)
        y = attention(q, k, v) if cache is None else cache.attend(q, k, v, self.index)
        return self.o(y.flatten(2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""
    def __init__(self, config, reader, name):
        super().__init__()
        d = config.hidden_size
        inner = config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_up = reader.linear(name, ["gate_proj", "up_proj"], [inner, inner], d, bias)
        self.down = reader.linear(name, ["down_proj"], [d], inner, bias)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    def __init__(self, config, reader, name, index):
        super().__init__()
        d = config.hidden_size
        eps = config.rms_norm_eps
        self.attention_norm = reader.norm(f"{name}.input_layernorm", d, eps)
        self.attention = Attention(config, reader, f"{name}.self_attn", index)
        self.mlp_norm = reader.norm(f"{name}.post_attention_layernorm", d, eps)
        self.mlp = MLP(config, reader, f"{name}.mlp")

    def forward(self, x, rope, cache=None):
        x = x + self.attention(self.attention_norm(x), rope, cache)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """model(tokens int64 [B, T]) -> logits [B, T, V]. config: of transformers."""

    def __init__(self, config, reader):
        super().__init__()
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        first, last = "model.embed_tokens.weight", "lm_head.weight"
        tied = config.tie_word_embeddings
        if tied and first not in reader.files:
            first = last                       # they are one tensor, which may have either name
        self.register_buffer("embedding", reader.tensor(first, shape))
        self.register_buffer("lm_head", self.embedding if tied else reader.tensor(last, shape))
        self.blocks = nn.ModuleList(
            Block(config, reader, f"model.layers.{i}", i) for i in range(config.num_hidden_layers)
        )
        self.norm = reader.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        # How π_ref (section 6) differs: the norms have the scales with which they began. LoRA began
        # at zero; it is missing here, and will be switched off.
        self.reference = {name: p.detach().clone() for name, p in trainable(self).items()
                          if "lora" not in name}
        frequencies, self.rope_factor = rope_frequencies(config, self.blocks[0].attention.head_dim)
        self.register_buffer("frequencies", frequencies.to(self.device))

    def rope(self, positions, dtype):
        """cos and sin of int64 positions [...], each [..., D]."""
        angles = positions[..., None] * self.frequencies
        angles = torch.cat([angles, angles], -1)
        cos = angles.cos() * self.rope_factor
        sin = angles.sin() * self.rope_factor
        return cos.to(dtype), sin.to(dtype)

    def hidden(self, tokens, cache=None):
        """tokens int64 [B, T] -> hidden states [B, T, d]. cache: with KVCache's two methods."""
        x = F.embedding(tokens, self.embedding)
        count = tokens.shape[1]
        positions = torch.arange(count, device=self.device)
        if cache is not None:
            positions = cache.positions(count)
        rope = self.rope(positions, x.dtype)
        for block in self.blocks:
            x = block(x, rope, cache)
        return self.norm(x)

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
# Up to `slots` completions decode together, one token of each at a time, until the last is done.

class KVCache:
    """Keys and values of B rows; filled int64 [B]: how many positions each row holds.

    layers: one tensor a block, [2, B, max_len, kv_heads, D], keys then values.
    """

    def __init__(self, model, rows, max_len):
        head_dim = model.blocks[0].attention.head_dim
        shape = 2, rows, max_len, model.config.num_key_value_heads, head_dim
        self.layers = [model.embedding.new_zeros(shape) for _ in model.blocks]
        self.filled = torch.zeros(rows, dtype=torch.long, device=model.device)

    def positions(self, count):
        """The places of the next `count` tokens of each row, int64 [B, count]."""
        return self.filled[:, None] + torch.arange(count, device=self.filled.device)

    def attend(self, q, k, v, layer):
        """`attention` of T new tokens a row, each to its row up to itself; they enter the cache.

        `filled` stays, because every block appends at the same positions.
        """
        kv = self.layers[layer]
        position = self.positions(q.shape[1])                                            # [B, T]
        row = torch.arange(len(q), device=q.device)[:, None]
        kv[0, row, position] = k
        kv[1, row, position] = v
        total = int(position.max()) + 1
        up_to_itself = torch.arange(total, device=q.device) <= position[..., None]   # [B, T, total]
        return attention(q, *kv[:, :, :total], mask=up_to_itself[:, None])


@dataclass
class Rollout:
    """N completions, padded to C tokens, in the order of the prompts, group_size of each."""
    tokens: torch.Tensor           # int64 [N, C]
    logprobs: torch.Tensor         # float32 [N, C], of the tokens, as `sample` says
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


def nucleus(probs, top_p):
    """Zero all but the smallest set of tokens whose probability reaches top_p; probs [B, V]."""
    ordered, index = probs.sort(descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0       # all likelier tokens have top_p already
    return torch.zeros_like(probs).scatter(-1, index, ordered)


def sample(logits, temperature=1.0, top_p=1.0, generator=None):
    """logits [B, V] -> token int64 [B], its log-probability and the entropy, float32 [B] in nats.

    Log-probability and entropy are of softmax(logits / temperature), before top_p cuts it. Temperature
    0 takes the likeliest token, and reports those of temperature 1. A token is drawn by the Gumbel-max
    trick: for E_i ~ Exp(1), argmax p_i / E_i is i with probability p_i / Σ p.
    """
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).sum(-1)
    if temperature == 0:
        token = logprobs.argmax(-1)
    else:
        candidates = nucleus(probs, top_p) if top_p < 1 else probs
        token = (candidates / torch.empty_like(probs).exponential_(generator=generator)).argmax(-1)
    return token, logprobs.gather(-1, token[:, None])[:, 0], entropy


def decode_batch(model, prompts, max_new_tokens, temperature, top_p, eos, generator):
    """Decode a completion of each of B prompts -> the tensors of a Rollout, C = max_new_tokens.

    A row that is finished decodes on. What comes behind its length is not part of it.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    rows = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    padded = pad_sequence(rows, batch_first=True)                                        # [B, longest]
    cache = KVCache(model, len(prompts), padded.shape[1] + max_new_tokens)
    if padded.shape[1] > 1:
        model.hidden(padded[:, :-1], cache)            # all but the last token of each prompt
    cache.filled = lengths - 1                         # new tokens overwrite what padding wrote
    token = padded.gather(1, lengths[:, None] - 1)[:, 0]                                 # [B]
    ends = torch.tensor(sorted(eos), dtype=torch.long, device=model.device)
    length = torch.zeros_like(token)
    finished = torch.zeros_like(token, dtype=torch.bool)
    tokens = token.new_zeros(len(prompts), max_new_tokens)                               # [B, C]
    logprobs = torch.zeros_like(tokens, dtype=torch.float32)
    entropy = torch.zeros_like(logprobs)
    for i in range(max_new_tokens):
        hidden = model.hidden(token[:, None], cache)[:, 0]                               # [B, d]
        cache.filled += 1
        logits = F.linear(hidden, model.lm_head)                                         # [B, V]
        token, logprobs[:, i], entropy[:, i] = sample(logits, temperature, top_p, generator)
        tokens[:, i] = token
        length += ~finished
        finished |= torch.isin(token, ends)
        if finished.all():
            break
    return tokens, logprobs, entropy, length, finished


def check_generate(prompts, max_new_tokens, group_size, temperature, top_p):
    """Refuse arguments of `generate` that are out of range."""
    assert prompts and all(map(len, prompts)), "generate: prompts are empty, or one of them is"
    assert min(max_new_tokens, group_size) > 0, "generate: max_new_tokens or group_size is below 1"
    assert temperature == 0 or temperature >= 1e-3, "generate: temperature is not 0 and below 1e-3"
    assert 0 < top_p <= 1, f"generate: top_p {top_p} is out of range"


@torch.no_grad()
def generate(model, prompts, max_new_tokens, group_size=1, temperature=1.0, top_p=1.0, eos=(),
             slots=256, generator=None):
    """Sample group_size completions for each prompt -> Rollout of N = P * group_size.

    prompts: P lists of token ids; eos: token ids that end a completion; slots: sequences decoded at
    once, for which memory grows; generator: on model.device. temperature 0 is greedy.
    """
    check_generate(prompts, max_new_tokens, group_size, temperature, top_p)
    repeated = [prompt for prompt in prompts for _ in range(group_size)]
    parts = [
        decode_batch(
            model, repeated[i:i + slots], max_new_tokens, temperature, top_p, eos, generator)
        for i in range(0, len(repeated), slots)]
    *columns, length, finished = map(torch.cat, zip(*parts))
    there = length_mask(length, int(length.max()))
    cut = [column[:, :there.shape[1]] * there for column in columns]                   # [N, C] each
    return Rollout(*cut, length, finished)


# --------------------------------------------------------------------------------------------------
# 6. Objectives
#
#    J   = E[ min(ρ A, clip(ρ, 1-ε_low, 1+ε_high) A) - β KL(π_θ || π_ref) ],
#    ρ   = π_θ / π_old per token                                                           (Eq. 3)
#    A_i = (r_i - mean(r)) / std(r)     over the G samples of a prompt                     (Eq. 4)
#
# GRPO's E is the mean over the tokens of a completion, then over completions; OBJECTIVES has other
# rules, and token_weights applies them. ε_high > ε_low is DAPO's "clip higher", here the default of
# GRPO, too; Eq. 3 has them equal.
#
#    π_θ         is trained
#    π_old       π_θ before the updates of this step, without noise
#    π_rollout   π_old with AQN: it sampled the completions
#    π_ref       the policy that training began with
#
# Algorithm 1 calls the noisy policy π_old. Here, as in the paper's code, ρ divides by the policy
# without noise. `mismatch` measures how far the two are apart, `truncated_importance` corrects it.

@contextlib.contextmanager
def reference_policy(model):
    """Inside, the model is Eq. 3's π_ref: what is trained has the values that it began with.

    They are in model.reference, {name: tensor}. LoRA that is not there began at zero: it is switched
    off. Do not use this inside AQN.
    """
    trained = trainable(model)

    def put(values, use_adapter):
        for name, value in values.items():
            trained[name].data = value
        for layer in model.quantized_layers():
            layer.use_adapter = use_adapter and layer.rank > 0
    now = {name: trained[name].data for name in model.reference}
    adapter_is_stored = model.reference.keys() == trained.keys()       # training began with one
    put(model.reference, use_adapter=adapter_is_stored)
    try:
        yield
    finally:
        put(now, use_adapter=True)


def has_signal(rewards):
    """rewards [P, G] -> bool [P]: do a group's rewards differ? If not, its advantages are 0."""
    return (rewards != rewards[:, :1]).any(1)


def completion_length(mask):
    """Tokens of each completion: mask [N, C] of 0 and 1 -> [N, 1], at least 1."""
    return mask.sum(1, keepdim=True).clamp_min(1)


@dataclass
class Objective:
    """What differs between objectives; the defaults are GRPO's.

    The loss of a token is divided by length_divisor of its completion and by batch_divisor.
    """
    # mask, max_new_tokens -> [N, 1] or a number
    length_divisor: Callable = lambda mask, limit: completion_length(mask)
    batch_divisor: Callable = len   # mask -> a number; by default that of the completions
    # rewards [P, G] -> [P, 1] or a number; it divides r - mean(r). 1e-4 as in TRL
    advantage_divisor: Callable = lambda rewards: rewards.std(1, keepdim=True) + 1e-4        # Eq. 4
    log_ratio: Callable = None      # log ρ of tokens [B, C], mask -> log ρ of completions [B, 1]
    weighted_logprob: bool = False  # the gain is clip(ρ) A log π, without a gradient of ρ
    redraw: bool = False            # groups without a signal are replaced by others
    mask_truncated: bool = False    # a completion that was cut off gives no gradient
    defaults: dict = None           # of the training's settings, where they are others


OBJECTIVES = {
    # Eq. 3: the mean over completions of the mean over their tokens
    "grpo": Objective(),
    # arXiv 2503.14476: the mean over all tokens
    "dapo": Objective(length_divisor=lambda mask, limit: 1, batch_divisor=torch.sum,
                      redraw=True, mask_truncated=True),
    # Dr. GRPO, arXiv 2503.20783: a constant length, so that long wrong answers do not weigh less
    "dr-grpo": Objective(length_divisor=lambda mask, limit: limit,
                         advantage_divisor=lambda rewards: 1),
    # arXiv 2507.18071: the ratio of a completion is the geometric mean of its tokens'
    "gspo": Objective(log_ratio=lambda x, mask:
                      (x * mask).sum(1, keepdim=True) / completion_length(mask),
                      defaults=dict(clip_low=3e-4, clip_high=4e-4)),
    # MiniMax-M1, arXiv 2506.13585: a token whose ratio is clipped keeps its gradient
    "cispo": Objective(length_divisor=lambda mask, limit: 1, batch_divisor=torch.sum,
                       weighted_logprob=True, defaults=dict(clip_low=1.0, clip_high=4.0)),
    # arXiv 2402.14740: the baseline is the mean of the others, (r - mean(r)) G / (G - 1), and the
    # ratio of a completion is the product of its tokens'
    "rloo": Objective(advantage_divisor=lambda rewards: 1 - 1 / rewards.shape[1],
                      log_ratio=lambda x, mask: (x * mask).sum(1, keepdim=True)),
}


def group_advantages(rewards, objective="grpo"):
    """rewards [P, G], a name in OBJECTIVES -> advantages [P, G], exactly 0 without a signal."""
    divisor = OBJECTIVES[objective].advantage_divisor(rewards)
    divisor = torch.as_tensor(divisor, device=rewards.device).expand(len(rewards), 1)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / divisor                     # Eq. 4
    return torch.where(has_signal(rewards)[:, None], advantages, 0)


def token_weights(mask, objective="grpo", limit=None):
    """mask bool [N, C] of a minibatch -> float32 [N, C], the weight of each token in Eq. 3's E.

    limit: max_new_tokens, which dr-grpo needs.
    """
    objective = OBJECTIVES[objective]
    mask = mask.float()
    count = torch.as_tensor(objective.batch_divisor(mask)).clamp_min(1)
    return mask / objective.length_divisor(mask, limit) / count


def bounded(log_ratio):
    """log_ratio cut at ±20, so that its exponential is finite: infinity times 0 would be NaN."""
    return log_ratio.clamp(-20, 20)


def policy_loss(logprobs, old_logprobs, advantages, weights, clip_low=0.2, clip_high=0.28,
                ref_logprobs=None, beta=0.0, rollout_logprobs=None, tis=0.0, objective="grpo"):
    """-J of Eq. 3 for B sequences -> (loss, KL to the reference; 0 without ref_logprobs).

    log-probabilities [B, C]; advantages [B] or [B, C]; clip_low, clip_high: numbers or [B, C];
    weights [B, C]: token_weights of the whole minibatch, so that the losses of its micro-batches add
    up. KL is Schulman's estimate K3, e^x - x - 1 with x = log π_ref - log π_θ: never negative, and
    unbiased if π_θ drew the tokens (here π_rollout did); its gradient is that of KL(π_ref || π_θ).
    tis, if not 0: the cap of the truncated_importance that multiplies the gain, but not the KL.
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
        gain = torch.minimum(ratio * advantage, clipped * advantage)                     # Eq. 3
    x = torch.zeros_like(logprobs) if ref_logprobs is None else bounded(ref_logprobs - logprobs)
    kl = x.exp() - x - 1
    return ((beta * kl - gain) * weights).sum(), (kl * weights).sum().detach()           # Eq. 3


def mismatch(old_logprobs, rollout_logprobs, mask):
    """How far π_old is from π_rollout: (K3's estimate of KL(π_rollout || π_old) a token, largest ratio).

    The ratio is max(π_old / π_rollout, π_rollout / π_old) of a token. Without AQN the two differ at
    most by rounding: decoding and training may add in different orders.
    """
    x = bounded((old_logprobs - rollout_logprobs)[mask])
    kl = (x.exp() - x - 1).mean()
    largest = x.abs().max().exp()
    return kl.item(), largest.item()


def truncated_importance(old_logprobs, rollout_logprobs, cap):
    """min(π_old / π_rollout, cap), float32 [N, C]: corrects the mismatch (TIS; FlashRL)."""
    return (old_logprobs - rollout_logprobs).exp().clamp(max=cap)


# --------------------------------------------------------------------------------------------------
# 7. Log-probabilities of completions
#
# Each row is a prompt with its completion, padded to the longest.

def token_logprobs(model, prompts, completions, length, temperature=1.0):
    """log π(token) of completions int64 [B, C] after B prompts; length int64 [B] -> float32 [B, C].

    π is softmax(logits / temperature); padding has 0.
    """
    assert temperature > 0, f"token_logprobs: temperature {temperature} is not positive"
    longest = completions.shape[1]
    rows = [torch.cat([completion.new_tensor(prompt), completion])
            for prompt, completion in zip(prompts, completions)]
    tokens = pad_sequence(rows, batch_first=True)                                        # [B, T]
    logits = model(tokens[:, :-1]).float() / temperature       # at each token those of the next one
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]           # [B, T - 1]
    of_completions = [
        row[len(prompt) - 1:][:longest] for row, prompt in zip(logprobs, prompts)]
    return torch.stack(of_completions) * length_mask(length, longest).to(logprobs.device)


# --------------------------------------------------------------------------------------------------
# 8. Loading
#
# This refuses models that section 4 does not compute, and tensors that are missing or left over.

@dataclass
class WeightReader:
    """Reads and quantises one linear layer at a time: no other is in full precision meanwhile."""
    files: dict                    # {tensor name: the open safetensors file that holds it}
    weights: str = "nvfp4"
    lora_rank: int = 0
    lora_alpha: float = None
    train_norms: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    formats = FORMATS

    def __post_init__(self):
        self.unread = set(self.files)

    def read(self, name, shape):
        """The stored tensor `name`, of this shape; a single number is [1]."""
        assert name in self.files, f"tensor {name} is missing; fetch the model again or check config.json"
        tensor = torch.atleast_1d(self.files[name].get_tensor(name))
        assert tensor.shape == shape, (
            f"tensor {name} has the shape {list(tensor.shape)}, not {list(shape)}; use the weights' "
            "own config.json")
        self.unread.discard(name)
        return tensor

    def tensor(self, name, shape):
        return self.read(name, shape).to(self.dtype)

    def norm(self, name, size, eps):
        return RMSNorm(name, self.read(f"{name}.weight", (size,)), eps, self.train_norms)

    def check_all_read(self):
        """Refuse a tensor that config.json does not ask for."""
        assert not self.unread, f"config.json asks for no tensor {min(self.unread)}; use its own"

    def in_4_bits(self, name):
        return f"{name}.weight_packed" in self.files

    def read_nvfp4(self, name, out_features, in_features):
        """(packed, block_scale, global_scale [1]) of a layer that the folder has in NVFP4."""
        packed = self.read(f"{name}.weight_packed", (out_features, in_features // 2))
        block_scale = self.read(f"{name}.weight_scale", (out_features, in_features // 16))
        return packed, block_scale, self.read(f"{name}.weight_global_scale", (1,))

    def quantized(self, name, out_features, in_features, weights):
        """The three parts of a layer in a format, read as NVFP4 or quantised here."""
        if self.in_4_bits(name):
            parts = self.read_nvfp4(name, out_features, in_features)
            if weights == "nvfp4":
                return parts
            weight = self.formats["nvfp4"].dequantize(*parts, self.dtype)
        else:
            weight = self.read(f"{name}.weight", (out_features, in_features))
            if weights == "bf16":                    # others are quantised in the dtype they have
                weight = weight.to(self.dtype)
            mixed = weights != "bf16" and any(other.endswith(".weight_packed") for other in self.files)
            assert not mixed, f"layer {name} is in 16 bit, others are in NVFP4; load it by harness.fast"
        return self.quantize(name, weight, weights)

    def quantize(self, name, weight, weights):
        """The three parts of a weight [out, in]."""
        format = self.formats[weights]
        assert weight.shape[1] % format.block == 0, (
            f"layer {name} has {weight.shape[1]} input features, not divisible by {weights}'s block of "
            f"{format.block}; use another format")
        return format.quantize(weight)

    def stacked(self, names, sizes, in_features):
        """The weights of several layers, one below the other, as one that can multiply."""
        layers = [
            self.quantized(name, size, in_features, self.weights) for name, size in zip(names, sizes)]
        return PackedWeight(self.formats[self.weights], *stack_parts(layers))

    def linear(self, prefix, leaves, sizes, in_features, bias):
        """One QuantLinear of the layers prefix.leaf (leaves: names; sizes: their out_features)."""
        names = [f"{prefix}.{leaf}" for leaf in leaves]
        weight = self.stacked(names, sizes, in_features)
        biases = [self.tensor(f"{name}.bias", (size,)) for name, size in zip(names, sizes) if bias]
        layer = QuantLinear(names, sizes, in_features, weight, torch.cat(biases) if bias else None,
                            self.lora_rank, self.lora_alpha)
        return layer.to(self.device)


def stack_parts(layers):
    """The three parts of each layer -> of one layer with all rows; its global_scale is [out, 1]."""
    packed, block_scale, global_scale = zip(*layers)
    global_scale = [scale.expand(len(codes), 1) for scale, codes in zip(global_scale, packed)]
    return torch.cat(packed), torch.cat(block_scale), torch.cat(global_scale)


def check_config(config, stored_formats=(None, "nvfp4-pack-quantized")):
    """Refuse, with the reason, what this transformer does not compute."""
    rope = config.rope_parameters
    rope_type = rope["rope_type"]
    stored = getattr(config, "quantization_config", None) or {}
    format = stored.get("format") or stored.get("quant_method")
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    supported = {
        f"architecture {config.model_type}": config.model_type in ("qwen2", "qwen3", "llama"),
        f"rope scaling {rope_type}": rope_type in ("default", "linear", "llama3", "yarn"),
        "rope on a part of a head": rope.get("partial_rotary_factor") in (None, 1),
        "sliding-window or chunked attention": set(layer_types) == {"full_attention"},
        f"activation {config.hidden_act}": config.hidden_act in ("silu", "swish"),
        f"quantisation {format}": format in stored_formats,
        "a transform_config (rotated weights)": not stored.get("transform_config"),
    }
    for what, computed in supported.items():
        assert computed, (f"config.json asks for {what}, which is not supported; use a Qwen2, Qwen2.5, "
                          "Qwen3 or Llama 3 model in 16 bit or NVFP4A16")


MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]          # what is fetched of a model


def load_model(path, weights="nvfp4", lora_rank=0, device="cpu", dtype=None, lora_alpha=None,
               train_norms=False, reader_class=WeightReader):
    """Read a Hugging Face folder or name into a Transformer, quantising it layer by layer.

    weights: a name in FORMATS; NVFP4 of compressed-tensors is read as it is, or dequantised for
    others. dtype: of activations, embeddings and lm_head; by default bfloat16 on a GPU, float32 on a
    CPU. LoRA (lora_rank 0: none) and, with train_norms, the norms' scales are trained.
    """
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    assert dtype.is_floating_point, f"load_model: {dtype} is no floating-point dtype"
    if not os.path.isdir(path):
        path = huggingface_hub.snapshot_download(path, allow_patterns=MODEL_FILES)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    check_config(config)
    files = {}
    for name in sorted(glob.glob(f"{glob.escape(path)}/*.safetensors")):
        file = safe_open(name, "pt", str(device))
        twice = files.keys() & set(file.keys())
        assert not twice, f"{name}: {min(twice)} is in another file, too; keep one model's files"
        files |= dict.fromkeys(file.keys(), file)
    reader = reader_class(files, weights, lora_rank, lora_alpha, train_norms, device, dtype)
    model = Transformer(config, reader)
    reader.check_all_read()
    return model
