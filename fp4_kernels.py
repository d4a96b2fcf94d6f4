"""Triton kernels in the place of PyTorch lines of qerl.py and harness/fast.py.

Those lines say what each kernel computes. harness/fast.py chooses (use_kernels) and runs without
this file. The PyTorch runs anywhere and steps in a debugger, and the tests hold the kernels to it, on
a GPU and in Triton's interpreter (TRITON_INTERPRET=1) on a CPU. Each kernel is introduced by its
formula, and by what bounds its speed: memory, instructions or latency.

    0. plain product  y = x Ŵᵀ: read this first                       fp4_matmul
    1. quantising     GPTQ's columns rounded to E2M1                  round_columns
    2. 4-bit tiles    weights in the order in which tensor cores      tile, TiledWeight.dequantize
                      take them
    3. linear         y = x Ŵᵀ + bias + LoRA                          TiledWeight.multiply, linear,
                                                                      lora_down
    4. in between     what a block does between its linear layers     FusedRMSNorm, FusedSiluMul,
                                                                      FusedRotary, PackedAttention,
                                                                      decode_attention
    5. output         log-probabilities; the draw of a token          token_logprob, sample
    6. launching      a decode step as one CUDA graph                 record_graph

Words that recur: a GPU has some hundred processors (SMs). A kernel is run by many programs, each on
one SM, and a program has a few warps of 32 threads. A name in CAPITALS is a constant that is
compiled into the kernel.
"""
import functools
import math
import os
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if torch.version.hip:          # PyTorch calls AMD's GPUs "cuda", too; PyTorch goes on without kernels
    print("fp4_kernels: an AMD GPU; PyTorch computes what the kernels do elsewhere, slower.",
          file=sys.stderr)
    raise ImportError("the kernels are made for NVIDIA GPUs, in part in their assembly language")

LOG2E = 1.4426950408889634             # exp(x) = exp2(x * LOG2E), and exp2 is what the hardware has
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The interpreter has neither inline PTX (NVIDIA's assembly language) nor products of bfloat16.
# What Triton compiles knows no other global values than a constexpr.
IN_INTERPRETER = tl.constexpr(INTERPRETED)


@triton.jit
def product(a, b, acc=None):
    """acc + a b in float32; the interpreter multiplies float32 only."""
    if IN_INTERPRETER:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


# --------------------------------------------------------------------------------------------------
# 0. A plain product: read this first                    y = x Ŵᵀ,    Ŵ = S_FP32 · (S_E4M3 ⊙ W̃)
#
# It computes, up to rounding, what FrozenProduct.forward of qerl.py does for a layer of its own:
#
#     y = x @ dequantize_blocks(packed, E2M1, scale / global_scale, x.dtype).T
#
# But Ŵ never exists in memory. A program decodes a piece of it, multiplies x by this piece, and goes
# on to the next. TiledWeight.multiply does the same in sections 2 and 3, faster; results/kernels.md
# says how much each of its tricks is worth. In bfloat16 a code times its block scale is exact: they
# have 2 and 4 significant bits, and a bfloat16 has 8. The global scale comes last, in float32.

def fp4_matmul(x, packed, scale, global_scale):
    """x [M, K] Ŵᵀ -> y [M, N] in x's dtype.

    packed uint8 [N, K/2], even index in the low nibble; scale float32 [N, K/16], or [N, K/32] for
    MXFP4; global_scale float32 [1]. K is divisible by the block; all are contiguous.
    """
    assert global_scale.numel() == 1, "fp4_matmul: stacked layers have several global scales, this takes one"
    M, K = x.shape
    N, blocks = scale.shape
    y = x.new_empty(M, N)
    rows = min(64, max(16, triton.next_power_of_2(M)))         # tensor cores take 16 at least
    fp4_matmul_kernel[triton.cdiv(M, rows), triton.cdiv(N, 64)](
        x, packed, scale, global_scale, y, M, N, K, ROWS=rows, OUT=64, STEP=64, BLOCK=K // blocks)
    return y


@triton.jit
def fp4_matmul_kernel(x, packed, scale, global_scale, y, M, N, K, ROWS: tl.constexpr,
                      OUT: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes a tile of y: ROWS rows of x by OUT rows of Ŵ, STEP columns at a time."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]                            # [ROWS, 1]
    n = tl.program_id(1) * OUT + tl.arange(0, OUT)[:, None]                              # [OUT, 1]
    acc = tl.zeros([ROWS, OUT], tl.float32)
    for first in range(0, K, STEP):
        i = first // 2 + tl.arange(0, STEP // 2)[None]
        byte = tl.load(packed + n * (K // 2) + i, mask=(n < N) & (i < K // 2), other=0)   # [OUT, STEP/2]
        code = tl.join(byte & 15, byte >> 4).reshape(OUT, STEP // BLOCK, BLOCK)
        b = first // BLOCK + tl.arange(0, STEP // BLOCK)[None]
        s = tl.load(scale + n * (K // BLOCK) + b, mask=(n < N) & (b < K // BLOCK), other=0.0)
        w = (e2m1_value(code) * s[:, :, None]).reshape(OUT, STEP)                # s: [OUT, STEP/BLOCK]
        k = first + tl.arange(0, STEP)[None]
        a = tl.load(x + m * K + k, mask=(m < M) & (k < K), other=0.0)                    # [ROWS, STEP]
        acc = product(a, w.to(a.dtype).T, acc)                                           # [ROWS, OUT]
    acc /= tl.load(global_scale)
    tl.store(y + m * N + n.T, acc.to(y.dtype.element_ty), mask=(m < M) & (n.T < N))


@triton.jit
def e2m1_value(code):
    """A code's bits are s e e m: (-1)^s · 2^(e - 1) · (1 + m/2), or (-1)^s · m/2 where e is 0."""
    half = (code & 1) * 0.5
    e = (code >> 1 & 3).to(tl.float32)
    magnitude = tl.where(e == 0, half, tl.exp2(e - 1) * (1 + half))
    return tl.where(code < 8, magnitude, -magnitude)


# --------------------------------------------------------------------------------------------------
# What runs where. All that depends on the kind of GPU is asked of these functions.
#
#     compute capability     GPUs, for example            the kernels
#     9.0                    H100, H200                   all
#     8.x, 10.x to 12.x      A100, RTX 3090 to 5090       all; linear_kernel by other instructions,
#                                                         for fewer rows
#     7.5                    T4                           not in bfloat16, which it cannot compute
#                                                         in; no weights in tiles
#     below                  V100                         none: PyTorch does everything

@functools.lru_cache
def capability(device):
    """The compute capability of an NVIDIA GPU, such as (9, 0). The interpreter acts as a Hopper GPU."""
    return (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)


def runs_on(device, dtype):
    """Whether kernels take tensors of this dtype on this device."""
    if device.type != "cuda":
        return INTERPRETED
    return capability(device) >= ((8, 0) if dtype == torch.bfloat16 else (7, 5))


def is_hopper(device):
    """Whether kernels use what they were measured with on Hopper: wgmma, TMA and launch_pdl."""
    return capability(device)[0] == 9


def tiles_fit(device, dtype, in_features, sizes):
    """Whether weights [size, in_features] are to lie in tiles: the kernels run here and take them.

    They do on a GPU that computes in bfloat16, if in_features and all sizes are divisible by 128.
    """
    in_bfloat16 = device.type == "cuda" and dtype == torch.bfloat16 and runs_on(device, dtype)
    return in_bfloat16 and all(n % 128 == 0 for n in (in_features, *sizes))


def flash_runs_on(q):
    """Whether PyTorch's FlashAttention, which PackedAttention needs, takes a tensor."""
    return q.is_cuda and q.dtype != torch.float32 and capability(q.device) >= (8, 0)


# A decode step is a chain of short kernels, and between two of them the GPU would idle. On Hopper a
# kernel may start while the one before it still runs (launch_pdl, "programmatic dependent launch"):
# as soon as all programs of the earlier one have called let_next_start or ended. It then prepares
# what does not depend on the earlier one, and calls wait_for_previous before it reads anything that
# the earlier one writes.

@triton.jit
def let_next_start():
    if not IN_INTERPRETER and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    if not IN_INTERPRETER and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointer, stride, there, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Have the L2 cache fetch the first BYTES of ROWS rows that lie `stride` bytes apart.

    Only the first `there` of a row's BYTES exist.
    """
    if not IN_INTERPRETER:
        i = tl.arange(0, ROWS * BYTES // 128)                    # a cache line has 128 bytes
        row = i // (BYTES // 128)
        byte = i % (BYTES // 128) * 128
        at = pointer.to(tl.int64) + row * stride + tl.where(byte < there, byte, 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1];  // $0", "=r,l", [at], tl.int32, is_pure=False, pack=1)


# --------------------------------------------------------------------------------------------------
# 1. Quantising to E2M1                                  code = the E2M1 number nearest to w / scale
#
# GPTQ's columns follow one another, so that latency bounds it: with a kernel for each operation that
# is a dozen launches a column. Here the columns of some rows stay in a program's registers.

@triton.jit
def e2m1_code(w, scale):
    """The code of w / scale, float32: its sign, and how many halfway points between magnitudes it passes.

    At a halfway point itself the code must be the even one, hence > and >= in turn.
    """
    x = tl.div_rn(w, scale)
    a = tl.abs(x)
    magnitude = (a > 0.25).to(tl.int32)
    magnitude += a >= 0.75
    magnitude += a > 1.25
    magnitude += a >= 1.75
    magnitude += a > 2.5
    magnitude += a >= 3.5
    magnitude += a > 5.0
    return magnitude | (x < 0).to(tl.int32) << 3


def round_columns(W, scale, U):
    """methods.gptq.round_columns in one kernel: W, scale [out, n], U [n, n] -> rounded, losses [out, n]."""
    out, n = W.shape
    W, scale, U = W.contiguous(), scale.contiguous(), U.contiguous()
    rounded = torch.empty_like(W)
    losses = torch.empty_like(W)
    # One warp a program: a row's columns are then exchanged without barriers.
    round_columns_kernel[(triton.cdiv(out, 4),)](
        W, scale, U, rounded, losses, out, n, ROWS=4, COLUMNS=triton.next_power_of_2(n), num_warps=1)
    return rounded, losses


@triton.jit
def round_columns_kernel(W, scale, U, rounded, losses, out, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program keeps ROWS rows in registers."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None]
    place = row * n + column
    there = (row < out) & (column < n)
    w = tl.load(W + place, mask=there, other=0.0)
    s = tl.load(scale + place, mask=there, other=1.0)
    lost = tl.zeros([ROWS, COLUMNS], tl.float32)
    for j in range(n):
        now = column == j
        w_j = tl.sum(tl.where(now, w, 0.0), 1, keep_dims=True)
        s_j = tl.sum(tl.where(now, s, 0.0), 1, keep_dims=True)
        q_j = e2m1_value(e2m1_code(w_j, s_j)) * s_j
        loss = (w_j - q_j) / tl.load(U + j * n + j)
        behind = tl.load(U + j * n + column, mask=(column > j) & (column < n), other=0.0)
        w = tl.where(now, q_j, w - loss * behind)
        lost = tl.where(now, loss, lost)
    tl.store(rounded + place, w, mask=there)
    tl.store(losses + place, lost, mask=there)


# --------------------------------------------------------------------------------------------------
# 2. 4-bit tiles                          weight[n, k] = e2m1(code[n, k]) · scale[n, k/16] · row[n]
#
# Hopper's tensor cores (the instruction wgmma) take W, 64 rows x 16 columns at a time, from the
# registers of 128 threads. The hardware prescribes who holds what: call a thread (warp, g, t),
# where warp < 4, g < 8 and t < 4. It holds the rows 16 warp + g and 16 warp + g + 8 ("row half" 0
# and 1), and of each of them the columns with its t:
#
#     column    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
#     t         0  0  1  1  2  2  3  3  0  0  1  1  2  2  3  3
#
# Moving codes from thread to thread would cost more than the product. So when a model is loaded,
# its codes are put into the order in which threads will take them. A tile is 64 rows x 64 columns,
# that is four such steps, and each thread finds its 32 codes of it in 16 consecutive bytes: for
# each row half two words of 32 bits, of 8 codes each.
#
# One freedom is left. A product may sum over the columns in any order, if W and x come in the same
# one. Thread t takes for its 16 columns of the four steps 16 neighbours, the columns 16t to 16t +
# 15 of the tile, because neighbours share a scale: a thread then needs one scale for each row. The
# columns of x have to be permuted alike (`interleave`); the kernels before a linear layer write
# them so (`interleaved`), which costs nothing.

def interleave(x):
    """x [..., in], in divisible by 64 -> the same columns in the order of the tiles.

    Column 16t + 4 step + 2 half + i of a tile goes to place 16 step + 8 half + 2t + i, where thread
    t takes it; step and t are below 4, half and i below 2.
    """
    x = x.unflatten(-1, (-1, 4, 8, 2))                          # (tile, t, step and half, i)
    return x.transpose(-3, -2).flatten(-4)


class Lora(NamedTuple):
    """LoRA of layers that are stacked along out, as TiledWeight.multiply takes it.

    The rank is a power of two, at least 16. B is divided by out_scale, because linear_kernel
    multiplies the whole sum by it.
    """
    A: torch.Tensor             # [pieces * rank, in], interleaved
    B: torch.Tensor             # [out, rank]
    bounds: tuple               # the two rows of B where the second and the third piece begin


@dataclass(eq=False)
class TiledWeight:
    """A frozen weight [out, in] in tiles: e2m1(code) * scale * out_scale.

    out and in are divisible by 128. Its tensors do not move with a module's .to(). qerl.PackedWeight
    computes the same from a weight in the order of its file.
    """
    words: torch.Tensor         # int32 [out/64, in/64, 512]: a tile has four words of each thread
    scales: torch.Tensor        # uint8 [out/64, in/64, warp 4, g 8, t 4, row half 2]
    out_scale: torch.Tensor     # float32 [out]

    interleaved = True          # `multiply` takes x's columns in the order of the tiles
    wide = None                 # see fast.with_room
    in_order = False            # it adds parts of sums: see plan_linear
    values = None               # the weight in bfloat16, too, as an object that multiplies, where
                                # machine.keep_values found room for it

    def for_rows(self, rows):
        """What multiplies so many rows fastest: this or, if they are kept, the values.

        With more rows than these, multiplying takes longer than reading 16 bits a weight, and decoding
        would only add to it.
        """
        few = rows <= (128 if is_hopper(self.words.device) else 64)
        return self if few or self.values is None else self.values

    def dequantize(self, dtype, interleaved=False):
        """The whole weight [out, in] in dtype: a temporary, or the kept values.

        interleaved: with its columns in the order of the tiles.
        """
        if self.values is not None and dtype == torch.bfloat16 and not interleaved:
            return self.values.dequantize(dtype)
        row_tiles, column_tiles, _ = self.words.shape
        weight = self.out_scale.new_empty(64 * row_tiles, 64 * column_tiles, dtype=dtype)
        untile_kernel[(row_tiles, column_tiles // 2)](
            self.words, self.scales, self.out_scale,
            weight, column_tiles, INTERLEAVED=interleaved, num_warps=4)
        return weight

    def prepare_lora(self, A, B, sizes, scaling, dtype):
        """LoRA of layers stacked along out -> a Lora in dtype, which `multiply` takes.

        A float32 [pieces * r, in]; B float32 [out, r]; sizes: each piece's rows of B, three pieces
        at most; scaling: α/r.
        """
        rank = B.shape[1]
        padded = max(16, triton.next_power_of_2(rank))
        A = F.pad(A.unflatten(0, (-1, rank)), (0, 0, 0, padded - rank)).flatten(0, 1)
        B = F.pad(scaling * B / self.out_scale[:, None], (0, padded - rank))
        bounds = sum(sizes[:1]), sum(sizes[:2])
        return Lora(interleave(A).to(dtype), B.to(dtype), bounds)

    def multiply(self, x, bias=None, lora=None):
        """x Ŵᵀ + bias + LoRA [rows, out], in x's dtype, without gradient.

        x [rows, in], interleaved and contiguous, on a GPU bfloat16; bias [out] in its dtype; lora from
        prepare_lora.
        """
        # Decode first where linear_kernel does not pay. On an H200 that was measured: with more than
        # 512 rows, unless the weight is large. Without wgmma it is with more rows than a tile has.
        if is_hopper(x.device):
            pays = len(x) <= 512 or 8 * self.words.numel() > 2 ** 25         # 8 weights a word
        else:
            pays = len(x) <= 64
        if pays and (lora is None or lora.B.shape[1] <= 128):        # a tile has no room for more
            return launch_linear(x, self, bias, lora)
        if pays:
            y = launch_linear(x, self, bias, None)
        else:
            y = F.linear(x, self.dequantize(x.dtype, interleaved=True), bias)
        return y if lora is None else add_lora(y, x, self, lora)


# How a word holds its eight codes. Two neighbours, a pair, stand at the same bits of its lower and
# its upper half, as the hardware computes with two bfloat16 in one register. The four pairs share
# the 16 bits of a half so:
#
#     bit          15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
#     of pair       0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2
#     code's bit    s  s  e  s  f  m  s  e  f  m  e  f  m  e  f  m
#
# where s is the sign, e f the exponent and m the mantissa. A bfloat16 has its sign at bit 15, its
# exponent at the bits 14-7 and its mantissa at 6-0. Pair 0 therefore is a bfloat16 once the other
# bits are cleared: its exponent has the lowest two of eight bits and its mantissa the first of seven,
# which is the code's value times 2^-126. (This holds for the smallest codes, too, as both formats are
# subnormal there.) Pairs 1 and 2 get there by a shift of 3 and of 6. Pair 3 has the bits that are
# left, and takes three shifts. The product with the scale makes up for 2^-126.
#
# A scale is stored in a byte: 5 bits tell how many powers of two it is below the largest of its row,
# 3 are its mantissa. One multiplication and one addition make of it a pair of bfloat16. All of this
# is exact.

def pack_words(codes):
    """4-bit codes uint8 [..., 8] -> words int32 [...]."""
    words = codes.new_zeros(codes.shape[:-1], dtype=torch.int32)
    for i, code in enumerate(codes.unbind(-1)):
        code = code.int()
        pair, half = divmod(i, 2)
        sign = code >> 3
        magnitude = code & 7
        if pair < 3:
            bits = sign << 15 - 3 * pair | magnitude << 6 - 3 * pair
        else:
            bits = sign << 14 | magnitude >> 2 << 13 | (magnitude & 3) << 10
        words |= bits << 16 * half
    return words


def pack_scales(scale):
    """scale float32 [out, in/16] -> (bytes uint8 [out, in/16], factor float32 [out]).

    A byte b stands for 2^((b >> 3) - 30) (1 + (b & 7) / 8), and scale is this times the factor.
    """
    # scale = mantissa * 2^exponent, where 0.5 <= mantissa < 1
    mantissa, exponent = torch.frexp(scale)
    top = exponent.amax(1)
    byte = (exponent - top[:, None] + 31) * 8 + (mantissa * 16 - 8)
    byte = torch.where((byte >= 0) & (scale > 0), byte, 0).to(torch.uint8)
    return byte, torch.exp2(top - 2.0)


def tile(packed, scale, row_scale):
    """The TiledWeight of a quantised weight e2m1(code) * scale * row_scale.

    packed uint8 [out, in/2], even index in the low nibble; scale float32 [out, in/16]; row_scale
    float32, broadcast to [out]; out and in divisible by 64.
    Exact for scales of four significant bits (E4M3, E8M0) less than 2^31 below their row's largest.
    """
    out, columns = packed.shape[0], 2 * packed.shape[1]
    codes = torch.stack([packed & 15, packed >> 4], -1)
    # (tile, warp, row half, g, tile, t, word, code) -> (tile, tile, warp, g, t, row half, word, code)
    codes = codes.view(out // 64, 4, 2, 8, columns // 64, 4, 2, 8).permute(0, 4, 1, 3, 5, 2, 6, 7)
    words = pack_words(codes).reshape(out // 64, columns // 64, 512)

    stored, factor = pack_scales(scale)
    # (tile, warp, row half, g, tile, t) -> (tile, tile, warp, g, t, row half)
    stored = stored.view(out // 64, 4, 2, 8, columns // 64, -1).permute(0, 4, 1, 3, 5, 2)
    out_scale = row_scale.reshape(-1).expand(out) * factor
    return TiledWeight(words, stored.contiguous(), out_scale)


# untile_kernel is bound by memory: it reads 9/16 byte and writes two for each weight. Its inner
# part, decode_tiles, is also linear_kernel's, and there its instructions count: 15 for the eight
# codes of a word.


@triton.jit
def e2m1_pairs(word, scale):
    """The eight codes of a word times the bfloat16 pair `scale` -> eight bfloat16.

    They are in the order of the columns. a, b, c and d are the pairs 0 to 3, moved to where
    bfloat16 has sign, exponent and mantissa: the bits 15, 8, 7 and 6 of both halves.
    """
    if IN_INTERPRETER:
        fields = 0x81C081C0 - 2 ** 32                           # the bits 15, 8, 7 and 6, signed
        signs = 0x80008000 - 2 ** 32
        a = word & fields
        b = word << 3 & fields
        c = word << 6 & fields
        d = word << 1 & signs | word >> 5 & 0x01000100 | word >> 4 & 0x00C000C0
        # A bfloat16 in the upper half of a word is the word as float32, once the lower half is 0.
        s = (scale << 16).to(tl.float32, bitcast=True)
        halves = [half for pair in (a, b, c, d) for half in (pair << 16, pair & -65536)]
        return tuple(half.to(tl.float32, bitcast=True) * s for half in halves)
    return tl.inline_asm_elementwise("""{
        .reg .b32 a, b, c, d, t, z;
        mov.b32 z, 0x80008000;               // a pair of -0: fma(a, s, -0) is the product a s
        and.b32 a, $8, 0x81C081C0;
        shl.b32 t, $8, 3;
        and.b32 b, t, 0x81C081C0;
        shl.b32 t, $8, 6;
        and.b32 c, t, 0x81C081C0;
        shl.b32 t, $8, 1;
        and.b32 d, t, 0x80008000;
        shr.b32 t, $8, 5;
        lop3.b32 d, t, 0x01000100, d, 0xEA;  // (t & mask) | d
        shr.b32 t, $8, 4;
        lop3.b32 d, t, 0x00C000C0, d, 0xEA;
        fma.rn.bf16x2 a, a, $9, z;
        fma.rn.bf16x2 b, b, $9, z;
        fma.rn.bf16x2 c, c, $9, z;
        fma.rn.bf16x2 d, d, $9, z;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }""", constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r", args=[word, scale],
        dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1)


@triton.jit
def decode_tiles(words, scales, tile, column_tiles, R: tl.constexpr, C: tl.constexpr):
    """R x C tiles, without out_scale; tile: the number of the first.

    column_tiles: how many tiles lie side by side along the input. Returns bfloat16 [R, C, warp 4,
    g 8, t 4, row half 2, word 2, step 2, column half 2, i 2], where i counts neighbouring columns.
    """
    words += tile * 512
    scales += tile * 256
    r = tl.arange(0, R)[:, None] * column_tiles
    word = tl.load(words + r * 512 + tl.arange(0, C * 512)[None])
    word = word.reshape(R, C, 4, 8, 4, 2, 2)
    scale = tl.load(scales + r * 256 + tl.arange(0, C * 256)[None])

    # The scale as a pair of equal bfloat16.
    pair = scale.to(tl.int32) * 0x00100010                      # shifted by 4, in both halves
    # A code in a bfloat16's bits is 2^-126 times its value. With 2^96 here that leaves pack_scales'
    # 2^-30.
    pair = pair + 0x6F806F80
    pair = tl.broadcast_to(pair.reshape(R, C, 4, 8, 4, 2, 1), (R, C, 4, 8, 4, 2, 2))

    v0, v1, v2, v3, v4, v5, v6, v7 = e2m1_pairs(word, pair)
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))            # (.., step, column half)
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.join(even, odd)


@triton.jit
def untile_kernel(words, scales, out_scale, weight, column_tiles, INTERLEAVED: tl.constexpr):
    """Each program decodes two tiles that lie side by side."""
    row = tl.program_id(0)
    c = tl.program_id(1) * 2
    at = (row * column_tiles + c).to(tl.int64)
    v = decode_tiles(words, scales, at, column_tiles, 1, 2)

    # Rows of W are (R, warp, row half, g). Columns are (C, t, word, step, column half, i) or,
    # interleaved, (C, word, step, column half, t, i).
    if INTERLEAVED:
        v = v.permute(0, 2, 5, 3, 1, 6, 7, 8, 4, 9)
    else:
        v = v.permute(0, 2, 5, 3, 1, 4, 6, 7, 8, 9)
    n = row * 64 + tl.arange(0, 64)[:, None]
    k = c * 64 + tl.arange(0, 128)[None]
    w = v.reshape(64, 128).to(tl.float32) * tl.load(out_scale + n)
    at_w = weight + n.to(tl.int64) * (column_tiles * 64) + k
    tl.store(at_w, w.to(weight.dtype.element_ty))


# --------------------------------------------------------------------------------------------------
# 3. linear                                                   y = x Ŵᵀ + bias + (x Aᵀ) Bᵀ
#
# With many rows PyTorch multiplies, by a weight that was decoded before (TiledWeight.multiply). x and
# the columns of A are interleaved, so the weight has to be, too.

def add_lora(y, x, tiled, lora):
    """y + (x Aᵀ) Bᵀ, piece by piece: each of the stacked layers has its own part of A and of B."""
    B = lora.B * tiled.out_scale[:, None].to(x.dtype)
    h = F.linear(x, lora.A).split(B.shape[1], -1)
    return y + torch.cat([*map(F.linear, h, B.tensor_split(lora.bounds))], -1)


# The kernel computes the transposed product yᵀ = Ŵ xᵀ, because the weight is decoded in registers
# and tensor cores take only their left operand from there. A tile of y is 64R columns of y (rows of
# W) by `rows` rows of x. For each step of 64C columns along the input a program decodes R x C tiles
# of W, and has the tensor cores add their product with x.
#
# The work is cut evenly ("stream-K"). All steps of all tiles of y are laid end to end, and each
# program takes an equal share of this line, wherever that cuts a tile:
#
#     tile of y         |          0          |          1          |          2          |
#     step              | 0  1  2  3  4  5  6 | 0  1  2  3  4  5  6 | 0  1  2  3  4  5  6 |
#     program           | 0  0  0  0  0  1  1   1  1  1  2  2  2  2   2  3  3  3  3  3  3 |
#
# So all SMs have the same work, whatever the layer's size. A program that has only a part of a tile
# leaves its sums in `partial`. Whoever is the last to do so adds the parts up, always in the same
# order, so that equal inputs give equal outputs, and finishes the tile: it adds LoRA, multiplies by
# out_scale, adds the bias, and writes y.
#
# LoRA's h = x Aᵀ is left to the first few programs, who cut it along the input, too. When they are
# done, `ready` says so, and whoever finishes a tile multiplies h by its share of B. It may have to
# wait for `ready`. That is safe because programs start in the order of their numbers: what it waits
# for is running already. With more than 128 rows x Aᵀ is worth a product of its own, before the
# kernel.
#
# What bounds it: for few rows the memory, from which 9/16 byte a weight have to come, and the
# instructions that decode; from about 128 rows on the tensor cores and the L2 cache. Figures, and
# what was tried without gain, stand in results/kernels.md.

class Config(NamedTuple):
    """How large a tile of linear_kernel is and what a program gets to compute it."""
    rows: int            # rows of x in a tile of y
    R: int               # 64R rows of W in it
    C: int               # 64C columns of W in a step
    warps: int           # of a program: 4, or 8 that share the 64R rows
    stages: int          # steps whose loads are under way at once
    programs: int        # that run on an SM at once
    registers: int       # of a thread at most; an SM has 65,536 for all its threads


# Found by searches on an H200. Among configs with the same rows the first is for small layers and the
# last for large ones.
CONFIGS = [Config(*numbers) for numbers in (
    # rows, R, C, warps, stages, programs, registers
    (16, 1, 2, 4, 4, 3, 168),
    (16, 2, 2, 4, 4, 3, 168),
    (16, 4, 2, 4, 3, 2, 255),
    (32, 1, 2, 4, 4, 3, 160),
    (32, 2, 2, 4, 3, 2, 255),
    (32, 4, 2, 4, 3, 2, 255),
    (64, 1, 2, 4, 3, 2, 255),
    (64, 2, 2, 4, 4, 2, 255),
    (128, 1, 4, 4, 3, 1, 255),
    (128, 1, 2, 4, 3, 2, 255),
    (128, 2, 1, 4, 5, 2, 255),
    (256, 1, 2, 4, 3, 1, 255),
    (256, 2, 2, 8, 3, 1, 255),
)]
# Without wgmma, tiles of more than 64 rows take more registers than there are. GPUs for games and
# inference have 100 kB of shared memory an SM instead of 164 or more, in which two programs of these
# configs have room.
CONFIGS_WITHOUT_WGMMA = [c for c in CONFIGS if c.rows <= 64]
CONFIGS_IN_100_KB = [c._replace(programs=2) for c in CONFIGS if c.rows * c.R <= 64]
LARGE = 1e8                      # weights of a large layer, from these searches, too


def configs_on(device):
    """The Configs that a device has room for."""
    if is_hopper(device):
        return CONFIGS
    roomy = capability(device) in ((8, 0), (8, 7), (10, 0), (10, 3))
    return CONFIGS_WITHOUT_WGMMA if roomy else CONFIGS_IN_100_KB


def config_for(rows, out, columns, bounds, rank, configs):
    """The one of these Configs for x [rows, columns] and W [out, columns].

    Its tiles and steps fit into W's pieces, which begin at `bounds`, a whole number of times (sizes
    are divisible by 128), and its registers have room for a tile's part of LoRA's B. rank: of LoRA, at
    most 128, 0 without. The thresholds are measured on an H200.
    """
    tile_rows = min((c.rows for c in configs if c.rows >= rows), default=configs[-1].rows)
    fitting = [
        c for c in configs
        if c.rows == tile_rows
        and math.gcd(out, *bounds) % (64 * c.R) == 0
        and columns % (64 * c.C) == 0
        and c.R * rank <= 256
    ]
    return fitting[-1 if out * columns > LARGE or out * rows > 2.4e6 else 0]


COUNTERS = 2 ** 16          # of a device; linear_kernel has those from 1,024 on for its tiles of y


def plan_linear(config, rows, out, columns, ranks, sms):
    """How linear_kernel's work is cut for x [rows, columns] and W [out, columns] on `sms` SMs.

    ranks: of LoRA's pieces together, which h = x Aᵀ has as columns; 0 without LoRA. Returns the
    number of programs and, by name, the kernel's arguments: the first lora_programs compute h, one of
    lora_parts parts of a tile each (there are none if h is computed before); each other gets an equal
    share of the steps of all tiles of y.
    """
    running = config.programs * sms                          # programs that the GPU runs at once

    # h is multiplied in tiles of at most 32 rows, too few for wgmma, so that Triton takes mma.sync:
    # in Triton 3.6 wgmma may read shared memory before such loads have come. Where a tile of y has
    # more rows, each of its tiles of h is cut into fewer parts. If possible, h gets at most a sixth
    # of the programs.
    lora_rows = min(config.rows, 32)
    lora_tiles = triton.cdiv(ranks, 64) * triton.cdiv(rows, lora_rows)
    part_columns = 1024 if out * columns > LARGE else 256
    lora_parts = min(16, columns // part_columns) * lora_rows // config.rows
    lora_parts = max(1, min(lora_parts, running // (6 * lora_tiles + 1)))
    lora_programs = lora_tiles * lora_parts if rows <= 128 else 0

    # As many programs as run at once, but no more than there are steps. If it does not cost many of
    # them, their number is such that each gets a whole tile or an equal part of one: fewer programs
    # with whole tiles are faster.
    tiles = out // (64 * config.R) * triton.cdiv(rows, config.rows)
    assert 1024 + tiles <= COUNTERS, f"{rows} rows are more than the counters of this kernel"
    programs = max(1, running - lora_programs)
    whole = programs // tiles * tiles
    if whole > programs * (0.8 if config.rows <= 64 else 0.5):
        programs = whole
    programs = min(programs, tiles * (columns // (64 * config.C)))
    return lora_programs + programs, dict(
        lora_parts=lora_parts,
        lora_programs=lora_programs,
        ROWS=config.rows,
        LORA_ROWS=lora_rows,
        R=config.R,
        C=config.C,
        WARP_GROUPS=config.warps // 4,
        STAGES=config.stages,
        num_warps=config.warps,
        maxnreg=config.registers,
    )


@functools.lru_cache
def scratch(device):
    """(number of SMs, what programs of a kernel share), of a device, for one stream at a time.

    Those of linear_kernel share sums of cut tiles of y and those of h, float32. Those of all kernels
    that cut sums have the same counters, int32: a kernel reads none before the one before it has ended,
    and they are zero between calls.
    """
    sms = 3                        # in the interpreter, so that tiles are cut there, too
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    sums = max(c.programs * 64 * c.R * c.rows for c in CONFIGS)
    return (
        sms,
        torch.empty(2 * sms * sums, device=device),
        torch.empty(2 ** 22, device=device),
        torch.zeros(COUNTERS, dtype=torch.int32, device=device),
    )


def launch_linear(x, tiled, bias, lora):
    """TiledWeight.multiply by linear_kernel, in one launch."""
    rows, columns = x.shape
    out = len(tiled.out_scale)
    A, B, bounds = lora or Lora(None, None, (out, out))
    rank = B.shape[1] if lora else 0
    ranks = len(A) if lora else 0
    sms, *shared = scratch(x.device)
    wgmma = is_hopper(x.device)
    config = config_for(rows, out, columns, bounds, rank, configs_on(x.device))
    programs, plan = plan_linear(config, rows, out, columns, ranks, sms)
    y = x.new_empty(rows, out)
    h = F.linear(x, A) if rank and not plan["lora_programs"] else x.new_empty(rows, ranks)

    # By TMA, the GPU's copy engine, a tile of x or y is moved as a block, and the kernel takes a
    # descriptor instead of a pointer. This pays with more than 32 rows.
    x_tma = None
    y_there = y
    if wgmma and config.rows > 32:
        x_tma = TensorDescriptor.from_tensor(x, [config.rows, 64 * config.C])
        y_there = TensorDescriptor.from_tensor(y, [config.rows, 64 * config.R])

    linear_kernel[(programs,)](
        x_tma, x, tiled.words, tiled.scales, tiled.out_scale,
        bias, A, B, h, y_there, *shared, rows, out, columns // 64, ranks, *bounds,
        RANK=rank, WGMMA=wgmma, launch_pdl=wgmma, **plan)
    return y


# The tensor cores leave their sums in registers in an order of their own, too: of 64 rows a
# thread (warp, g, t) has the rows 16 warp + g and 16 warp + g + 8, and of every 8 columns of
# them the columns 2t and 2t + 1. If parts of a tile were stored row by row, they would first
# pass through shared memory to other threads. But only a program that holds its sums in the
# same order adds them up, so each thread stores what it has: no sum moves between threads.


@triton.jit
def by_thread(acc, R: tl.constexpr, WARP_GROUPS: tl.constexpr):
    """Sums [64R, ROWS] -> [R / groups * ROWS / 8, 512 groups], four sums of each thread a row.

    The program has WARP_GROUPS groups of four warps. The dimensions are (64 rows a group, warp,
    row half, g, 8 columns, t, i), and then (64 rows a group, 8 columns, warp, g, t, row half, i).
    """
    n: tl.constexpr = acc.shape[1] // 8
    acc = acc.reshape(R // WARP_GROUPS, 4 * WARP_GROUPS, 2, 8, n, 4, 2)
    acc = acc.permute(0, 4, 1, 3, 5, 2, 6)
    return acc.reshape(R // WARP_GROUPS * n, 512 * WARP_GROUPS)


@triton.jit
def by_row(acc, R: tl.constexpr, WARP_GROUPS: tl.constexpr):
    """The inverse of by_thread."""
    n: tl.constexpr = acc.shape[0] // (R // WARP_GROUPS)
    acc = acc.reshape(R // WARP_GROUPS, n, 4 * WARP_GROUPS, 8, 4, 2, 2)
    acc = acc.permute(0, 2, 5, 3, 1, 4, 6)
    return acc.reshape(64 * R, 8 * n)


@triton.jit
def is_last(counter, others):
    """Whether this program is the last to come here, after so many others; the counter is 0 again then."""
    tl.debug_barrier()                                   # all threads store before one counts
    last = tl.atomic_add(counter, 1) == others
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def add_parts(acc, parts, first, last, STRIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """acc + parts[first] + ... + parts[last - 1], AT_ONCE loads under way at once.

    They come from the L2 cache (.cg), to which other SMs write, not from this SM's own cache.
    """
    for q in range(first, last, AT_ONCE):
        for u in tl.static_range(AT_ONCE):
            there = tl.full([1, 1], q + u, tl.int32) < last
            part = parts + (q + u) * STRIDE
            acc += tl.load(part, mask=there, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def lora_down_kernel(x, lora_A, h, partial, arrived, ready, M, columns, ranks, parts,
                     ROWS: tl.constexpr, J: tl.constexpr, K: tl.constexpr):
    """This program's part of the columns, K a step, of a tile ROWS x J of h = x Aᵀ.

    Whoever is last to leave its part adds all up, writes the tile and counts it in `ready`. It is a
    kernel of its own (lora_down, without `ready`) and what the first programs of linear_kernel do.
    """
    if ready is None:                                    # linear_kernel has waited before
        let_next_start()
        wait_for_previous()
    tile = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    j_tiles = tl.cdiv(ranks, J)
    j = tile % j_tiles * J + tl.arange(0, J)
    m = tile // j_tiles * ROWS + tl.arange(0, ROWS)
    steps = columns // K
    acc = tl.zeros([ROWS, J], tl.float32)
    for step in range(part * steps // parts, (part + 1) * steps // parts):
        k = step * K + tl.arange(0, K)
        a = tl.load(lora_A + j[:, None] * columns + k[None], mask=j[:, None] < ranks, other=0.0)
        b = tl.load(x + m[:, None] * columns + k[None], mask=m[:, None] < M, other=0.0)
        acc = product(b, a.T, acc)

    here = partial + tile * parts * (ROWS * J)
    here = here + tl.arange(0, ROWS)[:, None] * J + tl.arange(0, J)[None]
    tl.store(here + part * (ROWS * J), acc)
    if is_last(arrived + tile, parts - 1):
        acc = add_parts(tl.zeros([ROWS, J], tl.float32), here, 0, parts, ROWS * J, 8)
        inside = (m[:, None] < M) & (j[None] < ranks)
        at_h = h + m[:, None] * ranks + j[None]
        tl.store(at_h, acc.to(h.dtype.element_ty), mask=inside)
        if ready is not None:
            tl.debug_barrier()
            tl.atomic_add(ready, 1)


@triton.jit
def prefetch_step(words, scales, out_scale, at, end, steps, m_tiles, column_tiles,
                  R: tl.constexpr, C: tl.constexpr):
    """Have the L2 cache fetch a share's first four tiles of W, their scales and out_scale.

    A tile has 512 words, which are 2,048 bytes.
    """
    tile_row = at // steps // m_tiles * R
    start = (tile_row * column_tiles + at % steps * C).to(tl.int64)
    there = tl.minimum(end - at, steps - at % steps) * C       # tiles side by side in the share
    prefetch(words + start * 512, column_tiles * 2048, there * 2048, R, 8192 // R)
    prefetch(scales + start * 256, column_tiles * 256, there * 256, R, 1024 // R)
    prefetch(out_scale + tile_row * 64, 0, 256 * R, 1, 256 * R)


@triton.jit
def sum_steps(x_tma, x, words, scales, row, m0, first, last, M, column_tiles,
              ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
              STAGES: tl.constexpr, WGMMA: tl.constexpr):
    """The sums [64R, ROWS] of a tile of Ŵ xᵀ over the steps first to last - 1.

    row: the number of its first tile of W; m0: of its first row of x.

    Columns of W are (C, t, word, step, column half, i), and t has to go to where the product
    expects it. To wgmma a thread gives two neighbours, i, at a time, as in untile_kernel. To
    mma.sync Triton has it give eight, so that W's columns become (C, word, t, step, column half,
    i), and those of x, which come in wgmma's order, are permuted alike.
    """
    acc = tl.zeros([64 * R, ROWS], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        w = decode_tiles(words, scales, row + step * C, column_tiles, R, C)
        if WGMMA:
            w = w.permute(0, 2, 5, 3, 1, 6, 7, 8, 4, 9)
        else:
            w = w.permute(0, 2, 5, 3, 1, 6, 4, 7, 8, 9)
        w = w.reshape(64 * R, 64 * C)
        if x_tma is not None:
            b = x_tma.load([m0, step * C * 64])
        else:
            m = m0 + tl.arange(0, ROWS)
            k = step * C * 64 + tl.arange(0, 64 * C)
            there = m[:, None] < M
            b = tl.load(x + m[:, None] * (column_tiles * 64) + k[None], mask=there, other=0.0)
        if not WGMMA:
            b = b.reshape(ROWS, C, 2, 2, 2, 4, 2)
            b = b.permute(0, 1, 2, 5, 3, 4, 6)
            b = b.reshape(ROWS, 64 * C)
        acc = product(w, b.T, acc)
    return acc


@triton.jit
def leave_part(acc, partial, arrived, tile, starts, p, P, steps, total,
               R: tl.constexpr, WARP_GROUPS: tl.constexpr):
    """Leave program p's sums of a part of a tile -> (whether it is the last to do so, acc).

    If it is the last, the returned acc has the sums of the whole tile. A program has part of at
    most two tiles: one whose start other programs have, for which slot 2p of `partial` is, and
    one whose start it has itself (`starts`), for which slot 2p + 1 is.
    """
    LINE: tl.constexpr = 512 * WARP_GROUPS
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    here = partial + tl.arange(0, SIZE // LINE)[:, None] * LINE + tl.arange(0, LINE)[None]
    tl.store(here + (2 * p + starts) * SIZE, by_thread(acc, R, WARP_GROUPS))

    # Step i of the line is in the share of program ((i + 1) P - 1) // total: those of this
    # tile's first and last.
    p0 = ((tile * steps + 1) * P - 1) // total
    p1 = ((tile + 1) * steps * P - 1) // total
    finishes = is_last(arrived + tile, p1 - p0)
    if finishes:
        parts = tl.load(here + (2 * p0 + 1) * SIZE, cache_modifier=".cg")
        # Of a part a thread has 4 SIZE / LINE sums; up to 128 of them are loaded at once.
        AT_ONCE: tl.constexpr = min(8, max(1, 32 * LINE // SIZE))
        acc = by_row(add_parts(parts, here, p0 + 1, p1 + 1, 2 * SIZE, AT_ONCE), R, WARP_GROUPS)
    return finishes, acc


@triton.jit
def finish(acc, n0, m0, tiles, out_scale, bias, lora_B, h, y, ready, finished,
           M, N, ranks, bound1, bound2, lora_tiles, RANK: tl.constexpr, BY_TMA: tl.constexpr):
    """Write a tile of y from its sums acc [rows of W from n0 on, rows of x from m0 on]."""
    n = n0 + tl.arange(0, acc.shape[0])
    m = m0 + tl.arange(0, acc.shape[1])
    scale = tl.load(out_scale + n)[:, None]
    shift = 0.0 if bias is None else tl.load(bias + n)[:, None]
    if RANK > 0:
        r = tl.arange(0, RANK)
        piece = (n0 >= bound1).to(tl.int32) + (n0 >= bound2).to(tl.int32)
        B = tl.load(lora_B + n[:, None] * RANK + r[None])
        while tl.atomic_add(ready, 0) < lora_tiles:      # an atomic read
            pass
        there = m[:, None] < M
        at_h = h + m[:, None] * ranks + piece * RANK + r[None]
        H = tl.load(at_h, mask=there, other=0.0, cache_modifier=".cg")
        acc = product(B, H.T, acc)
    out = acc * scale + shift

    if BY_TMA:                                           # which leaves out the rows from M on
        y.store([m0, n0], out.to(y.dtype).T)
    else:
        at_y = m[None].to(tl.int64) * N + n[:, None]
        tl.store(y + at_y, out.to(y.dtype.element_ty), mask=m[None] < M)

    if RANK > 0:
        if is_last(finished, tiles - 1):                 # no program still waits
            tl.store(ready, 0)


@triton.jit
def linear_kernel(x_tma, x, words, scales, out_scale,
                  bias, lora_A, lora_B, h, y,
                  partial, lora_partial, counters,
                  M, N, column_tiles, ranks, bound1, bound2, lora_parts, lora_programs,
                  RANK: tl.constexpr, ROWS: tl.constexpr,
                  LORA_ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                  WARP_GROUPS: tl.constexpr, STAGES: tl.constexpr, WGMMA: tl.constexpr):
    """y [M, N], where W has `column_tiles` tiles along the input; plan_linear explains the other
    numbers.

    If x_tma is a descriptor, y is one, too. WGMMA: on Hopper; else by mma.sync.
    """
    ready = counters                                     # how many tiles of h are done
    finished = counters + 1                              # how many tiles of y
    lora_arrived = counters + 2                          # how many parts of each tile of h
    arrived = counters + 1024                            # how many parts of each tile of y
    p = tl.program_id(0) - lora_programs                 # p < 0: a program of h = x Aᵀ
    P = tl.num_programs(0) - lora_programs
    steps = column_tiles // C                            # of a tile of y
    m_tiles = tl.cdiv(M, ROWS)
    tiles = N // (64 * R) * m_tiles
    total = tiles * steps
    at = p * total // P                                  # this program's share of the line:
    end = (p + 1) * total // P                           # the steps from `at` to end - 1

    if ROWS > 64:                                        # with fewer rows, after the last product
        let_next_start()
    if p >= 0:
        prefetch_step(words, scales, out_scale, at, end, steps, m_tiles, column_tiles, R, C)
    wait_for_previous()
    if RANK > 0:
        if p < 0:
            lora_down_kernel(x, lora_A, h, lora_partial, lora_arrived, ready, M, column_tiles * 64,
                             ranks, lora_parts, LORA_ROWS, 64, 64 * max(2, C))
            at = end

    while at < end:
        tile = at // steps
        first = at % steps
        last = tl.minimum(steps, first + end - at)
        at += last - first
        m0 = tile % m_tiles * ROWS
        row = (tile // m_tiles * R * column_tiles).to(tl.int64)
        acc = sum_steps(x_tma, x, words, scales, row, m0, first, last, M, column_tiles,
                        ROWS, R, C, STAGES, WGMMA)

        # If the next kernel were let start sooner, its few short programs would lie unevenly on
        # the SMs.
        if ROWS <= 64 and at == end:
            let_next_start()

        finishes = last - first == steps
        if not finishes:
            finishes, acc = leave_part(acc, partial, arrived, tile, first == 0, p, P, steps,
                                       total, R, WARP_GROUPS)
        if finishes:
            n0 = tile // m_tiles * (64 * R)
            finish(acc, n0, m0, tiles, out_scale, bias, lora_B, h, y, ready, finished,
                   M, N, ranks, bound1, bound2, lora_programs // lora_parts,
                   RANK, x_tma is not None)


# One order of sums. Of the values in 16 bits cuBLAS mostly adds the products of a row in the order of
# the columns, so that its result does not depend on the rows beside it. Where there are few rows and
# many columns it shares the sum out, and sampling and training would differ in the last bits. The
# kernel adds in order always; linear takes it where cuBLAS does not.

def linear(x, weight, bias=None):
    """F.linear(x, weight, bias), in the order of the columns. x is contiguous."""
    ordered = cublas_orders(*x.shape, len(weight), weight.stride(0), bias is not None, x.dtype, x.device)
    return F.linear(x, weight, bias) if ordered else in_order(x, weight, bias)


@functools.cache
def cublas_orders(rows, columns, out, stride, biased, dtype, device):
    """Whether cuBLAS's product of this size is in_order's: tried once, by large terms that cancel.

    The two halves of a row's sum are opposite up to a 64th, which brings its rounding to light.
    """
    generator = torch.Generator(device).manual_seed(0)
    random = functools.partial(torch.randn, generator=generator, dtype=dtype, device=device)
    half = columns // 2
    x = 64 * random(rows, columns)
    x[:, -half:] = random(rows, half) - x[:, :half]
    weight = random(out, stride)[:, :columns]
    weight[:, -half:] = weight[:, :half]
    bias = random(out) if biased else None
    return F.linear(x, weight, bias).equal(in_order(x, weight, bias))


def in_order(x, weight, bias):
    """linear by the kernel, which few rows bind to the memory."""
    M, K = x.shape
    N = len(weight)
    y = x.new_empty(M, N)
    rows = 16 if M <= 16 else 32 if M <= 32 else 64
    step = 256 if M <= 32 else 128
    out = 16                                               # the fewest whose programs run all at once
    while out < 128 and triton.cdiv(M, rows) * triton.cdiv(N, out) > scratch(x.device)[0]:
        out *= 2
    stages = min(8, 110_000 // ((rows + out) * step))      # loads under way in the SM's 220,000 bytes
    in_order_kernel[triton.cdiv(N, out), triton.cdiv(M, rows)](
        x, weight, bias, y, M, N, K, weight.stride(0), REST=K % step > 0, ROWS=rows, OUT=out, STEP=step,
        num_warps=2 if M <= 32 else 4, num_stages=stages, launch_pdl=True)
    return y


@triton.jit
def in_order_kernel(x, weight, bias, y, M, N, K, stride, REST: tl.constexpr,
                    ROWS: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr):
    """A tile ROWS x OUT of y. Behind the last row or output it reads the last again."""
    let_next_start()
    wait_for_previous()
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, STEP)[None]
    at_x = x + tl.minimum(m, M - 1)[:, None].to(tl.int64) * K + k
    at_w = weight + tl.minimum(n, N - 1)[:, None].to(tl.int64) * stride + k
    acc = tl.zeros([ROWS, OUT], tl.float32)
    whole = K // STEP * STEP
    for first in range(0, whole, STEP):
        acc = product(tl.load(at_x + first), tl.load(at_w + first).T, acc)
    if REST:
        there = k < K - whole
        a = tl.load(at_x + whole, mask=there, other=0.0)
        b = tl.load(at_w + whole, mask=there, other=0.0)
        acc = product(a, b.T, acc)
    if bias is not None:
        acc += tl.load(bias + tl.minimum(n, N - 1)).to(tl.float32)[None]
    at_y = y + m[:, None].to(tl.int64) * N + n[None]
    tl.store(at_y, acc.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None] < N))


def lora_down(x, A):
    """h = x Aᵀ of x [rows, in], in divisible by 128, and A [ranks, in].

    The columns are cut into parts whatever the number of rows, which are added up in their order. Up to
    2,048 columns cuBLAS does not cut the sum.
    """
    rows, columns = x.shape
    if columns <= 2048:
        return linear(x, A)
    ranks = len(A)
    h = x.new_empty(rows, ranks)
    few = rows <= 1024
    J = 32 if few or ranks <= 32 else 64
    tile_rows = 16 if few else 32                      # too few for wgmma, see plan_linear
    parts = triton.cdiv(columns, 1024)
    tiles = triton.cdiv(rows, tile_rows) * triton.cdiv(ranks, J)
    partial = torch.empty(tiles * parts * tile_rows * J, device=x.device)
    lora_down_kernel[(tiles * parts,)](
        x, A, h, partial, scratch(x.device)[-1], None, rows, columns, ranks, parts,
        ROWS=tile_rows, J=J, K=128, num_warps=4, num_stages=4, launch_pdl=True)
    return h


# --------------------------------------------------------------------------------------------------
# 4. Between the linear layers
#
# RMSNorm, SwiGLU and the rotary embedding are bound by latency in a decode step, where a launch takes
# longer than the work, and by memory in training. Each reads and writes everything once, where
# PyTorch would launch a kernel for each operation and keep what lies between them for backward. They
# compute in float32. The last, decode_attention, is for decoding alone, and bound by memory.
#
# interleaved=True has the columns written in the order of the tiles, in which the next layer's
# TiledWeight takes them. It is for decoding, without gradient.


@triton.jit
def tile_place(k):
    """Where column k goes in the order of the tiles; see interleave."""
    return k // 64 * 64 + k % 16 // 2 * 8 + k % 64 // 16 * 2 + k % 2


# RMSNorm: y = w ⊙ x r, where r = 1 / √(mean(x²) + ε). With g = dL/dy:
#
#     dL/dx = r (w ⊙ g - x r² mean(x ⊙ w ⊙ g))              dL/dw = Σ g ⊙ x r, over the rows
#
# In a block x goes on beside its norm, and the branch before it is added first. One pass does
# all: (s, y) = (x + added, norm of s), where dL/ds is what reaches s, plus dL/dx above.

class FusedRMSNorm(torch.autograd.Function):
    """x, added [..., d], weight float32 [d] -> (x + added, its norm), in x's dtype; added may be None."""

    @staticmethod
    def launch(kernel, x, *others, eps, **options):
        """A kernel over x [..., d]: each program has a whole row in its registers."""
        d = x.shape[-1]
        size = triton.next_power_of_2(d)
        warps = 8 if d > 512 else 1
        kernel[(x.numel() // d,)](x, *others, d, eps, SIZE=size, num_warps=warps, **options)

    @staticmethod
    def forward(ctx, x, added, weight, eps, interleaved):
        x = x.contiguous()
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        s = x.view_as(x) if added is None else torch.empty_like(x)
        y = torch.empty_like(x)
        FusedRMSNorm.launch(rms_norm_kernel, x, added, weight, s, y, eps=eps,
                            INTERLEAVED=interleaved, launch_pdl=is_hopper(x.device))
        ctx.save_for_backward(s, weight)
        return s, y

    @staticmethod
    def backward(ctx, grad_s, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_s = grad_s if grad_s is None else grad_s.contiguous()
        grad_x = torch.empty_like(x)
        grad_weight = None
        FusedRMSNorm.launch(rms_norm_gradient_kernel, x, weight, grad, grad_s, grad_x,
                            eps=ctx.eps)
        if ctx.needs_input_grad[2]:                            # --train-norms, seldom: by PyTorch
            normed = F.rms_norm(x.float(), x.shape[-1:], None, ctx.eps)
            grad_weight = (grad * normed).flatten(0, -2).sum(0)
        return grad_x, grad_x if ctx.needs_input_grad[1] else None, grad_weight, None, None


@triton.jit
def rms_norm_kernel(x, added, weight, s, y, d, eps,
                    INTERLEAVED: tl.constexpr, SIZE: tl.constexpr):
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, SIZE)
    v = tl.load(x + row * d + k, mask=k < d, other=0.0)
    if added is not None:
        v += tl.load(added + row * d + k, mask=k < d, other=0.0)
        tl.store(s + row * d + k, v, mask=k < d)
    v = v.to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v) / d + eps) * tl.load(weight + k, mask=k < d, other=0.0)
    at = y + row * d
    at += tile_place(k) if INTERLEAVED else k
    tl.store(at, v.to(y.dtype.element_ty), mask=k < d)


@triton.jit
def rms_norm_gradient_kernel(x, weight, grad, grad_s, grad_x, d, eps, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, SIZE)
    v = tl.load(x + row * d + k, mask=k < d, other=0.0).to(tl.float32)
    g = tl.load(grad + row * d + k, mask=k < d, other=0.0).to(tl.float32)
    g = g * tl.load(weight + k, mask=k < d, other=0.0)
    r = tl.rsqrt(tl.sum(v * v) / d + eps)
    g = r * (g - v * (r * r * tl.sum(v * g) / d))
    if grad_s is not None:
        g += tl.load(grad_s + row * d + k, mask=k < d, other=0.0).to(tl.float32)
    tl.store(grad_x + row * d + k, g.to(grad_x.dtype.element_ty), mask=k < d)


# SiLU: y = u · a s, where s = 1 / (1 + e^-a), a is the gate and u what is gated ("up"). With
# g = dL/dy:
#
#     dL/da = g u s (1 + a (1 - s))              dL/du = g a s

COLUMNS = 1024             # of gate and of up, of a program


class FusedSiluMul(torch.autograd.Function):
    """gate_up [..., 2n] -> silu(gate) * up [..., n]."""

    @staticmethod
    def launch(kernel, gate_up, *others, **options):
        """A program has COLUMNS of the n columns of a row of gate and of up."""
        n = gate_up.shape[-1] // 2
        rows = gate_up.numel() // (2 * n)
        kernel[(rows * triton.cdiv(n, COLUMNS),)](
            gate_up, *others, n, SIZE=COLUMNS, num_warps=4, **options)

    @staticmethod
    def forward(ctx, gate_up, interleaved):
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        y = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        FusedSiluMul.launch(silu_mul_kernel, gate_up, y, INTERLEAVED=interleaved,
                            launch_pdl=is_hopper(y.device))
        return y

    @staticmethod
    def backward(ctx, grad):
        gate_up, = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        FusedSiluMul.launch(silu_mul_gradient_kernel, gate_up, grad.contiguous(), grad_gate_up)
        return grad_gate_up, None


@triton.jit
def gate_and_up(gate_up, n, SIZE: tl.constexpr):
    """(row, columns k, gate and up of these in float32) that are this program's."""
    pieces = tl.cdiv(n, SIZE)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    k = tl.program_id(0) % pieces * SIZE + tl.arange(0, SIZE)
    gate = tl.load(gate_up + row * 2 * n + k, mask=k < n, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + k, mask=k < n, other=0.0).to(tl.float32)
    return row, k, gate, up


@triton.jit
def silu_mul_kernel(gate_up, y, n, INTERLEAVED: tl.constexpr, SIZE: tl.constexpr):
    let_next_start()
    wait_for_previous()
    row, k, gate, up = gate_and_up(gate_up, n, SIZE)
    silu = gate / (1 + tl.exp(-gate))
    silu = silu.to(y.dtype.element_ty).to(tl.float32)             # rounded, as PyTorch's is
    at = y + row * n
    at += tile_place(k) if INTERLEAVED else k
    tl.store(at, (silu * up).to(y.dtype.element_ty), mask=k < n)


@triton.jit
def silu_mul_gradient_kernel(gate_up, grad, grad_gate_up, n, SIZE: tl.constexpr):
    row, k, gate, up = gate_and_up(gate_up, n, SIZE)
    g = tl.load(grad + row * n + k, mask=k < n, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))
    at = grad_gate_up + row * 2 * n + k
    grad_gate = g * up * s * (1 + gate * (1 - s))
    tl.store(at, grad_gate.to(grad.dtype.element_ty), mask=k < n)
    grad_up = g * gate * s
    tl.store(at + n, grad_up.to(grad.dtype.element_ty), mask=k < n)


# Rotary embedding: y = R(position) x, which turns each pair (x[i], x[i + D/2]) of a head by an
# angle of its own. It is a rotation, so the gradient is turned back: dL/dx = R(-position) dL/dy.
# decode_attention rotates, too. In both kernels each product is rounded (enable_fp_fusion=False), so
# that their results are equal.

class FusedRotary(torch.autograd.Function):
    """Rotary embedding of x [B, T, heads, D]; cos, sin [T, D], contiguous."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return FusedRotary.turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return FusedRotary.turn(grad, *ctx.saved_tensors, -1), None, None

    @staticmethod
    def turn(x, cos, sin, sign):
        """x by its angles, or back if sign is -1. A program has one token's heads."""
        B, T, heads, D = x.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = x.new_empty(x.shape)
        rotary_kernel[(B * T,)](
            x, cos, sin, y, T, heads, *x.stride()[:3], SIGN=sign,
            HEADS=triton.next_power_of_2(heads), D=D, D_PAD=triton.next_power_of_2(D),
            num_warps=4, enable_fp_fusion=False)
        return y


@triton.jit
def rotated(x, at, d, cos, sin, inside, D: tl.constexpr):
    """The rotary embedding of the head that begins at x + at."""
    half = tl.where(d < D // 2, d + D // 2, d - D // 2)
    v = tl.load(x + at + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    return (v * cos + tl.where(d < D // 2, -other, other) * sin).to(x.dtype.element_ty)


# T is not specialised, else the kernel would be compiled again where T is divisible by 16.
@triton.jit(do_not_specialize=["T"])
def rotary_kernel(x, cos, sin, y, T, heads, stride_b, stride_t, stride_h, SIGN: tl.constexpr,
                  HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D_PAD)[None]
    inside = (h < heads) & (d < D)
    t = row % T
    c = tl.load(cos + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    s = tl.load(sin + t * D + d, mask=d < D, other=0.0).to(tl.float32) * SIGN
    at = row // T * stride_b + t * stride_t + h * stride_h
    tl.store(y + (row * heads + h) * D + d, rotated(x, at, d, c, s, inside, D), mask=inside)


# Attention, online: of the keys seen so far a kernel keeps the maximal score of each query (m), the sum
# of exp(score - m) (total), and the sum of exp(score - m) · v (out). When a larger score comes, total
# and out shrink by exp(old m - new m). At the end y = out / total.
#
# Training and sampling add up in one order. The keys of a sequence, from its first token on, are cut
# into parts of PART and these into blocks; each part begins anew, and the parts are put together one
# after the other. A sum over a block's keys is a product with ones: that of tl.sum would depend on the
# tile.

PART = 256
BLOCK = tl.constexpr(64)
LOWEST = tl.constexpr(-1e30)           # below all scores; unlike -inf it can be subtracted from itself


@triton.jit
def begin(ROWS: tl.constexpr, D_PAD: tl.constexpr):
    """(m, total, out) of no keys."""
    m = tl.full([ROWS], LOWEST, tl.float32)
    return m, tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, D_PAD], tl.float32)


@triton.jit
def attend(Q, k, v, there, seen, m, total, out, scale_log2e):
    """(m, total, out) after another block of keys, of which each query takes those that it has `seen`.

    Those `there` lie at k, and their values at v.
    """
    K = tl.load(k, mask=there, other=0.0)
    V = tl.load(v, mask=there, other=0.0)
    score = product(Q, tl.trans(K))                                          # [ROWS, BLOCK]
    score = tl.where(seen, score * scale_log2e, -float("inf"))
    new_m = tl.maximum(m, tl.max(score, 1))
    w = tl.exp2(score - new_m[:, None]).to(V.dtype)
    shrink = tl.exp2(m - new_m)[:, None]
    total = product(w, tl.full([V.shape[0], 16], 1.0, V.dtype), total * shrink)
    return new_m, total, product(w, V, out * shrink)


@triton.jit
def put_together(m, total, out, part_m, part_total, part_out):
    """(m, total, out) of what was so far and of another part."""
    new_m = tl.maximum(m, part_m)
    old = tl.exp2(m - new_m)[:, None]
    new = tl.exp2(part_m - new_m)[:, None]
    return new_m, total * old + part_total * new, out * old + part_out * new


# In a line of tokens (fast.pack) a prompt attends to itself, and a completion to its prompt and to
# itself. For the gradient PyTorch's FlashAttention runs twice: within each prompt and completion, and
# from all completions of a prompt to the prompt. Of the softmax it takes only y and l = log Σ
# exp(scores). If these are the whole's, the gradients of both places add up to the whole's.

def attend_in_line(q, k, v, ends, prefix, longest):
    """Attention of sequences in a line: -> y [S, heads, D], l float32 [heads, S].

    q [S, heads, D], k and v [S, kv_heads, D]; ends int32 [1 + sequences]: 0, and where each ends;
    prefix int32 [2, sequences]: where tokens of the line begin that precede each, and how many;
    longest: of the sequences.
    """
    S, heads, D = q.shape
    y = q.new_empty(q.shape)
    l = torch.empty(heads, S, device=q.device)
    sequences = len(ends) - 1
    line_attention_kernel[heads, sequences, triton.cdiv(longest, 64)](
        q, k, v, y, l, ends, prefix, S, heads, sequences, q.stride(0), k.stride(0), v.stride(0),
        D ** -0.5 * LOG2E, SHARE=heads // k.shape[1], ROWS=64, D=D, D_PAD=triton.next_power_of_2(D),
        PART=PART, num_warps=4, num_stages=2, enable_fp_fusion=False)
    return y, l


@triton.jit(do_not_specialize=["S", "sequences"])
def line_attention_kernel(q, k, v, y, l, ends, prefix, S, heads, sequences, stride_q, stride_k,
                          stride_v, scale_log2e, SHARE: tl.constexpr, ROWS: tl.constexpr,
                          D: tl.constexpr, D_PAD: tl.constexpr, PART: tl.constexpr):
    """A program has ROWS tokens of a sequence, and one of the heads, of which SHARE share a kv head."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    first = tl.load(ends + sequence)
    end = tl.load(ends + sequence + 1)
    start = first + tl.program_id(2) * ROWS
    row = start + tl.arange(0, ROWS)
    if start < end:
        before = tl.load(prefix + sequence)                      # where its prompt begins
        count = tl.load(prefix + sequences + sequence)           # tokens of it
        origin = first - count                                   # its own tokens' position 0 in the line
        d = tl.arange(0, D_PAD)[None]
        inside = (row[:, None] < end) & (d < D)
        Q = tl.load(q + row[:, None].to(tl.int64) * stride_q + head * D + d, mask=inside, other=0.0)
        keys = tl.minimum(start + ROWS, end) - origin
        m, total, out = begin(ROWS, D_PAD)
        for part in range(0, keys, PART):
            part_m, part_total, part_out = begin(ROWS, D_PAD)
            for block in range(part, tl.minimum(part + PART, keys), BLOCK):
                t = block + tl.arange(0, BLOCK)
                at = tl.where(t < count, before, origin) + t
                at = at[:, None].to(tl.int64)
                at_head = head // SHARE * D + d
                there = (t[:, None] < keys) & (d < D)
                seen = t[None] <= row[:, None] - origin
                part_m, part_total, part_out = attend(
                    Q, k + at * stride_k + at_head, v + at * stride_v + at_head, there, seen,
                    part_m, part_total, part_out, scale_log2e)
            m, total, out = put_together(m, total, out, part_m, part_total, part_out)
        total = tl.max(total, 1)                                 # its columns are equal
        at_y = y + (row[:, None].to(tl.int64) * heads + head) * D + d
        tl.store(at_y, (out / total[:, None]).to(y.dtype.element_ty), mask=inside)
        log_sum = (m + tl.log2(total)) * 0.6931471805599453
        tl.store(l + head.to(tl.int64) * S + row, log_sum, mask=row < end)


class PackedAttention(torch.autograd.Function):
    """q [S, heads, D], k and v [S, kv_heads, D] of a line of tokens, a Packing -> y [S, heads, D]."""

    @staticmethod
    def forward(ctx, q, k, v, packing):
        y, l = attend_in_line(q, k, v, packing.ends, packing.prefix, max(packing.sizes))
        ctx.packing = packing
        ctx.save_for_backward(q, k, v, y, l)
        return y

    @staticmethod
    def backward(ctx, grad):
        flash = torch.ops.aten._flash_attention_backward
        packing = ctx.packing
        q, k, v, y, l = ctx.saved_tensors
        grad = grad.contiguous()
        P = len(packing.group_ends) - 1
        first = len(packing.position) - len(packing.before)      # where the completions begin
        longest = max(packing.sizes)
        unused = [grad.new_empty(2, dtype=torch.uint64)] * 2     # the state of its random numbers
        dq, dk, dv = flash(grad, q, k, v, y, l, packing.ends, packing.ends, longest, longest, 0.0, True,
                           *unused)
        dq_2, dk_2, dv_2 = flash(
            grad[first:], q[first:], k[:first], v[:first], y[first:], l[:, first:].contiguous(),
            packing.group_ends, packing.ends[:P + 1], packing.largest, longest, 0.0, False, *unused)
        dq[first:] += dq_2
        dk[:first] += dk_2
        dv[:first] += dv_2
        return dq, dk, dv, None


# Attention of one new token a row against a cache: rotary embedding, append, attend.
#
#     y[b, h] = softmax(q[b, h] · K[b, :filled[b] + 1]ᵀ / √D) · V[b, :filled[b] + 1]
#
# It is bound by memory: the keys and values that are there are read once for all query heads that
# share them (grouped-query attention); the places of the cache that are not filled are not
# touched. The parts of a row are for different programs, so that long rows do not make the others
# wait. The last program of a row to finish puts its parts together.

def decode_attention(qkv, cos, sin, cache, filled, interleaved=False):
    """Append one token a row to the cache and attend to all that are there: -> [B, heads * D].

    qkv [B, (heads + 2 kv_heads) * D] of the new tokens; cos, sin [B, D] of their positions; filled
    int64 [B]: how many places of each row's cache are filled, so that the new k and v go to place
    `filled`; the caller then adds 1 to it. cache: [2 (k, v), B, kv_heads, max_len, D], perhaps the
    first B rows of one with more.
    """
    _, B, kv_heads, max_len, D = cache.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    share = heads // kv_heads
    parts = triton.cdiv(max_len, PART)

    # The query heads that share keys are the rows of a product, of which tensor cores take 16 at
    # least.
    padded_heads = max(16, triton.next_power_of_2(share))
    padded_D = triton.next_power_of_2(D)
    # What the parts of each row and kv head leave; a CUDA graph keeps its own.
    left = torch.empty(B * kv_heads, parts, padded_heads, 2 + padded_D, device=qkv.device)
    y = qkv.new_empty(B, heads * D)
    decode_attention_kernel[(parts, B * kv_heads)](
        qkv, cos, sin, cache, filled, y, left, scratch(qkv.device)[-1],
        kv_heads, max_len, cache.stride(0), D ** -0.5 * LOG2E,
        INTERLEAVED=interleaved, SHARE=share, HEADS=padded_heads, D=D, D_PAD=padded_D,
        PART=PART, num_warps=4, num_stages=2, enable_fp_fusion=False,
        launch_pdl=is_hopper(y.device))
    return y


@triton.jit
def leave_attention(m, total, out, left, arrived, part, parts, b_head,
                    HEADS: tl.constexpr, D_PAD: tl.constexpr):
    """Leave a part of a row and kv head -> (whether it is the last to do so, total, out).

    If it is the last, the returned total and out are those of all parts. It reads them from the L2
    cache (.cg), to which other SMs write, not from this SM's own cache.
    """
    SIZE: tl.constexpr = HEADS * (2 + D_PAD)               # of a part: m, total and out
    left += b_head.to(tl.int64) * tl.num_programs(0) * SIZE
    head = tl.arange(0, HEADS)
    at_m = left + head
    at_total = at_m + HEADS
    at_out = left + 2 * HEADS + head[:, None] * D_PAD + tl.arange(0, D_PAD)[None]
    tl.store(at_m + part * SIZE, m)
    tl.store(at_total + part * SIZE, tl.max(total, 1))
    tl.store(at_out + part * SIZE, out)
    done = is_last(arrived + b_head, parts - 1)
    if done:
        m, total, out = begin(HEADS, D_PAD)
        for q in range(0, parts):
            part_m = tl.load(at_m + q * SIZE, cache_modifier=".cg")
            part_total = tl.load(at_total + q * SIZE, cache_modifier=".cg")[:, None]
            part_out = tl.load(at_out + q * SIZE, cache_modifier=".cg")
            m, total, out = put_together(m, total, out, part_m, part_total, part_out)
    return done, total, out


# Not specialised, else the kernel would be compiled again where it is divisible by 16.
@triton.jit(do_not_specialize=["max_len"])
def decode_attention_kernel(qkv, cos, sin, cache, filled, y, left, arrived,
                            kv_heads, max_len, values, scale_log2e,
                            INTERLEAVED: tl.constexpr, SHARE: tl.constexpr,
                            HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
                            PART: tl.constexpr):
    """A program has a part of the cache of one row and kv head (b_head).

    SHARE query heads share this kv head. HEADS and D_PAD are SHARE and D, padded. values: how far
    behind the keys the values are.
    """
    let_next_start()
    wait_for_previous()
    part = tl.program_id(0)
    b_head = tl.program_id(1)
    b = (b_head // kv_heads).to(tl.int64)
    g = b_head % kv_heads
    n = tl.load(filled + b).to(tl.int32)
    k_cache = cache + b_head.to(tl.int64) * max_len * D        # all keys come before all values
    v_cache = k_cache + values
    first = part * PART
    if first <= n:
        head = tl.arange(0, HEADS)[:, None]
        d = tl.arange(0, D_PAD)[None]
        inside = (head < SHARE) & (d < D)
        c = tl.load(cos + b * D + d, mask=d < D, other=0.0).to(tl.float32)
        s = tl.load(sin + b * D + d, mask=d < D, other=0.0).to(tl.float32)
        at = b * (kv_heads * (SHARE + 2)) * D
        Q = rotated(qkv, at + (g * SHARE + head) * D, d, c, s, inside, D)
        if n < first + PART:                                   # the new token is this part's
            k = rotated(qkv, at + (kv_heads * SHARE + g) * D, d, c, s, d < D, D)
            v = tl.load(qkv + at + (kv_heads * (SHARE + 1) + g) * D + d, mask=d < D, other=0.0)
            tl.store(k_cache + n * D + d, k, mask=d < D)
            tl.store(v_cache + n * D + d, v, mask=d < D)
            tl.debug_barrier()                                 # all threads store before any loads
        m, total, out = begin(HEADS, D_PAD)
        for block in range(first, tl.minimum(n + 1, first + PART), BLOCK):
            t = block + tl.arange(0, BLOCK)
            at_t = t[:, None] * D + d
            there = (t[:, None] <= n) & (d < D)
            m, total, out = attend(Q, k_cache + at_t, v_cache + at_t, there, t[None] <= n,
                                   m, total, out, scale_log2e)

        parts = n // PART + 1
        done = parts == 1
        if not done:
            done, total, out = leave_attention(m, total, out, left, arrived, part, parts,
                                               b_head, HEADS, D_PAD)
        if done:
            place = (g * SHARE + head) * D + d
            place = tile_place(place) if INTERLEAVED else place
            at_y = y + (b * (kv_heads * SHARE * D) + place)
            result = (out / tl.max(total, 1)[:, None]).to(y.dtype.element_ty)
            tl.store(at_y, result, mask=inside)


# --------------------------------------------------------------------------------------------------
# 5. After the output layer
#
# Log-probabilities and sampling are bound by memory: by one pass over the logits, of which a token
# has as many as the vocabulary has entries (their gradient is as large again). A row's logits are
# shared by many programs. Each finds the sums of its part, and of these alone the rest is made. With
# z = logits/temperature a token's log-probability is z[token] - log Z, where Z = Σ e^z, and its gradient
#
#     dlogprob/dlogits = (1[token] - softmax(z)) / temperature

LOGITS = 4096              # of a row at a time


def token_logprob(logits, tokens, temperature, gradient):
    """logits [n, V], tokens int64 [n] -> log-probability of each token, float32 [n].

    gradient: put its gradient [n, V] in the place of the logits.
    """
    scale = 1 / temperature
    parts, sizes = sums_of_parts(logits, scale)
    logprob, log_Z, _ = chosen_logprob(logits, tokens, parts, scale, sizes)
    if gradient:
        n, V = logits.shape
        token_logprob_gradient_kernel[(triton.cdiv(V, LOGITS), n)](
            logits, tokens, log_Z, V, scale, SIZE=LOGITS, num_warps=8)
    return logprob


def sums_of_parts(logits, scale):
    """(the sums of each row's parts [B, 4, PARTS], the kernels' sizes)."""
    B, V = logits.shape
    blocks = triton.cdiv(V, LOGITS)
    # A fused multiplication would give the threads sums that differ in the last bit (each adds its own
    # product unrounded), and nucleus_kernel's threads would leave its loop at different passes.
    sizes = {"PARTS": triton.next_power_of_2(blocks), "SIZE": LOGITS, "num_warps": 8,
             "enable_fp_fusion": False}
    parts = torch.empty(B, 4, sizes["PARTS"], device=logits.device)
    sample_parts_kernel[(blocks, B)](logits, parts, V, scale, **sizes)
    return parts, sizes


def chosen_logprob(logits, tokens, parts, scale, sizes):
    """Of each row its token's log-probability, log Z and the entropy, float32 [3, B]."""
    found = torch.empty(3, len(tokens), device=logits.device)
    chosen_kernel[(len(tokens),)](
        logits, tokens, parts, *found, logits.shape[1], scale, **sizes | {"num_warps": 1})
    return found


@triton.jit
def sums_of_row(parts, i, V, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """(a row's largest z, number i of the sums of each of its parts, as of e^(z - largest))."""
    part = tl.arange(0, PARTS)
    here = parts + tl.program_id(0) * (4 * PARTS) + part
    there = part < tl.cdiv(V, SIZE)
    m = tl.load(here, mask=there, other=-float("inf"))
    largest = tl.max(m)
    sums = tl.load(here + i * PARTS, mask=there, other=0.0)
    return largest, sums * tl.exp(m - largest)


@triton.jit
def chosen_kernel(logits, tokens, parts, logprob, log_Z, entropy, V, scale,
                  PARTS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    largest, total = sums_of_row(parts, 1, V, PARTS, SIZE)
    _, weighted = sums_of_row(parts, 2, V, PARTS, SIZE)
    Z = tl.sum(total)
    log_sum = largest + tl.log(Z)
    tl.store(log_Z + row, log_sum)
    tl.store(entropy + row, log_sum - tl.sum(weighted) / Z)
    z = scaled_logits(logits, row, tl.load(tokens + row), V, scale)
    tl.store(logprob + row, z - log_sum)


@triton.jit
def scaled_logits(logits, row, i, V, scale):
    """z = logits/temperature at some places of a row, float32; -inf behind its end."""
    places = logits + row.to(tl.int64) * V + i
    return tl.load(places, mask=i < V, other=-float("inf")).to(tl.float32) * scale


@triton.jit
def sample_parts_kernel(logits, parts, V, scale, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Of SIZE logits of a row: m = max z, Σ e^(z-m) and Σ z e^(z-m), the numbers 0 to 2 of its sums."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.program_id(1)
    z = scaled_logits(logits, row, i, V, scale)
    m = tl.max(z)
    e = tl.exp(z - m)
    here = parts + row * (4 * PARTS) + tl.program_id(0)
    tl.store(here, m)
    tl.store(here + PARTS, tl.sum(e))
    tl.store(here + 2 * PARTS, tl.sum(tl.where(e > 0, z * e, 0.0)))


@triton.jit
def token_logprob_gradient_kernel(logits, tokens, log_Z, V, scale, SIZE: tl.constexpr):
    """A program has SIZE logits of a row, and overwrites them."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.program_id(1)
    p = tl.exp(scaled_logits(logits, row, i, V, scale) - tl.load(log_Z + row))
    g = scale * ((i == tl.load(tokens + row)).to(tl.float32) - p)
    tl.store(logits + row.to(tl.int64) * V + i, g.to(logits.dtype.element_ty), mask=i < V)


# Sampling: a random share of a sum of probabilities is drawn, and the place at which the running sum passes
# it. (qerl.sample draws other numbers, from the same distribution.) From the sums of the parts a kernel
# draws a part, and then it draws a token in it. The entropy is log Z - Σ softmax(z) z.

def sample(logits, temperature, seed, top_p=1.0):
    """Draw a token a row: -> token int64, its log-probability and the entropy, float32 [B].

    logits [B, V]; temperature above 0; seed int64 [1] on the device, fresh for each call. With top_p the
    token is of the nucleus; of equal logits at its border all are in it.
    """
    B, V = logits.shape
    scale = 1 / temperature
    parts, sizes = sums_of_parts(logits, scale)
    lowest = torch.empty(B, device=logits.device)
    token = torch.empty(B, dtype=torch.int64, device=logits.device)
    if top_p < 1:
        nucleus_kernel[(B,)](logits, parts, lowest, V, scale, top_p, **sizes | {"num_warps": 16})
    sample_kernel[(B,)](logits, seed, parts, lowest, token, V, scale, NUCLEUS=top_p < 1, **sizes)
    logprob, _, entropy = chosen_logprob(logits, token, parts, scale, sizes)
    return token, logprob, entropy


@triton.jit
def nucleus_kernel(logits, parts, lowest, V, scale, top_p,
                   PARTS: tl.constexpr, SIZE: tl.constexpr):
    """The lowest z of a row's nucleus, and of each part Σ e^(z-m) of those that reach it, its number 3.

    They are the fewest of the likeliest that have at least the probability top_p. The lowest is searched
    for by halving: `low` reaches top_p, and `high`, the highest z that may still be wrong to leave out,
    does not. Each pass moves one of them to a z that is there. Where top_p is reached by the likeliest
    token alone the first pass ends the search.
    """
    row = tl.program_id(0)
    i = tl.arange(0, SIZE)
    infinity = float("inf")
    largest, total = sums_of_row(parts, 1, V, PARTS, SIZE)
    wanted = tl.sum(total) * top_p

    low = -infinity
    high = largest
    middle = largest
    passes = 0
    while (high > low) & (passes < 64):
        reached = tl.zeros([SIZE], tl.float32)
        above = tl.full([SIZE], infinity, tl.float32)        # the next z from the middle on
        below = tl.full([SIZE], -infinity, tl.float32)       # and the one under it
        for start in range(0, V, SIZE):
            z = scaled_logits(logits, row, start + i, V, scale)
            in_it = z >= middle
            reached += tl.where(in_it, tl.exp(z - largest), 0.0)
            above = tl.minimum(above, tl.where(in_it, z, infinity))
            below = tl.maximum(below, tl.where(in_it, -infinity, z))
        enough = tl.sum(reached) >= wanted
        low = tl.where(enough, tl.min(above), low)
        high = tl.where(enough, high, tl.max(below))
        # What is 60 nats below the likeliest counts for nothing.
        middle = (tl.maximum(low, largest - 60) + high) / 2
        middle = tl.where(middle > low, middle, high)
        passes += 1

    tl.store(lowest + row, low)
    here = parts + row * (4 * PARTS)
    for block in range(tl.cdiv(V, SIZE)):
        z = scaled_logits(logits, row, block * SIZE + i, V, scale)
        e = tl.exp(z - tl.load(here + block))
        tl.store(here + 3 * PARTS + block, tl.sum(tl.where(z >= low, e, 0.0)))


@triton.jit
def sample_kernel(logits, seed, parts, lowest, token, V, scale,
                  NUCLEUS: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Pick one of a row's parts, and a token in it."""
    row = tl.program_id(0)
    largest, total = sums_of_row(parts, 3 if NUCLEUS else 1, V, PARTS, SIZE)
    u, v, _, _ = tl.rand4x(tl.load(seed), row)               # the generator gives four at a time
    block = place_of(total, u * tl.sum(total), PARTS)
    i = block * SIZE + tl.arange(0, SIZE)
    z = scaled_logits(logits, row, i, V, scale)
    p = tl.exp(z - largest)
    if NUCLEUS:
        p = tl.where(z >= tl.load(lowest + row), p, 0.0)
    chosen = block * SIZE + place_of(p, v * tl.sum(p), SIZE)
    tl.store(token + row, chosen)


@triton.jit
def place_of(weights, drawn, SIZE: tl.constexpr):
    """The first of SIZE places, with a weight above 0, at which the weights' running sum is above `drawn`.

    Where rounding leaves the whole sum below it, that of the last weight above 0; of NaN, 0.
    """
    i = tl.arange(0, SIZE)
    passed = (tl.cumsum(weights) > drawn) & (weights > 0)
    first = tl.min(tl.where(passed, i, SIZE))
    return tl.where(first < SIZE, first, tl.max(tl.where(weights > 0, i, 0)))


# --------------------------------------------------------------------------------------------------
# 6. Many kernels, launched at once
#
# The host takes some microseconds to launch a kernel, and a decode step has hundreds of short ones. A
# CUDA graph is a recording of them all, which one launch starts again.

def record_graph(step, generator):
    """Run step() as one CUDA graph: record its kernels once, replay them with one launch.

    Returns step's replacement, which reads and writes the very tensors of the recording; whoever
    feeds it must change them in place. The warm-up is a step like any other: what it changes
    stays changed. generator: what step draws from; None is the default one.
    """
    step()                                       # warm up: compiles kernels, allocates workspaces
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    return graph.replay
