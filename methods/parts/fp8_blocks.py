"""Matrices in FP8 (E4M3) with a float32 scale for each block, and their products.

    x ≈ code · s,     s = max|x| / 448 over a block

A product x Wᵀ sums over the columns of both operands. There are two recipes for their blocks:

    BLOCKS   x (activations, gradients) in blocks of 1 x 128, W in blocks of 128 x 128
    ROWS     x in whole rows, W in one block; some 8 % faster

In both the codes of W are those of its transpose, too. On a GPU cuBLAS multiplies and Triton
quantises, on a CPU PyTorch computes the same with the decoded operands in float32. What the
products reach on an H200: results/README.md.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F

import qerl
from qerl import UserError

if qerl.kernels is not None:
    import triton
    import triton.language as tl

# --------------------------------------------------------------------------------------------------
# Codes and their product

SMALLEST_SCALE = 1e-30         # of an empty block, which is then not divided by 0
ROW = (1, 128)                 # (rows, columns) of a block
SQUARE = (128, 128)
WHOLE_ROW = (1, None)
WHOLE = (None, None)


class Recipe(NamedTuple):
    """The blocks of the two operands."""
    activation: tuple
    weight: tuple


BLOCKS = Recipe(ROW, SQUARE)
ROWS = Recipe(WHOLE_ROW, WHOLE)


class Codes(NamedTuple):
    """A matrix in FP8, padded with zeros: columns to 128, rows to 16 or, of a weight, 128."""
    codes: torch.Tensor        # float8_e4m3fn [padded rows, padded columns]
    scale: torch.Tensor        # float32, one for each block, in their order
    shape: tuple               # (rows, columns) without the padding

    @property
    def whole_rows(self):
        """Whether a row has one scale, its own or that of the whole matrix."""
        down, across = self.scale.shape
        return across == 1 and down in (1, len(self.codes))

    def dequantize(self):
        """codes times scales, float32, of `shape`."""
        down, across = self.scale.shape
        blocks = self.codes.float().unflatten(0, (down, -1)).unflatten(2, (across, -1))
        whole = (blocks * self.scale[:, None, :, None]).flatten(2).flatten(0, 1)
        rows, columns = self.shape
        return whole[:rows, :columns]


def quantize(x, block):
    """x [rows, columns], of any strides, -> Codes with a scale for each block."""
    rows, columns = x.shape
    height, width = block
    padded_rows = rows + -rows % (16 if height == 1 else 128)
    padded_columns = columns + -columns % 128
    if qerl.use_kernels(x) and block != WHOLE:
        return quantize_fused(x, padded_rows, padded_columns, block)
    padded = F.pad(x.float(), (0, padded_columns - columns, 0, padded_rows - rows))
    blocks = padded.unflatten(0, (-1, height or padded_rows))
    blocks = blocks.unflatten(2, (-1, width or padded_columns))
    scale = (blocks.abs().amax((1, 3)) / qerl.E4M3_MAX).clamp_min(SMALLEST_SCALE)
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return Codes(codes.to(torch.float8_e4m3fn), scale, (rows, columns))


def transposed(weight):
    """The Codes of a weight's transpose, which are the same."""
    rows, columns = weight.shape
    return Codes(transpose_bytes(weight.codes), weight.scale.T, (columns, rows))


def multiply(x, weight, dtype, bias=None):
    """Codes of x [n, in] and of weight [out, in], bias [out] -> x weightᵀ + bias [n, out].

    The blocks of both lie along `in`.
    """
    if not x.codes.is_cuda:
        y = (x.dequantize() @ weight.dequantize().T).to(dtype)
        return y if bias is None else y + bias
    product = multiply_rows if x.whole_rows and weight.whole_rows else multiply_blocks
    rows, columns = x.shape[0], weight.shape[0]
    if bias is not None:
        bias = F.pad(bias, (0, len(weight.codes) - columns))
    return product(x, weight, dtype, bias)[:rows, :columns].to(dtype)


def multiply_rows(x, weight, dtype, bias=None):
    """multiply on a GPU of whole rows with whole rows or a whole weight, [padded n, padded out].

    cuBLAS takes a scale for each row of both. Its fast accumulation keeps fewer bits of the sums.
    """
    scale = weight.scale.T.expand(1, len(weight.codes)).contiguous()
    if bias is not None:
        bias = bias.to(torch.bfloat16)
    return torch._scaled_mm(x.codes, weight.codes.T, x.scale, scale, bias=bias,
                            out_dtype=torch.bfloat16, use_fast_accum=True)


def multiply_blocks(x, weight, dtype, bias=None):
    """multiply on a Hopper GPU with cuBLAS 12.9 or later, [padded n, padded out].

    cuBLAS takes scales of 1 x 128 column by column, those of 128 x 128 row by row (along in), each
    row padded to four.
    """
    kind = F.ScalingType
    if len(weight.scale) == len(weight.codes):
        recipe = kind.BlockWise1x128
        scale = weight.scale.T.contiguous().T
    else:
        recipe = kind.BlockWise128x128
        scale = F.pad(weight.scale, (0, -weight.scale.shape[1] % 4)).contiguous().T
    y = F.scaled_mm(
        x.codes, weight.codes.T, x.scale.T.contiguous().T, kind.BlockWise1x128, scale, recipe,
        output_dtype=dtype,
    )
    return y if bias is None else y + bias


# --------------------------------------------------------------------------------------------------
# On a GPU: quantising in one pass through memory, where PyTorch takes several

def quantize_fused(x, padded_rows, padded_columns, block, dtype=torch.float8_e4m3fn):
    """quantize for all blocks but WHOLE; its twin are the lines there.

    dtype: in float32 the codes are not rounded, which Triton's interpreter does wrongly.
    """
    codes = torch.empty(padded_rows, padded_columns, dtype=dtype, device=x.device)
    if block == WHOLE_ROW:
        x = x.contiguous()
        scale = torch.empty(padded_rows, 1, device=x.device)
        quantize_rows_kernel[(padded_rows,)](
            x, codes, scale, *x.shape, padded_columns, SMALLEST=SMALLEST_SCALE, BLOCK=4096,
            num_warps=8)
        return Codes(codes, scale, tuple(x.shape))
    square = block == SQUARE
    tiles = triton.cdiv(padded_rows, 128), padded_columns // 128
    if square:
        scale = torch.empty(tiles, device=x.device)
    else:                                              # column by column, as cuBLAS takes them
        scale = torch.empty(tiles[1], padded_rows, device=x.device).T
    quantize_kernel[tiles](
        x, codes, scale, *x.shape, padded_rows, padded_columns, *x.stride(), *scale.stride(),
        SQUARE=square, SMALLEST=SMALLEST_SCALE, num_warps=8)
    return Codes(codes, scale, tuple(x.shape))


def transpose_bytes(codes):
    """codes.T.contiguous(), of sizes divisible by 128."""
    if not qerl.use_kernels(codes):
        return codes.T.contiguous()
    rows, columns = codes.shape
    result = torch.empty(columns, rows, dtype=codes.dtype, device=codes.device)
    transpose_kernel[(rows // 128, columns // 128)](
        codes.view(torch.uint8), result.view(torch.uint8), rows, columns, num_warps=8)
    return result


if qerl.kernels is not None:
    @triton.jit
    def quantize_kernel(x, codes, scale, rows, columns, padded_rows, padded_columns,
                        x_row, x_column, scale_row, scale_column,
                        SQUARE: tl.constexpr, SMALLEST: tl.constexpr):
        """Each program has a tile of 128 x 128, the values in registers."""
        row = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
        column = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
        at = x + row[:, None] * x_row + column[None, :] * x_column
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        v = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(v), 1)
        if SQUARE:
            largest = tl.zeros_like(largest) + tl.max(largest, 0)
        s = tl.maximum(tl.div_rn(largest, 448.0), SMALLEST)
        v = tl.div_rn(v, tl.broadcast_to(s[:, None], (128, 128)))
        at = codes + row[:, None] * padded_columns + column[None, :]
        tl.store(at, v.to(codes.dtype.element_ty), mask=(row < padded_rows)[:, None])
        if SQUARE:
            at = scale + tl.program_id(0) * scale_row + tl.program_id(1) * scale_column
            tl.store(at, tl.max(s, 0))
        else:
            at = scale + row * scale_row + tl.program_id(1) * scale_column
            tl.store(at, s, mask=row < padded_rows)

    @triton.jit
    def quantize_rows_kernel(x, codes, scale, rows, columns, padded_columns,
                             SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
        """Each program has a row: once through it for its scale, once, in the cache, for the codes."""
        row = tl.program_id(0).to(tl.int64)
        x += row * columns
        codes += row * padded_columns
        there = tl.where(row < rows, columns, 0)
        largest = tl.zeros([BLOCK], tl.float32)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            v = tl.load(x + column, mask=column < there, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(v))
        s = tl.maximum(tl.div_rn(tl.max(largest, 0), 448.0), SMALLEST)
        tl.store(scale + row, s)
        for first in range(0, padded_columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            v = tl.load(x + column, mask=column < there, other=0.0).to(tl.float32)
            v = tl.div_rn(v, tl.zeros_like(v) + s)
            tl.store(codes + column, v.to(codes.dtype.element_ty), mask=column < padded_columns)

    @triton.jit
    def transpose_kernel(x, y, rows, columns):
        row = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
        column = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
        tile = tl.load(x + row[:, None] * columns + column[None, :])
        tl.store(y + column[:, None] * rows + row[None, :], tl.trans(tile))


def products_are_right(recipe, device, dtype):
    """Whether the three products, of blocks of very different size, are close to the exact ones.

    The rounding of both operands is an error of about 4 %, a scale in the wrong place of 100 %.
    """
    generator = torch.Generator().manual_seed(0)

    def matrix(rows, columns):
        size = torch.exp2(4 * torch.randn(rows // 16, 1, columns // 128, 1, generator=generator))
        values = torch.randn(rows // 16, 16, columns // 128, 128, generator=generator) * size
        return values.flatten(2).flatten(0, 1).to(device, dtype)
    x = matrix(272, 640)
    weight = matrix(384, 640)
    grad = matrix(272, 384)
    bias = grad[0]
    block = recipe.activation
    codes = quantize(weight, recipe.weight)
    pairs = [
        (multiply(quantize(x, block), codes, dtype, bias), x @ weight.T + bias),
        (multiply(quantize(grad, block), transposed(codes), dtype), grad @ weight),
        (multiply(quantize(grad.T, block), quantize(x.T, block), dtype), grad.T @ x),
    ]
    return all((ours - exact).norm() < 0.1 * exact.norm() for ours, exact in pairs)


def choose_recipe(device, dtype, recipes):
    """The first of the recipes that this device multiplies rightly, found by a try on a GPU.

    Raises UserError.
    """
    if device.type != "cuda":
        return recipes[0]
    names = {
        BLOCKS: "blocks of 1 x 128 and 128 x 128 have a scale",
        ROWS: "whole rows of activations have a scale, and whole weights",
    }
    for recipe in recipes:
        name = names[recipe]
        try:
            right = products_are_right(recipe, device, dtype)
            refusal = "wrong products"
        except (RuntimeError, ValueError, AttributeError) as e:
            right = False
            refusal = qerl.reason(e)
        if right:
            print(f"FP8 products: {name}")
            return recipe
        print(f"FP8 products: not where {name.split(' have')[0]} have a scale ({refusal})")
    raise UserError("--method jetrl: this GPU or PyTorch multiplies no FP8; use --method qerl")
