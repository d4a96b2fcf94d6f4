"""What the linear layers of a model get to read, block by block."""
import torch
import torch.nn.functional as F
from tqdm import tqdm

import qerl
from harness.ranks import Ranks
from harness.worked import batches_of


class Inputs:
    """Sums over all tokens x [in] that a layer reads."""

    def __init__(self, layer):
        weight = layer.weight.dequantize(torch.float32)
        size = weight.shape[1]
        self.gram = weight.new_zeros(size, size)                                 # Σ x xᵀ
        self.magnitude = weight.new_zeros(size)                                  # Σ |x|
        self.count = 0
        self.mask = None           # bool [B, T] of the rows that come next, False at padding
        self.hook = layer.register_forward_pre_hook(self.add)

    def add(self, layer, arguments):
        x = arguments[0][self.mask].float()                                      # [n, in]
        self.gram.addmm_(x.T, x)
        self.magnitude += x.abs().sum(0)
        self.count += len(x)


@torch.no_grad()
def calibrate(model, sequences, visit, batch=8):
    """Call visit(block, {layer: Inputs}) for each block in turn; sequences: of harness.worked.

    A block reads what the blocks before it give as `visit` left them. What takes longer than two
    seconds shows a bar on stderr.
    """
    batches = batches_of(sequences, batch, model.device)
    hidden = [F.embedding(rows.tokens, model.embedding) for rows in batches]
    ropes = [model.rope(torch.arange(x.shape[1], device=x.device), x.dtype) for x in hidden]
    for block in tqdm(model.blocks, "calibrating", unit="block", delay=2, disable=not Ranks().main):
        layers = [block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down]
        inputs = {layer: Inputs(layer) for layer in layers}
        for rows, x, rope in zip(batches, hidden, ropes):
            for seen in inputs.values():
                seen.mask = rows.mask
            block(x, rope)
        for layer, seen in inputs.items():
            seen.hook.remove()
            qerl.require(torch.isfinite(seen.gram).all(),
                         f"layer {layer.names[0]}: what it reads overflows {hidden[0].dtype}, so that no "
                         "codes can be fitted to it; use --quantizer rtn")
        visit(block, inputs)
        hidden = [block(x, rope) for x, rope in zip(hidden, ropes)]
