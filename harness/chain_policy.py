"""A policy whose expected reward, and thereby its gradient, is known exactly: a Markov chain.

Each of 16 tokens depends on the one before it alone, by the softmax of a row of logits [5, 5]; the
reward is 1 if the last of them is 0. For methods/rollout_correction.py.
"""
import torch

from harness.batches import Batch


def expected_reward(logits):
    return torch.linalg.matrix_power(logits.softmax(-1), 16)[0, 0]


def sampled_gradient(method, logits, noisy, size=1024):
    """The gradient in the logits [5, 5] that the method makes of the noisy policy's completions."""
    tokens = [torch.zeros(size, dtype=torch.long)]
    for _ in range(16):
        tokens.append(torch.multinomial(noisy.softmax(-1)[tokens[-1]], 1)[:, 0])
    tokens = torch.stack(tokens, 1)
    pairs = tokens[:, :-1], tokens[:, 1:]
    logprobs = logits.log_softmax(-1)[pairs]
    rollout_logprobs = noisy.log_softmax(-1)[pairs]
    advantages = (tokens[:, -1] == 0).float() - expected_reward(logits).item()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    batch = Batch(None, tokens, None, rollout_logprobs, advantages, mask, weights=mask / size)
    batch.old_logprobs = rollout_logprobs if method.variant == "bypass" else logprobs.detach()
    loss, _ = method.loss(logprobs, batch)
    return -torch.autograd.grad(loss, logits)[0]
