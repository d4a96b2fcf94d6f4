"""Jet-RL: one flow of FP8 products for rollout and training (arXiv 2601.14243).

    python -m methods.jetrl                                          what FP8 does to the policy
    python train_gsm8k.py --method jetrl --lora-rank 0 --beta 0      the paper's: trains all weights
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
                faster one (our inference: not in the paper). The codes never change: they are made
                once, from the decoded 4-bit weights, and kept for the whole run, a byte a weight
                (6.5 GB for 7B). To make them anew in each pass would save that and cost some 2 %
                of a step (an estimate from bytes and bandwidth).

`training` gives up the rule of one policy: metrics.jsonl has fp8_error, the mean |l| that FP8 adds,
l = log π in FP8 - log π in 16 bits of the sampled tokens (of eight completions a step), and
mismatch_kl contains it. Look at both before you trust a run; --tis 2 weights the tokens for it. On
the built-in policy it is more than AQN's noise, as the demonstration shows.

The paper's result (secondary): rollout 1.33, training 1.41, the whole 1.16 times as fast (8B), no
collapse. Ours will stand in methods/README.md. harness/fp8_blocks.py has the products; on a GPU
they have not run so far.

When would you use it? `unified` to train all weights on Hopper GPUs, with long completions.
`training` where the update and not the rollout takes the time: large batches, QeRL's weights.
"""
import contextlib
import functools
import types

import torch
import torch.nn.functional as F

import fp4_kernels
import qerl
from harness.demonstration import sample_step, small_policy
from harness.fp8_blocks import BLOCKS, ROWS, choose_recipe, multiply, quantize, transposed
from harness.full_weights import TrainedLinear, replace_layers, train_all_weights
from harness.mismatch import describe_mismatch
from methods import Method
from qerl import require

# --------------------------------------------------------------------------------------------------
# Layers

class CodedWeight(qerl.PackedWeight):
    """A weight [out, in] in FP8 that multiplies FP8 activations, in decoding and in training."""

    def __init__(self, weight, recipe):
        self.codes = quantize(weight, recipe.weight)
        self.recipe = recipe

    def dequantize(self, dtype):
        return self.codes.dequantize().to(dtype)

    def forward(self, x):
        """Y = X Wᵀ, without gradient: x [n, in] -> [n, out]."""
        return multiply(quantize(x, self.recipe.activation), self.codes, x.dtype)

    def gradient(self, grad):
        """dX = dY W: grad [n, out] -> [n, in]."""
        rounded = quantize(grad, self.recipe.activation)
        return multiply(rounded, transposed(self.codes), grad.dtype)

    def multiply(self, x, bias=None, residual=None, lora=None):
        y = self.forward(x)
        for added in (bias, residual):
            if added is not None:
                y = y + added
        if lora is None:
            return y
        A, B = lora
        return torch.addmm(y, F.linear(x, A), B.T)


class FrozenProduct(torch.autograd.Function):
    """As qerl.FrozenLinear, of a layer whose weight is a CodedWeight: Y and dX in FP8, h Bᵀ not."""

    @staticmethod
    def forward(ctx, x, h, B, layer):
        ctx.save_for_backward(h, B)
        ctx.layer = layer
        ctx.weight = layer.weight
        y = layer.weight.forward(x)
        if layer.bias is not None:
            y += layer.bias
        for y_i, h_i, B_i in layer.pieces(y, h, B):
            y_i.addmm_(h_i, B_i.T)
        return y

    @staticmethod
    def backward(ctx, grad):
        h, B = ctx.saved_tensors
        grad_x = grad_h = grad_B = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.weight.gradient(grad)
        if h is not None:
            pieces = list(ctx.layer.pieces(grad, h, B))
            grad_h = torch.cat([grad_i @ B_i for grad_i, _, B_i in pieces], -1)
            grad_B = torch.cat([grad_i.T @ h_i for grad_i, h_i, _ in pieces])
        return grad_x, grad_h, grad_B, None


class TrainedProduct(torch.autograd.Function):
    """x [n, in], master float32 [out, in] -> x masterᵀ [n, out]: all three products in FP8."""

    @staticmethod
    def forward(ctx, x, master, recipe):
        ctx.weight = CodedWeight(master, recipe)
        ctx.x = quantize(x, recipe.activation)
        return multiply(ctx.x, ctx.weight.codes, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        grad_x = grad_master = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.weight.gradient(grad)
        if ctx.needs_input_grad[1]:
            block = ctx.weight.recipe.activation
            x = quantize(ctx.x.dequantize().T, block)
            grad_master = multiply(quantize(grad.T, block), x, grad.dtype).float()
        return grad_x, grad_master, None


class FrozenBlockLinear(qerl.QuantLinear):
    """A QuantLinear whose frozen weight is used in FP8 or as it was: see switch_fp8."""

    def __init__(self, layer, recipe, dtype):
        weight = layer.weight.dequantize(dtype)
        super().__init__(layer.names, layer.sizes, weight.shape[1], layer.weight, layer.bias)
        self.rank = layer.rank
        self.alpha = layer.alpha
        self.use_adapter = layer.use_adapter
        self.keep_dequantized = layer.keep_dequantized
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
        h = B = None
        if self.use_adapter:
            h = self.alpha / self.rank * F.linear(rows, self.lora_A.to(x.dtype))
            B = self.lora_B.to(x.dtype)
        return FrozenProduct.apply(rows, h, B, self).unflatten(0, x.shape[:-1])


class TrainedBlockLinear(TrainedLinear):
    """A TrainedLinear that computes in FP8 or as it did: see switch_fp8."""
    fp8 = False

    def __init__(self, layer, recipe):
        super().__init__(layer)
        self.recipe = recipe

    def forward(self, x):
        if not self.fp8:
            return super().forward(x)
        y = TrainedProduct.apply(x.flatten(0, -2), self.master, self.recipe)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y.unflatten(0, x.shape[:-1])

    def prepare_decoding(self, dtype):
        super().prepare_decoding(dtype)
        if self.fp8:
            self.weight = CodedWeight(self.master.detach(), self.recipe)


def put_block_layers(model):
    """Replace each QuantLinear by a layer that can compute in FP8, and does not yet."""
    dtype = model.embedding.dtype
    recipe = choose_recipe(model.device, dtype)

    def make(layer):
        if isinstance(layer, TrainedLinear):
            return TrainedBlockLinear(layer, recipe)
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


class Neighbour(Method):
    variants = ("unified", "rollout", "training")

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
        device = torch.device(settings.device)
        if device.type == "cuda":
            able = not torch.version.hip and fp4_kernels.capability(device) >= (8, 9)
            require(able, "--method jetrl: this GPU has no FP8 products, NVIDIA's have them from "
                          "Ada and Hopper on; use --method qerl")

    def prepare(self, model, folder, questions, tokenizer):
        self.model = model
        put_block_layers(model)
        switch_fp8(model, self.variant == "unified")

    @contextlib.contextmanager
    def noise(self, model, sigma, generator):
        with super().noise(model, sigma, generator), fp8(model, self.variant != "training"):
            yield

    def old_logprobs(self, model, batch):
        # `training` is in FP8 from here to the end of the updates.
        switch_fp8(model, self.variant != "rollout")
        return super().old_logprobs(model, batch)

    def measure(self, batch):
        """What FP8 changes in log π_old, of the first of the completions, in nats a token."""
        first = batch.rows(list(range(min(8, len(batch.prompts)))))
        with fp8(self.model, self.variant == "rollout"):
            other = first.logprobs_under(self.model, self.settings.micro_tokens)
        tokens = qerl.length_mask(first.length, other.shape[1])
        error = (other - first.old_logprobs)[tokens].abs()
        return {"fp8_error": error.mean().item(), "fp8_largest_error": error.max().item()}

    def measure_updates(self):
        switch_fp8(self.model, self.variant == "unified")
        return {}


# --------------------------------------------------------------------------------------------------
# The demonstration

def straight_through(x, block):
    """A matrix x as FP8 holds it; its gradient is passed on to x as it is, not rounded."""
    rounded = quantize(x.detach(), block).dequantize()
    return x + (rounded - x.detach())


def round_forward_alone(layer, x):
    """TrainedBlockLinear.forward with an exact backward."""
    rows = straight_through(x.flatten(0, -2), BLOCKS.activation)
    weight = straight_through(layer.master, BLOCKS.weight)
    return F.linear(rows, weight, layer.bias).unflatten(0, x.shape[:-1])


def gradient(model, batch):
    """The gradient of the loss of a Batch by all that is trained, float32 [n]."""
    for p in qerl.trainable(model).values():
        p.grad = None
    logprobs = qerl.token_logprobs(model, batch.prompts, batch.tokens, batch.length)
    loss, _ = qerl.policy_loss(logprobs, batch.old_logprobs, batch.advantages, batch.weights)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()])


def relative(ours, exact):
    return ((ours - exact).norm() / exact.norm()).item()


def show_products():
    model, _, _ = small_policy(1, "bf16")
    weight = model.blocks[0].mlp.down.weight.dequantize(torch.float32)
    x = torch.randn(256, weight.shape[1]) * torch.randn(weight.shape[1]).exp()
    grad = torch.randn(256, weight.shape[0]) * 1e-5
    print("1. The three products of a layer of the built-in policy (down), relative error. Whole\n"
          "rows share a scale on GPUs that multiply no blocks; x has channels of unequal size.\n\n"
          "  scales                   Y = X W^T   dX = dY W   dW = dY^T X")
    for name, recipe in (("1 x 128 and 128 x 128", BLOCKS), ("whole rows", ROWS)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = TrainedProduct.apply(*leaves, recipe)
        y.backward(grad)
        pairs = [(y, x @ weight.T), (leaves[0].grad, grad @ weight), (leaves[1].grad, grad.T @ x)]
        print(f"  {name:22}" + "".join(f"{relative(*pair):12.2%}" for pair in pairs))


def show_mismatch():
    """Prints a table -> the model of its first line, all of whose weights are trained, and its Batch."""
    print("\n2. Who samples and who is trained: 96 completions. l = log pi_old - log pi_rollout\n"
          "should be 0 but for AQN, QeRL's noise on purpose, here sigma = 0.01 as at its start.\n\n"
          "  rollout        training   trained           K3   mean |l|   eff. completions")
    settings = types.SimpleNamespace(micro_tokens=16384)
    cases = [
        ("all weights", Neighbour(settings, "unified"), "FP8", "FP8"),
        ("all weights", Neighbour(settings, "rollout"), "FP8", "float32"),
        ("LoRA", Neighbour(settings, "training"), "NVFP4", "FP8"),
        ("LoRA", Method(settings), "NVFP4", "NVFP4"),
        ("LoRA", Method(settings), "NVFP4 + AQN", "NVFP4"),
    ]
    runs = []
    for trained, method, rollout, training in cases:
        torch.manual_seed(0)
        weights, rank = ("nvfp4", 16) if trained == "LoRA" else ("bf16", 0)
        model, text, prompts = small_policy(24, weights, lora_rank=rank)
        if rank == 0:
            train_all_weights(model)
        for layer in model.quantized_layers():
            if layer.rank:                             # LoRA as after some training
                torch.nn.init.normal_(layer.lora_B, std=0.02)
        method.prepare(model, None, None, None)
        _, batch = sample_step(method, model, text, prompts, 0.01 * rollout.endswith("AQN"))
        runs.append((model, batch))
        seen = describe_mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.mask)
        log_ratio = (batch.old_logprobs - batch.rollout_logprobs)[batch.mask]
        print(f"  {rollout:14} {training:10} {trained:12} {max(seen['mismatch_kl'], 0):7.1e} "
              f"{log_ratio.abs().mean():10.1e} {seen['effective_completions']:18.1%}", flush=True)
    return runs[0]


def show_gradient(model, batch):
    batch.weights = qerl.token_weights(batch.mask)
    batch.advantages = torch.randn(len(batch.prompts))
    ours = gradient(model, batch)
    for layer in model.quantized_layers():
        layer.forward = functools.partial(round_forward_alone, layer)
    forward = gradient(model, batch)
    for layer in model.quantized_layers():
        del layer.forward
    with fp8(model, False):
        exact = gradient(model, batch)
        four_bits, _, _ = small_policy(1, "nvfp4")
        for layer, rounded in zip(model.quantized_layers(), four_bits.quantized_layers()):
            layer.master.data = rounded.weight.dequantize(torch.float32)
        other = gradient(model, batch)
    print("\n3. The gradient of all weights, relative error. The policy is so sure of most tokens\n"
          "that its gradient hangs on few; to round its weights is to ask another policy.\n")
    lines = {
        "forward and backward in FP8, against 32 bits": (ours, exact),
        "weights rounded to NVFP4, the rest in 32 bits, against 32 bits": (other, exact),
        "backward in FP8, against 32 bits, of the same FP8 policy": (ours, forward),
    }
    for name, pair in lines.items():
        print(f"  {name:63}{relative(*pair):7.1%}")


def main():
    torch.manual_seed(0)
    show_products()
    show_gradient(*show_mismatch())


if __name__ == "__main__":
    main()
