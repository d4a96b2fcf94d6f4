"""Linear layers that multiply in FP8 blocks (methods/parts/fp8_blocks.py), for methods/jetrl.py.

Frozen weights get codes once, from the decoded 4-bit weights, which are kept for the whole run, a
byte a weight (6.5 GB for 7B). To make them anew in each pass would save that and cost some 2 % of a
step (an estimate from bytes and bandwidth). Trained weights are rounded anew in each pass.
"""
import contextlib

import torch

import qerl
from harness.layers import TrainedLinear, replace_layers
from methods.parts.fp8_blocks import choose_recipe, multiply, quantize


class CodedWeight(qerl.PackedWeight):
    """A weight [out, in] in FP8 that multiplies FP8 activations in decoding."""

    def __init__(self, weight, recipe):
        self.codes = quantize(weight, recipe.weight)
        self.recipe = recipe

    def dequantize(self, dtype):
        return self.codes.dequantize().to(dtype)

    def multiply(self, x, bias=None, residual=None, lora=None):
        y = multiply(quantize(x, self.recipe.activation), self.codes, x.dtype)
        for added in (bias, residual):
            y = y if added is None else y + added
        return y if lora is None else y.addmm_(x @ lora[0].T, lora[1].T)


class BlockLinear:
    """What a frozen and a trained layer that can compute in FP8 share; `fp8` says whether it does.

    product(x [n, in], master float32 [out, in] or None, its Codes, recipe, unread) -> [n, out], with
    gradients; unread: see QuantLinear.output_unread.
    """

    def __init__(self, layer, recipe, product):
        vars(self).update(vars(layer))             # the same names, LoRA, hooks ...
        self.recipe = recipe
        self.product = product

    def forward(self, x):
        if not self.fp8:
            return super().forward(x)
        rows = x.flatten(0, -2)
        y = self.product(rows, *self.master_and_codes(), self.recipe, self.output_unread)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        A, B = self.lora(x.dtype)
        y = y if A is None else y.addmm_(rows @ A.T, B.T)
        return y.unflatten(0, x.shape[:-1])


class FrozenBlockLinear(BlockLinear, qerl.QuantLinear):
    """A QuantLinear that has its frozen weight in FP8, too."""

    def __init__(self, layer, recipe, product):
        super().__init__(layer, recipe, product)
        self.usual = layer.weight
        self.coded = CodedWeight(layer.weight.dequantize(torch.float32), recipe)

    @property
    def fp8(self):
        return self.weight is self.coded

    @fp8.setter
    def fp8(self, on):
        self.weight = self.coded if on else self.usual

    def master_and_codes(self):
        return None, self.coded.codes


class TrainedBlockLinear(BlockLinear, TrainedLinear):
    """A TrainedLinear whose weight is rounded to FP8 in each pass."""
    fp8 = False

    def master_and_codes(self):
        return self.master, quantize(self.master.detach(), self.recipe.weight)

    def prepare_decoding(self, dtype):
        super().prepare_decoding(dtype)
        if self.fp8:
            self.weight = CodedWeight(self.master.detach(), self.recipe)


def put_block_layers(model, product, recipes):
    """Replace each QuantLinear by a BlockLinear that can compute in FP8, and does not yet.

    recipes: the first that the device multiplies is taken.
    """
    recipe = choose_recipe(model.device, model.embedding.dtype, recipes)

    def make(layer):
        trained = isinstance(layer, TrainedLinear)
        return (TrainedBlockLinear if trained else FrozenBlockLinear)(layer, recipe, product)
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
