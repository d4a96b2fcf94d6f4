"""QuRL: an 8-bit rollout whose clipping follows the truncation, and whose steps show in the codes.

    python -m methods.qurl                                    both ideas in figures
    python train_gsm8k.py --method qurl:acr                   ACR alone, with QeRL's rollout
    python train_gsm8k.py --method qurl --lora-rank 0 --beta 0 --lr 1e-6    both, on an INT8 rollout

The problem (arXiv 2602.13953, abstract; the formulas from secondary notes, two of which agree).
FlashRL's truncated weights make long runs collapse, and steps of RL are so small that rounding
swallows them: the 8-bit policy that samples stands still while the 16-bit one is trained.

ACR (adaptive clipping range). Let ρ = π_old / π_rollout and R = π / π_old at a token. The whole
weight ρ is truncated to w = min(ρ, C) = ρ r with r = min(1, C / ρ). Then

    w min(R A, clip(R, 1-ε, 1+ε) A) = ρ min(r R A, clip(r R, r (1-ε), r (1+ε)) A):

where r < 1 the bound of what is weighted by ρ fell from 1+ε to r (1+ε). ACR puts it back,

    w min(R A, clip(R, 1-ε, (1+ε) / r) A).

So a bound moves only at tokens whose weight was truncated. (One note has r = π_old / π_rollout,
which moves nearly all bounds, and inwards where ρ is large. That contradicts the derivation, which
we follow: an inference.)

UAQ (update-aware quantisation): once, before training, norm scales γ <- s γ and the weights that
read them W <- W / s, s = 1.5. The function stays; an optimiser's step in W is s times larger
against the quantisation step. Our inference, which `main` checks: scales are maxima, so codes and
relative rounding errors stay as they were, too. What is gained is the larger step alone, as from a
learning rate times s, but only for the weights that read a norm; the norm's own scales, trained as
well, move 1/s as far. And so frozen weights gain nothing: NVFP4's codes and block scales do not
change (--method qurl refuses them). A note counts s², since it takes the rounding error in the
units of the weights that became smaller.

What differs from QeRL: it leaves clipping alone, and its LoRA is never rounded. The paper's result
(secondary; 0.5B, PPO, GSM8K): BF16 55.4, FlashRL INT8 51.4, QuRL INT8 53.6, QuRL FP8 54.3. Ours: on
the small policy acr never reaches its cap, and is token-tis to the last bit; accuracy:
methods/README.md. Variants acr-int8 and acr-fp8 leave UAQ out and take LoRA.

When would you use it? Where FlashRL's rollout is right, all weights are trained with small steps,
and the log shows tokens beyond the cap (capped_fraction). If it shows none, ACR changes nothing.
"""
import contextlib
from types import SimpleNamespace

import torch

import qerl
from harness.batches import Batch
from harness.eight_bit import eight_bit, quantize_rows, require_fp8_products
from harness.small_policy import warm_start
from methods import Method, flashrl
from qerl import UserError

UAQ_SCALE = 1.5


def truncation(old_logprobs, rollout_logprobs, cap):
    """r = min(1, C π_rollout / π_old), float32 [B, C]: what truncation leaves of a weight."""
    return (cap * (rollout_logprobs - old_logprobs).exp()).clamp(max=1)


def scale_for_updates(model, s):
    """UAQ, in place: norm scales times s, the trained weights that read them divided by s."""
    for block in model.blocks:
        readers = (block.attention_norm, block.attention.qkv), (block.mlp_norm, block.mlp.gate_up)
        for norm, layer in readers:
            norm.weight.data *= s
            norm.reference_weight *= s
            layer.master.data /= s


class Neighbour(Method):
    variants = ("int8", "fp8", "acr", "acr-int8", "acr-fp8")

    def __init__(self, settings, variant=None):
        super().__init__(settings, variant)
        self.update_aware = not variant.startswith("acr")
        self.format = variant.removeprefix("acr").removeprefix("-")      # "" for QeRL's own rollout

    @classmethod
    def defaults(cls, variant):
        return dict(tis=2.0) if variant == "acr" else flashrl.Neighbour.defaults(variant)

    def check(self):
        name = f"--method qurl:{self.variant}"
        if self.update_aware and self.settings.weights != "bf16":
            raise UserError(f"{name}: UAQ does nothing to frozen {self.settings.weights} weights; "
                            "use --weights bf16 --lora-rank 0 --beta 0, or --method qurl:acr")
        if self.update_aware and self.settings.lora_rank:
            raise UserError(f"{name}: UAQ is for weights that are trained; use --lora-rank 0 "
                            f"--beta 0 and a lower --lr, or with LoRA --method qurl:acr-{self.format}")
        if self.format and self.settings.weights != "bf16":
            raise UserError(f"{name}: quantises 16-bit weights for the rollout; use --weights bf16, "
                            "or --method qurl:acr")
        if not self.settings.tis:
            raise UserError(f"{name}: ACR undoes what truncation does to clipping; use --tis 2")
        if self.format == "fp8":
            remedy = f"use --method qurl:{self.variant.replace('fp8', 'int8')}"
            require_fp8_products(self.settings.device, f"qurl:{self.variant}", remedy)

    def prepare(self, model, folder, questions, tokenizer):
        if self.update_aware:
            scale_for_updates(model, UAQ_SCALE)

    @contextlib.contextmanager
    def noise(self, model, sigma, generator):
        rollout = eight_bit(model, self.format) if self.format else contextlib.nullcontext()
        with super().noise(model, sigma, generator), rollout:
            yield

    def loss(self, logprobs, micro_batch):
        old = micro_batch.old_logprobs
        r = truncation(old, micro_batch.rollout_logprobs, self.settings.tis)
        weight = qerl.truncated_importance(old, micro_batch.rollout_logprobs, self.settings.tis)
        return qerl.policy_loss(
            logprobs, old, micro_batch.advantages, micro_batch.weights,
            torch.full_like(r, self.settings.clip_low), (1 + self.settings.clip_high) / r - 1,
            micro_batch.ref_logprobs, self.settings.beta, weight,
        )

    def before_updates(self, batch):
        r = truncation(batch.old_logprobs, batch.rollout_logprobs, self.settings.tis)
        capped = (r < 1)[batch.mask].float().sum() / batch.mask.sum().clamp_min(1)
        return {"capped_fraction": capped.item()}


def show_clipping():
    """The slope of the gain in log π at R = 1.5 and advantage 1."""
    rho = torch.tensor([[0.5, 1, 2, 3, 4, 8]])
    one = torch.ones_like(rho)
    token = Batch(None, None, None, -rho.log(), one[0, :1], one.bool(), 0 * rho, weights=one)
    settings = SimpleNamespace(tis=2.0, clip_low=0.2, clip_high=0.28, beta=0)
    logprobs = (1.5 * one).log().requires_grad_()
    loss, _ = Neighbour(settings, "acr").loss(logprobs, token)
    slope = -torch.autograd.grad(loss, logprobs)[0]
    r = truncation(token.old_logprobs, token.rollout_logprobs, settings.tis)
    print("ACR: the slope of a token's gain at R = 1.5, C = 2. With TIS alone, whose bound is always\n"
          "1.28, it is 0 everywhere.\n\n"
          "   ρ    w     r   ACR's bound   slope")
    for row in zip(rho[0], (rho * r)[0], r[0], (1.28 / r)[0], slope[0].abs()):
        print("{:4.1f} {:4.1f} {:5.2f} {:13.2f} {:7.1f}".format(*row))


def show_updates():
    """A weight that reads a norm, W and W / s, before and after a step of Adam from the start."""
    layer = qerl.load_model(warm_start(), "bf16").blocks[0].mlp.gate_up
    weight = layer.weight.dequantize(torch.float32)
    scaled = weight / UAQ_SCALE
    sign = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).sign()

    def changed(before, after):
        codes, _ = quantize_rows(before, "int8")
        return (quantize_rows(after, "int8")[0] != codes).float().mean()

    int8 = changed(weight, scaled)
    nvfp4 = (qerl.quantize_nvfp4(weight)[0] != qerl.quantize_nvfp4(scaled)[0]).float().mean()
    print(f"\nUAQ, s = {UAQ_SCALE}, changes {int8:.3%} of a weight's INT8 codes and {nvfp4:.3%} of "
          "its NVFP4 codes.\nThen a step of Adam moves each value by the learning rate, up or down. "
          "INT8 codes that\nit changes:\n\nlearning rate    plain   rate times s      UAQ")
    for lr in (1e-6, 1e-5, 1e-4):
        plain = changed(weight, weight + lr * sign)
        faster = changed(weight, weight + UAQ_SCALE * lr * sign)
        by_uaq = changed(scaled, scaled + lr * sign)
        print(f"{lr:13.0e} {plain:8.3%} {faster:14.3%} {by_uaq:8.3%}")
    print("\nThe rounding stays, the step grows; a larger rate would move the other weights, too.")


def main():
    show_clipping()
    show_updates()


if __name__ == "__main__":
    main()
