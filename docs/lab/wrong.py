"""Wrong solutions of the lab: each has one fault. README.md says what to do with them.

Keep this file closed until you have written your own functions. A name is that of the right function
and a number. Arguments that are not here, such as `objective`, have no part in a fault.
"""
import contextlib
import math

import torch

import qerl


# --------------------------------------------------------------------------------------------------
# 1. Four bits

def quantize_nvfp4_1(weight):
    _, block_scale, global_scale = qerl.quantize_nvfp4(weight.relu())
    packed = qerl.encode_e2m1(weight, block_scale.float() / global_scale)
    return packed, block_scale, global_scale


def quantize_nvfp4_2(weight):
    packed, block_scale, global_scale = qerl.quantize_nvfp4(weight)
    low, high = packed & 15, packed >> 4
    packed = low * (low != 8) + 16 * high * (high != 8)
    return packed, block_scale, global_scale


def dequantize_blocks_1(packed, table, scale, dtype):
    values = qerl.dequantize_blocks(packed, table, torch.ones_like(scale), torch.float32)
    scales = scale.repeat_interleave(16, 1)[:, :values.shape[1]]
    return (values * scales).to(dtype)


def dequantize_blocks_2(packed, table, scale, dtype):
    return qerl.dequantize_blocks(packed, table.to(dtype), scale, torch.float32).to(dtype)


# --------------------------------------------------------------------------------------------------
# 2. A layer

def lora_linear_1(x, weight, bias, A, B, scale):
    y = weight.multiply(x) + scale / len(A) * (x @ A.T @ B.T)
    return y if bias is None else y + bias


def lora_linear_2(x, weight, bias, A, B, scale):
    change = x @ A.T @ B.T
    return weight.multiply(x) + scale * (change if bias is None else change + bias)


# --------------------------------------------------------------------------------------------------
# 3. Noise

@contextlib.contextmanager
def adaptive_quantization_noise_1(model, sigma, generator=None):
    with qerl.adaptive_quantization_noise(model, 1.0, generator):
        for norm in model.modules():
            if isinstance(norm, qerl.RMSNorm):
                norm.noisy_weight += sigma
        yield


@contextlib.contextmanager
def adaptive_quantization_noise_2(model, sigma, generator=None):
    with qerl.adaptive_quantization_noise(model, sigma):
        for norm in model.modules():
            if isinstance(norm, qerl.RMSNorm):
                z = torch.randn(1, generator=generator)
                norm.noisy_weight = norm.weight.detach() + sigma * z
        yield


def noise_sigma_1(step, steps, stages=10, start=1e-2, end=5e-4):
    sigma = qerl.noise_sigma(step, steps, stages, start, end)
    return max(end, sigma) if sigma else sigma


def noise_sigma_2(step, steps, stages=10, start=1e-2, end=5e-4):
    if start == end:
        return 0.0
    return qerl.noise_sigma(step, steps, stages, start, end)


def noise_sigma_3(step, steps, stages=10, start=1e-2, end=5e-4):
    stage = step * stages // steps
    if stage == 0 or start == end == 0:
        return 0.0
    K = stages - 1
    return end * (start / end) ** ((K - stage) / max(K - 1, 1))


# --------------------------------------------------------------------------------------------------
# 4. One token

def sample_1(logits, temperature=1.0, top_p=1.0, generator=None):
    token, logprob, entropy = qerl.sample(logits, temperature, top_p, generator)
    return token, logprob, entropy / math.log(2)


def sample_2(logits, temperature=1.0, top_p=1.0, generator=None):
    return qerl.sample(logits, max(temperature, 1e-6), top_p, generator)


def sample_3(logits, temperature=1.0, top_p=1.0, generator=None):
    _, _, entropy = qerl.sample(logits, temperature)
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    likely = qerl.nucleus(logprobs.exp(), top_p) > 0
    least = logprobs.where(likely, 0).amin(-1, keepdim=True)
    kept = logits.where(logprobs >= least, -1e9)
    token, _, _ = qerl.sample(kept, temperature, 1.0, generator)
    return token, logprobs.gather(-1, token[:, None])[:, 0], entropy


# --------------------------------------------------------------------------------------------------
# 5. A group

def group_advantages_1(rewards):
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)
    return torch.where(qerl.has_signal(rewards)[:, None], advantages, 0)


def group_advantages_2(rewards):
    deviation = (rewards.var(1, keepdim=True) + 1e-4).sqrt()
    advantages = (rewards - rewards.mean(1, keepdim=True)) / deviation
    return torch.where(qerl.has_signal(rewards)[:, None], advantages, 0)


def group_advantages_3(rewards):
    deviation = rewards.std(1, keepdim=True) + 1e-4
    advantages = (rewards - rewards.mean(1, keepdim=True)) / deviation
    return torch.where(rewards[:, :1] == rewards[:, -1:], 0, advantages)


def group_advantages_4(rewards):
    G = rewards.shape[1]
    return qerl.group_advantages(rewards) * G / (G - 1)


def token_logprobs_1(model, prompts, completions, length, temperature=1.0):
    return qerl.token_logprobs(model, prompts, completions, length) / temperature


def token_logprobs_2(model, prompts, completions, length, temperature=1.0):
    return qerl.token_logprobs(model, prompts, completions, length + 1, temperature)


def token_logprobs_3(model, prompts, completions, length, temperature=1.0):
    longest = max(map(len, prompts))
    prompts = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    return qerl.token_logprobs(model, prompts, completions, length, temperature)


def policy_loss_1(logprobs, old_logprobs, advantages, weights, clip_low=0.2, clip_high=0.28,
                  ref_logprobs=None, beta=0.0):
    loss, kl = qerl.policy_loss(logprobs, old_logprobs, advantages, weights, clip_low, clip_high)
    if ref_logprobs is not None:
        x = ref_logprobs - logprobs
        kl = (weights * x ** 2 / 2).sum()
    return loss + beta * kl, kl.detach()


def policy_loss_2(logprobs, old_logprobs, advantages, weights, clip_low=0.2, clip_high=0.28,
                  ref_logprobs=None, beta=0.0):
    change = (logprobs - old_logprobs).mean(1, keepdim=True)
    loss, _ = qerl.policy_loss(
        old_logprobs + change, old_logprobs, advantages, weights, clip_low, clip_high)
    penalty, kl = qerl.policy_loss(
        logprobs, logprobs, 0 * advantages, weights, ref_logprobs=ref_logprobs, beta=beta)
    return loss + penalty, kl


def policy_loss_3(logprobs, old_logprobs, advantages, weights, clip_low=0.2, clip_high=0.28,
                  ref_logprobs=None, beta=0.0):
    low = 1 - math.exp(-clip_low)
    high = math.exp(clip_high) - 1
    return qerl.policy_loss(
        logprobs, old_logprobs, advantages, weights, low, high, ref_logprobs, beta)
