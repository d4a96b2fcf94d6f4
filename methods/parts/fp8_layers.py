"""Linear layers that multiply in FP8 blocks (methods/parts/fp8_blocks.py), for methods/jetrl.py.

Frozen weights get codes once, from the decoded 4-bit weights, which are kept for the whole run, a
byte a weight (6.5 GB for 7B). To make them anew in each pass would save that and cost some 2 % of a
step (an estimate from bytes and bandwidth). Trained weights are rounded anew in each pass.
"""
import contextlib

import torch
import torch.nn.functional as F

import qerl
from harness.full_weights import TrainedLinear, replace_layers
from methods.parts.fp8_blocks import choose_recipe, multiply, quantize, transposed


class CodedWeight(qerl.PackedWeight):
    """A weight [out, in] in FP8 that multiplies FP8 activations, in decoding and in training."""

    def __init__(self, weight, recipe):
        self.codes = quantize(weight, recipe.weight)
        self.recipe = recipe

    def dequantize(self, dtype):
        return self.codes.dequantize().to(dtype)

    def forward(self, x, bias=None):
        """Y = X Wᵀ + bias, without gradient: x [n, in] -> [n, out]."""
        return multiply(quantize(x, self.recipe.activation), self.codes, x.dtype, bias)

    def gradient(self, grad):
        """dX = dY W: grad [n, out] -> [n, in]."""
        rounded = quantize(grad, self.recipe.activation)
        return multiply(rounded, transposed(self.codes), grad.dtype)

    def multiply(self, x, bias=None, residual=None, lora=None):
        y = self.forward(x, bias)
        if residual is not None:
            y = y + residual
        if lora is None:
            return y
        A, B = lora
        return torch.addmm(y, F.linear(x, A), B.T)


class FrozenProduct(torch.autograd.Function):
    """As qerl.FrozenLinear, of a layer whose weight is a CodedWeight: Y and dX in FP8, LoRA not."""

    @staticmethod
    def forward(ctx, x, A, B, layer):
        h = None if A is None else x @ A.T
        ctx.save_for_backward(x, h, A, B)
        ctx.weight = layer.weight
        if layer.output_unread and ctx.needs_input_grad[0]:        # see qerl.FrozenLinear
            return x.new_zeros(len(x), sum(layer.sizes))
        y = layer.weight.forward(x, layer.bias)
        return y if h is None else y.addmm_(h, B.T)

    @staticmethod
    def backward(ctx, grad):
        x, h, A, B = ctx.saved_tensors
        grad_x = ctx.weight.gradient(grad)
        if h is None:
            return grad_x, None, None, None
        grad_h = grad @ B
        return grad_x.addmm_(grad_h, A), grad_h.T @ x, grad.T @ h, None


class FrozenBlockLinear(qerl.QuantLinear):
    """A QuantLinear whose frozen weight is used in FP8 or as it was: see switch_fp8."""

    def __init__(self, layer, recipe, dtype):
        weight = layer.weight.dequantize(dtype)
        super().__init__(layer.names, layer.sizes, weight.shape[1], layer.weight, layer.bias)
        self.rank = layer.rank
        self.alpha = layer.alpha
        self.use_adapter = layer.use_adapter
        self.keep_dequantized = layer.keep_dequantized
        self.output_unread = layer.output_unread
        if layer.rank:
            self.lora_A = layer.lora_A
            self.lora_B = layer.lora_B
        self.usual = layer.weight
        self.coded = CodedWeight(weight, recipe)

    @property
    def fp8(self):
        return self.weight is self.coded

    @fp8.setter
    def fp8(self, on):
        self.weight = self.coded if on else self.usual

    def forward(self, x):
        if not self.fp8:
            return super().forward(x)
        rows = x.flatten(0, -2)
        return FrozenProduct.apply(rows, *self.lora(x.dtype), self).unflatten(0, x.shape[:-1])


class TrainedBlockLinear(TrainedLinear):
    """A TrainedLinear that computes in FP8 or as it did: see switch_fp8."""
    fp8 = False

    def __init__(self, layer, recipe, product):
        super().__init__(layer)
        self.recipe = recipe
        self.product = product

    def forward(self, x):
        if not self.fp8:
            return super().forward(x)
        y = self.product(x.flatten(0, -2), self.master, self.recipe)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y.unflatten(0, x.shape[:-1])

    def prepare_decoding(self, dtype):
        super().prepare_decoding(dtype)
        if self.fp8:
            self.weight = CodedWeight(self.master.detach(), self.recipe)


def put_block_layers(model, product, recipes):
    """Replace each QuantLinear by a layer that can compute in FP8, and does not yet.

    product(x [n, in], master float32 [out, in], recipe) -> [n, out]: of layers whose weights are
    trained, with its gradients. recipes: the first that the device multiplies is taken.
    """
    dtype = model.embedding.dtype
    recipe = choose_recipe(model.device, dtype, recipes)

    def make(layer):
        if isinstance(layer, TrainedLinear):
            return TrainedBlockLinear(layer, recipe, product)
        return FrozenBlockLinear(layer, recipe, dtype)
    replace_layers(model, make)


def switch_fp8(model, on):
    """From now on the layers compute in FP8, or not."""
    for layer in model.quantized_layers():
        layer.fp8 = on


@contextlib.contextmanager
def fp8(model, on):
    """Inside, the layers compute in FP8, or not; afterwards as before."""
    before = model.quantized_layers()[0].fp8
    switch_fp8(model, on)
    try:
        yield
    finally:
        switch_fp8(model, before)
