"""Layers that hold their weights otherwise: trained themselves (--lora-rank 0), cut (--shard).

    torchrun --nproc_per_node=8 train_gsm8k.py --model FOLDER --shard

Of each quantised layer a rank keeps one of `count` equal pieces of its packed bytes. Before a block
runs, the ranks gather its layers whole into one of two buffers; while it runs, the next block's into
the other. So a rank holds 1/count of the packed weights and two blocks of them. LoRA, the norms,
the embedding and lm_head are whole everywhere.

All ranks take part in each gathering, but one decodes more tokens than another or has more pieces
to train on. They therefore go through the blocks in common passes: up, for prefill, decoding and
forward, or down, for backward, in which each block is computed again (recompute_in_backward).
Before a pass the ranks vote. Up comes first, if any rank wants it, then down. Whoever wants neither
serves: it takes part in the others' passes, until all ranks have come to the next exchange of
harness.ranks. A rank that wants up knows without waiting that it comes, so that a decode step with
its vote and its gatherings can be one CUDA graph: NCCL's collectives can be recorded, and whether
another rank replays a graph, too, or serves makes no difference to them.
"""
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import qerl
from harness import fast
from harness.ranks import Ranks


# --------------------------------------------------------------------------------------------------
# Full fine-tuning: no LoRA, no 4 bits; what QeRL is compared with (its Tables 1-3)
#
#     python train_gsm8k.py --model Qwen2.5-0.5B --weights bf16 --lora-rank 0 --lr 1e-6
#
# Each linear layer keeps a float32 master of its weights, because a step of 1e-6 is lost in
# bfloat16's eight bits, and multiplies with a copy in the dtype of the activations. The norms' scales
# are trained, too (train_norms); embeddings and output layer stay as they are, unlike in the authors'
# full runs.

class TrainedLinear(fast.QuantLinear):
    """A QuantLinear's layers with weights that are trained themselves: x [..., in] -> [..., out].

    master: float32 [out, in], the layers stacked; bias: float32 [out] or None, trained as well.
    """

    def __init__(self, layer):
        master = layer.weight.dequantize(torch.float32)
        super().__init__(layer.names, layer.sizes, master.shape[1], layer.weight, None)
        self.master = nn.Parameter(master)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.float())

    def cast(self, dtype):
        """Weight and bias as a product in this dtype takes them, with gradient to the masters."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return self.master.to(dtype), bias

    def forward(self, x):
        return F.linear(x, *self.cast(x.dtype))

    def prepare_decoding(self, dtype):
        weight, self.decode_bias = self.cast(dtype)
        self.weight = fast.FORMATS["bf16"].pack(weight.detach())

    def decode(self, x):
        return self.weight.multiply(x, self.decode_bias)


def replace_layers(model, make):
    """Put make(layer) in the place of each QuantLinear; returns [(its parent, name, layer)]."""
    places = [(parent, name, child) for parent in model.modules()
              for name, child in parent.named_children() if isinstance(child, qerl.QuantLinear)]
    for parent, name, layer in places:
        setattr(parent, name, make(layer))
    return places


# --------------------------------------------------------------------------------------------------
# Frozen weights cut over the processes of a run

UP = 0
DOWN = 1
ALIGNMENT = 256                # bytes; the kernels read a weight by TMA, which wants 16 of them
# PyTorch 2.13 renamed it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def packed_tensors(weight):
    """The two large tensors of a qerl.PackedWeight or fp4_kernels.TiledWeight: codes and scales."""
    if isinstance(weight, qerl.PackedWeight):
        return list(weight.parts[:2])
    return [weight.words, weight.scales]


def replace_packed(weight, tensors):
    """Put others in the place of packed_tensors(weight)."""
    if isinstance(weight, qerl.PackedWeight):
        weight.parts = (*tensors, *weight.parts[2:])
    else:
        weight.words, weight.scales = tensors


class ShardedReader(fast.WeightReader):
    """Of each layer that it hands out this rank keeps its piece alone, from the start."""

    def linear(self, *args):
        layer = super().linear(*args)
        ranks = Ranks()
        tensors = packed_tensors(layer.weight)
        layer.layout = [(t.dtype, t.shape) for t in tensors]
        line = torch.cat([padded_bytes(t, ALIGNMENT * ranks.count) for t in tensors])
        layer.piece = line.chunk(ranks.count)[ranks.rank].clone()
        replace_packed(layer.weight, [t.new_empty(0) for t in tensors])
        return layer


def padded_bytes(tensor, unit):
    """A tensor's bytes, uint8, filled up to a multiple of `unit`."""
    stored = tensor.contiguous().flatten().view(torch.uint8)
    return F.pad(stored, (0, -len(stored) % unit))


def tensors_in(line, layout, unit):
    """Views of a line of padded_bytes as the tensors, (dtype, shape) each, of which it was made."""
    tensors = []
    for dtype, shape in layout:
        size = shape.numel() * dtype.itemsize
        tensors.append(line[:size].view(dtype).view(shape))
        line = line[size + -size % unit:]
    return tensors


class SharedPasses:
    """The passes of the ranks through the blocks of a model from a ShardedReader.

    It makes the model gather its weights. Before all else that the ranks do together each of them
    must `serve`, which Ranks sees to.
    """

    def __init__(self, model, count):
        self.device = model.device
        self.blocks = [
            [m for m in block.modules() if isinstance(m, qerl.QuantLinear)] for block in model.blocks
        ]
        numbers = range(len(self.blocks))
        self.orders = numbers, numbers[::-1]           # of the blocks in a pass UP or DOWN
        self.works = {}                                # what is being gathered, by the block's number
        self.place_weights(count)
        model.recompute_in_backward()                  # else backward would need blocks at any time
        for i, block in enumerate(model.blocks):
            block.compute = partial(self.run, i, block.compute)
            block.decode = partial(self.run, i, block.decode)

    def place_weights(self, count):
        """Let the weights of block i lie in buffer i % 2, where `gather` brings them."""
        size = max(count * sum(len(layer.piece) for layer in layers) for layers in self.blocks)
        buffers = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        for i, layers in enumerate(self.blocks):
            rest = buffers[i % 2]
            for layer in layers:
                size = count * len(layer.piece)
                layer.place, rest = rest[:size], rest[size:]
                views = tensors_in(layer.place, layer.layout, ALIGNMENT * count)
                replace_packed(layer.weight, views)

    def run(self, i, compute, *args):
        """Block i's compute or decode, with its weights here and the next one's on their way."""
        # With gradients a block runs in backward alone: forward keeps nothing but its input.
        direction = DOWN if torch.is_grad_enabled() else UP
        order = self.orders[direction]
        if i == order[0]:
            self.serve(direction)
            self.gather(i)
        self.wait(i)
        if i != order[-1]:
            self.gather(order[order.index(i) + 1])
        return compute(*args)

    def serve(self, wanted=None):
        """Take part in the passes of other ranks until that comes which this one wants, if any.

        All want their direction by vote. Up comes first, and then without waiting for the votes.
        """
        while True:
            votes = torch.zeros(2, dtype=torch.long, device=self.device)
            if wanted is not None:
                votes[wanted].fill_(1)
            dist.all_reduce(votes)
            if wanted == UP:
                return
            first = next((way for way in (UP, DOWN) if votes[way]), None)
            if first == wanted:
                return
            for i in self.orders[first]:
                self.gather(i)
                self.wait(i)

    def gather(self, i):
        """Begin to bring block i's weights into its buffer, which the block before last has left."""
        self.works[i] = [
            all_gather(layer.place, layer.piece, async_op=True)
            for layer in self.blocks[i]
        ]

    def wait(self, i):
        """Let what this process does next wait for block i's weights."""
        for work in self.works.pop(i):
            work.wait()
