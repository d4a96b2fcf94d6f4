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
    height = height or padded_rows
    width = width or padded_columns
    if qerl.use_kernels(x) and height == 1:
        return quantize_fused(x, padded_rows, padded_columns, width)
    padded = F.pad(x.float(), (0, padded_columns - columns, 0, padded_rows - rows))
    blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))
    scale = (blocks.abs().amax((1, 3)) / qerl.E4M3_MAX).clamp_min(SMALLEST_SCALE)
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return Codes(codes.to(torch.float8_e4m3fn), scale, (rows, columns))


def transposed(weight):
    """The Codes of a weight's transpose, which are the same."""
    rows, columns = weight.shape
    return Codes(transpose_bytes(weight.codes), weight.scale.T, (columns, rows))


def multiply(x, weight, dtype):
    """Codes of x [n, in] and of weight [out, in] -> x weightᵀ [n, out]; blocks lie along `in`."""
    if not x.codes.is_cuda:
        return (x.dequantize() @ weight.dequantize().T).to(dtype)
    product = multiply_rows if x.whole_rows and weight.whole_rows else multiply_blocks
    return product(x, weight, dtype)[:x.shape[0], :weight.shape[0]].to(dtype)


def multiply_rows(x, weight, dtype):
    """multiply on a GPU of whole rows with whole rows or a whole weight, [padded n, padded out].

    cuBLAS takes a scale for each row of both. Its fast accumulation keeps fewer bits of the sums.
    """
    scale = weight.scale.T.expand(1, len(weight.codes)).contiguous()
    return torch._scaled_mm(x.codes, weight.codes.T, x.scale, scale, out_dtype=torch.bfloat16,
                            use_fast_accum=True)


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
# On a GPU: quantising rows in one pass through memory, where PyTorch takes several

def quantize_fused(x, padded_rows, padded_columns, width, dtype=torch.float8_e4m3fn):
    """quantize in blocks of 1 x width; its twin are the lines there.

    dtype: in float32 the codes are not rounded, which Triton's interpreter does wrongly.
    """
    codes = torch.empty(padded_rows, padded_columns, dtype=dtype, device=x.device)
    scale = torch.empty(padded_rows, padded_columns // width, device=x.device)
    quantize_kernel[scale.shape](
        x.contiguous(), codes, scale, *x.shape, padded_columns, width, SMALLEST=SMALLEST_SCALE,
        BLOCK=128 if width == 128 else 4096, num_warps=1 if width == 128 else 8)
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
    def quantize_kernel(x, codes, scale, rows, columns, padded_columns, width,
                        SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
        """Each program has a block: once through it for its scale, once, in the cache, for the codes."""
        row = tl.program_id(0).to(tl.int64)
        x += row * columns
        codes += row * padded_columns
        first = tl.program_id(1) * width
        there = tl.where(row < rows, tl.minimum(columns, first + width), 0)
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(first, first + width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            v = tl.load(x + column, mask=column < there, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(v))
        s = tl.maximum(tl.div_rn(tl.max(largest, 0), 448.0), SMALLEST)
        tl.store(scale + row * tl.num_programs(1) + tl.program_id(1), s)
        for start in range(first, first + width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            v = tl.load(x + column, mask=column < there, other=0.0).to(tl.float32)
            v = tl.div_rn(v, tl.zeros_like(v) + s)
            tl.store(codes + column, v.to(codes.dtype.element_ty), mask=column < first + width)

    @triton.jit
    def transpose_kernel(x, y, rows, columns):
        row = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
        column = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
        tile = tl.load(x + row[:, None] * columns + column[None, :])
        tl.store(y + column[:, None] * rows + row[None, :], tl.trans(tile))


def products_are_right(recipe, device, dtype):
    """Whether both kinds of products, of blocks of very different size, are those of the codes."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows, columns=640):
        size = torch.exp2(4 * torch.randn(rows, columns // 128, generator=generator))
        values = torch.randn(rows, columns, generator=generator)
        return (values * size.repeat_interleave(128, 1)).to(device, dtype)
    x = quantize(matrix(272), recipe.activation)
    for block in recipe:                               # Y and dX, dW
        weight = quantize(matrix(384), block)
        ours = multiply(x, weight, dtype)
        exact = x.dequantize() @ weight.dequantize().T
        if (ours - exact).norm() > 0.1 * exact.norm():
            return False
    return True


def choose_recipe(device, dtype, recipes):
    """The first of the recipes that this device multiplies rightly, found by a try on a GPU.

    Raises UserError.
    """
    refusal = "wrong products"
    for recipe in recipes:
        try:
            if device.type != "cuda" or products_are_right(recipe, device, dtype):
                return recipe
        except (RuntimeError, ValueError, AttributeError) as e:
            refusal = qerl.reason(e)
    raise qerl.UserError("--method jetrl: this GPU or PyTorch multiplies no FP8 "
                         f"({refusal}); use --method qerl")
