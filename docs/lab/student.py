"""The lab: write the nine functions of quantised reinforcement learning.

    python docs/lab/check.py                        points of all functions
    python docs/lab/check.py group_advantages       points of one

Each docstring says what to compute, with shapes and dtypes. Replace the line `raise
NotImplementedError` by your code: a function that still has this line counts as not written. Keep
the names and the arguments, because the training program calls your functions by them. You need
only PyTorch, and from qerl the class RMSNorm. README.md in this folder tells the rest.

Tensors are on the CPU, and float32 where a docstring names no dtype. No function changes a tensor or
a model that it is given. What a docstring leaves open, such as another shape or an input that is not
finite, is yours to choose.

Letters in shapes: P prompts, G completions of each, B sequences, T tokens of a sequence, C tokens of
the longest completion, V tokens of the vocabulary, r the rank of LoRA.
"""
import contextlib

import torch

import qerl


# --------------------------------------------------------------------------------------------------
# 1. Four bits

def quantize_nvfp4(weight):
    """Round a weight to NVFP4 (Eq. 6): Ŵ = magnitude of the code * block_scale / global_scale.

    weight: float32 [out, in]; in is divisible by 16. Returns three tensors:

    packed: uint8 [out, in/2]. A code has 4 bits. Codes 0 to 7 are the magnitudes 0, 0.5, 1, 1.5, 2,
        3, 4, 6. Adding 8 makes a code negative; a negative number (x < 0) has this bit even if its
        magnitude becomes 0. A byte holds two neighbours along `in`: the one of even index in its
        lower four bits, the one of odd index in its upper four.
    block_scale: torch.float8_e4m3fn [out, in/16], one for each 16 neighbours along `in`.
    global_scale: float32 [1].

    1. global_scale = 448 * 6 / (largest magnitude of the whole weight), and 1 if all are zero: the
       largest block scale becomes 448, the largest number of E4M3.
    2. block_scale = global_scale * ((largest magnitude of the block) / 6), at most 448, rounded by
       .to(torch.float8_e4m3fn). Where it has become 0 it is set to 0.125 (work on .float() of it:
       float8 has few operations).
    3. x = weight / (the rounded block_scale / global_scale), in float32.
    4. The code of x is that of the nearest magnitude; beyond 6 it is code 7. A tie goes to the even
       code: 0.75 lies between 0.5 (code 1) and 1 (code 2), so it becomes the value 1, code 2.
    """
    raise NotImplementedError


def dequantize_blocks(packed, table, scale, dtype):
    """Decode (Eq. 6): bytes uint8 [out, in/2] -> weight [out, in] of this dtype.

    table: float32 [16], the value of each code. scale: float32 [out, in/block], what a value of each
    block is multiplied by. The block's size follows from the shapes; it is not always 16. Multiply in
    float32 and convert last.
    """
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------
# 2. A layer that learns beside its frozen weight

def lora_linear(x, weight, bias, A, B, scale):
    """LoRA (Eq. 2): y = x Ŵᵀ + b + scale * (x Aᵀ) Bᵀ.

    x [..., in]; weight: an object whose weight.multiply(x) is x Ŵᵀ [..., out]; bias [out] or None;
    A [r, in]; B [out, r]; scale: the number α/r. x, bias, A, B and y have one dtype, float32 or
    bfloat16. Gradients reach x, A and B. Do not compute B A, which has the size of the weight.
    """
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------
# 3. Noise while sampling

@contextlib.contextmanager
def adaptive_quantization_noise(model, sigma, generator=None):
    """Inside the `with` block each RMSNorm scale carries noise: w + Z, Z ~ N(0, sigma²) (Eq. 7-10).

    Put w + Z as a tensor into `norm.noisy_weight` of every module of `model` (itself included) that
    is a qerl.RMSNorm: there the norm uses it in the place of `norm.weight` (w, float32 [size]).
    noisy_weight is float32, no Parameter; norm.weight stays as it is. Each norm and each channel has
    a draw of its own, from this torch.Generator or, if it is None, from PyTorch's own. With sigma 0
    the norms compute as without noise. When the block ends, with an error too, noisy_weight is None
    again: updates run without noise. (A function with this decorator runs as far as `yield` when the
    block begins, and goes on from there when it ends. An error in the block is raised at the `yield`.)
    Replace the line `raise NotImplementedError` and the `yield` below it.
    """
    raise NotImplementedError
    yield


def noise_sigma(step, steps, stages=10, start=1e-2, end=5e-4, schedule="exponential"):
    """The size of the noise at `step`, which counts from 0, of a training of `steps` (Eq. 8).

    Training is cut into `stages` equal parts: step is in stage step * stages // steps. Stage 0 has
    no noise: σ is 0.0. The K = stages - 1 others fall from start to end:

        σ_k = start * (end / start) ** ((k - 1) / (K - 1)),    k = 1 ... K

    A single noisy stage (K = 1) has `start`. start = end = 0 switches noise off: σ is 0.0. The result
    is a number, no tensor. Only this schedule is asked for; raise a ValueError for another name.
    """
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------
# 4. One token

def sample(logits, temperature=1.0, top_p=1.0, generator=None):
    """Draw one token for each row: logits [B, V] -> (token, logprob, entropy), each [B].

    logits: float32 or bfloat16; compute in float32. Each row has a draw of its own.

    token: int64, drawn from softmax(logits / temperature), but only among the smallest set of the
        likeliest tokens whose probabilities reach top_p together (the token that reaches it belongs
        to the set; probabilities after the temperature). At temperature 0 the likeliest.
    logprob: float32, log-probability of that token, before top_p cuts.
    entropy: float32, -Σ p log p of the row in nats, before top_p cuts.

    At temperature 0, logprob and entropy are those of temperature 1. generator: a torch.Generator, or
    None for PyTorch's own.
    """
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------
# 5. Learning from a group

def group_advantages(rewards, objective="grpo"):
    """Eq. 4: rewards float32 [P, G] -> advantages [P, G], A = (r - mean(r)) / (std(r) + 1e-4).

    Mean and standard deviation are those of the G completions of one prompt; std has the divisor
    G - 1. A group whose rewards are all equal gets exactly 0 (rounding of the mean would leave 3e-4,
    so set it to 0). Only "grpo" is asked for; raise a ValueError for another name.
    """
    raise NotImplementedError


def token_logprobs(model, prompts, completions, length, temperature=1.0):
    """log π(token) of each completion's tokens after its prompt -> float32 [B, C].

    model(tokens int64 [B, T]) gives logits [B, T, V], float32 or bfloat16; compute in float32. Those at
    a position depend on it and on what stands before, and predict the NEXT token. prompts: B lists of
    token ids, of several lengths. completions: int64 [B, C], padded with any ids of the vocabulary;
    length: int64 [B], of the completions, at least 1. The log-probabilities are of softmax(logits /
    temperature). The result has a gradient. At padding it is 0.
    """
    raise NotImplementedError


def policy_loss(logprobs, old_logprobs, advantages, weights, clip_low=0.2, clip_high=0.28,
                ref_logprobs=None, beta=0.0, rollout_logprobs=None, tis=0.0, objective="grpo"):
    """The negative of Eq. 3's J for B sequences -> (loss, kl), two numbers as tensors.

        ρ    = π_θ / π_old,                 by token, from logprobs and old_logprobs
        gain = min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A)
        K3   = e^x - x - 1,                 x = log π_ref - log π_θ
        loss = Σ weights * (beta * K3 - gain),      kl = Σ weights * K3 without a gradient

    logprobs, old_logprobs, ref_logprobs [B, C]; advantages [B] or [B, C]; weights [B, C]: how much a
    token counts, 0 at padding, already divided by the number of tokens. clip_low and clip_high are
    numbers, and nothing but clip bounds ρ or the gain. ref_logprobs may be there with beta = 0; without
    them kl is 0. Only objective "grpo" and tis = 0 are asked for; raise a ValueError for others.
    rollout_logprobs is for tis alone, and may be there without it: do nothing with it.
    """
    raise NotImplementedError
