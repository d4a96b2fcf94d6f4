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
learning rate times s, but only for the weights that read a norm. And so frozen weights gain
nothing: NVFP4's codes and block scales do not change (--method qurl refuses them). A note counts
s², since it takes the rounding error in the units of the weights that became smaller.

What differs from QeRL: it leaves clipping alone, and its LoRA is never rounded. The paper's result
(secondary; 0.5B, PPO, GSM8K): BF16 55.4, FlashRL INT8 51.4, QuRL INT8 53.6, QuRL FP8 54.3.
Ours will stand in methods/README.md. Variants acr-int8 and acr-fp8 leave UAQ out and take LoRA.

When would you use it? Where FlashRL's rollout is right, all weights are trained with small steps,
and the log shows tokens beyond the cap (capped_fraction). If it shows none, ACR changes nothing.
"""
import contextlib
import copy
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import qerl
from harness.batches import Batch
from harness.eight_bit import eight_bit, quantize_rows, require_fp8_products
from harness.full_weights import train_all_weights
from harness.small_policy import ByteText, made_up_problems, warm_start
from harness.worked import answer_logits, rows_of, worked_sequences
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

    def loss(self, logprobs, piece):
        old = piece.old_logprobs
        r = truncation(old, piece.rollout_logprobs, self.settings.tis)
        weight = qerl.truncated_importance(old, piece.rollout_logprobs, self.settings.tis)
        return qerl.policy_loss(
            logprobs, old, piece.advantages, piece.weights,
            torch.full_like(r, self.settings.clip_low), (1 + self.settings.clip_high) / r - 1,
            piece.ref_logprobs, self.settings.beta, weight,
        )

    def measure(self, batch):
        r = truncation(batch.old_logprobs, batch.rollout_logprobs, self.settings.tis)
        capped = (r < 1)[batch.mask].float().sum() / batch.mask.sum().clamp_min(1)
        return {"capped_fraction": capped.item()}


def show_clipping():
    """The slope of the gain in log π at R = 1.5 and advantage 1, with and without ACR."""
    rho = torch.tensor([[0.5, 1, 2, 3, 4, 8]])
    one = torch.ones_like(rho)
    token = Batch(None, None, None, -rho.log(), one[0, :1], one.bool(), 0 * rho, weights=one)
    settings = SimpleNamespace(tis=2.0, clip_low=0.2, clip_high=0.28, beta=0)
    slopes = []
    for method in (Method(settings), Neighbour(settings, "acr")):
        logprobs = (1.5 * one).log().requires_grad_()
        loss, _ = method.loss(logprobs, token)
        slopes.append(-torch.autograd.grad(loss, logprobs)[0][0])
    r = truncation(token.old_logprobs, token.rollout_logprobs, settings.tis)
    print("ACR: a token at R = 1.5, where TIS alone clips all that is above 1.28; C = 2\n"
          "   ρ    w     r   ACR's bound   slope with TIS   with ACR")
    for row in zip(rho[0], (rho * r)[0], r[0], (1.28 / r)[0], *slopes):
        print("{:4.1f} {:4.1f} {:5.2f} {:13.2f} {:16.1f} {:10.1f}".format(*map(abs, row)))


def codes_of(model):
    """The INT8 codes of all weights that read a norm, in a line, and their relative error."""
    weights = [b.attention.qkv.master.detach() for b in model.blocks]
    weights += [b.mlp.gate_up.master.detach() for b in model.blocks]
    parts = [quantize_rows(weight, "int8") for weight in weights]
    errors = [(codes * scale - w).norm() for w, (codes, scale) in zip(weights, parts)]
    error = torch.stack(errors).norm() / torch.stack([w.norm() for w in weights]).norm()
    return torch.cat([codes.flatten() for codes, _ in parts]), error


def one_step(model, lr):
    """One step of Adam towards some 16 worked answers."""
    questions, _ = made_up_problems()
    rows = rows_of(worked_sequences(questions, ByteText(), tokens=1600), "cpu")
    optimizer = torch.optim.Adam(qerl.trainable(model).values(), lr)
    F.cross_entropy(*answer_logits(model, rows)).backward()
    optimizer.step()


def show_updates():
    plain = qerl.load_model(warm_start(), "bf16")
    train_all_weights(plain)
    scaled = copy.deepcopy(plain)
    scale_for_updates(scaled, UAQ_SCALE)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        moved = (plain(tokens) - scaled(tokens)).abs().max()
    error = [codes_of(model)[1] for model in (plain, scaled)]
    print(f"\nUAQ on the built-in policy, s = {UAQ_SCALE}: its logits move by {moved:.0e},\n"
          f"the relative error of its INT8 weights from {error[0]:.5f} to {error[1]:.5f}.\n"
          "Codes that one step of Adam changes:\n"
          "learning rate    plain   rate times s      UAQ")
    for lr in (1e-6, 1e-5, 1e-4):
        changed = []
        for start, rate in ((plain, lr), (plain, lr * UAQ_SCALE), (scaled, lr)):
            model = copy.deepcopy(start)
            before, _ = codes_of(model)
            one_step(model, rate)
            changed.append((codes_of(model)[0] != before).float().mean().item())
        print(f"{lr:13.0e} {changed[0]:8.3%} {changed[1]:14.3%} {changed[2]:8.3%}")
    print("The rounding stays, the step grows; a larger rate would move the other weights, too.")


def show_frozen():
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    packed, block_scale, global_scale = qerl.quantize_nvfp4(weight)
    packed_s, block_scale_s, global_scale_s = qerl.quantize_nvfp4(weight / UAQ_SCALE)
    codes = (packed != packed_s).sum()
    scales = (block_scale.float() != block_scale_s.float()).sum()
    factor = (global_scale_s / global_scale).item()
    print(f"\nUAQ on a frozen NVFP4 weight [512, 1024]: {codes} pairs of codes and {scales} block scales\n"
          f"change. The global scale takes the factor ({factor:.4f}), the norm takes it back, and no\n"
          "step will come.")


def main():
    show_clipping()
    show_updates()
    show_frozen()


if __name__ == "__main__":
    main()
