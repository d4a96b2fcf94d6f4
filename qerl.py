"""QeRL in one file: reinforcement learning for LLMs on frozen 4-bit weights.

Equations, tables and algorithms cited here are those of "QeRL: Beyond Efficiency - Quantization-enhanced
Reinforcement Learning for LLMs", arXiv 2510.11696. The file reads top to bottom in the paper's order:

    1. NVFP4          a number format: codes, block scales, one global scale          Eq. 6
    2. QuantLinear    frozen packed weight + trainable LoRA                           Eq. 2
    3. RMSNorm + AQN  quantisation noise as annealed exploration, merged in the norm  Eq. 7-10
    4. Transformer    Qwen2/2.5, Qwen3 and Llama 3, read layer by layer
    5. Sampler        KV cache, groups of completions per prompt
    6. Objectives     GRPO and DAPO                                                   Eq. 3-4

Letters in shape comments: B sequences (LoRA's A and B apart), T tokens, S tokens packed in a line, V vocabulary, d model width,
P prompts, G samples per prompt, N = P*G completions, C longest completion.
"""
import contextlib
import glob
import math
import os
from collections import namedtuple
from dataclasses import dataclass

import huggingface_hub
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import fp4_kernels


class UserError(Exception):
    """Something the user can mend. Its text is one line that names the thing and the remedy."""


def reason(error):
    """Another exception's text as one short line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


# ---------------------------------------------------------------------------------------------------------------------
# 1. NVFP4                                                            Ŵ = S_FP32 · (S_E4M3 ⊙ W̃)                (Eq. 6)
#
# A weight is 4 bits: sign and one of eight magnitudes (E2M1: 2 exponent bits, 1 mantissa bit). Each 16 neighbours along
# the input dimension share an FP8 (E4M3) scale, each tensor one FP32 scale: 4 + 8/16 = 4.5 bits a weight.
# A format is first of all a pair of functions; every 4-bit format stores even input indices in the low nibble of a byte:
#   quantize(weight [out, in])                        -> packed uint8 [out, in/2], block_scale [out, in/block], global_scale
#   dequantize(packed, block_scale, global_scale, dtype) -> weight [out, in]
# global_scale is [1], in a QuantLinear [out, 1], as stacked layers differ. Rounding is to nearest, as in the paper's
# public checkpoints; the calibration (AWQ) of its experiments is left out.

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E2M1_MAX, E4M3_MAX = 6.0, 448.0
# Halfway points between neighbouring magnitudes, i between codes i and i + 1. bucketize gives a value on point i the lower code, i;
# a tie must go to the even one, so points 1, 3 and 5 are moved down by one ulp, and their ties go up.
E2M1_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
E2M1_BOUNDS[1::2] = torch.nextafter(E2M1_BOUNDS[1::2], torch.zeros(3))

# QLoRA's NF4 (arXiv 2305.14314, appendix E): quantiles of N(0, 1), 7 below and 8 above an exact 0, over their maximum.
NF4 = torch.tensor([-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0,
                    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1])


def pack_nibbles(codes):
    """4-bit codes uint8 [out, in] -> bytes uint8 [out, in/2], even index in the low nibble."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def encode_e2m1(weight, scale):
    """weight [out, in] / scale float32 [out, in/block], rounded to E2M1 (nearest, ties to even, saturating at 6) and packed."""
    if fp4_kernels.use_triton(weight):
        return fp4_kernels.encode_e2m1(weight, scale)
    x = (weight.unflatten(1, (scale.shape[1], -1)).float() / scale[..., None]).flatten(1)
    return pack_nibbles((torch.bucketize(x.abs(), E2M1_BOUNDS.to(x.device)) + 8 * (x < 0)).to(torch.uint8))


def unpack_nibbles(packed, table, scale, dtype):
    """Packed codes to weights: table float32 [16] has the value of each code, scale is float32 [out, in/block] -> [out, in]."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).int()                         # [out, in/2, 2]
    values = fp4_kernels.table_on(table, packed.device)[codes]
    return (values.view(*scale.shape, -1) * scale[..., None]).flatten(1).to(dtype)


def quantize_nvfp4(weight):
    """Round to nearest NVFP4, byte for byte as compressed-tensors' "nvfp4-pack-quantized" (weights only).

    weight [out, in], in divisible by 16. Returns packed uint8 [out, in/2], block_scale float8_e4m3fn [out, in/16] and
    global_scale float32 [1], which by that format's convention is the reciprocal of the S_FP32 of Eq. 6.
    """
    weight = weight.float() if weight.dtype == torch.float16 else weight                  # float16 cannot hold every global scale
    amax = weight.unflatten(1, (-1, 16)).abs().amax(-1)                                   # of each block, [out, in/16]
    global_scale = (E4M3_MAX * E2M1_MAX / amax.amax()).float()                            # the largest block scale becomes 448
    global_scale = global_scale.nan_to_num(nan=1.0, posinf=1.0).reshape(1)                # posinf: a tensor of zeros
    scale = (global_scale * (amax / E2M1_MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()     # a block's largest becomes 6
    scale = torch.where(scale == 0, 0.125, scale)                                         # 0.125, by that format: (nearly) empty blocks
    return encode_e2m1(weight, scale / global_scale), scale.to(torch.float8_e4m3fn), global_scale


def dequantize_nvfp4(packed, block_scale, global_scale, dtype=torch.bfloat16):
    """Eq. 6; shapes as quantize_nvfp4 returns them -> weight [out, in] in dtype."""
    return unpack_nibbles(packed, E2M1, block_scale.float() / global_scale, dtype)


def quantize_mxfp4(weight):
    """OCP Microscaling FP4: E2M1 codes, a power-of-two (E8M0) scale for each 32 weights, a global scale of 1.

    weight [out, in], in divisible by 32 -> packed uint8 [out, in/2], block_scale uint8 [out, in/32], global_scale [1].
    """
    # The largest of a block is mantissa * 2^exponent, 0.5 <= mantissa < 1; the largest code is 6 = 1.5 * 2^2. What would round to
    # 8 = 2^3 takes the next power.
    mantissa, exponent = torch.frexp(weight.unflatten(1, (-1, 32)).float().abs().amax(-1))
    e8m0 = (127 + exponent - 1 - 2 + (mantissa >= 0.875)).clamp(0, 254).to(torch.uint8)
    return encode_e2m1(weight, torch.exp2(e8m0.float() - 127)), e8m0, torch.ones(1, device=weight.device)


def dequantize_mxfp4(packed, block_scale, global_scale, dtype=torch.bfloat16):
    """Shapes as quantize_mxfp4 returns them -> weight [out, in] in dtype."""
    return unpack_nibbles(packed, E2M1, torch.exp2(block_scale.float() - 127), dtype)


def quantize_nf4(weight):
    """QLoRA's NF4: the nearest of 16 normal quantiles, times the absolute maximum of each 64 weights.

    weight [out, in], in divisible by 64 -> packed uint8 [out, in/2], block_scale float32 [out, in/64], global_scale [1].
    """
    blocks = weight.unflatten(1, (-1, 64)).float()
    absmax = blocks.abs().amax(-1)
    scaled = blocks * (1 / absmax.clamp_min(1e-38))[..., None]                            # as bitsandbytes rounds
    codes = torch.bucketize(scaled, ((NF4[1:] + NF4[:-1]) / 2).to(weight.device)).to(torch.uint8)
    return pack_nibbles(codes.flatten(1)), absmax, torch.ones(1, device=weight.device)


def dequantize_nf4(packed, block_scale, global_scale, dtype=torch.bfloat16):
    """Shapes as quantize_nf4 returns them -> weight [out, in] in dtype."""
    return unpack_nibbles(packed, NF4, block_scale, dtype)


# block: input features that share a scale. table: the value of each code, for the GPU's kernels. tile(packed, block_scale,
# global_scale) puts a weight into the order in which they read it (fp4_kernels.py, 2), the same values but for NF4's scales, rounded
# to bfloat16; a tiled layer's `decode` takes its input's columns in that order, which the function before writes with interleaved=True.
Format = namedtuple("Format", "quantize dequantize block table tile", defaults=(None, None))
FORMATS = {
    "nvfp4": Format(quantize_nvfp4, dequantize_nvfp4, 16, E2M1, lambda p, s, g: fp4_kernels.tile(p, s.float(), 1 / g, E2M1)),
    "mxfp4": Format(quantize_mxfp4, dequantize_mxfp4, 32, E2M1,
                    lambda p, s, g: fp4_kernels.tile(p, torch.exp2(s.float() - 127).repeat_interleave(2, 1), g, E2M1)),
    "nf4": Format(quantize_nf4, dequantize_nf4, 64, NF4, lambda p, s, g: fp4_kernels.tile(p, s, g, NF4, nf4=True)),
    "bf16": Format(lambda weight: (weight, *torch.ones(2, 1, device=weight.device)),     # the weight itself; two scales, not used
                   lambda weight, _, __, dtype=torch.bfloat16: weight.to(dtype), 1)}


# ---------------------------------------------------------------------------------------------------------------------
# 2. Quantised linear with LoRA                             y = x Ŵᵀ + b + (α/r) · (x Aᵀ) Bᵀ                      (Eq. 2)
#
# Ŵ is frozen and stays packed; only A [r, in] and B [out, r] are trained. B starts at zero, so that training starts at
# the quantised model. Layers that read the same input (q, k, v; gate, up) are stacked into one: one product with one
# packed weight instead of three, each piece with its own A, B and global scale.

class FrozenLinear(torch.autograd.Function):
    """x [n, in], h = α/r · x Aᵀ [n, layers * r] and B [out, r] -> x Ŵᵀ + b + h Bᵀ [n, out]; h and B are None without LoRA.

    Ŵ has no gradient, and is kept for backward only while a block is recomputed (see Transformer.recompute_in_backward), else
    dequantised again. x Aᵀ is left to autograd; the product with B is here so that it is added to y in place.
    """

    @staticmethod
    def forward(ctx, x, h, B, layer):
        weight = layer.dequantize(x.dtype)
        ctx.layer = layer
        ctx.save_for_backward(h, B, *([weight] if layer.keep_dequantized else []))
        y = F.linear(x, weight, layer.bias)
        for y_i, h_i, B_i in layer.pieces(y, h, B):
            y_i.addmm_(h_i, B_i.T)
        return y

    @staticmethod
    def backward(ctx, grad):
        h, B, *weight = ctx.saved_tensors
        grad_x = grad_h = grad_B = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ (weight[0] if weight else ctx.layer.dequantize(grad.dtype))
        if h is not None:
            grad_h = torch.cat([grad_i @ B_i for grad_i, _, B_i in ctx.layer.pieces(grad, h, B)], -1)
            grad_B = torch.cat([grad_i.T @ h_i for grad_i, h_i, _ in ctx.layer.pieces(grad, h, B)])
        return grad_x, grad_h, grad_B, None


class QuantLinear(nn.Module):
    """One or several linear layers over one input, frozen in one of FORMATS, with LoRA (Eq. 2): x [..., in] -> [..., out].

    names: the layers' names in the checkpoint; sizes: their out_features; weight: (packed, block_scale, global_scale) of
    all, stacked along out, or fp4_kernels.TiledWeight; bias [out] or None; neither moves with .to(). lora_A [layers * r, in] and
    lora_B [out, r] are float32 whatever the activations are; lora_alpha defaults to the rank.
    """

    def __init__(self, names, sizes, in_features, weight, bias, format="nvfp4", lora_rank=0, lora_alpha=None):
        super().__init__()
        self.names, self.sizes, self.format = names, sizes, format
        self.weight, self.bias, self.tiled = weight, bias, isinstance(weight, fp4_kernels.TiledWeight)
        self.rank, self.use_adapter = lora_rank, lora_rank > 0
        self.alpha = lora_rank if lora_alpha is None else lora_alpha
        self.keep_dequantized = False                                        # see Transformer.recompute_in_backward
        if lora_rank:
            device, bound = (weight if self.tiled else weight[0]).device, in_features ** -0.5            # kaiming_uniform(a=√5), PEFT's start
            self.lora_A = nn.Parameter(torch.empty(len(sizes) * lora_rank, in_features).uniform_(-bound, bound).to(device))
            self.lora_B = nn.Parameter(torch.zeros(sum(sizes), lora_rank, device=device))

    def dequantize(self, dtype):
        """The whole weight [out, in], a temporary."""
        return self.weight.dequantize(dtype) if self.tiled else FORMATS[self.format].dequantize(*self.weight, dtype)

    def pieces(self, y, h, B):
        """The stacked layers' shares of y [n, out], h [n, layers * r] and B [out, r]."""
        return zip(y.split(self.sizes, -1), h.split(self.rank, -1), B.split(self.sizes)) if h is not None else ()

    def forward(self, x):
        rows, h, B = x.flatten(0, -2), None, None
        if self.use_adapter:
            h, B = self.alpha / self.rank * F.linear(rows, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype)
        return FrozenLinear.apply(rows, h, B, self).unflatten(0, x.shape[:-1])

    def prepare_decoding(self, dtype):
        """Cast LoRA for `decode`, before each rollout; without tiles B's pieces become the blocks of a block-diagonal matrix."""
        self.decode_lora, scaling = None, self.alpha / max(self.rank, 1)
        if self.use_adapter and self.tiled:
            self.decode_lora = self.weight.prepare_lora(self.lora_A, self.lora_B, self.sizes, scaling, dtype)
        elif self.use_adapter:
            self.decode_lora = self.lora_A.to(dtype), (scaling * torch.block_diag(*self.lora_B.split(self.sizes))).to(dtype)

    def decode(self, x, residual=None):
        """forward(x) + residual without gradient, for x [slots, in], its columns in tile order if self.tiled."""
        if self.tiled:
            return self.weight.multiply(x, self.bias, residual, self.decode_lora)
        weight = self.dequantize(x.dtype)
        y = F.linear(x, weight, self.bias) if residual is None else torch.addmm(residual, x, weight.T)
        y = y + self.bias if residual is not None and self.bias is not None else y
        return torch.addmm(y, F.linear(x, self.decode_lora[0]), self.decode_lora[1].T) if self.decode_lora else y


@contextlib.contextmanager
def adapters_off(model):
    """Inside this, and not inside AQN, the model is the reference policy π_ref of Eq. 3: no LoRA, norm scales as loaded."""
    before = [(m, m.use_adapter) for m in model.modules() if isinstance(m, (QuantLinear, RMSNorm))]
    for layer, _ in before:
        layer.use_adapter = False
    try:
        yield
    finally:
        for layer, on in before:
            layer.use_adapter = on


# ---------------------------------------------------------------------------------------------------------------------
# 3. RMSNorm with Adaptive Quantization Noise                                                                 (Eq. 7-10)
#
#    RMSNorm_noise(x) = w_noise ⊙ x / √(mean(x²) + δ),     w_noise = w + Z,     Z ~ N(0, σ²)
#
# w + Z scales the input channels of the layers that read the norm (q, k, v; gate, up), which is the same as multiplying
# each input channel of their weights by 1 + Z/w (appendix G): parameter noise, for one addition per rollout batch. As in
# the paper's code every RMSNorm of the model is noisy, so the final norm and Qwen3's norms of q and k are, too.

class RMSNorm(nn.Module):
    """x [..., size] -> normalised x, same dtype; computed in float32. noisy_weight is w + Z during a rollout, else None."""

    def __init__(self, name, weight, eps, trainable=False):
        super().__init__()
        self.name, self.eps, self.use_adapter, self.noisy_weight = name, eps, True, None
        self.weight = nn.Parameter(weight.float(), requires_grad=trainable)
        self.register_buffer("reference_weight", self.weight.detach().clone() if trainable else self.weight.detach())

    def forward(self, x, tiled=False):
        """tiled: columns in tile order, for the next layer's decode."""
        weight = self.weight if self.use_adapter else self.reference_weight
        return fp4_kernels.rms_norm(x, weight if self.noisy_weight is None else self.noisy_weight, self.eps, tiled)


@contextlib.contextmanager
def adaptive_quantization_noise(model, sigma, generator=None):
    """AQN: inside, every RMSNorm scale carries one fresh draw of noise, w + N(0, sigma²) (Eq. 7, 10; Algorithm 1, line 9).

    Wrap one rollout batch in it; log-probabilities and updates run outside. generator: on the CPU.
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


def noise_sigma(step, steps, stages=10, start=1e-2, end=5e-4, schedule="exponential"):
    """σ of 0-based `step`: training is cut into `stages` equal parts, the first without noise, the others from start to end.

    Exponential is Eq. 8 with K = stages - 1, so that the last stage has `end` (for stages > 2 and steps >= stages);
    it needs start and end positive, or both 0. The other three are Figure 9's.
    """
    stage = step * stages // steps
    if stage == 0 or start == end:
        return start if stage else 0.0
    t = (stage - 1) / max(stages - 2, 1)                                        # 0 in the first noisy stage, 1 in the last
    if schedule == "exponential":
        return start * (end / start) ** t
    fall = {"linear": t, "cosine": (1 - math.cos(math.pi * t)) / 2,
            "logarithmic": math.log(stage) / math.log(max(stages - 1, 2))}
    return start + (end - start) * fall[schedule]


# ---------------------------------------------------------------------------------------------------------------------
# 4. Transformer: Qwen2/Qwen2.5, Qwen3, Llama 3

def rope_frequencies(config, head_dim):
    """(inverse frequencies [head_dim/2] in radians per position, factor on cos and sin) as config.rope_parameters say."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device="cpu")
    return rope["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim), 1.0


torch.backends.cuda.enable_cudnn_sdp(False)         # cuDNN plans each new [B, T] for 0.1 s, and hardly two batches are alike


class Attention(nn.Module):
    """Grouped-query attention; rope = (cos, sin), each [T, head_dim]; cache and slots as in Transformer.hidden. With a packing (see
    pack) x is a line of tokens [S, d]: .place lays it out as rows for attention, .origin takes the results back."""

    def __init__(self, config, checkpoint, name, index):
        super().__init__()
        self.index = index
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        q, kv, d = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim, config.hidden_size
        qwen2, bias = config.model_type == "qwen2", getattr(config, "attention_bias", False)
        self.qkv = checkpoint.linear(name, ["q_proj", "k_proj", "v_proj"], [q, kv, kv], d, bias=qwen2 or bias)
        self.o = checkpoint.linear(name, ["o_proj"], [d], q, bias=bias)
        qk_norm = config.model_type == "qwen3"
        self.q_norm = checkpoint.norm(f"{name}.q_norm", self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = checkpoint.norm(f"{name}.k_norm", self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()

    def forward(self, x, rope, cache=None, slots=None, packing=None):
        qkv = self.qkv(x)
        if packing is not None:                          # = qkv[packing.place], (S, ..) -> (B, T, ..), whose backward is slow
            qkv = F.embedding(packing.place, qkv)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.split(self.qkv.sizes, -1))
        q, k = fp4_kernels.rotary(self.q_norm(q), *rope), fp4_kernels.rotary(self.k_norm(k), *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)              # (B, heads, T, head_dim)
        if cache is not None:
            cache.store_prompts(self.index, slots, k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.o(y if packing is None else y.flatten(0, 1).index_select(0, packing.origin))          # (S, q)

    def decode(self, qkv, rope, cache):
        """What lies between qkv and o, for one new token of each slot: [slots, q + k + v] -> [slots, q]; k and v go into the cache."""
        if isinstance(self.q_norm, RMSNorm):
            q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in qkv.split(self.qkv.sizes, -1))
            qkv = torch.cat([self.q_norm(q).flatten(1), self.k_norm(k).flatten(1), v.flatten(1)], -1)
        return fp4_kernels.decode_attention(qkv, *rope, cache.k[self.index], cache.v[self.index], cache.length, self.o.tiled)


class MLP(nn.Module):
    def __init__(self, config, checkpoint, name):
        super().__init__()
        d, inner, bias = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
        self.gate_up = checkpoint.linear(name, ["gate_proj", "up_proj"], [inner, inner], d, bias=bias)
        self.down = checkpoint.linear(name, ["down_proj"], [d], inner, bias=bias)

    def forward(self, x):
        return self.down(fp4_kernels.silu_mul(self.gate_up(x)))


class Block(nn.Module):
    def __init__(self, config, checkpoint, name, index):
        super().__init__()
        self.attention_norm = checkpoint.norm(f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, checkpoint, f"{name}.self_attn", index)
        self.mlp_norm = checkpoint.norm(f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, checkpoint, f"{name}.mlp")

    def forward(self, x, rope, cache=None, slots=None, packing=None):
        x = x + self.attention(self.attention_norm(x), rope, cache, slots, packing)
        return x + self.mlp(self.mlp_norm(x))

    def decode(self, x, rope, cache):
        """forward for one new token of each slot, x [slots, d]; for Qwen2.5 on Hopper eight kernels, up to 128 slots and rank 128."""
        qkv, o, gate_up, down = self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down
        y = self.attention.decode(qkv.decode(self.attention_norm(x, qkv.tiled)), rope, cache)
        x = o.decode(y, residual=x)
        y = gate_up.decode(self.mlp_norm(x, gate_up.tiled))
        return down.decode(fp4_kernels.silu_mul(y, down.tiled), residual=x)


class Transformer(nn.Module):
    """model(tokens [B, T]) -> logits [B, T, V]. config is transformers'; checkpoint hands out the layers (see Checkpoint)."""

    def __init__(self, config, checkpoint):
        check_config(config)
        super().__init__()
        self.config, self.recompute_blocks = config, False
        shape = (config.vocab_size, config.hidden_size)
        self.register_buffer("embedding", checkpoint.tensor("model.embed_tokens.weight", shape))
        self.register_buffer("lm_head", self.embedding if config.tie_word_embeddings else checkpoint.tensor("lm_head.weight", shape))
        self.blocks = nn.ModuleList(Block(config, checkpoint, f"model.layers.{i}", i) for i in range(config.num_hidden_layers))
        self.norm = checkpoint.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        frequencies, self.rope_factor = rope_frequencies(config, self.blocks[0].attention.head_dim)
        self.register_buffer("frequencies", frequencies.to(self.device))

    def rope(self, positions, dtype):
        """cos and sin of int64 positions [...], each [..., head_dim]."""
        angles = positions[..., None] * self.frequencies
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.rope_factor).to(dtype), (angles.sin() * self.rope_factor).to(dtype)

    def hidden(self, tokens, cache=None, slots=None, packing=None):
        """tokens int64 [B, T] -> final hidden states [B, T, d], by causal attention over each row. With a cache and slots
        int64 [B*G], prefill: row b also fills the cache's slots[b*G : (b+1)*G]. With a packing (see pack): [S] -> [S, d]."""
        recomputing = self.recompute_blocks and torch.is_grad_enabled()
        x = F.embedding(tokens, self.embedding).requires_grad_(recomputing)   # else reentrant recomputation has no gradient
        T = tokens.shape[1] if packing is None else packing.place.shape[1]
        rope = self.rope(torch.arange(T, device=tokens.device), x.dtype)
        for block in self.blocks:
            if recomputing:                    # use_reentrant=False, today's default, hooks every tensor: twice the host's work
                x = recompute(block, x, rope, None, None, packing, use_reentrant=True, preserve_rng_state=False)
            else:
                x = block(x, rope, cache, slots, packing)
        return self.norm(x)

    def decode(self, tokens, cache):
        """The next token of every slot of the cache, int64 [slots], at position cache.length -> hidden states [slots, d]. Sampler.pick
        moves the length on."""
        x = F.embedding(tokens, self.embedding)
        rope = self.rope(cache.length, x.dtype)
        for block in self.blocks:
            x = block.decode(x, rope, cache)
        return self.norm(x)

    def recompute_in_backward(self):
        """Keep only each block's input; in backward run a block forward again, differentiate it and free it: less memory for one
        more forward pass. Its dequantised weights live from this second forward to the end of its backward, so that each is
        dequantised once a pass. Gradients then come from .backward() without `inputs`, not from autograd.grad."""
        self.recompute_blocks = True
        for layer in self.quantized_layers():
            layer.keep_dequantized = True

    def quantized_layers(self):
        return [m for m in self.modules() if isinstance(m, QuantLinear)]

    def forward(self, tokens):
        return F.linear(self.hidden(tokens), self.lm_head)

    @property
    def device(self):
        return self.embedding.device


class Checkpoint:
    """Hands a model its tensors one layer at a time, read, checked and quantised, so that of the quantised layers no more
    than one is ever held in full precision. Override `read` and `has` to make a model without files (random weights)."""

    def __init__(self, folder, weights="nvfp4", lora_rank=0, lora_alpha=None, train_norms=False, device="cpu", dtype=torch.float32):
        self.weights, self.lora_rank, self.lora_alpha, self.train_norms = weights, lora_rank, lora_alpha, train_norms
        self.device, self.dtype = torch.device(device), dtype
        self.files = {}                                                       # tensor name -> open safetensors file
        for path in sorted(glob.glob(f"{glob.escape(folder)}/*.safetensors")) if folder else []:
            try:
                file = safe_open(path, framework="pt", device=str(self.device))
            except Exception as e:
                raise UserError(f"{path}: not a readable safetensors file ({reason(e)}); fetch it again")
            self.files.update((name, file) for name in file.keys())
        if folder and not self.files:
            raise UserError(f"{folder}: holds no .safetensors file; pickled weights (.bin, .pt) are never loaded, convert them first")
        self.packed = any(name.endswith(".weight_packed") for name in self.files)

    def has(self, name):
        return name in self.files

    def read(self, name, shape):
        """The stored tensor `name`, checked to exist, to have `shape` and to be finite."""
        if not self.has(name):
            raise UserError(f"tensor {name} is missing from the checkpoint; fetch the model again or check its config.json")
        tensor = self.files[name].get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise UserError(f"tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {tuple(shape)}; "
                            "use the config that belongs to the weights")
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise UserError(f"tensor {name} holds NaN or infinity; use an undamaged checkpoint")
        return tensor

    def tensor(self, name, shape):
        return self.read(name, shape).to(self.dtype)

    def norm(self, name, size, eps):
        return RMSNorm(name, self.read(f"{name}.weight", (size,)), eps, self.train_norms)

    def quantized(self, name, out_features, in_features, format):
        """(packed, block_scale, global_scale [out, 1]) of one layer, read as NVFP4 or quantised here."""
        if in_features % (block := FORMATS[format].block):
            raise UserError(f"layer {name} has {in_features} input features, not divisible by {format}'s block of {block}; "
                            "use other --weights")
        if self.has(f"{name}.weight_packed"):                                 # compressed-tensors nvfp4-pack-quantized
            parts = (self.read(f"{name}.weight_packed", (out_features, in_features // 2)),
                     self.read(f"{name}.weight_scale", (out_features, in_features // 16)),
                     self.read(f"{name}.weight_global_scale", (1,)))
            if parts[1].dtype != torch.float8_e4m3fn or parts[2] <= 0:
                raise UserError(f"layer {name}: its scales are not NVFP4's (float8_e4m3fn, and a positive global scale); "
                                "quantise the model again")
            if format != "nvfp4":
                parts = FORMATS[format].quantize(dequantize_nvfp4(*parts, self.dtype))
        else:
            weight = self.read(f"{name}.weight", (out_features, in_features))           # quantised in the dtype it has
            parts = FORMATS[format].quantize(weight.to(self.dtype) if format == "bf16" else weight)
        return (*parts[:2], parts[2].expand(out_features).reshape(-1, 1))

    def linear(self, prefix, leaves, sizes, in_features, bias):
        """One QuantLinear of the layers prefix.leaf (leaves: names; sizes: their out_features), with fresh LoRA."""
        names = [f"{prefix}.{leaf}" for leaf in leaves]
        plain = not any(self.has(f"{name}.weight_packed") for name in names)
        format = "bf16" if self.packed and plain else self.weights            # what a packed folder left in 16 bit stays so
        parts = zip(*(self.quantized(name, size, in_features, format) for name, size in zip(names, sizes)))
        weight = [torch.cat(part).contiguous() for part in parts]
        if fp4_kernels.triton and self.device.type == "cuda" and self.dtype == torch.bfloat16 and format != "bf16":
            if in_features % 128 == 0 and all(size % 128 == 0 for size in sizes):         # what the kernels take
                weight = FORMATS[format].tile(*weight)
        bias = torch.cat([self.tensor(f"{n}.bias", (s,)) for n, s in zip(names, sizes)]) if bias else None
        return QuantLinear(names, sizes, in_features, weight, bias, format, self.lora_rank, self.lora_alpha)


def model_folder(name):
    """A local folder as it is, or the cached snapshot of a Hugging Face name (downloaded once)."""
    if os.path.isdir(name):
        if not os.path.exists(f"{name}/config.json"):
            raise UserError(f"model {name}: no config.json in this folder; give a Hugging Face model's folder")
        return name
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"model {name}: no such folder; check the path")
    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
    except Exception as e:
        raise UserError(f"model {name}: no such folder, and Hugging Face does not give it ({reason(e)}); "
                        "check the name and the connection")


def check_config(config):
    """Refuse, with the reason, what this transformer does not compute."""
    if config.model_type not in ("qwen2", "qwen3", "llama"):
        raise UserError(f"architecture {config.model_type} is not supported; use a Qwen2/Qwen2.5, Qwen3 or Llama 3 model")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in ("default", "linear", "llama3", "yarn"):
        raise UserError(f"rope scaling {rope_type} is not supported; use a model with default, linear, llama3 or yarn")
    if getattr(config, "use_sliding_window", False):
        raise UserError("sliding-window attention is not supported; set use_sliding_window to false in config.json")
    if config.hidden_act != "silu":
        raise UserError(f"activation {config.hidden_act} is not supported; use a model with silu")
    stored = getattr(config, "quantization_config", None) or {"format": "nvfp4-pack-quantized"}
    if stored.get("format") != "nvfp4-pack-quantized":
        raise UserError(f"weights quantised as {stored.get('format') or stored.get('quant_method')} are not supported; "
                        "use the 16-bit model or an NVFP4A16 one")


def load_model(path, weights="nvfp4", lora_rank=0, device="cpu", dtype=None, lora_alpha=None, train_norms=False):
    """Read a Hugging Face folder or name into a Transformer, quantising layer by layer on the device.

    weights: nvfp4, mxfp4, nf4 or bf16 (unquantised, in dtype). dtype of activations, embeddings and lm_head: bfloat16 on
    a GPU, float32 on a CPU unless given. Gradients go to LoRA (rank 0: none; lora_alpha defaults to the rank) and, with
    train_norms, to the norms' scales. A compressed-tensors NVFP4A16 folder is read as it is with weights="nvfp4", and
    dequantised first for the others. Of several GPUs choose one by torch.cuda.set_device first: kernels start on the current one.
    Raises UserError for what the user can mend.
    """
    if weights not in FORMATS:
        raise UserError(f"weights {weights} are unknown; choose {', '.join(FORMATS)}")
    folder = model_folder(path)
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as e:
        raise UserError(f"model {path}: config.json cannot be used ({reason(e)}); give the folder of a Qwen2.5, Qwen3 or Llama 3 model")
    dtype = dtype or (torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32)
    return Transformer(config, Checkpoint(folder, weights, lora_rank, lora_alpha, train_norms, device, dtype))


def trainable(model):
    """{name: parameter} of what the optimiser moves, in a fixed order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# ---------------------------------------------------------------------------------------------------------------------
# 5. Sampler
#
# `slots` sequences are decoded together. A prompt enters once G slots are idle: its keys and values are computed once and
# copied to all of them. Everything a decode step needs lives in tensors of fixed shape on the device, so that on a GPU the
# whole step is one recorded CUDA graph, and the host looks at the slots only every 8 tokens. Once no prompt waits and half of
# the slots are idle, the other half goes on alone (from 32 slots on).

class KVCache:
    """Keys and values [layers, slots, kv_heads, max_len, head_dim]; length int64 [slots] is how many are filled."""

    def __init__(self, model, slots, max_len):
        shape = (len(model.blocks), slots, model.config.num_key_value_heads, max_len, model.blocks[0].attention.head_dim)
        self.k = torch.zeros(shape, dtype=model.embedding.dtype, device=model.device)
        self.v = torch.zeros_like(self.k)
        self.length = torch.zeros(slots, dtype=torch.long, device=model.device)

    def store_prompts(self, layer, slots, k, v):
        """k, v [P, kv_heads, T, head_dim] of P prompts into slots [P*G]; padding lies behind `length`, where nothing looks."""
        group = len(slots) // len(k)
        self.k[layer, slots, :, :k.shape[2]] = k.repeat_interleave(group, 0)
        self.v[layer, slots, :, :k.shape[2]] = v.repeat_interleave(group, 0)

    def keep(self, slots):
        """Forget all slots but these, int64 [fewer]."""
        self.k = self.k[:, slots]                                          # the old k is free before v is copied
        self.v, self.length = self.v[:, slots], self.length[slots]


@dataclass
class Rollout:
    """N completions, padded to C tokens, in the order of the prompts (each repeated group_size times)."""
    tokens: torch.Tensor                # int64 [N, C]
    logprobs: torch.Tensor              # float32 [N, C], of the sampled tokens at the sampling temperature
    entropy: torch.Tensor               # float32 [N, C], of the policy at each token, in nats
    length: torch.Tensor                # int64 [N]
    finished: torch.Tensor              # bool [N]: ended by an EOS token

    @property
    def mask(self):
        """bool [N, C], True at sampled tokens (the EOS included)."""
        return length_mask(self.length, self.tokens.shape[1])


def length_mask(length, longest):
    """length int64 [N] -> bool [N, longest], True at the first `length` places of each row."""
    return torch.arange(longest, device=length.device) < length[:, None]


def nucleus(probs, top_p):
    """Zero all but the smallest set of tokens whose probability reaches top_p; probs [B, V]."""
    ordered, index = probs.sort(-1, descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    return torch.zeros_like(probs).scatter(-1, index, ordered)


def sample(logits, temperature=1.0, top_p=1.0, generator=None):
    """logits [B, V] -> token int64 [B], its log-probability and the policy's entropy, float32 [B] in nats.

    Log-probability and entropy are of softmax(logits/temperature), before top_p cuts it. temperature 0 takes the likeliest
    token; the two are then those of temperature 1. Sampling is the Gumbel-max trick in its exponential form: for E_i ~ Exp(1),
    argmax p_i/E_i is a draw from p, normalised or not, without waiting for the device.
    """
    if logits.is_cuda and temperature > 0 and top_p == 1 and fp4_kernels.use_triton(logits):
        return fp4_kernels.sample(logits, temperature, torch.randint(2 ** 62, (1,), device=logits.device, generator=generator))
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).sum(-1)
    if temperature == 0:
        token = logprobs.argmax(-1)
    else:
        candidates = nucleus(probs, top_p) if top_p < 1 else probs
        token = (candidates / torch.empty_like(probs).exponential_(generator=generator)).argmax(-1)
    return token, logprobs.gather(-1, token[:, None])[:, 0], entropy


def record_graph(step, generator=None):
    """Run step() as one CUDA graph: record its kernels once, replay them with one launch. Returns step's replacement.

    A replay reads and writes the very tensors of the recording; whoever feeds it must change them in place. The warm-up is a
    step like any other: what it changes stays changed. generator: what step draws from, if not the default.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()                                                 # warm up: compiles kernels, allocates workspaces
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def to_device(numbers, device):
    """(Lists of) ints as an int64 tensor, without waiting for the GPU's queue, which torch.tensor(numbers, device) does."""
    tensor = torch.tensor(numbers)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class Sampler:
    """The state of one `generate` call. Of each slot: row, column, token, cache.length; of each of the n completions: tokens,
    logprobs, entropy, length, finished, limit.

    Made anew for each call, and with it the CUDA graph, which has the call's cache and noisy norms in it.
    """

    def __init__(self, model, n, slots, max_len, max_new_tokens, temperature, top_p, eos, generator):
        device = model.device
        self.model, self.n, self.cache = model, n, KVCache(model, slots, max_len)
        self.temperature, self.top_p, self.generator = temperature, top_p, generator
        self.eos = torch.tensor(sorted(eos), dtype=torch.long, device=device)
        self.row = torch.full((slots,), n, device=device)                  # the completion each slot continues; n, a spare row: idle
        self.column = torch.zeros_like(self.row)                           # and its next token's place in it
        self.token = torch.zeros_like(self.row)                            # next input of each slot
        shape = (n + 1, max_new_tokens)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs, self.entropy = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self.length = torch.zeros(n + 1, dtype=torch.long, device=device)
        self.finished = torch.zeros(n + 1, dtype=torch.bool, device=device)
        self.limit = torch.full((n + 1,), max_new_tokens, device=device)   # where each is cut; bench.py lowers it
        for layer in model.quantized_layers():
            layer.prepare_decoding(model.embedding.dtype)
        self.record()

    def record(self):
        """`replay`: None, or on a GPU with Triton a graph of `step`; with top-p, of `forward` alone, which `pick` follows."""
        self.replay = None
        if self.model.device.type == "cuda" and fp4_kernels.triton:
            self.replay = record_graph(self.step, self.generator) if self.top_p == 1 else record_graph(self.forward)

    def shrink(self):
        """Go on with half of the slots, when as many are idle: the last and longest completions then take less time a token."""
        keep = (self.row == self.n).int().argsort(stable=True)[:len(self.row) // 2]           # the busy ones come first
        self.row, self.column, self.token = self.row[keep], self.column[keep], self.token[keep]
        self.replay = None                                                 # gives the old graph's memory back
        self.cache.keep(keep)
        self.record()

    def steps(self, count):
        for _ in range(count):
            (self.replay or self.step)()
            if self.replay and self.top_p != 1:
                self.pick()

    def admit(self, prompts, slots, rows, prefill_tokens=32768):
        """Let idle slots [P*G] begin the completions `rows` [P*G] of `prompts` (P lists of token ids).

        All but the last token of a prompt are prefilled, prefill_tokens at a time; the last is the slot's first decode input.
        """
        device, group = self.model.device, len(slots) // len(prompts)
        longest = max(len(p) for p in prompts)
        padded = to_device([p + [0] * (longest - len(p)) for p in prompts], device)
        at_once = max(1, prefill_tokens // longest)
        for i in range(0, len(prompts), at_once) if longest > 1 else ():            # a single token needs no prefill
            self.model.hidden(padded[i:i + at_once, :-1], self.cache, slots[i * group:(i + at_once) * group])
        last = to_device([len(p) - 1 for p in prompts], device)
        self.cache.length[slots] = last.repeat_interleave(group)
        self.token[slots] = padded.gather(1, last[:, None])[:, 0].repeat_interleave(group)
        self.row[slots], self.column[slots] = rows, 0

    def step(self):
        """One token for every slot; nothing here waits for the device."""
        self.forward()
        self.pick()

    def forward(self):
        self.logits = F.linear(self.model.decode(self.token, self.cache), self.model.lm_head)             # [slots, V]

    def pick(self):
        """Draw the tokens, write them down, and let the slots go whose completion ends; in place, for the graph's sake."""
        token, logprob, entropy = sample(self.logits, self.temperature, self.top_p, self.generator)
        at = (self.row, self.column)
        self.tokens[at], self.logprobs[at], self.entropy[at] = token, logprob, entropy
        ended = (token[:, None] == self.eos).any(1)
        self.finished[self.row], self.length[self.row] = ended, self.column + 1
        stop = ended | (self.column + 1 >= self.limit[self.row]) | (self.row == self.n)
        self.row.masked_fill_(stop, self.n)
        self.column.add_(1).masked_fill_(stop, 0)
        self.token.copy_(token)
        self.cache.length.add_(1).masked_fill_(stop, 0)

    def rollout(self):
        """The completions, without the row that idle slots wrote into, cut to the longest."""
        n, longest = self.n, int(self.length[:self.n].max())
        return Rollout(self.tokens[:n, :longest], self.logprobs[:n, :longest], self.entropy[:n, :longest],
                       self.length[:n], self.finished[:n])


def generate(model, prompts, max_new_tokens, group_size=1, temperature=1.0, top_p=1.0, eos=(), slots=256, generator=None):
    """Sample group_size completions for each prompt -> Rollout of N = len(prompts) * group_size rows on model.device.

    prompts: lists of token ids, of any lengths but 0; eos: token ids that end a completion; slots: sequences decoded at once,
    at least group_size (memory grows with them); generator: on model.device. temperature 0 is greedy; 0 < top_p <= 1.
    """
    n = len(prompts) * group_size
    slots = max(group_size, min(slots, n))
    max_len = max(len(p) for p in prompts) + max_new_tokens
    check_every = 8 if model.device.type == "cuda" else 1       # looking at the slots makes the host wait for the GPU
    entered = 0                                                 # prompts that have had their slots
    with torch.no_grad():
        sampler = Sampler(model, n, slots, max_len, max_new_tokens, temperature, top_p, eos, generator)
        while True:
            idle = (sampler.row == n).nonzero()[:, 0]
            admitted = min(len(idle) // group_size, len(prompts) - entered)
            busy = len(sampler.row) - len(idle)
            if not busy and not admitted:
                return sampler.rollout()
            if entered == len(prompts) and len(sampler.row) >= 32 and busy <= len(idle):
                sampler.shrink()
            if busy:                    # first, so that the GPU decodes while the host issues the prefill; idle slots remain idle
                sampler.steps(check_every)
            if admitted:
                rows = torch.arange(entered * group_size, (entered + admitted) * group_size, device=model.device)
                sampler.admit(prompts[entered:entered + admitted], idle[:len(rows)], rows)
                entered += admitted


# ---------------------------------------------------------------------------------------------------------------------
# 6. Objectives
#
#    A_i = (r_i - mean(r)) / std(r)     over the G samples of a prompt                                   (Eq. 4)
#    J   = E[ min(ρ A, clip(ρ, 1-ε_low, 1+ε_high) A) - β KL(π_θ || π_ref) ],  ρ = π_θ / π_old per token   (Eq. 3)
#
# Four policies: π_θ is trained; π_old is π_θ before this batch's updates; π_rollout sampled the batch: π_old with AQN,
# in the decoding kernels' arithmetic; π_ref is π_θ without adapters. Algorithm 1 names the noisy π_rollout π_old; as in
# the paper's code, ρ divides by the π_old without noise. How far π_old is from π_rollout is logged (`mismatch`), and may be
# corrected by `truncated_importance`. ε_high > ε_low is DAPO's "clip higher", here the default of GRPO, too; Eq. 3 has them equal.

def has_signal(rewards):
    """rewards [P, G] -> bool [P]: do a group's rewards differ? If not, it teaches nothing."""
    return (rewards != rewards[:, :1]).any(1)


def group_advantages(rewards, eps=1e-4):
    """rewards [P, G] -> advantages [P, G] (Eq. 4; sample std over G - 1, eps as in TRL); exactly 0 in groups without signal."""
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + eps)
    return torch.where(has_signal(rewards)[:, None], advantages, 0)


Packing = namedtuple("Packing", ["place", "origin", "start"])                             # see pack


def pack(prompts, length):
    """Rows [B, T] of prompt + completion as S tokens in one line, where a prompt that rows share stands once, and padding never.
    Attention alone works on rows, all other layers on the line (as in Prefix Grouper, arXiv 2506.05433).

    prompts: B lists; length int64 [B] of the completions -> Packing(place int64 [B, T]: which token of the line stands at each
    position (any, at padding); origin int64 [S]: the position in [B * T] that each token came from; start int64 [B]: the
    position of each completion in its row).
    Rows "p q a" and "p q b c" -> line "p q a b c", place [[0, 1, 2, -], [0, 1, 3, 4]], origin [0, 1, 2, 6, 7], start [2, 2].
    """
    start = to_device([len(p) for p in prompts], length.device)
    first = to_device([prompts.index(p) for p in prompts], length.device)                   # the first row with this prompt
    t = torch.arange((start + length).max(), device=length.device)
    in_prompt, is_first = t < start[:, None], first == torch.arange(len(prompts), device=length.device)
    is_origin = torch.where(in_prompt, is_first[:, None], t < (start + length)[:, None])    # (B, T): where it enters the line
    place = is_origin.flatten().cumsum(0).view_as(is_origin) - 1                            # and how many before it do
    return Packing(torch.where(in_prompt, place[first], place), is_origin.flatten().nonzero()[:, 0], start)


def token_logprobs(model, prompts, completions, length, chunk=2048):
    """log π(token) of completions int64 [B, C] with lengths [B] after their prompts (B lists) -> float32 [B, C], 0 at padding.

    At temperature 1. Rows are padded on the right, so causal attention alone hides the padding. The output layer runs on
    `chunk` tokens at a time and again in backward: [tokens, V] logits never exist whole.
    """
    device, packing, mask = completions.device, pack(prompts, length), length_mask(length, completions.shape[1])
    T = packing.place.shape[1]
    padded = to_device([p + [0] * (T - len(p)) for p in prompts], device)                                   # (B, T)
    column = torch.arange(T, device=device) - packing.start[:, None]                                        # in the completion
    tokens = torch.where(column < 0, padded, completions.gather(1, column.clamp(0, completions.shape[1] - 1)))
    predicts = (column >= -1) & (column + 1 < length[:, None])               # a completion's token comes next
    # Not hidden[...], whose backward on several CPU threads adds up in any order, so that no run could be repeated exactly.
    hidden = F.embedding(packing.place[predicts], model.hidden(tokens.flatten()[packing.origin], packing=packing))       # (n, d)

    def head(h, t):
        return fp4_kernels.token_logprob(F.linear(h, model.lm_head), t)

    pieces = [recompute(head, h, t, use_reentrant=False, preserve_rng_state=False)
              for h, t in zip(hidden.split(chunk), completions[mask].split(chunk))]
    return torch.zeros(completions.shape, device=device).masked_scatter(mask, torch.cat(pieces))


def token_weights(mask, algorithm="grpo"):
    """The weight of each token in the loss: mask bool [N, C] of a whole (mini)batch -> float32 [N, C].

    grpo: the mean over samples of the mean over a sample's tokens (Eq. 3); dapo: the mean over all tokens.
    """
    mask = mask.float()
    assert algorithm in ("grpo", "dapo"), algorithm
    if algorithm == "grpo":
        return mask / mask.sum(1, keepdim=True).clamp_min(1) / len(mask)
    return mask / mask.sum().clamp_min(1)


def policy_loss(logprobs, old_logprobs, advantages, weights, clip_low=0.2, clip_high=0.28, ref_logprobs=None, beta=0.0, importance=None):
    """-J of Eq. 3 for sequences [B, C], advantages [B], weights of token_weights -> (loss, mean KL to the reference).

    Losses of micro-batches add up to the batch's, because weights are of the batch. KL is Schulman's unbiased estimate
    e^d - d - 1 with d = log π_ref - log π_θ. importance [B, C] multiplies the gain, not the KL: see truncated_importance.
    """
    ratio = (logprobs - old_logprobs).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - clip_low, 1 + clip_high) * advantages[:, None])
    if importance is not None:
        gain = gain * importance
    d = torch.zeros_like(logprobs) if ref_logprobs is None else ref_logprobs - logprobs
    kl = d.exp() - d - 1
    return ((beta * kl - gain) * weights).sum(), (kl * weights).sum().detach()


def mismatch(old_logprobs, rollout_logprobs, mask):
    """How far π_old is from π_rollout: (KL(π_rollout || π_old) in nats per token, largest ratio of the two either way).

    With AQN the noise is part of it; without, only rounding is (decoding and training add in different orders).
    """
    d = (old_logprobs - rollout_logprobs)[mask]
    return (d.exp() - d - 1).mean().item(), d.abs().max().exp().item()


def truncated_importance(old_logprobs, rollout_logprobs, cap=2.0):
    """min(π_old / π_rollout, cap), float32 [N, C]: corrects the mismatch without letting one token dominate (TIS; FlashRL)."""
    return (old_logprobs - rollout_logprobs).exp().clamp(max=cap)
