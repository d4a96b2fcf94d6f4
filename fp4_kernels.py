"""Triton kernels. Each has a twin of a few lines of PyTorch, here or in qerl.py, which serves where Triton does not run.

The twins are the specification: they step in a debugger, and the tests hold the kernels to them, on a GPU and in
Triton's interpreter (TRITON_INTERPRET=1) on a CPU.

    1. quantising     weights rounded to E2M1                                          encode_e2m1
    2. 4-bit tiles    weights in the order in which tensor cores take them            tile, untile
    3. linear         y = x Ŵᵀ + bias + LoRA + residual, for one to a thousand rows    linear
    4. in between     what a block does between its linear layers                      rms_norm, silu_mul, rotary, decode_attention
    5. output         log-probabilities; a token, its log-probability and entropy      token_logprob, sample
"""
import functools
import math
import os
from collections import namedtuple

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:                    # no Triton for this system: the twins do everything
    triton = None

LOG2E = 1.4426950408889634             # exp(x) = exp2(x * LOG2E), and exp2 is what the hardware has
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x):
    return triton is not None and (x.is_cuda or INTERPRETED)


# A decode step is a chain of short kernels. On Hopper each may start while the one before it still runs (launch_pdl: "programmatic
# dependent launch"), as soon as all programs of that one have said so or ended, and waits where it needs what that one writes.
# linear_kernel has its first weights fetched meanwhile.

@functools.lru_cache
def is_hopper(device):
    """Hopper, or the interpreter."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


def tma_descriptor(x, block):
    """What TMA, the copy engine, needs to move blocks of this shape from or to x."""
    if x.is_cuda:                                              # there has to be a CUDA context, which a thread, such as autograd's,
        torch.cuda.set_device(torch.cuda.current_device())     # may not have before its first call of the runtime
    return TensorDescriptor.from_tensor(x, block)


if triton is not None:
    PLAIN = tl.constexpr(INTERPRETED)                          # the interpreter has neither inline PTX nor bfloat16 products

    @triton.jit
    def let_next_start():
        if not PLAIN and tl.target_info.cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_launch_dependents()

    @triton.jit
    def wait_for_previous():
        if not PLAIN and tl.target_info.cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def prefetch(pointer, stride, there, ROWS: tl.constexpr, BYTES: tl.constexpr):
        """Have the L2 cache fetch the first BYTES, of which `there` exist, of ROWS rows that lie `stride` bytes apart."""
        if not PLAIN:
            i = tl.arange(0, ROWS * BYTES // 128)
            byte = i % (BYTES // 128) * 128
            at = pointer.to(tl.int64) + i // (BYTES // 128) * stride + tl.where(byte < there, byte, 0)
            tl.inline_asm_elementwise("prefetch.global.L2 [$1];  // $0", "=r,l", [at], tl.int32, is_pure=False, pack=1)


# ---------------------------------------------------------------------------------------------------------------------
# 1. Quantising to E2M1                           code = round(w / scale)                          twin: qerl.encode_e2m1
#
# Bound by memory: a weight is read once and a quarter of it written; in PyTorch it would pass through memory ten times.

def encode_e2m1(weight, scale):
    """weight [out, in], scale float32 [out, in/block] -> packed uint8 [out, in/2], as qerl.encode_e2m1."""
    packed = torch.empty(len(weight), weight.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    encode_kernel[(triton.cdiv(packed.numel(), 1024),)](weight.contiguous(), scale, packed, packed.numel(), weight.numel() // scale.numel() // 2, SIZE=1024)
    return packed


if triton is not None:
    @triton.jit
    def e2m1_code(w, scale):
        """The code of w / scale: how many of the halfway points between magnitudes it passes, and the sign; ties to even."""
        x = tl.div_rn(w.to(tl.float32), scale)
        a = tl.abs(x)
        return ((a > 0.25).to(tl.int32) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)) | (x < 0).to(tl.int32) << 3

    @triton.jit
    def encode_kernel(weight, scale, packed, size, pairs_per_scale, SIZE: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        s = tl.load(scale + i // pairs_per_scale, mask=i < size, other=1.0)
        low = e2m1_code(tl.load(weight + 2 * i, mask=i < size, other=0.0), s)
        high = e2m1_code(tl.load(weight + 2 * i + 1, mask=i < size, other=0.0), s)
        tl.store(packed + i, (low | high << 4).to(tl.uint8), mask=i < size)


# ---------------------------------------------------------------------------------------------------------------------
# 2. 4-bit tiles
#
# Hopper's tensor cores (wgmma) take 64 rows x 16 columns of W from the registers of 128 threads: thread (warp, g, t), g < 8,
# t < 4, holds columns 2t, 2t+1, 2t+8, 2t+9 of the rows 16 warp + g and 16 warp + g + 8. So that no code has to move between
# threads, a model's codes are put into that order when it is loaded: a tile is 64 rows x 64 columns, four such steps, and
# each thread finds its 32 codes in 16 consecutive bytes.
#
# A product may sum over columns in any order. What thread t takes for its 16 columns of the four steps is therefore block t
# of the tile, 16 neighbours that share a scale: one scale a thread and row. Activations have to come in the same order
# (`interleave`); the kernels before a linear layer write them so. A 32-bit word holds 8 codes, two neighbours 16 bits apart:
#
#   E2M1   Their bits stand where a shift and an AND make them the sign, the last two exponent bits and the first mantissa
#          bit of a bfloat16, that is 2^-126 times the code: code pair 0 at bits 15, 8-6; 1 three lower; 2 six lower; the
#          last where there is room, 14, 13, 11-10. The scale is stored as 5 exponent bits, below the row's largest, and 3
#          mantissa bits: one multiplication and addition make it a pair of bfloat16. All of it is exact.
#   NF4    Code i stands at bit 4i. PRMT looks four 3-bit codes up in a table of eight bytes; NF4 as bfloat16 takes four.

Tiled = namedtuple("Tiled", "words scales out_scale")     # int32 [out/64, in/64, 512], uint8 or bfloat16, float32 [out]


@functools.lru_cache
def table_on(table, device):
    """A constant table on a device, copied there once."""
    return table.to(device)


def interleave(x):
    """x [..., in] -> its columns in the order of the tiles."""
    return x.unflatten(-1, (-1, 4, 8, 2)).transpose(-3, -2).flatten(-4)


def tile(packed, scale, row_scale, nf4=False):
    """packed uint8 [out, in/2], even index in the low nibble; scale float32 [out, in/16], NF4 [out, in/64]; row_scale
    float32, broadcast to [out]; out and in divisible by 64 -> Tiled, whose weight is code * scale * row_scale.

    Exact for scales of four significant bits (E4M3, E8M0) less than 2^31 below their row's largest. NF4's become bfloat16.
    """
    out, columns = packed.shape[0], 2 * packed.shape[1]
    codes = torch.stack([packed & 15, packed >> 4], -1)
    codes = codes.view(out // 64, 4, 2, 8, columns // 64, 4, 2, 8).permute(0, 4, 1, 3, 5, 2, 6, 7)      # (.., 8 in a word)
    words = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=packed.device)
    for i, code in enumerate(codes.unbind(-1)):
        code = code.int()
        pair, half = i // 2, i % 2
        if nf4:
            words |= code << 4 * i
        elif pair < 3:
            words |= (code >> 3 << 15 - 3 * pair | (code & 7) << 6 - 3 * pair) << 16 * half
        else:
            words |= (code >> 3 << 14 | (code >> 2 & 1) << 13 | (code & 3) << 10) << 16 * half
    words = words.reshape(out // 64, columns // 64, 512)
    mantissa, exponent = torch.frexp(scale)                                 # scale = mantissa * 2^exponent, 0.5 <= mantissa < 1
    top = exponent.amax(1)
    stored = (exponent - top[:, None] + 31) * 8 + (mantissa * 16 - 8)
    stored = scale.bfloat16() if nf4 else torch.where((stored >= 0) & (scale > 0), stored, 0).to(torch.uint8)
    stored = stored.view(out // 64, 4, 2, 8, columns // 64, -1).permute(0, 4, 1, 3, 5, 2).contiguous()  # (.., warp, g, t, row half)
    return Tiled(words, stored, row_scale.reshape(-1).expand(out) * (1.0 if nf4 else torch.exp2(top - 2.0)))


def untile_torch(tiled, table, dtype=torch.bfloat16):
    words, scales, out_scale = tiled
    nf4 = scales.dtype == torch.bfloat16
    w = words.view(*words.shape[:2], 4, 8, 4, 2, 2)
    halves = [w & 0xFFFF, w >> 16 & 0xFFFF]
    if nf4:
        codes, scale = [w >> 4 * i & 15 for i in range(8)], scales.float()
    else:
        codes = [(h >> 12 - 3 * p & 8 | h >> 6 - 3 * p & 7) if p < 3 else (h >> 11 & 8 | h >> 11 & 4 | h >> 10 & 3)
                 for p in range(4) for h in halves]
        scale = torch.exp2((scales >> 3).float() - 30) * (1 + (scales & 7) / 8)
    scale = scale * out_scale.view(-1, 1, 4, 2, 8).transpose(3, 4)[..., None, :]
    weight = table_on(table, words.device)[torch.stack(codes, -1).long()] * scale[..., None, None]             # (.., t, row half, 2, 8)
    return weight.permute(0, 2, 5, 3, 1, 4, 6, 7).reshape(len(out_scale), -1).to(dtype)


def untile(tiled, table, dtype=torch.bfloat16, interleaved=False):
    """Tiled -> weight [out, in] in dtype; out and in divisible by 64. table: float32 [16], the value of each code."""
    words, scales, out_scale = tiled
    if not use_triton(words) or words.shape[1] % 2:
        weight = untile_torch(tiled, table, dtype)
        return interleave(weight) if interleaved else weight
    weight = torch.empty(len(out_scale), words.shape[1] * 64, dtype=dtype, device=words.device)
    untile_kernel[(words.shape[0], words.shape[1] // 2)](
        words, scales, out_scale, table_on(table, words.device), tma_descriptor(weight, [64, 128]), words.shape[1],
        NF4=scales.dtype == torch.bfloat16, INTERLEAVED=interleaved, num_warps=4)
    return weight


if triton is not None:
    @triton.jit
    def e2m1_pairs(word, scale):
        """Eight codes of a word times the bfloat16 pair `scale` -> eight bfloat16, in the order of the columns."""
        if PLAIN:
            a, b, c = word & -0x7E3F7E40, word << 3 & -0x7E3F7E40, word << 6 & -0x7E3F7E40       # 0x81C081C0
            d = word << 1 & -0x7FFF8000 | word >> 5 & 0x01000100 | word >> 4 & 0x00C000C0
            s = (scale << 16).to(tl.float32, bitcast=True)
            return ((a << 16).to(tl.float32, bitcast=True) * s, (a & -65536).to(tl.float32, bitcast=True) * s,
                    (b << 16).to(tl.float32, bitcast=True) * s, (b & -65536).to(tl.float32, bitcast=True) * s,
                    (c << 16).to(tl.float32, bitcast=True) * s, (c & -65536).to(tl.float32, bitcast=True) * s,
                    (d << 16).to(tl.float32, bitcast=True) * s, (d & -65536).to(tl.float32, bitcast=True) * s)
        return tl.inline_asm_elementwise("""{
            .reg .b32 a, b, c, d, t, z;
            mov.b32 z, 0x80008000;                                      // -0: fma is the product
            and.b32 a, $8, 0x81C081C0;
            shl.b32 t, $8, 3;  and.b32 b, t, 0x81C081C0;
            shl.b32 t, $8, 6;  and.b32 c, t, 0x81C081C0;
            shl.b32 t, $8, 1;  and.b32 d, t, 0x80008000;
            shr.b32 t, $8, 5;  lop3.b32 d, t, 0x01000100, d, 0xEA;      // (t & mask) | d
            shr.b32 t, $8, 4;  lop3.b32 d, t, 0x00C000C0, d, 0xEA;
            fma.rn.bf16x2 a, a, $9, z;  fma.rn.bf16x2 b, b, $9, z;  fma.rn.bf16x2 c, c, $9, z;  fma.rn.bf16x2 d, d, $9, z;
            mov.b32 {$0, $1}, a;  mov.b32 {$2, $3}, b;  mov.b32 {$4, $5}, c;  mov.b32 {$6, $7}, d;
            }""", "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, scale], (tl.bfloat16,) * 8, is_pure=True, pack=1)

    @triton.jit
    def nf4_pairs(word, scale, table):
        """As e2m1_pairs. The lookup tables are the high and the low bytes of NF4 in bfloat16, codes 0-7 and 8-15."""
        if PLAIN:
            s = (scale << 16).to(tl.float32, bitcast=True)
            return (tl.load(table + (word & 15)) * s, tl.load(table + (word >> 4 & 15)) * s,
                    tl.load(table + (word >> 8 & 15)) * s, tl.load(table + (word >> 12 & 15)) * s,
                    tl.load(table + (word >> 16 & 15)) * s, tl.load(table + (word >> 20 & 15)) * s,
                    tl.load(table + (word >> 24 & 15)) * s, tl.load(table + (word >> 28 & 15)) * s)
        return tl.inline_asm_elementwise("""{
            .reg .b32 i, j, u, m, h, g, l, k, a, b, c, d, z;
            mov.b32 z, 0x80008000;
            and.b32 i, $8, 0x77777777;  shr.b32 j, i, 16;  shl.b32 u, $8, 4;
            prmt.b32 m, $8, u, 0x9D8C;                                                   // FF where a code is 8 or more
            prmt.b32 h, 0xBEBFBFBF, 0x00BDBEBE, i;  prmt.b32 g, 0x3E3E3E3D, 0x3F3F3F3E, i;  lop3.b32 h, m, g, h, 0xCA;
            prmt.b32 l, 0xCA063280, 0x00BA3D92, i;  prmt.b32 k, 0xAD7C25A3, 0x803910E2, i;  lop3.b32 l, m, k, l, 0xCA;
            prmt.b32 a, l, h, 0x5140;  prmt.b32 b, l, h, 0x7362;
            prmt.b32 m, $8, u, 0xBFAE;
            prmt.b32 h, 0xBEBFBFBF, 0x00BDBEBE, j;  prmt.b32 g, 0x3E3E3E3D, 0x3F3F3F3E, j;  lop3.b32 h, m, g, h, 0xCA;
            prmt.b32 l, 0xCA063280, 0x00BA3D92, j;  prmt.b32 k, 0xAD7C25A3, 0x803910E2, j;  lop3.b32 l, m, k, l, 0xCA;
            prmt.b32 c, l, h, 0x5140;  prmt.b32 d, l, h, 0x7362;
            fma.rn.bf16x2 a, a, $9, z;  fma.rn.bf16x2 b, b, $9, z;  fma.rn.bf16x2 c, c, $9, z;  fma.rn.bf16x2 d, d, $9, z;
            mov.b32 {$0, $1}, a;  mov.b32 {$2, $3}, b;  mov.b32 {$4, $5}, c;  mov.b32 {$6, $7}, d;
            }""", "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, scale], (tl.bfloat16,) * 8, is_pure=True, pack=1)

    @triton.jit
    def decode_tiles(words, scales, table, chunks, R: tl.constexpr, C: tl.constexpr, NF4: tl.constexpr):
        """R x C tiles from the pointers to their first word and scale, `chunks` tiles lying in a row of them ->
        [R, C, warp 4, g 8, t 4, row half 2, word 2, step 2, column half 2, neighbour 2], in bfloat16."""
        T: tl.constexpr = 1 if NF4 else 4
        r = tl.arange(0, R)[:, None] * chunks
        word = tl.load(words + r * 512 + tl.arange(0, C * 512)[None]).reshape(R, C, 4, 8, 4, 2, 2)
        scale = tl.load(scales + r * (64 * T) + tl.arange(0, C * 64 * T)[None])
        if NF4:
            pair = (scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x00010001
        else:
            pair = scale.to(tl.int32) * 0x00100010 + 0x6F806F80        # exponent and mantissa into place, 2^96
        pair = tl.broadcast_to(pair.reshape(R, C, 4, 8, T, 2, 1), (R, C, 4, 8, 4, 2, 2))
        if NF4:
            v0, v1, v2, v3, v4, v5, v6, v7 = nf4_pairs(word, pair, table)
        else:
            v0, v1, v2, v3, v4, v5, v6, v7 = e2m1_pairs(word, pair)
        return tl.join(tl.join(tl.join(v0, v4), tl.join(v2, v6)), tl.join(tl.join(v1, v5), tl.join(v3, v7)))

    @triton.jit
    def untile_kernel(words, scales, out_scale, table, weight, chunks, NF4: tl.constexpr, INTERLEAVED: tl.constexpr):
        row, c = tl.program_id(0), tl.program_id(1) * 2
        at = (row * chunks + c).to(tl.int64)
        v = decode_tiles(words + at * 512, scales + at * (64 if NF4 else 256), table, chunks, 1, 2, NF4)
        if INTERLEAVED:
            v = v.permute(0, 2, 5, 3, 1, 6, 7, 8, 4, 9).reshape(64, 128)
        else:
            v = v.permute(0, 2, 5, 3, 1, 4, 6, 7, 8, 9).reshape(64, 128)
        w = v.to(tl.float32) * tl.load(out_scale + row * 64 + tl.arange(0, 64))[:, None]
        weight.store([row * 64, c * 64], w.to(weight.dtype))          # by TMA, the copy engine, where there is one


# ---------------------------------------------------------------------------------------------------------------------
# 3. linear                                       y = x Ŵᵀ + bias + (x Aᵀ) Bᵀ + residual
#
# The transposed product Ŵ xᵀ: weights are decoded in the registers from which the tensor cores take them. For few rows it is
# bound by memory (9/16 byte a weight) and by the instructions that decode, from about 128 rows on by the tensor cores.
#
# Work is cut evenly ("stream-K"): all steps along the input, tile after tile, are laid end to end, and each of P programs takes an
# equal share, wherever that cuts a tile. P is as many programs as the GPU runs at once; if a multiple of the number of tiles is not
# much less, it is that, and each program has a whole tile or an equal part of one. A program that has only a part of a tile leaves
# its sums in `partial`, as its threads hold them; whoever is last to do so adds them up, always in the same order, and finishes the
# tile. LoRA's x Aᵀ is cut along the input, too: over the first few programs (more than 128 rows have it computed before); when they
# are done, `ready` says so, and tiles are finished with their share of B. Who waits relies on programs starting in their order: it
# waits for one that runs.
#
# What bounds it on an H200. To 16 rows: for 8 weights a thread runs 22 instructions in tiles of 256 rows of W, 26-29 in smaller ones
# (15 decode, the others feed the tensor cores), near what an SM can issue at the memory's rate; a layer below 10 MB takes 7 us where
# reading takes 2, waiting and adding up parts. At 128 rows and more: each tile's rows of W read all of x again, 50 MB out of the L2
# cache for 3584 x 3584, and parts of 64 x 128 sums pass through it. Programs that go through the columns side by side read x faster:
# 512 rows with W of 3584 x 18944 take 96 us as 112 whole tiles on as many SMs, cut evenly for 132 SMs 150. Tried without gain: split-K
# with a second kernel, mma.sync, 8 warps below 256 rows, 2 to 6 stages, 128 and 256 rows of W a step for small layers, tiles of 256
# rows of W above 32 rows of x, whole tiles and an evenly cut rest, all programs of a tile finishing it together (waiting costs what it
# saves), fetching bias and B ahead as well, cuBLAS for x Aᵀ of rank 128, LoRA's parts of x Aᵀ added up by each program that needs them
# (a wait fewer, but with 4 to 128 rows 1-8 % more time at rank 32 and 6-38 % at rank 128).

# rows of x in a tile, 64R x 64C of W in a step; warps; steps whose loads are under way; programs an SM; registers a thread at most
Shape = namedtuple("Shape", "rows R C warps stages programs registers")
SHAPES = [(Shape(16, 1, 2, 4, 4, 3, 168), Shape(16, 2, 2, 4, 4, 3, 168), Shape(16, 4, 2, 4, 3, 2, 255)),       # from searches on an H200,
          (Shape(32, 1, 2, 4, 4, 3, 160), Shape(32, 2, 2, 4, 3, 2, 255), Shape(32, 4, 2, 4, 3, 2, 255)),       # small layers' first,
          (Shape(64, 1, 2, 4, 3, 2, 255), Shape(64, 2, 2, 4, 4, 2, 255)),                                      # large ones' last
          (Shape(128, 1, 4, 4, 3, 1, 255), Shape(128, 1, 2, 4, 3, 2, 255), Shape(128, 2, 1, 4, 5, 2, 255)),
          (Shape(256, 1, 2, 4, 3, 1, 255), Shape(256, 2, 2, 8, 3, 1, 255))]
LARGE = 1e8                                  # weights of a large layer, from such searches, too
Lora = namedtuple("Lora", "A B bounds")      # bfloat16 [pieces * r, in] interleaved, bfloat16 [out, r] divided by out_scale, ints


def lora_for_tiles(A, B, sizes, scaling, tiled):
    """LoRA of layers stacked along out, A float32 [pieces * r, in] and B [out, r], as `linear` takes it: a rank that is a
    power of two, at least 16; bounds are where the second and third piece begin in out."""
    rank = B.shape[1]
    padded = max(16, 1 << (rank - 1).bit_length())
    A = F.pad(A.unflatten(0, (-1, rank)), (0, 0, 0, padded - rank)).flatten(0, 1)
    B = F.pad(scaling * B / tiled.out_scale[:, None], (0, padded - rank))
    return Lora(interleave(A).bfloat16().contiguous(), B.bfloat16().contiguous(), (sum(sizes[:1]), sum(sizes[:2])))


def dense_linear(x, weight, tiled, bias, residual, lora):
    """What `linear` computes, from a weight [out, in] that is decoded and interleaved already."""
    y = F.linear(x, weight, bias if bias is None else bias.to(x.dtype))
    return add_lora(y if residual is None else y + residual, x, tiled, lora)


def add_lora(y, x, tiled, lora):
    """y + (x Aᵀ) Bᵀ, piece by piece."""
    if lora is None:
        return y
    B, h = lora.B * tiled.out_scale[:, None].to(x.dtype), F.linear(x, lora.A).split(lora.B.shape[1], -1)
    first, second = lora.bounds
    return y + torch.cat([F.linear(h_i, B_i) for h_i, B_i in zip(h, (B[:first], B[first:second], B[second:]))], -1)


def linear_torch(x, tiled, table, bias=None, residual=None, lora=None):
    return dense_linear(x, interleave(untile_torch(tiled, table, x.dtype)), tiled, bias, residual, lora)


@functools.lru_cache
def scratch(device):
    """(number of SMs, partial sums, LoRA's partial sums, counters: zero between calls) of a device, for one stream."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
    partial = max(2 * s.programs * sms * 64 * s.R * s.rows for shapes in SHAPES for s in shapes)
    return sms, torch.empty(partial, device=device), torch.empty(2 ** 22, device=device), torch.zeros(2 ** 16, dtype=torch.int32, device=device)


def shape_for(M, N, columns, bounds, rank):
    """The Shape for M rows of x and W [N, columns] of pieces that begin at `bounds`, LoRA of `rank` (0: none): the first that is whole
    tiles and steps of it, and whose tiles' part of LoRA's B is not too large. Thresholds are measured on an H200."""
    shapes = next((shapes for shapes in SHAPES if shapes[0].rows >= M), SHAPES[-1])
    large = N * columns > LARGE or N * M > 2.4e6
    return next(s for s in (reversed(shapes) if large else shapes)
                if math.gcd(N, *bounds) % (64 * s.R) == 0 and columns % (64 * s.C) == 0 and s.R * rank <= 256)


def linear(x, tiled, table, bias=None, residual=None, lora=None, shape=None):
    """x bfloat16 [M, in], interleaved -> y [M, out]; in and out divisible by 128. bias [out], residual [M, out]; x and residual
    contiguous; shape: a Shape instead of the one chosen here, for tests."""
    words, scales, out_scale = tiled
    (M, columns), N, chunks = x.shape, len(out_scale), words.shape[1]
    # Decode first where the kernel does not pay: many rows of a small layer, or a GPU it is not made for.
    if (M > 512 and N * columns <= 2 ** 25 and shape is None) or not is_hopper(x.device):
        return dense_linear(x, untile(tiled, table, x.dtype, interleaved=True), tiled, bias, residual, lora)
    if lora is not None and lora.B.shape[1] > 128:                            # more than a tile has room for
        return add_lora(linear(x, tiled, table, bias, residual, shape=shape), x, tiled, lora)
    A, B, (bound1, bound2) = lora or (None, None, (N, N))
    rank, ranks = (0, 0) if lora is None else (B.shape[1], len(A))
    s = shape or shape_for(M, N, columns, (bound1, bound2), rank)
    assert N % (64 * max(2, s.R)) == 0 and chunks % max(2, s.C) == 0, f"{N} x {columns} are not whole steps of {s}"
    sms, partial, lora_partial, counters = scratch(x.device)
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    lora_rows = min(s.rows, 32)      # by mma.sync: Triton 3.6 lets wgmma read shared memory too early after such loads (triton#9610)
    lora_tiles = triton.cdiv(ranks, 64) * triton.cdiv(M, lora_rows)
    parts = min(16, chunks // (16 if N * columns > LARGE else 4)) * lora_rows // s.rows       # of the columns, for a tile of x Aᵀ
    parts = max(1, min(parts, s.programs * sms // (6 * lora_tiles + 1)))      # if possible, at most a sixth of the programs
    if lora is not None and M > 128:                                         # many rows are worth a product of their own
        h, lora_programs = F.linear(x, A), 0
    else:
        h, lora_programs = torch.empty(M, ranks, dtype=x.dtype, device=x.device), lora_tiles * parts
    tiles, programs = N // (64 * s.R) * triton.cdiv(M, s.rows), max(1, s.programs * sms - lora_programs)
    assert 1024 + tiles <= len(counters), f"{M} rows are more than the counters of this kernel"
    even = programs // tiles * tiles                                          # programs, if each gets a whole tile or an equal part
    if even > programs * (0.8 if s.rows <= 64 else 0.5):                      # fewer programs with equal work are faster
        programs = even
    programs = min(programs, tiles * (chunks // s.C))
    assert s.R % (s.warps // 4) == 0 and 2 * programs * 64 * s.R * s.rows <= len(partial), f"{s} is not made for this kernel"
    by_tma = s.rows > 32
    x_tma = tma_descriptor(x, [s.rows, s.C * 64]) if by_tma else None
    residual, out = (tma_descriptor(t, [s.rows, s.R * 64]) if by_tma and t is not None else t for t in (residual, y))
    linear_kernel[(lora_programs + programs,)](
        x_tma, x, words, scales, out_scale, table_on(table, x.device), bias, residual, A, B, h, out, partial, lora_partial,
        counters, M, N, chunks, ranks, bound1, bound2, parts, lora_programs, RANK=rank, NF4=scales.dtype == torch.bfloat16,
        ROWS=s.rows, LORA_ROWS=lora_rows, R=s.R, C=s.C, W=s.warps // 4, STAGES=s.stages,
        AT_ONCE=min(8, max(1, 64 * s.warps // (s.R * s.rows))), num_warps=s.warps, maxnreg=s.registers, launch_pdl=True)
    return y


if triton is not None:
    @triton.jit
    def product(a, b, acc):
        """acc + a b; the interpreter multiplies float32 only."""
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc) if PLAIN else tl.dot(a, b, acc)

    @triton.jit
    def by_thread(acc, R: tl.constexpr, W: tl.constexpr):
        """Sums [64R, ROWS] in the registers of 4W warps, one above the other, as the tensor cores leave them -> [R / W * ROWS / 8, 512 W],
        four of each thread in turn: written and read in this order, none goes through shared memory to another thread."""
        n: tl.constexpr = acc.shape[1] // 8
        return acc.reshape(R // W, 4 * W, 2, 8, n, 4, 2).permute(0, 4, 1, 3, 5, 2, 6).reshape(R // W * n, 512 * W)

    @triton.jit
    def by_row(acc, R: tl.constexpr, W: tl.constexpr):
        """by_thread's inverse."""
        n: tl.constexpr = acc.shape[0] // (R // W)
        return acc.reshape(R // W, n, 4 * W, 8, 4, 2, 2).permute(0, 2, 5, 3, 1, 4, 6).reshape(64 * R, 8 * n)

    @triton.jit
    def add_parts(acc, parts, first, last, STRIDE: tl.constexpr, AT_ONCE: tl.constexpr):
        """acc + parts[first] + ... + parts[last - 1], some loads at once; .cg: from the L2 cache, where other SMs write to."""
        for q in range(first, last, AT_ONCE):
            for u in tl.static_range(AT_ONCE):
                there = tl.full([1, 1], q + u, tl.int32) < last
                acc += tl.load(parts + (q + u) * STRIDE, mask=there, other=0.0, cache_modifier=".cg")
        return acc

    @triton.jit
    def lora_down(x, lora_A, h, partial, arrived, M, columns, ranks, parts, ROWS: tl.constexpr, J: tl.constexpr, K: tl.constexpr):
        """h = x Aᵀ: of a tile of ROWS x J the part of the columns that is this program's, K a step; who is last adds the parts up: -> 1."""
        tile, part, j_tiles = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.cdiv(ranks, J)
        j, m = tile % j_tiles * J + tl.arange(0, J), tile // j_tiles * ROWS + tl.arange(0, ROWS)
        acc = tl.zeros([ROWS, J], tl.float32)
        for step in range(part * (columns // K) // parts, (part + 1) * (columns // K) // parts):
            k = step * K + tl.arange(0, K)
            a = tl.load(lora_A + j[:, None] * columns + k[None], mask=j[:, None] < ranks, other=0.0)
            b = tl.load(x + m[:, None] * columns + k[None], mask=m[:, None] < M, other=0.0)
            acc = product(b, a.T, acc)
        here = partial + tile * parts * (ROWS * J) + tl.arange(0, ROWS)[:, None] * J + tl.arange(0, J)[None]
        tl.store(here + part * (ROWS * J), acc)
        tl.debug_barrier()
        last = (tl.atomic_add(arrived + tile, 1) == parts - 1).to(tl.int32)
        if last == 1:
            tl.store(arrived + tile, 0)
            acc = add_parts(tl.zeros([ROWS, J], tl.float32), here, 0, parts, ROWS * J, 8)
            tl.store(h + m[:, None] * ranks + j[None], acc.to(h.dtype.element_ty), mask=(m[:, None] < M) & (j[None] < ranks))
            tl.debug_barrier()
        return last

    @triton.jit
    def finish(acc, n0, m0, tiles, out_scale, bias, residual, lora_B, h, y, ready, finished, M, N, ranks, bound1, bound2,
               lora_tiles, RANK: tl.constexpr, BY_TMA: tl.constexpr):
        """A tile of y from its sums acc [rows of W from n0 on, rows of x from m0 on]: yᵀ, as Ŵ xᵀ gives it."""
        n, m = n0 + tl.arange(0, acc.shape[0]), m0 + tl.arange(0, acc.shape[1])
        scale = tl.load(out_scale + n)[:, None]
        shift = 0.0 if bias is None else tl.load(bias + n)[:, None]
        if RANK > 0:
            r, piece = tl.arange(0, RANK), (n0 >= bound1).to(tl.int32) + (n0 >= bound2).to(tl.int32)
            B = tl.load(lora_B + n[:, None] * RANK + r[None])
            while tl.atomic_add(ready, 0) < lora_tiles:              # reads it
                pass
            H = tl.load(h + m[:, None] * ranks + piece * RANK + r[None], mask=m[:, None] < M, other=0.0, cache_modifier=".cg")
            acc = product(B, H.T, acc)
        out = acc * scale + shift                                    # lora_for_tiles has divided B by out_scale
        if BY_TMA:                                                   # which leaves out rows from M on
            if residual is not None:
                out += residual.load([m0, n0]).T
            y.store([m0, n0], out.to(y.dtype).T)
        else:
            at_y = m[None].to(tl.int64) * N + n[:, None]
            if residual is not None:
                out += tl.load(residual + at_y, mask=m[None] < M, other=0.0)
            tl.store(y + at_y, out.to(y.dtype.element_ty), mask=m[None] < M)
        if RANK > 0:
            tl.debug_barrier()
            if tl.atomic_add(finished, 1) == tiles - 1:              # the last tile: no one waits any more
                tl.store(finished, 0)
                tl.store(ready, 0)

    @triton.jit
    def linear_kernel(x_tma, x, words, scales, out_scale, table, bias, residual, lora_A, lora_B, h, y, partial, lora_partial,
                      counters, M, N, chunks, ranks, bound1, bound2, parts, lora_programs, RANK: tl.constexpr, NF4: tl.constexpr,
                      ROWS: tl.constexpr, LORA_ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
                      STAGES: tl.constexpr, AT_ONCE: tl.constexpr):
        SIZE: tl.constexpr = 64 * R * ROWS                           # of a tile of y
        S: tl.constexpr = 64 if NF4 else 256                         # scales of a tile of W,
        BYTES: tl.constexpr = 128 if NF4 else 256                    # and their size
        ready, finished, lora_arrived, arrived = counters, counters + 1, counters + 2, counters + 1024
        p, P = tl.program_id(0) - lora_programs, tl.num_programs(0) - lora_programs      # p < 0: a program of x Aᵀ
        steps, m_tiles = chunks // C, tl.cdiv(M, ROWS)               # of a tile of y; there are `chunks` tiles of W along the input
        tiles = N // (64 * R) * m_tiles
        total = tiles * steps
        at, end = p * total // P, (p + 1) * total // P
        if ROWS > 64:                                                # here, or after the last product: see there
            let_next_start()
        if p >= 0:                                                   # four tiles, their scales, out_scale
            tile_row = at // steps // m_tiles * R
            start = (tile_row * chunks + at % steps * C).to(tl.int64)
            there = tl.minimum(end - at, steps - at % steps) * C
            prefetch(words + start * 512, chunks * 2048, there * 2048, R, 8192 // R)
            prefetch(scales + start * S, chunks * BYTES, there * BYTES, R, 4 * BYTES // R)
            prefetch(out_scale + tile_row * 64, 0, 256 * R, 1, 256 * R)
        wait_for_previous()
        if RANK > 0:
            if p < 0:
                tl.atomic_add(ready, lora_down(x, lora_A, h, lora_partial, lora_arrived, M, chunks * 64, ranks, parts,
                                               LORA_ROWS, 64, 64 * max(2, C)))
                at = end
        while at < end:
            tile, first = at // steps, at % steps
            last = tl.minimum(steps, first + end - at)
            at += last - first
            m0, row = tile % m_tiles * ROWS, (tile // m_tiles * R * chunks).to(tl.int64)
            acc = tl.zeros([64 * R, ROWS], tl.float32)
            for step in tl.range(first, last, num_stages=STAGES):
                w = decode_tiles(words + (row + step * C) * 512, scales + (row + step * C) * S, table, chunks, R, C, NF4)
                w = w.permute(0, 2, 5, 3, 1, 6, 7, 8, 4, 9).reshape(64 * R, 64 * C)      # as the tensor cores count the columns
                if x_tma is not None:
                    b = x_tma.load([m0, step * C * 64])
                else:
                    m, k = m0 + tl.arange(0, ROWS), step * C * 64 + tl.arange(0, 64 * C)
                    b = tl.load(x + m[:, None] * (chunks * 64) + k[None], mask=m[:, None] < M, other=0.0)
                acc = product(w, b.T, acc)
            if ROWS <= 64 and at == end:                             # sooner, few short programs would lie unevenly on the SMs
                let_next_start()
            finishes = last - first == steps
            if not finishes:                                         # leave it; whoever is last finishes the tile
                here = partial + tl.arange(0, SIZE // (512 * W))[:, None] * (512 * W) + tl.arange(0, 512 * W)[None]
                # slot 2p: of a tile that others begin; 2p + 1: that p begins
                tl.store(here + (2 * p + (first == 0)) * SIZE, by_thread(acc, R, W))
                tl.debug_barrier()
                # step i is in the share of program ((i + 1) P - 1) // total: those of this tile's first and last step
                p0, p1 = ((tile * steps + 1) * P - 1) // total, ((tile + 1) * steps * P - 1) // total
                finishes = tl.atomic_add(arrived + tile, 1) == p1 - p0
                if finishes:
                    tl.store(arrived + tile, 0)
                    acc = tl.load(here + (2 * p0 + 1) * SIZE, cache_modifier=".cg")
                    acc = by_row(add_parts(acc, here, p0 + 1, p1 + 1, 2 * SIZE, AT_ONCE), R, W)
            if finishes:
                finish(acc, tile // m_tiles * (64 * R), m0, tiles, out_scale, bias, residual, lora_B, h, y, ready, finished, M, N,
                       ranks, bound1, bound2, lora_programs // parts, RANK, x_tma is not None)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Between the linear layers. In a decode step each is bound by the latency of its launch, in training by memory: it reads and
# writes everything once, where PyTorch would launch a kernel for each operation, and keeps nothing in between for backward.
# `tiled` says that the next layer takes its input interleaved; that is for decoding alone, without gradient.
#
#   rms_norm    y = w ⊙ x r,  r = 1 / √(mean(x²) + ε)        dL/dx = r (w ⊙ g - x r² mean(x ⊙ w ⊙ g)),  g = dL/dy;  dL/dw = Σ g ⊙ x r
#   silu_mul    y = u · a s,  s = 1 / (1 + e^-a)             dL/da = g u s (1 + a (1 - s)),  dL/du = g a s
#   rotary      y = R(position) x, two halves a head         dL/dx = R(-position) g

def rms_norm_torch(x, weight, eps, tiled=False):
    y = F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
    return interleave(y) if tiled else y


def rms_norm(x, weight, eps, tiled=False):
    """x [..., d], weight float32 [d] -> [..., d] in x's dtype; computed in float32."""
    return FusedRMSNorm.apply(x.contiguous(), weight, eps, tiled) if use_triton(x) else rms_norm_torch(x, weight, eps, tiled)


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, tiled):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.tiled, d, y = eps, tiled, x.shape[-1], torch.empty_like(x)
        rms_norm_kernel[(x.numel() // d,)](x, weight, y, d, eps, TILED=tiled, SIZE=triton.next_power_of_2(d), num_warps=8 if d > 512 else 1,
                                           launch_pdl=is_hopper(x.device))
        return y

    @staticmethod
    def backward(ctx, grad):
        assert not ctx.tiled
        x, weight = ctx.saved_tensors
        d, grad, grad_x, grad_weight = grad.shape[-1], grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            rms_norm_gradient_kernel[(x.numel() // d,)](x, weight, grad, grad_x, d, ctx.eps, SIZE=triton.next_power_of_2(d), num_warps=8 if d > 512 else 1)
        if ctx.needs_input_grad[1]:                            # seldom: --train-norms
            grad_weight = (grad * F.rms_norm(x.float(), (d,), None, ctx.eps)).flatten(0, -2).sum(0)
        return grad_x, grad_weight, None, None


def silu_mul_torch(gate_up, tiled=False):
    gate, up = gate_up.chunk(2, -1)
    y = F.silu(gate) * up
    return interleave(y) if tiled else y


def silu_mul(gate_up, tiled=False):
    """gate_up [..., 2n] -> silu(gate) * up [..., n]."""
    return FusedSiluMul.apply(gate_up.contiguous(), tiled) if use_triton(gate_up) else silu_mul_torch(gate_up, tiled)


class FusedSiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, tiled):
        ctx.save_for_backward(gate_up)
        ctx.tiled, n = tiled, gate_up.shape[-1] // 2
        y = torch.empty(*gate_up.shape[:-1], n, dtype=gate_up.dtype, device=gate_up.device)
        silu_mul_kernel[(y.numel() // n * triton.cdiv(n, 1024),)](gate_up, y, n, TILED=tiled, SIZE=1024, num_warps=4, launch_pdl=is_hopper(y.device))
        return y

    @staticmethod
    def backward(ctx, grad):
        assert not ctx.tiled
        gate_up, = ctx.saved_tensors
        n, grad_gate_up = grad.shape[-1], torch.empty_like(gate_up)
        silu_mul_gradient_kernel[(grad.numel() // n * triton.cdiv(n, 1024),)](gate_up, grad.contiguous(), grad_gate_up, n, SIZE=1024, num_warps=4)
        return grad_gate_up, None


def rotate(x, cos, sin):
    """Rotary embedding of x [..., D]; cos, sin broadcast to it."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def rotary(x, cos, sin):
    """Rotary embedding of x [B, T, heads, D]; cos, sin [T, D]."""
    return FusedRotary.apply(x, cos.contiguous(), sin.contiguous()) if use_triton(x) else rotate(x, cos[:, None], sin[:, None])


class FusedRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return FusedRotary.turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return FusedRotary.turn(grad, *ctx.saved_tensors, -1), None, None

    @staticmethod
    def turn(x, cos, sin, sign):
        """x by its angles, or back if sign is -1."""
        B, T, heads, D = x.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rotary_kernel[(B * T,)](x, cos, sin, y, T, heads, *x.stride()[:3], SIGN=sign, HEADS=triton.next_power_of_2(heads), HALF=D // 2,
                                HALF_PAD=triton.next_power_of_2(D // 2), num_warps=4)
        return y


if triton is not None:
    @triton.jit
    def interleaved(k):
        """Where column k goes."""
        return k // 64 * 64 + k % 16 // 2 * 8 + k % 64 // 16 * 2 + k % 2

    @triton.jit
    def rms_norm_kernel(x, weight, y, d, eps, TILED: tl.constexpr, SIZE: tl.constexpr):
        let_next_start()
        wait_for_previous()
        row, k = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
        v = tl.load(x + row * d + k, mask=k < d, other=0.0).to(tl.float32)
        v = v * tl.rsqrt(tl.sum(v * v) / d + eps) * tl.load(weight + k, mask=k < d, other=0.0)
        tl.store(y + row * d + (interleaved(k) if TILED else k), v.to(y.dtype.element_ty), mask=k < d)

    @triton.jit
    def rms_norm_gradient_kernel(x, weight, grad, grad_x, d, eps, SIZE: tl.constexpr):
        row, k = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
        v = tl.load(x + row * d + k, mask=k < d, other=0.0).to(tl.float32)
        g = tl.load(grad + row * d + k, mask=k < d, other=0.0).to(tl.float32) * tl.load(weight + k, mask=k < d, other=0.0)
        r = tl.rsqrt(tl.sum(v * v) / d + eps)
        g = r * (g - v * (r * r * tl.sum(v * g) / d))
        tl.store(grad_x + row * d + k, g.to(grad_x.dtype.element_ty), mask=k < d)

    @triton.jit
    def silu_mul_kernel(gate_up, y, n, TILED: tl.constexpr, SIZE: tl.constexpr):
        let_next_start()
        wait_for_previous()
        pieces = tl.cdiv(n, SIZE)
        row, k = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces * SIZE + tl.arange(0, SIZE)
        gate = tl.load(gate_up + row * 2 * n + k, mask=k < n, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * n + n + k, mask=k < n, other=0.0).to(tl.float32)
        silu = (gate / (1 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
        tl.store(y + row * n + (interleaved(k) if TILED else k), (silu * up).to(y.dtype.element_ty), mask=k < n)

    @triton.jit
    def silu_mul_gradient_kernel(gate_up, grad, grad_gate_up, n, SIZE: tl.constexpr):
        pieces = tl.cdiv(n, SIZE)
        row, k = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces * SIZE + tl.arange(0, SIZE)
        gate = tl.load(gate_up + row * 2 * n + k, mask=k < n, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * n + n + k, mask=k < n, other=0.0).to(tl.float32)
        g, s = tl.load(grad + row * n + k, mask=k < n, other=0.0).to(tl.float32), 1 / (1 + tl.exp(-gate))
        at = grad_gate_up + row * 2 * n + k
        tl.store(at, (g * up * s * (1 + gate * (1 - s))).to(grad.dtype.element_ty), mask=k < n)
        tl.store(at + n, (g * gate * s).to(grad.dtype.element_ty), mask=k < n)

    @triton.jit(do_not_specialize=["T"])                       # else compiled again where T is divisible by 16
    def rotary_kernel(x, cos, sin, y, T, heads, stride_b, stride_t, stride_h, SIGN: tl.constexpr, HEADS: tl.constexpr,
                      HALF: tl.constexpr, HALF_PAD: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        h, d = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF_PAD)[None]
        inside, t = (h < heads) & (d < HALF), row % T
        c = tl.load(cos + t * 2 * HALF + d, mask=d < HALF, other=0.0).to(tl.float32)           # the second half has the same
        s = tl.load(sin + t * 2 * HALF + d, mask=d < HALF, other=0.0).to(tl.float32) * SIGN
        at = x + row // T * stride_b + t * stride_t + h * stride_h + d
        left, right = tl.load(at, mask=inside, other=0.0).to(tl.float32), tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        at = y + (row * heads + h) * 2 * HALF + d
        tl.store(at, (left * c - right * s).to(y.dtype.element_ty), mask=inside)
        tl.store(at + HALF, (right * c + left * s).to(y.dtype.element_ty), mask=inside)


# Attention of one new token a row against a cache of fixed size: rotary embedding, append, attend.
#                                                           y[b, h] = softmax(q[b, h] · K[b, :length[b]+1]ᵀ / √D) · V
# Bound by memory: the keys and values that are there are read once for all query heads that share them (GQA); what lies
# behind `length` is not touched. Rows longer than `split` tokens are cut into parts for different programs; the last to
# finish puts the parts together.

def decode_attention_torch(qkv, cos, sin, k_cache, v_cache, length, tiled=False):
    B, kv_heads, _, D = k_cache.shape
    q, k, v = qkv.view(B, -1, D).split([qkv.shape[1] // D - 2 * kv_heads, kv_heads, kv_heads], 1)           # (B, heads, D)
    q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])
    rows = torch.arange(B, device=qkv.device)
    k_cache[rows, :, length], v_cache[rows, :, length] = k, v
    k, v = k_cache[:, :, :length.max() + 1], v_cache[:, :, :length.max() + 1]
    mask = torch.arange(k.shape[2], device=k.device) <= length[:, None, None, None]                          # (B, 1, 1, T)
    y = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=True).reshape(B, -1)
    return interleave(y) if tiled else y


def decode_attention(qkv, cos, sin, k_cache, v_cache, length, tiled=False, split=None):
    """qkv [B, (heads + 2 kv_heads) * D]; cos, sin [B, D] of each row's position; caches [B, kv_heads, max_len, D], where
    k and v are appended at `length`, int64 [B] -> [B, heads * D]."""
    if not use_triton(qkv):
        return decode_attention_torch(qkv, cos, sin, k_cache, v_cache, length, tiled)
    B, kv_heads, max_len, D = k_cache.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    y = torch.empty(B, heads * D, dtype=qkv.dtype, device=qkv.device)
    split = split or (512 if B * kv_heads >= 128 else 128)
    assert split % 64 == 0
    parts, share = triton.cdiv(max_len, split), heads // kv_heads
    HEADS = max(16, triton.next_power_of_2(share))
    D_PAD = triton.next_power_of_2(D)
    out, stats, arrived = attention_scratch(B * kv_heads, parts, HEADS, D_PAD, qkv.device)
    decode_attention_kernel[(parts, B * kv_heads)](
        qkv, cos, sin, k_cache, v_cache, length, y, out, stats, arrived, kv_heads, k_cache.stride(0), k_cache.stride(1),
        D ** -0.5 * LOG2E, TILED=tiled, SHARE=share, HEADS=HEADS, D=D, D_PAD=D_PAD, BLOCK=64, SPLIT=split, num_warps=4, num_stages=2,
        launch_pdl=is_hopper(y.device))
    return y


@functools.lru_cache(maxsize=4)
def attention_scratch(rows, parts, heads, D, device):
    """(unnormalised outputs, (maximum, sum) of each part, how many parts have arrived: zero between calls)."""
    return (torch.empty(rows, parts, heads, D, device=device), torch.empty(rows, parts, 2, heads, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device))


if triton is not None:
    @triton.jit
    def rotated(x, at, d, cos, sin, inside, D: tl.constexpr):
        """The rotary embedding of what `at` points at."""
        half = tl.where(d < D // 2, d + D // 2, d - D // 2)
        v = tl.load(x + at + d, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
        return (v * cos + tl.where(d < D // 2, -other, other) * sin).to(x.dtype.element_ty)

    @triton.jit
    def combined(outs, stats, parts, HEADS: tl.constexpr, D_PAD: tl.constexpr):
        """(sum, unnormalised output) of softmax over all parts of a row, from the pointers to the first part's output and maximum."""
        top = tl.full([HEADS], -float("inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        out = tl.zeros([HEADS, D_PAD], tl.float32)
        for q in range(0, parts):
            part_top = tl.load(stats + q * (2 * HEADS), cache_modifier=".cg")
            part_total = tl.load(stats + q * (2 * HEADS) + HEADS, cache_modifier=".cg")
            part_out = tl.load(outs + q * (HEADS * D_PAD), cache_modifier=".cg")
            new_top = tl.maximum(top, part_top)
            old, new = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
            total, out = total * old + part_total * new, out * old[:, None] + part_out * new[:, None]
            top = new_top
        return total, out

    @triton.jit
    def decode_attention_kernel(qkv, cos, sin, k_cache, v_cache, length, y, outs, stats, arrived, kv_heads, stride_b, stride_h,
                                scale_log2e, TILED: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
                                D_PAD: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
        let_next_start()
        wait_for_previous()
        part, row = tl.program_id(0), tl.program_id(1)
        b, g = (row // kv_heads).to(tl.int64), row % kv_heads
        n = tl.load(length + b).to(tl.int32)
        if part * SPLIT <= n:
            head, d = tl.arange(0, HEADS), tl.arange(0, D_PAD)         # the query heads of one kv head, padded for tl.dot
            inside = (head[:, None] < SHARE) & (d[None] < D)
            c = tl.load(cos + b * D + d, mask=d < D, other=0.0).to(tl.float32)
            s = tl.load(sin + b * D + d, mask=d < D, other=0.0).to(tl.float32)
            at = b * (kv_heads * (SHARE + 2)) * D
            Q = rotated(qkv, at + (g * SHARE + head[:, None]) * D, d[None], c[None], s[None], inside, D)
            top = tl.full([HEADS], -float("inf"), tl.float32)          # online softmax: running maximum, sum and output
            total = tl.zeros([HEADS], tl.float32)
            out = tl.zeros([HEADS, D_PAD], tl.float32)
            cached = b * stride_b + g * stride_h
            if n < (part + 1) * SPLIT:                                 # this part has the new token: begin with it
                k = rotated(qkv, at + (kv_heads * SHARE + g) * D, d, c, s, d < D, D)
                v = tl.load(qkv + at + (kv_heads * (SHARE + 1) + g) * D + d, mask=d < D, other=0.0)
                tl.store(k_cache + cached + n * D + d, k, mask=d < D)
                tl.store(v_cache + cached + n * D + d, v, mask=d < D)
                top = tl.sum(Q.to(tl.float32) * k.to(tl.float32)[None], 1) * scale_log2e
                total += 1.0
                out += v.to(tl.float32)[None]
            for start in range(part * SPLIT, tl.minimum(n, (part + 1) * SPLIT), BLOCK):
                t = start + tl.arange(0, BLOCK)
                there = (t[:, None] < n) & (d[None] < D)
                K = tl.load(k_cache + cached + t[:, None] * D + d[None], mask=there, other=0.0)
                V = tl.load(v_cache + cached + t[:, None] * D + d[None], mask=there, other=0.0)
                score = (tl.dot(Q.to(tl.float32), tl.trans(K).to(tl.float32)) if PLAIN else tl.dot(Q, tl.trans(K), input_precision="ieee"))
                score = tl.where(t[None] < n, score * scale_log2e, -float("inf"))                  # (HEADS, BLOCK)
                new_top = tl.maximum(top, tl.max(score, 1))
                w, shrink = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
                total = total * shrink + tl.sum(w, 1)
                V = V.to(tl.float32) if PLAIN else V
                out = out * shrink[:, None] + tl.dot(w.to(V.dtype), V, input_precision="ieee")
                top = new_top
            parts, done = n // SPLIT + 1, n < SPLIT
            if not done:
                slot = row.to(tl.int64) * tl.num_programs(0)
                i = head[:, None] * D_PAD + d[None]
                tl.store(outs + (slot + part) * (HEADS * D_PAD) + i, out)
                tl.store(stats + (slot + part) * (2 * HEADS) + head, top)
                tl.store(stats + (slot + part) * (2 * HEADS) + HEADS + head, total)
                tl.debug_barrier()
                done = tl.atomic_add(arrived + row, 1) == parts - 1
                if done:
                    tl.store(arrived + row, 0)
                    total, out = combined(outs + slot * (HEADS * D_PAD) + i, stats + slot * (2 * HEADS) + head, parts, HEADS, D_PAD)
            if done:
                o = (g * SHARE + head[:, None]) * D + d[None]
                o = b * (kv_heads * SHARE * D) + (interleaved(o) if TILED else o)
                tl.store(y + o, (out / total[:, None]).to(y.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------------------------------
# 5. After the output layer; bound by one pass over the logits.
#
#   token_logprob    logits[token] - log Z,  Z = Σ exp(logits)        dL/dlogits = g (1[token] - softmax(logits))

def token_logprob_torch(logits, tokens):
    return -F.cross_entropy(logits.float(), tokens, reduction="none")


def token_logprob(logits, tokens):
    """logits [n, V], tokens int64 [n] -> log-probability of each token, float32 [n]."""
    return FusedLogprob.apply(logits.contiguous(), tokens.contiguous()) if use_triton(logits) else token_logprob_torch(logits, tokens)


class FusedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens):
        n, V = logits.shape
        logprob, log_Z = torch.empty(n, device=logits.device), torch.empty(n, device=logits.device)
        token_logprob_kernel[(n,)](logits, tokens, logprob, log_Z, V, SIZE=4096, num_warps=8)
        ctx.save_for_backward(logits, tokens, log_Z)
        return logprob

    @staticmethod
    def backward(ctx, grad):
        logits, tokens, log_Z = ctx.saved_tensors
        n, V = logits.shape
        grad_logits = torch.empty_like(logits)
        token_logprob_gradient_kernel[(n * triton.cdiv(V, 4096),)](logits, tokens, log_Z, grad.contiguous(), grad_logits, V, SIZE=4096, num_warps=8)
        return grad_logits, None


if triton is not None:
    @triton.jit
    def token_logprob_kernel(logits, tokens, logprob, log_Z, V, SIZE: tl.constexpr):
        row, m, total = tl.program_id(0).to(tl.int64), -float("inf"), 0.0
        for first in range(0, V, SIZE):
            i = first + tl.arange(0, SIZE)
            z = tl.load(logits + row * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
            new_m = tl.maximum(m, tl.max(z))
            total = total * tl.exp(m - new_m) + tl.sum(tl.exp(z - new_m))
            m = new_m
        m += tl.log(total)
        tl.store(log_Z + row, m)
        tl.store(logprob + row, tl.load(logits + row * V + tl.load(tokens + row)).to(tl.float32) - m)

    @triton.jit
    def token_logprob_gradient_kernel(logits, tokens, log_Z, grad, grad_logits, V, SIZE: tl.constexpr):
        pieces = tl.cdiv(V, SIZE)
        row, i = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces * SIZE + tl.arange(0, SIZE)
        z = tl.load(logits + row * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
        p = tl.exp(z - tl.load(log_Z + row))
        g = tl.load(grad + row) * ((i == tl.load(tokens + row)).to(tl.float32) - p)
        tl.store(grad_logits + row * V + i, g.to(grad_logits.dtype.element_ty), mask=i < V)


# Sampling: token = argmax(z - log E), E ~ Exp(1), z = logits/temperature: a draw from softmax(z) (Gumbel-max), with its
# log-probability z[token] - log Z and the entropy log Z - Σ softmax(z) z. Its twin is qerl.sample, which draws other numbers
# from the same distribution.

def sample(logits, temperature, seed):
    """logits [B, V], seed int64 [1] on the device, fresh for each call -> token int64, log-probability and entropy float32 [B]."""
    B, V = logits.shape
    blocks = triton.cdiv(V, 4096)
    parts = torch.empty(B, 5, triton.next_power_of_2(blocks), device=logits.device)
    index = torch.empty(B, parts.shape[2], dtype=torch.int64, device=logits.device)
    token, logprob, entropy = torch.empty_like(index[:, 0]), torch.empty_like(parts[:, 0, 0]), torch.empty_like(parts[:, 0, 0])
    sample_parts_kernel[(blocks, B)](logits, seed, parts, index, V, 1 / temperature, PARTS=parts.shape[2], QUARTER=1024, num_warps=4)
    sample_kernel[(B,)](parts, index, token, logprob, entropy, blocks, PARTS=parts.shape[2], num_warps=1)
    return token, logprob, entropy


if triton is not None:
    @triton.jit
    def sample_parts_kernel(logits, seed, parts, index, V, scale, PARTS: tl.constexpr, QUARTER: tl.constexpr):
        """Of 4 * QUARTER logits: maximum m, Σ e^(z-m), Σ z e^(z-m), and the best z - log E with its z and where it is."""
        block, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
        i = block * (4 * QUARTER) + tl.arange(0, QUARTER)
        u0, u1, u2, u3 = tl.rand4x(tl.load(seed), b * (tl.num_programs(0) * QUARTER) + block * QUARTER + tl.arange(0, QUARTER))
        m, total, weighted, best, best_z, best_i = -float("inf"), 0.0, 0.0, -float("inf"), 0.0, 0
        for quarter in tl.static_range(4):
            u = u0 if quarter == 0 else u1 if quarter == 1 else u2 if quarter == 2 else u3
            at = i + quarter * QUARTER
            z = tl.load(logits + b * V + at, mask=at < V, other=-float("inf")).to(tl.float32) * scale
            new_m = tl.maximum(m, tl.max(z))
            e, shrink = tl.exp(z - new_m), tl.exp(m - new_m)
            total = total * shrink + tl.sum(e)
            weighted = weighted * shrink + tl.sum(tl.where(at < V, z * e, 0.0))
            m = new_m
            noisy = z - tl.log(-tl.log(u))
            top, where = tl.max(noisy, 0, return_indices=True)
            if top > best:
                best, best_i = top, block * (4 * QUARTER) + quarter * QUARTER + where
                best_z = tl.max(tl.where(tl.arange(0, QUARTER) == where, z, -float("inf")))
        here = parts + b * (5 * PARTS) + block
        tl.store(here, m)
        tl.store(here + PARTS, total)
        tl.store(here + 2 * PARTS, weighted)
        tl.store(here + 3 * PARTS, best)
        tl.store(here + 4 * PARTS, best_z)
        tl.store(index + b * PARTS + block, best_i)

    @triton.jit
    def sample_kernel(parts, index, token, logprob, entropy, blocks, PARTS: tl.constexpr):
        b, i = tl.program_id(0), tl.arange(0, PARTS)
        here = parts + b * (5 * PARTS) + i
        m = tl.load(here, mask=i < blocks, other=-float("inf"))
        total = tl.load(here + PARTS, mask=i < blocks, other=0.0)
        weighted = tl.load(here + 2 * PARTS, mask=i < blocks, other=0.0)
        best, where = tl.max(tl.load(here + 3 * PARTS, mask=i < blocks, other=-float("inf")), 0, return_indices=True)
        top = tl.max(m)
        e = tl.exp(m - top)
        Z = tl.sum(total * e)
        log_Z = top + tl.log(Z)
        tl.store(token + b, tl.load(index + b * PARTS + where))
        tl.store(logprob + b, tl.load(parts + b * (5 * PARTS) + 4 * PARTS + where) - log_Z)
        tl.store(entropy + b, log_Z - tl.sum(weighted * e) / Z)
