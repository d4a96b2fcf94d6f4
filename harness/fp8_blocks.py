"""Matrices in FP8 (E4M3) with a float32 scale for each block, and their products.

    x ≈ code · s,     s = max|x| / 448 over a block

A product x Wᵀ has the scales of both operands along the dimension that is summed: blocks of 1 x 128
(activations, gradients) and of 128 x 128 (weights, whose transpose then has the same codes). On a
Hopper GPU cuBLAS multiplies them and Triton quantises, on a CPU PyTorch computes the same with the
decoded operands in float32. What the products reach on an H200: results/README.md.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F

import fp4_kernels
import qerl
from qerl import UserError

if fp4_kernels.triton is not None:
    import triton
    import triton.language as tl

# --------------------------------------------------------------------------------------------------
# Codes and their product

SMALLEST_SCALE = 1e-30         # of an empty block, which is then not divided by 0
ROW = (1, 128)                 # (rows, columns) of a block
SQUARE = (128, 128)
WHOLE_ROW = (1, None)


class Recipe(NamedTuple):
    """The blocks of the two operands. Weights in square blocks can be transposed as they are."""
    activation: tuple
    weight: tuple


BLOCKS = Recipe(ROW, SQUARE)
ROWS = Recipe(WHOLE_ROW, WHOLE_ROW)            # for GPUs that do not multiply blocks


class Codes(NamedTuple):
    """A matrix in FP8, padded with zeros: columns to 128, rows to 16 or, in square blocks, 128."""
    codes: torch.Tensor        # float8_e4m3fn [padded rows, padded columns]
    scale: torch.Tensor        # float32, one for each block, in their order
    shape: tuple               # (rows, columns) without the padding

    @property
    def whole_rows(self):
        """Whether each row has one scale."""
        return self.scale.shape == (len(self.codes), 1)

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
    padded_rows = rows + -rows % max(16, height)
    padded_columns = columns + -columns % 128
    if fp4_kernels.use_triton(x) and width:
        return quantize_fused(x, padded_rows, padded_columns, block == SQUARE)
    padded = F.pad(x.float(), (0, padded_columns - columns, 0, padded_rows - rows))
    blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width or padded_columns))
    scale = (blocks.abs().amax((1, 3)) / qerl.E4M3_MAX).clamp_min(SMALLEST_SCALE)
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return Codes(codes.to(torch.float8_e4m3fn), scale, (rows, columns))


def transposed(weight):
    """The Codes of a weight's transpose, the same; those of whole rows are rounded once more."""
    if weight.whole_rows:
        return quantize(weight.dequantize().T, WHOLE_ROW)
    rows, columns = weight.shape
    return Codes(transpose_bytes(weight.codes), weight.scale.T, (columns, rows))


def multiply(x, weight, dtype):
    """Codes of x [n, in] and of weight [out, in], blocks lying along in -> x weightᵀ [n, out]."""
    if not x.codes.is_cuda:
        return (x.dequantize() @ weight.dequantize().T).to(dtype)
    if x.whole_rows and weight.whole_rows:
        y = torch._scaled_mm(
            x.codes, weight.codes.T, x.scale, weight.scale.T, out_dtype=torch.bfloat16)
    else:
        y = multiply_blocks(x, weight, dtype)
    rows, columns = x.shape[0], weight.shape[0]
    return y[:rows, :columns].to(dtype)


def multiply_blocks(x, weight, dtype):
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
    return F.scaled_mm(
        x.codes, weight.codes.T, x.scale.T.contiguous().T, kind.BlockWise1x128, scale, recipe,
        output_dtype=dtype,
    )


# --------------------------------------------------------------------------------------------------
# On a GPU: quantising in one pass through memory, where PyTorch takes several

def quantize_fused(x, padded_rows, padded_columns, square, dtype=torch.float8_e4m3fn):
    """quantize for blocks of 1 x 128 or, if square, 128 x 128; its twin are the lines there.

    dtype: in float32 the codes are not rounded, which Triton's interpreter does wrongly.
    """
    codes = torch.empty(padded_rows, padded_columns, dtype=dtype, device=x.device)
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
    if not fp4_kernels.use_triton(codes):
        return codes.T.contiguous()
    rows, columns = codes.shape
    result = torch.empty(columns, rows, dtype=codes.dtype, device=codes.device)
    transpose_kernel[(rows // 128, columns // 128)](
        codes.view(torch.uint8), result.view(torch.uint8), rows, columns, num_warps=8)
    return result


if fp4_kernels.triton is not None:
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
    block = recipe.activation
    codes = quantize(weight, recipe.weight)
    pairs = [
        (multiply(quantize(x, block), codes, dtype), x @ weight.T),
        (multiply(quantize(grad, block), transposed(codes), dtype), grad @ weight),
        (multiply(quantize(grad.T, block), quantize(x.T, block), dtype), grad.T @ x),
    ]
    return all((ours - exact).norm() < 0.1 * exact.norm() for ours, exact in pairs)


def choose_recipe(device, dtype):
    """The Recipe that this device multiplies rightly, found by a try on a GPU; raises UserError."""
    if device.type != "cuda":
        return BLOCKS
    names = {
        BLOCKS: "blocks of 1 x 128 and 128 x 128 have a scale",
        ROWS: "whole rows have a scale, because blocks are refused; slower, and rounded more",
    }
    for recipe, name in names.items():
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
