"""How far the policy that sampled is from the one that is trained, in a few numbers a step.

l = log π_old - log π_rollout of each sampled token. With AQN the noise is part of it; without, only
rounding is, unless the rollout has weights or arithmetic of its own (methods/flashrl.py).
"""
import qerl


def effective_sample_size(ratio):
    """(Σ ratio)² / (n Σ ratio²): the fraction of n samples that is left after weighting them."""
    return (ratio.sum() ** 2 / (len(ratio) * (ratio ** 2).sum())).item()


def describe_mismatch(old_logprobs, rollout_logprobs, mask):
    """{name: number} for metrics.jsonl of log-probabilities float32 [N, C] and mask bool [N, C].

    mismatch_k1 = E[-l] and mismatch_kl = E[eˡ - 1 - l] (K3) both estimate KL(π_rollout || π_old) in
    nats a token; mismatch_chi2 = E[e²ˡ] - 1 is the chi-squared divergence. The effective sample
    sizes are fractions, of tokens and of completions, whose ratio is the product of their tokens'.
    """
    kl, largest_ratio = qerl.mismatch(old_logprobs, rollout_logprobs, mask)
    log_ratio = (old_logprobs - rollout_logprobs).masked_fill(~mask, 0)
    tokens = qerl.bounded(log_ratio[mask]).exp()
    completions = qerl.bounded(log_ratio.sum(1)).exp()
    return {
        "mismatch_kl": kl,
        "mismatch_max_ratio": largest_ratio,
        "mismatch_k1": -log_ratio[mask].mean().item(),
        "mismatch_chi2": (tokens ** 2).mean().item() - 1,
        "effective_tokens": effective_sample_size(tokens),
        "effective_completions": effective_sample_size(completions),
    }
