"""AQN steered instead of scheduled; several draws a group; other places and other distributions.

    python -m methods.noise_control                    the demonstration, on a CPU
    python train_gsm8k.py --method noise_control:VARIANT

The problem. QeRL schedules sigma (Eq. 8), but what explores is the divergence that sigma causes:
how far the same sigma moves a policy depends on the model, its layers and the time. Besides, all
completions of a step share one draw, so that a group compares answers of a single perturbed policy.

Marks: [P] a paper or its code was read, [S] a secondary note, [I] our inference. mu is the noisy
policy that sampled, pi_old the same without noise, l = log pi_old - log mu of a sampled token.

    divergence  K = EMA(mean(e^l - 1 - l)) - K_0, where K_0 was measured at sigma 0 (rounding);
                sigma <- sigma * clip(sqrt(delta / K), 0.8, 1.25), as K grows with sigma^2       [I]
                delta = 3e-3 * (Eq. 8's sigma / its first)^2: QeRL's curve, in nats              [I]
    plappert    sigma <- 1.01 sigma if mean(-l) <= 0.003, else sigma / 1.01: Plappert et al.
                (arXiv 1706.01905); mean(-l) and 0.003 are PSN-RLVR's (2602.02555)               [P]
    entropy     sigma <- sigma +- a 50th of its range by whether the entropy is below 0.2: the
                rule of Skywork-OR1 for its entropy bonus [P], here for sigma                    [I]
    pooled      four draws a group, each for a quarter of it, and sequence-MIS: a completion counts
                min(w, 2) times for w = exp(sum of l), and not at all outside 0.5 <= w <= 2.
                3PO (2608.09805); how many draws it takes is not in our note                     [S]
    attention, mlp, first, last    noise in these norms alone: before attention, before the MLP, in
                the first or last third of the blocks                                            [I]
    uniform, laplace               the same variance, lighter or heavier tails                   [I]

What differs from QeRL: `noise`, and for pooled draws also `generate` and the loss. The first stage
stays without noise. PSN-RLVR truncates importance weights at 10: add --tis 10.

The papers' results: with one draw a step 3PO's authors found no gain over GRPO on average, with
pooled draws and sequence-MIS 0.9 points, three seeds [S]. Ours will stand in methods/README.md.

When would you use it? `divergence` where no good sigma is known: for a new model, format or number
of layers. It needs the noise's share of K to stand out of K_0, which in bfloat16 is not small.
`pooled` where rewards within a group hardly differ; it starts the sampler four times, and with long
completions w leaves its range, so look at kept_fraction. The others are for ablations.
"""
import contextlib
import dataclasses
import math
import types

import torch

import qerl
from harness.batches import join_rollouts
from harness.demonstration import sample_step, small_policy
from harness.mismatch import ratio_of
from methods import Method
from qerl import require

LOOPS = ("divergence", "plappert", "entropy")
PLACES = ("attention", "mlp", "first", "last")
UNIT_VARIANCE = {
    "uniform": torch.distributions.Uniform(-math.sqrt(3), math.sqrt(3)),
    "laplace": torch.distributions.Laplace(0.0, math.sqrt(0.5)),
}
SMALLEST = 1e-4                # sigma of a loop stays between these: our choice
LARGEST = 0.2
FIRST_DIVERGENCE = 3e-3        # nats a token
PLAPPERT_DIVERGENCE = 3e-3
TARGET_ENTROPY = 0.2           # nats a token
DRAWS = 4                      # in a pooled group


def clip(x, low, high):
    return max(low, min(x, high))


def faster_rule(sigma, divergence, target):
    """The sigma at which the divergence, proportional to sigma^2, would be at its target.

    At most a factor of 1.25 is taken at once.
    """
    return sigma * clip(math.sqrt(target / max(divergence, 1e-12)), 0.8, 1.25)


def chosen_norms(model, place):
    """The RMSNorms that a place names; without a place all."""
    third = math.ceil(len(model.blocks) / 3)
    if place == "attention":
        return [block.attention_norm for block in model.blocks]
    if place == "mlp":
        return [block.mlp_norm for block in model.blocks]
    part = {"first": model.blocks[:third], "last": model.blocks[-third:]}.get(place, model)
    return [m for m in part.modules() if isinstance(m, qerl.RMSNorm)]


@contextlib.contextmanager
def shaped_noise(model, sigma, generator, variant):
    """AQN in the norms of a place alone, or of another distribution; for other variants AQN."""
    noisy = chosen_norms(model, variant)
    with qerl.adaptive_quantization_noise(model, sigma, generator):
        for norm in (m for m in model.modules() if isinstance(m, qerl.RMSNorm)):
            if norm not in noisy:
                norm.noisy_weight = None
            elif variant in UNIT_VARIANCE:
                # u > 0: Laplace's 0 lies at minus infinity.
                u = torch.rand(norm.weight.shape, generator=generator).clamp_min(2 ** -25)
                z = UNIT_VARIANCE[variant].icdf(u).to(norm.weight.device)
                norm.noisy_weight = norm.weight.detach() + sigma * z
        yield


def sequence_weights(batch):
    """Sequence-MIS: how often each completion counts, float32 [N]; see `pooled` above."""
    log_ratio = (batch.old_logprobs - batch.rollout_logprobs).sum(1)         # padding has none
    ratio = ratio_of(log_ratio)
    inside = (ratio >= 0.5) & (ratio <= 2)
    return torch.where(inside, ratio, 0)


class Neighbour(Method):
    """QeRL with its noise controlled as the variant says.

    state: "sigma" of the next step, "divergence" (EMA) and "rounding" (K_0), in nats a token.
    """
    variants = (*LOOPS, "pooled", *PLACES, *UNIT_VARIANCE)

    def __init__(self, settings, variant=None):
        super().__init__(settings, variant)
        self.state = {"sigma": settings.sigma_start, "divergence": None, "rounding": 0.0}

    def check(self):
        name = f"--method noise_control:{self.variant}"
        settings = self.settings
        require(settings.sigma_start > 0 and settings.stages > 1,
                f"{name}: there is no noise to control; use --sigma-start 0.01 and --stages 10")
        if self.variant == "pooled":
            require(settings.group % DRAWS == 0, f"{name}: {DRAWS} draws share a group of "
                    f"{settings.group} unequally; use a --group divisible by {DRAWS}")
            require(settings.tis == 0,
                    f"{name}: weighs completions already; use --tis 0")

    @contextlib.contextmanager
    def noise(self, model, sigma, generator):
        """sigma: of QeRL's schedule, 0 in the first stage."""
        self.scheduled = sigma
        self.generator = generator
        self.sigma = self.state["sigma"] if self.variant in LOOPS and sigma > 0 else sigma
        if self.variant == "pooled":
            yield                              # `generate` draws the noise
        else:
            with shaped_noise(model, self.sigma, generator, self.variant):
                yield

    def generate(self, model, prompts, max_new_tokens, group_size, **options):
        if self.variant == "pooled":
            return self.generate_pooled(model, prompts, max_new_tokens, group_size, **options)
        rollout = super().generate(model, prompts, max_new_tokens, group_size, **options)
        self.entropy = rollout.entropy[rollout.mask].mean().item()
        return rollout

    def generate_pooled(self, model, prompts, max_new_tokens, group_size, **options):
        """One call of the sampler a draw; its rows are put back in the order of the prompts."""
        share = group_size // DRAWS
        rollouts = []
        for _ in range(DRAWS):
            with qerl.adaptive_quantization_noise(model, self.sigma, self.generator):
                rollouts.append(qerl.generate(model, prompts, max_new_tokens, share, **options))
        rows = torch.arange(DRAWS * len(prompts) * share).view(DRAWS, len(prompts), share)
        return join_rollouts(rollouts, rows.transpose(0, 1).flatten())

    def loss(self, logprobs, piece):
        if self.variant == "pooled":           # a weight of the gain is one of the advantage
            weighted = piece.advantages * sequence_weights(piece)
            piece = dataclasses.replace(piece, advantages=weighted)
        return super().loss(logprobs, piece)

    def measure(self, batch):
        """Steer sigma for the next step; log the one that this step had."""
        measured = {"sigma": self.sigma}
        if self.variant == "pooled":
            measured["kept_fraction"] = (sequence_weights(batch) > 0).float().mean().item()
        k3, _ = qerl.mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.mask)
        if self.scheduled == 0:
            self.state["rounding"] = k3
        elif self.variant in LOOPS:
            k1 = (batch.rollout_logprobs - batch.old_logprobs)[batch.mask].mean().item()
            self.state["sigma"] = clip(self.steer(k1, k3), SMALLEST, LARGEST)
        return measured

    def steer(self, k1, k3):
        """The next sigma by this step's mean(-l), mean(e^l - 1 - l) and entropy."""
        if self.variant == "plappert":
            return self.sigma * 1.01 if k1 <= PLAPPERT_DIVERGENCE else self.sigma / 1.01
        if self.variant == "entropy":
            step = LARGEST / 50
            return self.sigma + (step if self.entropy < TARGET_ENTROPY else -step)
        before = self.state["divergence"]
        self.state["divergence"] = k3 if before is None else (before + k3) / 2
        target = FIRST_DIVERGENCE * (self.scheduled / self.settings.sigma_start) ** 2
        return faster_rule(self.sigma, self.state["divergence"] - self.state["rounding"], target)


# --------------------------------------------------------------------------------------------------
# The demonstration

def k3_of(batch):
    return qerl.mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.mask)[0]


def main():
    model, text, prompts = small_policy(12)
    settings = types.SimpleNamespace(sigma_start=0.02, micro_tokens=16384)

    print("1. What sigma does to the small policy. K3 = mean(e^l - 1 - l) grows about as sigma^2, so\n"
          "one measurement tells the sigma of a target; the entropy hardly grows: AQN moves a policy\n"
          "more than it flattens it. kept: the completions that sequence-MIS leaves.\n\n"
          "  sigma        K3  K3/sigma^2  entropy  kept")
    for sigma in (0, 0.01, 0.03, 0.1, 0.2):
        rollout, batch = sample_step(Neighbour(settings), model, text, prompts, sigma)
        slope = f"{k3_of(batch) / sigma ** 2:.2f}" if sigma else ""
        entropy = rollout.entropy[rollout.mask].mean()
        kept = (sequence_weights(batch) > 0).float().mean()
        print(f"{sigma:7} {k3_of(batch):9.1e} {slope:>11} {entropy:8.3f} {kept:5.0%}")

    print("\n2. sigma = 0.1 elsewhere and of other distributions, K3 over four draws. The spread\n"
          "between draws is what a step with one draw is exposed to, and what pooling averages.\n\n"
          "  noise          mean     least      most")
    _, clean = sample_step(Neighbour(settings), model, text, prompts)
    for variant in (None, *PLACES, *UNIT_VARIANCE):
        method = Neighbour(settings, variant)
        noise_rng = torch.Generator().manual_seed(0)
        found = []
        for _ in range(4):
            with method.noise(model, 0.1, noise_rng):
                noisy = method.old_logprobs(model, clean)
            found.append(qerl.mismatch(noisy, clean.old_logprobs, clean.mask)[0])
        mean = sum(found) / len(found)
        print(f"  {variant or 'all norms':10} {mean:8.5f}  {min(found):8.5f}  {max(found):8.5f}")

    print(f"\n3. Loops from sigma = 0.02 on, towards K3 = {FIRST_DIVERGENCE} or mean(-l) = "
          f"{PLAPPERT_DIVERGENCE}:\n\n"
          "         divergence          plappert\n"
          "  step  sigma       K3    sigma       K3")
    loops = [Neighbour(settings, "divergence"), Neighbour(settings, "plappert")]
    for i in range(6):
        cells = []
        for loop in loops:
            _, batch = sample_step(loop, model, text, prompts, sigma=0.02, seed=i)
            cells.append(f"{loop.measure(batch)['sigma']:.4f} {k3_of(batch):8.5f}")
        print(f"{i + 1:6} {cells[0]}   {cells[1]}")


if __name__ == "__main__":
    main()
