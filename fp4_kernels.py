"""Triton kernels. Each stands beside the few lines of PyTorch that it equals, which run where Triton does not.

The twins are the specification: they step in a debugger, and the tests hold the kernels to them, on a GPU and in
Triton's interpreter (TRITON_INTERPRET=1) on a CPU.
"""
import functools
import os

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:                    # no Triton for this system: the twins do everything
    triton = None

LOG2E = 1.4426950408889634             # exp(x) = exp2(x * LOG2E), and exp2 is what the hardware has
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x):
    return triton is not None and (x.is_cuda or INTERPRETED)


# ---------------------------------------------------------------------------------------------------------------------
# Decode 4-bit codes                                        w[n, k] = table[code[n, k]] · scale[n, k // block]
# Bound by memory: half a byte of codes, 4/block bytes of float32 scale in, two bytes out for each weight.

@functools.lru_cache
def table_on(table, device):
    """A constant table on a device, copied there once."""
    return table.to(device)


def decode_nibbles_torch(packed, table, scale, dtype):
    table = table_on(table, packed.device)
    values = torch.stack([table[(packed & 15).int()], table[(packed >> 4).int()]], dim=-1)     # [out, in/2, 2]
    return (values.view(*scale.shape, -1) * scale[..., None]).flatten(1).to(dtype)


def decode_nibbles(packed, table, scale, dtype):
    """packed uint8 [out, in/2], even index in the low nibble; table float32 [16]; scale float32 [out, in/block];
    -> [out, in] in dtype."""
    if not use_triton(packed):
        return decode_nibbles_torch(packed, table, scale, dtype)
    out_features, half = packed.shape
    weight = torch.empty(out_features, 2 * half, dtype=dtype, device=packed.device)
    grid = (triton.cdiv(packed.numel(), 1024),)
    decode_nibbles_kernel[grid](packed, table_on(table, packed.device), scale, weight, packed.numel(),
                                HALF_BLOCK=half // scale.shape[1], BYTES=1024, num_warps=4)
    return weight


if triton is not None:
    @triton.jit
    def decode_nibbles_kernel(packed, table, scale, weight, n_bytes, HALF_BLOCK: tl.constexpr, BYTES: tl.constexpr):
        first = tl.program_id(0).to(tl.int64) * BYTES                 # rows are whole blocks, so one flat index serves all
        i, j, b = tl.arange(0, BYTES), tl.arange(0, 2 * BYTES), tl.arange(0, BYTES // HALF_BLOCK)
        code = tl.load(packed + first + i, mask=first + i < n_bytes, other=0).to(tl.int32)
        s = tl.load(scale + first // HALF_BLOCK + b, mask=first + b * HALF_BLOCK < n_bytes, other=0.0)
        s = tl.broadcast_to(s[:, None], (BYTES // HALF_BLOCK, HALF_BLOCK)).reshape(BYTES)
        low = tl.load(table + (code & 15)) * s
        high = tl.load(table + (code >> 4)) * s
        tl.store(weight + 2 * first + j, tl.interleave(low, high).to(weight.dtype.element_ty), mask=2 * first + j < 2 * n_bytes)


# ---------------------------------------------------------------------------------------------------------------------
# Decode attention                                          y[b, h] = softmax(q[b, h] · K[b, :length[b]]ᵀ / √D) · V
# One query a row against a cache of fixed size. Bound by memory: the keys and values that are there are read once, for
# all query heads that share them (GQA); what lies behind `length` is not touched.

def decode_attention_torch(q, k, v, length):
    k, v = k[:, :, :length.max()], v[:, :, :length.max()]
    mask = torch.arange(k.shape[2], device=q.device) < length[:, None, None, None]             # (B, 1, 1, T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def decode_attention(q, k, v, length):
    """q [B, heads, 1, D], k and v [B, kv_heads, max_len, D] of the same strides, rows contiguous, length int64 [B] >= 1
    -> [B, heads, 1, D]."""
    if not use_triton(q):
        return decode_attention_torch(q, k, v, length)
    B, heads, _, D = q.shape
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    share = heads // k.shape[1]
    decode_attention_kernel[(B, k.shape[1])](
        q.contiguous(), k, v, length, y, k.stride(0), k.stride(1), D ** -0.5 * LOG2E, SHARE=share,
        HEADS=max(16, triton.next_power_of_2(share)), D=D, BLOCK=64, D_PAD=triton.next_power_of_2(D), num_warps=4)
    return y


if triton is not None:
    @triton.jit
    def decode_attention_kernel(q, k, v, length, y, stride_b, stride_h, scale_log2e, SHARE: tl.constexpr, HEADS: tl.constexpr,
                                D: tl.constexpr, BLOCK: tl.constexpr, D_PAD: tl.constexpr):
        b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
        n = tl.load(length + b).to(tl.int32)
        head, d = tl.arange(0, HEADS), tl.arange(0, D_PAD)             # the query heads of one kv head, padded for tl.dot
        at = ((b * tl.num_programs(1) + g) * SHARE + head[:, None]) * D + d[None]
        inside = (head[:, None] < SHARE) & (d[None] < D)
        Q = tl.load(q + at, mask=inside, other=0.0)
        top = tl.full([HEADS], -float("inf"), tl.float32)              # online softmax: running maximum, sum and output
        total = tl.zeros([HEADS], tl.float32)
        out = tl.zeros([HEADS, D_PAD], tl.float32)
        for start in range(0, n, BLOCK):
            t = start + tl.arange(0, BLOCK)
            kv = b * stride_b + g * stride_h + t[:, None] * D + d[None]
            there = (t[:, None] < n) & (d[None] < D)
            K = tl.load(k + kv, mask=there, other=0.0)
            V = tl.load(v + kv, mask=there, other=0.0)
            score = tl.dot(Q, tl.trans(K), input_precision="ieee") * scale_log2e       # (HEADS, BLOCK)
            score = tl.where(t[None] < n, score, -float("inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            p, shrink = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, 1)
            out = out * shrink[:, None] + tl.dot(p.to(V.dtype), V, input_precision="ieee")
            top = new_top
        tl.store(y + at, (out / total[:, None]).to(y.dtype.element_ty), mask=inside)
