"""GPTQ: columns are rounded in turn, and the next ones make up for the error (arXiv 2210.17323).

    python train_gsm8k.py --quantizer gptq                           works with every --method

Problem. Rounding each weight to the nearest code (RTN) makes the smallest error in the weights, but
not in the layer's output, where the errors of correlated inputs add up. --model uses this file unless
--quantizer names another.

Formula. W [out, in] is a weight, H = Σ x xᵀ over its inputs. The columns are rounded one after the
other. The columns that are not yet rounded make up for the error of column j:

    W[:, k] -= (W - Q)[:, j] / U_jj · U_jk,    UᵀU = (H + λI)⁻¹, U upper triangular,

where λ is 1 % of the mean of H's diagonal [Algorithm 1 of the paper]. Columns with large inputs go
first [the authors' --act-order]. The block scales are those of RTN, of the weights in float32.

What differs from QeRL. Only the loaded bytes differ. They are found once, from 256 x 2,048 tokens of
the training questions and answers, and the cache keeps them (methods/parts/quantizers.py).

Results. GSM8K as a fraction of the 16-bit model's, Qwen3-30B-A3B: RTN 0.985, AWQ 0.975, GPTQ 1.001,
where the measurement has a noise of 0.011 (llm-compressor's thread 3001). Ours: methods/README.md,
and results/claims/README.md for longer runs.

When would you use it? Where the quantised policy starts visibly below the 16-bit one, or before
qat.py. The codes fit the text that they were calibrated on.
"""
import torch

import qerl
from harness import fast
from harness.export import stacked_parts
from methods.parts.calibration import calibrate


def inverse_factor(gram, order):
    """U float32 [in, in], upper triangular, with UᵀU = (H + λI)⁻¹; H is the gram in another order.

    H, with rows and columns reversed, has a Cholesky factor. This factor, reversed again, is upper
    triangular, and U is its inverse. All is computed in float64; of a large model's widest layer a few
    such matrices take most of the memory.
    """
    H = gram[order][:, order].double()
    H.diagonal().add_(0.01 * H.diag().mean() + 1e-12)
    L = torch.linalg.cholesky(H.flip(0, 1)).flip(0, 1)
    identity = torch.eye(len(L), dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, identity, upper=True).float()


def round_e2m1(x):
    """x -> the nearest of E2M1's values, ties to the even code."""
    magnitude = torch.bucketize(x.abs(), qerl.E2M1_BOUNDS.to(x.device))
    return qerl.E2M1_MAGNITUDES.to(x.device)[magnitude].copysign(x)


def round_columns(W, scale, U):
    """Round the columns of W [out, n] in turn -> the rounded ones and their losses, both [out, n].

    A column's loss is (W - Q)[:, j] / U_jj. scale [out, n], U [n, n]; all are float32.
    """
    if fast.use_kernels(W):
        return fast.kernels.round_columns(W, scale, U)
    rounded = W.clone()
    losses = torch.empty_like(W)
    for j in range(W.shape[1]):
        column = rounded[:, j].clone()
        rounded[:, j] = round_e2m1(column / scale[:, j]) * scale[:, j]
        losses[:, j] = (column - rounded[:, j]) / U[j, j]
        rounded[:, j + 1:] -= losses[:, j, None] * U[j, j + 1:]
    return rounded, losses


def quantize_gptq(weight, gram, group=128):
    """weight [out, in], gram [in, in] = Σ x xᵀ -> packed, block_scale, global_scale; GPTQ's codes.

    The losses of `group` columns reach the columns behind them in one product.
    """
    _, block_scale, global_scale = qerl.quantize_nvfp4(weight)
    scale = block_scale.float() / global_scale                                    # [out, in/16]
    order = gram.diag().argsort(descending=True, stable=True)
    W = weight.float()[:, order]
    column_scale = scale.repeat_interleave(16, 1)[:, order]
    U = inverse_factor(gram, order)
    for start in range(0, len(order), group):
        now = slice(start, start + group)
        behind = slice(start + group, None)
        W[:, now], losses = round_columns(W[:, now], column_scale[:, now], U[now, now])
        W[:, behind] -= losses @ U[now, behind]
    codes = qerl.encode_e2m1(W[:, order.argsort()], scale)
    return codes, block_scale, global_scale


def choose_codes(model, sequences):
    """{tensor name: tensor} in the place of a 16-bit model's; sequences: those of parts/worked.py.

    A block reads what the quantised blocks before it give.
    """
    found = {}
    for _, inputs in calibrate(model, sequences):
        for layer, seen in inputs.items():
            parts = quantize_gptq(layer.weight.dequantize(torch.float32), seen.gram)
            found.update(stacked_parts(layer.names, layer.sizes, *parts))
            rounded = fast.FORMATS["nvfp4"].dequantize(*parts, model.embedding.dtype)
            layer.weight = fast.FORMATS["bf16"].pack(rounded)
    return found
