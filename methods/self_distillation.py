"""Self-distillation: before RL, LoRA learns to write what the 16-bit model finds likely.

    python train_gsm8k.py --model Qwen2.5-0.5B --quantizer rtn --method self_distillation

"On-Policy Distillation" (thinkingmachines.ai/blog/on-policy-distillation, a secondary note) and GKD,
"On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", arXiv 2306.13649
(abstract).

The problem. Rounding to 4 bits costs accuracy before training starts. RL has to win it back from one
number a completion, the reward. But the model before rounding is still there, and can judge each token.

The formula. The student, the 4-bit policy with LoRA, answers questions. Its teacher is the same model
in 16 bits without LoRA. The advantage of each token that the student sampled is

    A = log π_teacher(token) - log π_student(token),

and a step follows Σ A ∇ log π_student over all tokens, divided by their number. As E[∇ log π] = 0,
that is on average the gradient of -KL(π_student || π_teacher) at each token, where the tokens before
it are taken as given. This reverse KL is 0 only where the student writes as its teacher does. It is
measured on the student's own texts, so that the teacher also judges what follows on a mistake. As the
student comes near, A goes to 0, and the noise of the gradient with it.

What differs from QeRL. LoRA starts here and not at zero, and the reference policy of the KL term has
this LoRA. Nothing is rewarded, and no worked answer is read (rilq.py and qat.py read them). The
teacher has to fit on the device beside the student. A resumed run finds this start again; on a GPU
sums may add up in another order.

The papers' results: a student comes near a stronger teacher in a fraction of the time that RL takes
[secondary]. Their teachers are larger models. That the teacher is the student's own 16-bit model is our
choice, and so are the recipe's numbers. Ours: not measured yet.

When would you use it? Where a policy starts visibly lower in 4 bits than in 16, and the 16-bit model
fits on the device.
"""
import torch

import qerl
from harness import fast
from harness.batches import cut_rows
from harness.export import require_16_bit
from methods import rilq

RECIPE = dict(steps=40, batch=256, lr=2e-4, budget=16384)
SMALL_RECIPE = dict(steps=10, batch=32, lr=1e-3, budget=16384)         # for the built-in policy


def distil(model, teacher, prompts, generator, steps, batch, lr, budget, **options):
    """Train the model's LoRA towards the teacher -> KL(student || teacher) of each step, nats a token.

    prompts: lists of token ids, of which a step takes the next `batch`; budget: tokens of a pass
    (batches.cut_rows); options, generator: those of fast.generate.
    """
    optimizer = torch.optim.AdamW(qerl.trainable(model).values(), lr, weight_decay=0.0)
    kls = []
    for step in range(steps):
        asked = [prompts[i % len(prompts)] for i in range(step * batch, (step + 1) * batch)]
        rollout = fast.generate(model, asked, generator=generator, **options)
        weights = qerl.token_weights(rollout.mask, "dapo")             # the mean over all tokens
        kl = 0.0
        for rows in cut_rows(asked, rollout.length.tolist(), budget):
            texts = [asked[i] for i in rows], rollout.tokens[rows], rollout.length[rows]
            logprobs = fast.token_logprobs(model, *texts)
            with torch.no_grad():
                advantages = fast.token_logprobs(teacher, *texts) - logprobs
            loss, _ = qerl.policy_loss(logprobs, logprobs.detach(), advantages, weights[rows])
            loss.backward()
            kl -= (advantages * weights[rows]).sum().item()
        optimizer.step()
        optimizer.zero_grad()
        kls.append(kl)
    return kls


class Neighbour(rilq.Neighbour):
    """QeRL whose LoRA starts near the 16-bit model."""

    def prepare(self, model, folder, questions, tokenizer):
        settings = self.settings
        require_16_bit(folder, f"--method {settings.method}")
        teacher = fast.load_model(folder, "bf16", device=settings.device)
        kls = distil(
            model, teacher, [question["prompt"] for question in questions],
            torch.Generator(model.device).manual_seed(settings.seed),
            **(RECIPE if settings.model else SMALL_RECIPE),
            max_new_tokens=settings.max_new_tokens, eos=tokenizer.eos, slots=settings.slots or 256)
        model.reference = rilq.adapter(model)          # of the KL term: the start, LoRA included
        print(f"self-distillation: KL to the 16-bit model {kls[0]:.4f} -> {kls[-1]:.4f} nats a token")
