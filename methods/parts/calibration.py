"""The inputs of the linear layers of a 16-bit model, block by block.

The weights stay in their files (LeftInFiles). Those of one block at a time are on the device, so that
a GPU calibrates models that it could not hold.
"""
from functools import partial

import torch
import torch.nn.functional as F
from tqdm import tqdm

from harness import fast
from harness.errors import require
from harness.ranks import Ranks
from methods.parts.worked import batches_of


class Unread:
    """Stands for a 16-bit fast.PackedWeight that is in its file; read() makes it."""

    def __init__(self, read):
        self.read = read

    def dequantize(self, dtype):
        """The whole weight [out, in], a temporary."""
        return self.read().dequantize(dtype)


class LeftInFiles(fast.WeightReader):
    """Hands out layers whose weights stay in their files; refuses weights that NVFP4's blocks do not fit.

    Each is read once beforehand, so that a damaged model is refused at once, not after an hour.
    """

    def stacked(self, names, sizes, in_features):
        require(in_features % 16 == 0, f"layer {names[0]} has {in_features} input features, not divisible by "
                                       "nvfp4's block of 16; use other --weights")
        read = partial(super().stacked, names, sizes, in_features)
        read()
        return Unread(read)


class Inputs:
    """Sums over all x [in] that a layer reads, one a token."""

    def __init__(self, layer):
        weight = layer.weight.dequantize(torch.float32)
        size = weight.shape[1]
        self.gram = weight.new_zeros(size, size)                                 # Σ x xᵀ
        self.magnitude = weight.new_zeros(size)                                  # Σ |x|
        self.count = 0
        self.kept = None           # int64 [n]: the next rows' tokens without padding, of all B T
        self.hook = layer.register_forward_pre_hook(self.add)

    def add(self, layer, arguments):
        x = arguments[0].flatten(0, 1)[self.kept]                                # [n, in]
        # A GPU adds products of 16-bit numbers in float32; on a CPU all is float32.
        dtypes = {"out_dtype": torch.float32} if x.is_cuda else {}
        for part in x.split(2048):         # a GPU's longer sums of outliers are too rough for GPTQ
            self.gram = torch.addmm(self.gram, part.T, part, **dtypes)
        self.magnitude += x.abs().sum(0, dtype=torch.float32)
        self.count += len(x)


def inputs_of(layers, block, kept, hidden, ropes):
    """{layer: Inputs} of a block's layers.

    Lists with an item for each batch: kept as in Inputs; hidden [B, T, d], which the block reads; ropes
    of (cos, sin).
    """
    inputs = {layer: Inputs(layer) for layer in layers}
    for tokens, x, rope in zip(kept, hidden, ropes):
        for seen in inputs.values():
            seen.kept = tokens
        block(x, None, rope)
    for layer, seen in inputs.items():
        seen.hook.remove()
        require(torch.isfinite(seen.gram).all(),
                     f"layer {layer.names[0]}: what it reads overflows {hidden[0].dtype}, so that no "
                     "codes can be fitted to it; use --quantizer rtn")
    return inputs


@torch.no_grad()
def calibrate(model, sequences):
    """Yield (block, {layer: Inputs}) of each block in turn.

    model: one of LeftInFiles; sequences: those of parts/worked.py. A block reads what the blocks
    before it give with the weights that the caller has left in them. After two seconds stderr shows a
    bar.
    """
    batches = batches_of(sequences, 64, model.device)
    kept = [rows.mask.flatten().nonzero()[:, 0] for rows in batches]
    hidden = [F.embedding(rows.tokens, model.embedding) for rows in batches]
    ropes = [model.rope(torch.arange(x.shape[1], device=x.device), x.dtype) for x in hidden]
    for block in tqdm(model.blocks, "calibrating", unit="block", delay=2, disable=not Ranks().main):
        layers = [block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down]
        unread = [layer.weight for layer in layers]
        for layer in layers:
            layer.weight = layer.weight.read()
        yield block, inputs_of(layers, block, kept, hidden, ropes)
        for i, rope in enumerate(ropes):               # in place: there is never a second copy
            hidden[i] = sum(block(hidden[i], None, rope))
        for layer, weight in zip(layers, unread):
            layer.weight = weight
