"""Jet-RL: one flow of FP8 products for rollout and training (arXiv 2601.14243).

    python train_gsm8k.py --method jetrl --lora-rank 0 --beta 0 --lr 1e-4    as the paper, all weights
    python train_gsm8k.py --method jetrl:training                    QeRL's NVFP4, trained on faster

The problem (abstract: primary). FP8 makes the rollout faster, but training in BF16 on what FP8
sampled is off-policy, and over long completions it collapses. FlashRL corrects this by weights of
tokens. Jet-RL computes the same in training as in the rollout, which makes training faster, too.

The formulas (shapes: from a secondary note). E4M3 has 4 exponent and 3 mantissa bits and reaches
to 448. The values of a block share a float32 scale s = max|x| / 448, and are stored as x / s:

    product                    first operand, block       second operand, block
    forward    Y = X Wᵀ        X     1 x 128 (a row)      W   128 x 128 (the whole)
    gradient  dX = dY W        dY    1 x 128 (a row)      W   128 x 128 (the whole), the same codes
    gradient  dW = dYᵀ X       dY  128 x 1 (a column)     X   128 x 1 (a column), from its codes of Y

The brackets have our blocks, which are larger than the paper's. Blocks guard against underflow, but
E4M3 keeps its precision over a range of 2¹⁴, which is enough here. Larger blocks are faster, and on
0.5B they change log π less (results/README.md, "Training in FP8"). Values between the layers, and
their gradients, stay in the dtype of the activations (BF16), and so do attention, embeddings, output
layer and LoRA. The optimiser moves float32 masters (the paper's are BF16), which are rounded anew in
each pass. X is kept in FP8 for dW. methods/parts/eight_bit.py has the codes and their products.

What differs from QeRL: 8 bits instead of 4, rounded activations, trained weights. Two variants:

    unified     rollout and training in FP8: the paper's
    training    training alone, on QeRL's frozen weights with LoRA, because the 4-bit rollout is the
                faster one (our inference: not in the paper); a weight takes a byte more memory

`training` gives up the rule of one policy: FP8 adds to mismatch_kl. Compare it with that of --method
qerl before you trust a run; --tis 2 weights the tokens for it. On the built-in policy FP8 adds more
than AQN's noise. The codes are made once, from the decoded 4-bit
weights, and kept for the whole run (6.5 GB for 7B). Making them anew in each pass would save this
memory and cost some 2 % of a step (an estimate from bytes and bandwidth).

The paper's result (secondary): with 8B the rollout is 1.33, training 1.41 and the whole 1.16 times as
fast, and nothing collapses. Ours: `training` makes a step of 7B with 256 completions 1.31 times as
fast as BF16 LoRA; accuracy: methods/README.md, where `unified` still had the paper's blocks.

When would you use it? Use `unified` to train all weights on Hopper GPUs, with long completions. Use
`training` where the update and not the rollout takes the time: QeRL's weights and large batches.
"""
import torch
import torch.nn.functional as F

from harness import fast
from harness.layers import TrainedLinear
from methods import Method
from methods.parts.eight_bit import CodedWeight, multiply, quantize, require_fp8_products
from harness.errors import require


class Product(torch.autograd.Function):
    """x [n, in] and a weight [out, in] -> x weightᵀ [n, out]; all three products are in FP8.

    master: the weight in float32, for its gradient; None if it is frozen. weight: a CodedWeight.
    unread: see QuantLinear.output_unread.
    """

    @staticmethod
    def forward(ctx, x, master, weight, unread):
        ctx.codes, ctx.scale = weight.parts
        ctx.x = None
        if unread and master is None and ctx.needs_input_grad[0]:      # see fast.FrozenLinear
            return x.new_zeros(len(x), len(ctx.codes))
        rounded = quantize(x, "fp8")
        if ctx.needs_input_grad[1]:
            ctx.x = rounded
        return multiply(rounded, weight.parts).to(x.dtype)     # Y = X Wᵀ

    @staticmethod
    def backward(ctx, grad):
        grad_x = grad_master = None
        if ctx.needs_input_grad[0]:                            # dX = dY W
            grad_x = multiply(quantize(grad, "fp8"), (ctx.codes.T.contiguous(), ctx.scale)).to(grad.dtype)
        if ctx.x is not None:                                  # dW = dYᵀ X
            codes, scale = ctx.x
            x = quantize(filled(codes.float() * scale).T, "fp8")
            grad_master = multiply(quantize(filled(grad).T, "fp8"), x).float()
        return grad_x, grad_master, None, None


def filled(x):
    """x with rows of zeros behind it, up to a multiple of 16: a GPU's products sum over so many."""
    return F.pad(x, (0, 0, 0, -len(x) % 16))


def forward(layer, x, master, weight):
    """A QuantLinear's forward in FP8. Bias and LoRA stay in the dtype of x."""
    rows = x.flatten(0, -2)
    y = Product.apply(rows, master, weight, layer.output_unread)
    if layer.bias is not None:
        y = y + layer.bias.to(x.dtype)
    A, B = layer.lora(x.dtype)
    y = y if A is None else y.addmm_(rows @ A.T, B.T)
    return y.unflatten(0, x.shape[:-1])


class FrozenFP8Linear(fast.QuantLinear):
    """A QuantLinear that has its frozen weight in FP8, too, in `coded`, and multiplies by it in training.

    A pass is of training if the module's `training` says so (model.train()), or if it is with gradient:
    the second forward of recompute_in_backward.
    """

    def forward(self, x):
        if self.training or torch.is_grad_enabled():
            return forward(self, x, None, self.coded)
        return super().forward(x)


class TrainedFP8Linear(TrainedLinear):
    """A TrainedLinear whose weight is rounded to FP8 in each pass."""

    def coded(self):
        return CodedWeight(self.master.detach(), "fp8", whole=True)

    def forward(self, x):
        return forward(self, x, self.master, self.coded())

    def prepare_decoding(self, dtype):
        super().prepare_decoding(dtype)
        self.weight = self.coded()


class Neighbour(Method):
    variants = ("unified", "training")

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
                    "--method jetrl: the rollout reads 8 bits a weight, and "
                    f"{settings.weights} fewer; use --weights bf16 or --method jetrl:training")
        require_fp8_products(settings)

    def prepare(self, model, *_):
        for layer in model.quantized_layers():
            if isinstance(layer, TrainedLinear):
                layer.__class__ = TrainedFP8Linear
                continue
            layer.__class__ = FrozenFP8Linear
            layer.coded = CodedWeight(layer.weight.dequantize(torch.float32), "fp8", whole=True)
            if self.variant == "unified":
                layer.weight = layer.coded             # it has no other
        model.train(self.variant == "unified")

    def token_logprobs(self, model, *batch):
        """fast.token_logprobs in FP8, also without gradient."""
        before = model.training
        model.train()
        logprobs = fast.token_logprobs(model, *batch)
        model.train(before)
        return logprobs
