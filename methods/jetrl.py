"""Jet-RL: one flow of FP8 products for rollout and training (arXiv 2601.14243).

    python train_gsm8k.py --method jetrl --lora-rank 0 --beta 0 --lr 1e-4    as the paper, all weights
    python train_gsm8k.py --method jetrl:training                    QeRL's NVFP4, trained on faster

The problem (abstract: primary). FP8 makes the rollout faster, but training in BF16 on what FP8
sampled is off-policy, and over long completions it collapses. FlashRL weights the tokens; Jet-RL
computes the same in training as in the rollout, which makes the training's products faster, too.

The formulas (shapes: from a secondary note). E4M3 has 4 exponent and 3 mantissa bits and reaches
to 448. The values of a block share a float32 scale s = max|x| / 448, and are stored as x / s:

    product                    first operand, block    second operand, block
    forward    Y = X Wᵀ        X     1 x 128           W   128 x 128
    gradient  dX = dY W        dY    1 x 128           W   128 x 128, the same codes
    gradient  dW = dYᵀ X       dY  128 x 1             X   128 x 1, from its codes of 1 x 128

What lies between the layers, gradients included, stays in the dtype of the activations (BF16), and
so do attention, embeddings, output layer and LoRA. The optimiser moves float32 masters (the paper's
are BF16); they are rounded anew in each pass. X is kept in FP8 for dW.

What differs from QeRL: 8 bits instead of 4, rounded activations, trained weights. Three variants:

    unified     rollout and training in FP8: the paper's
    rollout     the rollout alone: what the paper warns of
    training    training alone, on QeRL's frozen weights with LoRA, where the 4-bit rollout is the
                faster one (our inference: not in the paper); a byte a weight more memory

`training` takes larger blocks than the paper: whole rows of X and dY, and W as a whole. Blocks guard
against underflow, and E4M3 keeps its precision over 2¹⁴, which is enough for a frozen W. That is
faster, and on 0.5B it changes log π less (results/README.md, "Training in FP8").

`training` gives up the rule of one policy: metrics.jsonl has fp8_error, the mean |l| that FP8 adds,
l = log π in FP8 - log π in 16 bits of the sampled tokens (of eight completions a step), and
mismatch_kl contains it. Look at both before you trust a run; --tis 2 weights the tokens for it. On
the built-in policy it is more than AQN's noise, as `python -m methods` shows.

The paper's result (secondary): rollout 1.33, training 1.41, the whole 1.16 times as fast (8B), no
collapse. Ours: `training` makes a step of 7B with 256 completions 1.31 times as fast as BF16 LoRA;
accuracy: methods/README.md. The codes and products of blocks are in methods/parts/fp8_blocks.py.

Frozen weights get codes once, from the decoded 4-bit weights, which are kept for the whole run, a
byte a weight (6.5 GB for 7B). To make them anew in each pass would save that and cost some 2 % of a
step (an estimate from bytes and bandwidth). Trained weights are rounded anew in each pass.

When would you use it? `unified` to train all weights on Hopper GPUs, with long completions.
`training` where the update and not the rollout takes the time: large batches, QeRL's weights.
"""
import contextlib

import torch

import qerl
from harness.layers import TrainedLinear, replace_layers
from methods import Method
from methods.parts.eight_bit import require_fp8_products
from methods.parts.fp8_blocks import BLOCKS, ROWS, choose_recipe, multiply, quantize, transposed
from qerl import require


class Product(torch.autograd.Function):
    """x [n, in] and a weight [out, in] -> x weightᵀ [n, out]: all three products in FP8.

    master: the weight in float32, for its gradient; None if it is frozen. weight: its Codes. unread:
    see QuantLinear.output_unread.
    """

    @staticmethod
    def forward(ctx, x, master, weight, recipe, unread):
        ctx.block = recipe.activation                          # 1 x 128
        ctx.weight = weight                                    # 128 x 128
        ctx.x = None
        if unread and master is None and ctx.needs_input_grad[0]:      # see qerl.FrozenLinear
            return x.new_zeros(len(x), weight.shape[0])
        rounded = quantize(x, ctx.block)
        if ctx.needs_input_grad[1]:
            ctx.x = rounded
        y = multiply(rounded, weight, x.dtype)                 # Y = X Wᵀ
        return y.data                                          # no view: LoRA is added in place

    @staticmethod
    def backward(ctx, grad):
        grad_x = grad_master = None
        if ctx.needs_input_grad[0]:                            # dX = dY W
            grad_x = multiply(quantize(grad, ctx.block), transposed(ctx.weight), grad.dtype)
        if ctx.x is not None:                                  # dW = dYᵀ X
            x = quantize(ctx.x.dequantize().T, ctx.block)
            grad_master = multiply(quantize(grad.T, ctx.block), x, grad.dtype).float()
        return grad_x, grad_master, None, None, None


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
    """What a frozen and a trained layer that can compute in FP8 share; `fp8` says whether it does."""

    def __init__(self, layer, recipe):
        vars(self).update(vars(layer))             # the same names, LoRA, hooks ...
        self.recipe = recipe

    def forward(self, x):
        if not self.fp8:
            return super().forward(x)
        rows = x.flatten(0, -2)
        y = Product.apply(rows, *self.master_and_codes(), self.recipe, self.output_unread)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        A, B = self.lora(x.dtype)
        y = y if A is None else y.addmm_(rows @ A.T, B.T)
        return y.unflatten(0, x.shape[:-1])


class FrozenBlockLinear(BlockLinear, qerl.QuantLinear):
    """A QuantLinear that has its frozen weight in FP8, too."""

    def __init__(self, layer, recipe):
        super().__init__(layer, recipe)
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


def put_block_layers(model, recipes):
    """Let all layers be able to compute in FP8, by the first of the recipes that the device takes."""
    recipe = choose_recipe(model.device, model.embedding.dtype, recipes)

    def make(layer):
        trained = isinstance(layer, TrainedLinear)
        return (TrainedBlockLinear if trained else FrozenBlockLinear)(layer, recipe)
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


class Neighbour(Method):
    variants = ("unified", "rollout", "training")

    def __init__(self, settings, variant=None):
        super().__init__(settings, variant)
        self.rollout_in_fp8 = self.variant != "training"
        self.training_in_fp8 = self.variant != "rollout"

    @classmethod
    def defaults(cls, variant):
        if variant == "training":
            return {}
        return dict(weights="bf16", sigma_start=0.0, sigma_end=0.0)

    def check(self):
        settings = self.settings
        if self.variant == "training":
            require(settings.lora_rank > 0,
                    "--method jetrl:training: is for frozen weights, and with --lora-rank 0 all are "
                    "trained; use --method jetrl with --lora-rank 0")
        else:
            require(settings.weights == "bf16",
                    f"--method jetrl:{self.variant}: the rollout reads 8 bits a weight, and "
                    f"{settings.weights} fewer; use --weights bf16 or --method jetrl:training")
        require_fp8_products(settings.device, "jetrl", "use --method qerl")

    def prepare(self, model, folder, questions, tokenizer):
        self.model = model
        recipes = [ROWS, BLOCKS] if self.variant == "training" else [BLOCKS, ROWS]
        put_block_layers(model, recipes)
        self.switch_for_evaluations()

    def switch_for_evaluations(self):
        """They are in FP8 if the rollout and the training both are."""
        switch_fp8(self.model, self.rollout_in_fp8 and self.training_in_fp8)

    @contextlib.contextmanager
    def adaptive_quantization_noise(self, model, sigma, generator):
        self.measured = {}
        noise = qerl.adaptive_quantization_noise(model, sigma, generator)
        with noise, fp8(model, self.rollout_in_fp8):
            yield

    def token_logprobs(self, model, prompts, completions, length, temperature=1.0):
        """In the trainer's arithmetic, in which the model stays for backward."""
        switch_fp8(model, self.training_in_fp8)
        logprobs = qerl.token_logprobs(model, prompts, completions, length, temperature)
        if not self.measured:
            self.measure(model, prompts, completions, length, temperature, logprobs.detach())
        return logprobs

    @torch.no_grad()
    def measure(self, model, prompts, completions, length, temperature, logprobs, some=8):
        """What FP8 changes in log π_old of some of the step's completions, in nats a token."""
        mask = qerl.length_mask(length[:some], completions.shape[1])
        with fp8(model, not self.training_in_fp8):
            other = qerl.token_logprobs(
                model, prompts[:some], completions[:some], length[:some], temperature)
        error = (other - logprobs[:some])[mask].abs()
        self.measured = {"fp8_error": error.mean().item(), "fp8_largest_error": error.max().item()}

    def mismatch(self, old_logprobs, rollout_logprobs, mask):
        """qerl.mismatch, with which the loop ends a step."""
        self.switch_for_evaluations()
        return qerl.mismatch(old_logprobs, rollout_logprobs, mask)
