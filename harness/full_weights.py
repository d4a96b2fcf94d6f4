"""Full fine-tuning: no LoRA, no 4 bits; what QeRL is compared with (its Tables 1-3).

    python train_gsm8k.py --model Qwen2.5-0.5B --weights bf16 --lora-rank 0 --lr 1e-6

Each linear layer keeps a float32 master of its weights, because a step of 1e-6 is lost in
bfloat16's eight bits, and multiplies with a copy in the dtype of the activations. The norms' scales
are trained, too; embeddings and output layer stay as they are, which the authors' full runs do not.
"""
import torch
import torch.nn.functional as F
from torch import nn

import qerl


class TrainedLinear(qerl.QuantLinear):
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
        self.weight = qerl.PackedWeight(qerl.FORMATS["bf16"], *qerl.keep_16_bit(weight.detach()))

    def decode(self, x, residual=None):
        return self.weight.multiply(x, self.decode_bias, residual)


def replace_layers(model, make):
    """Put make(layer) in the place of each QuantLinear; returns [(its parent, name, layer)]."""
    places = [(parent, name, child) for parent in model.modules()
              for name, child in parent.named_children() if isinstance(child, qerl.QuantLinear)]
    for parent, name, layer in places:
        setattr(parent, name, make(layer))
    return places


def train_all_weights(model):
    """Make the weights and biases of all linear layers, and the norms' scales, trainable."""
    replace_layers(model, TrainedLinear)
    for module in model.modules():
        if isinstance(module, qerl.RMSNorm):
            module.weight.requires_grad_(True)
