"""What the demonstrations of methods/ share: the small policy, a step without its update, measures.

Of the answers that it reads on held-out problems 60 % are careless, as of those that it once
imitated.
"""
import torch
import torch.nn.functional as F

import qerl
from harness.answers import final_number, stated_number
from harness.batches import Batch
from harness.small_policy import ByteText, made_up_problems, warm_start, word_problems
from harness.worked import answer_logits, batches_of, worked_sequences


def small_policy(count, weights="nvfp4", **options):
    """(model, text, `count` prompts as lists of token ids) of the built-in policy on a CPU."""
    text = ByteText()
    problems, _ = made_up_problems()
    prompts = [text.prompt(p["question"]) for p in problems[:count]]
    return qerl.load_model(warm_start(), weights, **options), text, prompts


def adapted_policy(count, **options):
    """small_policy with LoRA as after some training: alike in every dtype."""
    torch.manual_seed(0)
    model, text, prompts = small_policy(count, **options)
    for layer in model.quantized_layers():
        torch.nn.init.normal_(layer.lora_B, std=0.02)
    return model, text, prompts


def sample_step(method, model, text, prompts, sigma=0.0, group=4, seed=0):
    """A step's rollout by a methods.Method, with noise, and its log pi_old -> (Rollout, Batch).

    group completions a prompt of at most 64 tokens; every advantage is 1.
    """
    sampling_rng = torch.Generator().manual_seed(seed)
    noise_rng = torch.Generator().manual_seed(seed)
    with method.noise(model, sigma, noise_rng):
        rollout = method.generate(
            model, prompts, 64, group, eos=text.eos, slots=256, generator=sampling_rng)
    repeated = [p for p in prompts for _ in range(group)]
    advantages = torch.ones(len(repeated))
    batch = Batch(
        repeated, rollout.tokens, rollout.length, rollout.logprobs, advantages, rollout.mask)
    batch.old_logprobs = method.old_logprobs(model, batch)
    return rollout, batch


def scored_completions(model, text, generator):
    """complete(questions), as a Method's `explore` takes it: groups of 8, of at most 64 tokens."""
    import train_gsm8k         # only here, because it imports the methods

    def complete(questions, phase="rollout", **options):
        prompts = [q["prompt"] for q in questions]
        rollout = qerl.generate(
            model, prompts, 64, 8, eos=text.eos, generator=generator, **options)
        texts = train_gsm8k.decode_all(text, rollout)
        return train_gsm8k.score(questions, rollout, texts, "answer")
    return complete


def gradient(model, batch, scale=1):
    """The gradient of `scale` times a Batch's loss by all that is trained, over scale: float32 [n]."""
    for p in qerl.trainable(model).values():
        p.grad = None
    logprobs = qerl.token_logprobs(model, batch.prompts, batch.tokens, batch.length)
    loss, _ = qerl.policy_loss(logprobs, batch.old_logprobs, batch.advantages, batch.weights)
    (scale * loss).backward()
    return torch.cat([p.grad.flatten() for p in qerl.trainable(model).values()]) / scale


def relative(ours, exact):
    """The length of the difference over that of the exact."""
    return ((ours - exact).norm() / exact.norm()).item()


def k3_of(batch):
    """How far the policy that sampled a Batch is from the one without noise, in nats a token."""
    return qerl.mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.sampled)[0]


def worked_problems(count=128):
    """(questions to learn from, `count` held out as Rows), answered as the policy once imitated."""
    questions, held_out = made_up_problems(careless=0.6)
    known = {p["question"] for p in questions + held_out}
    text = word_problems(count, seed=3, exclude=known, careless=0.6)
    sequences = worked_sequences(text, ByteText(), tokens=10 ** 9)
    return questions, batches_of(sequences, 64, "cpu")


@torch.no_grad()
def distance(model, teacher, held_out):
    """How far a model's outputs on held-out Rows are from a 16-bit model's.

    -> {"error": of the logits, relative; "kl": forward KL to it, nats per token; "perplexity"}.
    """
    difference = norm = kl = loss = 0.0
    count = 0
    for rows in held_out:
        logits, labels = answer_logits(model, rows)
        exact, _ = answer_logits(teacher, rows)
        difference += (logits - exact).square().sum().item()
        norm += exact.square().sum().item()
        kl += F.kl_div(logits.log_softmax(-1), exact.log_softmax(-1), log_target=True,
                       reduction="sum").item()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    perplexity = torch.tensor(loss / count).exp().item()
    return {"error": (difference / norm) ** 0.5, "kl": kl / count, "perplexity": perplexity}


def accuracy(model, problems=128):
    """The fraction of held-out problems that the built-in policy answers right, greedily."""
    text = ByteText()
    questions = made_up_problems()[1][:problems]
    prompts = [text.prompt(q["question"]) for q in questions]
    rollout = qerl.generate(model, prompts, 64, temperature=0.0, eos=text.eos)
    texts = [text.decode(tokens[:length].tolist())
             for tokens, length in zip(rollout.tokens, rollout.length)]
    right = [stated_number(t) == final_number(q) for t, q in zip(texts, questions)]
    return sum(right) / len(right)
