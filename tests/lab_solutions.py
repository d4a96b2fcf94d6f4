"""A right solution of the lab, wrong ones and others in another style, for test_lab.py."""

# As a student writes it. It is not qerl.py's text, so that the two check each other.
SOLUTION = """
import contextlib
import torch
import qerl

def quantize_nvfp4(weight):
    blocks = weight.unflatten(1, (-1, 16))
    amax = blocks.abs().amax(2)
    largest = amax.max()
    global_scale = (448 * 6 / largest).reshape(1) if largest > 0 else torch.ones(1)
    block_scale = (global_scale * (amax / 6)).clamp(max=448)
    block_scale = block_scale.to(torch.float8_e4m3fn).float()
    block_scale[block_scale == 0] = 0.125
    x = (blocks / (block_scale / global_scale)[..., None]).flatten(1)
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    for bound in 0.25, 1.25, 2.5, 5:
        codes += x.abs() > bound
    for bound in 0.75, 1.75, 3.5:
        codes += x.abs() >= bound
    codes += 8 * (x < 0)
    packed = codes[:, ::2] + 16 * codes[:, 1::2]
    return packed, block_scale.to(torch.float8_e4m3fn), global_scale

def dequantize_blocks(packed, table, scale, dtype):
    codes = torch.stack([packed % 16, packed // 16], 2).flatten(1).long()
    values = table[codes]
    scales = scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)
    return (values * scales).to(dtype)

def lora_linear(x, weight, bias, A, B, scale):
    y = weight.multiply(x) + scale * (x @ A.T @ B.T)
    return y if bias is None else y + bias

@contextlib.contextmanager
def adaptive_quantization_noise(model, sigma, generator=None):
    norms = [m for m in model.modules() if isinstance(m, qerl.RMSNorm)]
    for norm in norms:
        z = torch.randn(norm.weight.shape, generator=generator)
        norm.noisy_weight = norm.weight.detach() + sigma * z
    try:
        yield
    finally:
        for norm in norms:
            norm.noisy_weight = None

def noise_sigma(step, steps, stages=10, start=1e-2, end=5e-4, schedule="exponential"):
    if schedule != "exponential":
        raise ValueError(schedule)
    stage = step * stages // steps
    K = stages - 1
    if stage == 0 or start == 0:
        return 0.0
    return start * (end / start) ** ((stage - 1) / max(K - 1, 1))

def sample(logits, temperature=1.0, top_p=1.0, generator=None):
    logprobs = (logits.float() / (temperature or 1)).log_softmax(1)
    p = logprobs.exp()
    entropy = -(p * logprobs).sum(1)
    ordered, places = p.sort(1, descending=True)
    before = ordered.cumsum(1) - ordered
    ordered = ordered * (before < top_p)
    place = torch.multinomial(ordered, 1, generator=generator)
    token = places.gather(1, place)
    if temperature == 0:
        token = p.argmax(1, keepdim=True)
    logprob = logprobs.gather(1, token)[:, 0]
    return token[:, 0], logprob, entropy

def group_advantages(rewards, objective="grpo"):
    if objective != "grpo":
        raise ValueError(objective)
    mean = rewards.mean(1, keepdim=True)
    std = rewards.std(1, keepdim=True)
    A = (rewards - mean) / (std + 1e-4)
    same = rewards.amax(1) == rewards.amin(1)
    A[same] = 0
    return A

def token_logprobs(model, prompts, completions, length, temperature=1.0):
    result = torch.zeros(completions.shape)
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt + completions[i].tolist()])
        logits = model(tokens)[0].float() / temperature
        table = logits.log_softmax(1)
        for j in range(length[i]):
            result[i, j] = table[len(prompt) + j - 1, completions[i, j]]
    return result

def policy_loss(logprobs, old_logprobs, advantages, weights, clip_low=0.2, clip_high=0.28,
                ref_logprobs=None, beta=0.0, rollout_logprobs=None, tis=0.0, objective="grpo"):
    if objective != "grpo" or tis != 0:
        raise ValueError(objective)
    advantage = advantages if advantages.dim() == 2 else advantages[:, None]
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    k3 = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        x = ref_logprobs - logprobs
        k3 = x.exp() - x - 1
    kl = (weights * k3).sum().detach()
    loss = (weights * (beta * k3 - gain)).sum()
    return loss, kl
"""

# {function: {mistake: row}}. Each is SOLUTION with some text replaced, and must lose points. A row:
# words of the help that name the mistake, the text, and what stands in its place.
WRONG = {
    "quantize_nvfp4": {
        "ties rounded up": (
            "you round ties up",
            "codes += x.abs() > bound", "codes += x.abs() >= bound"),
        "all small scales raised": (
            "you raise every block scale below 0.125",
            "block_scale[block_scale == 0] = 0.125", "block_scale = block_scale.clamp(min=0.125)"),
        "scale not rounded": (
            "before its rounding",
            "(block_scale / global_scale)[", "(amax.clamp_min(1e-9) / 6)["),
        "shape of global_scale": (
            "the shape []",
            ".reshape(1) if", " if"),
        "largest magnitude in bfloat16": (
            "random input",
            "blocks.abs().amax(2)", "blocks.bfloat16().abs().amax(2).float()"),
    },
    "dequantize_blocks": {
        "scales of the first row": (
            "you use the scales of the first row",
            "scale.repeat", "scale[:1].repeat"),
        "product in dtype": (
            "random input",
            "(values * scales)", "(values.to(dtype) * scales.to(dtype))"),
    },
    "lora_linear": {
        "no gradient of LoRA's part": (
            "you stop the gradient of LoRA's part",
            "(x @ A.T", "(x.detach() @ A.T"),
        "gradient of the first row alone": (
            "tried by gradient",
            "(x @ A.T", "(torch.cat([x[:1], x[1:].detach()]) @ A.T"),
        "B A": (
            "x ten million ones",
            "x @ A.T @ B.T", "x @ (B @ A).T"),
        "sums in bfloat16": (
            "random input",
            "(x @ A.T @ B.T)", "(x.bfloat16() @ A.bfloat16().T @ B.bfloat16().T).to(x.dtype)"),
        "always float32": (
            "a dtype is not",
            "y = weight.multiply(x)", "y = weight.multiply(x).float()"),
    },
    "adaptive_quantization_noise": {
        "no finally": (
            "it should be in try and finally",
            "    try:\n        yield\n    finally:\n    ", "    yield\n    if True:\n    "),
        "the model's own norms alone": (
            "model.modules() should give all",
            "model.modules()", "model.children()"),
        "not the model itself": (
            "NoneType",
            "model.modules()", "list(model.modules())[1:]"),
        "uniform noise": (
            "you draw from a uniform distribution",
            "torch.randn(norm.weight.shape, generator=generator)",
            "12 ** 0.5 * (torch.rand(norm.weight.shape, generator=generator) - 0.5)"),
        "noise within 3": (
            "you cut the noise",
            "sigma * z", "sigma * z.clamp(-3, 3)"),
        "a parameter": (
            "you put an nn.Parameter",
            "norm.weight.detach() + sigma * z", "torch.nn.Parameter(norm.weight.detach() + sigma * z)"),
        "noise in float64": (
            "float64",
            "sigma * z", "sigma * z.double()"),
        "the same noise each time": (
            "you draw the same noise each time",
            "for norm in norms:\n        z",
            "generator = generator or torch.Generator().manual_seed(0)\n    for norm in norms:\n        z"),
        "generator started again": (
            "you start `generator` again",
            "for norm in norms:\n        z",
            "if generator:\n        generator.manual_seed(0)\n    for norm in norms:\n        z"),
        "nothing at sigma 0": (
            "the block should run at sigma 0",
            "    norms = [", "    if sigma == 0:\n        return\n    norms = ["),
        "a smallest sigma": (
            "you add noise at sigma 0",
            "sigma * z", "max(sigma, 1e-3) * z"),
        "norms of one size": (
            "RuntimeError",
            "for norm in norms:\n        z = torch.randn(norm.weight.shape, generator=generator)",
            "draws = torch.randn(len(norms), len(norms[0].weight), generator=generator)\n"
            "    for norm, z in zip(norms, draws):"),
        "error swallowed": (
            "you swallow the error",
            "    finally:", "    except Exception:\n        pass\n    finally:"),
        "no yield": (
            "you have no `yield`",
            "        yield", "        pass"),
    },
    "noise_sigma": {
        "other schedules allowed": (
            "you take any schedule",
            "schedule != ", "schedule > "),
        "three stages as four": (
            "random input",
            "max(K - 1, 1)", "max(K - 1, 2)"),
        "start and end not used": (
            "they should be the arguments start and end",
            "start * (end / start)", "0.01 * (5e-4 / 0.01)"),
        "stage by a quotient": (
            "28.999",
            "step * stages // steps", "int(step / steps * stages)"),
        "sigma as a tensor": (
            "float32",
            "return start *", "return torch.tensor(start) *"),
    },
    "sample": {
        "not mapped back": (
            "you give the place in the sorted row",
            "places.gather(1, place)", "place"),
        "cut before the temperature": (
            "you cut before the temperature",
            "before = ordered.cumsum(1)",
            "before = logits.float().softmax(1).sort(1, descending=True)[0].cumsum(1)"),
        "one set for all rows": (
            "cut every row as the first",
            "before < top_p", "before[:1] < top_p"),
        "one token more": (
            "you take one token more",
            "before < top_p", "before <= top_p"),
        "never the last hundredths": (
            "you leave out unlikely tokens",
            "before < top_p", "before < min(top_p, 0.97)"),
        "generator not used": (
            "you do not draw from `generator`",
            "ordered, 1, generator=generator", "ordered, 1"),
        "one draw for all rows": (
            "once for all rows",
            "torch.multinomial(ordered, 1, generator=generator)",
            "(ordered.cumsum(1) < torch.rand(1, generator=generator)).sum(1, keepdim=True).clamp(max=2)"),
        "drawn at temperature 0": (
            "temperature 0",
            "if temperature == 0", "if False"),
        "the same tokens each time": (
            "you draw the same tokens each time",
            "    place = torch",
            "    generator = generator or torch.Generator().manual_seed(0)\n    place = torch"),
        "generator started again": (
            "you start `generator` again",
            "    place = torch", "    if generator:\n        generator.manual_seed(0)\n    place = torch"),
        "the likeliest token's logprob": (
            "not that of the token that was drawn",
            "logprobs.gather(1, token)[:, 0]", "logprobs.amax(1)"),
        "logits divided in their dtype": (
            "random input",
            "(logits.float() / (temperature or 1))", "(logits / (temperature or 1)).float()"),
        "log of softmax": (
            "nan",
            ".log_softmax(1)\n    p = logprobs.exp()", ".softmax(1).log()\n    p = logprobs.exp()"),
        "arguments in another order": (
            "in their order",
            "temperature=1.0, top_p=1.0,", "top_p=1.0, temperature=1.0,"),
        "entropy of the likely": (
            "random input",
            "(p * logprobs).sum(1)", "(p * logprobs * (p > 1e-3)).sum(1)"),
        "logits changed": (
            "you change the argument logits",
            "logits.float() / (temperature or 1)", "logits.div_(temperature or 1).float()"),
        "in the dtype of logits": (
            "bfloat16",
            "logits.float()", "logits"),
    },
    "group_advantages": {
        "biased deviation": (
            "with the divisor G;",
            "rewards.std(1, keepdim=True)", "rewards.std(1, keepdim=True, correction=0)"),
        "rounding left": (
            "you leave what the rounding of the mean gives",
            "A[same] = 0", ""),
        "nearly equal": (
            "nearly agree",
            "rewards.amax(1) == rewards.amin(1)", "std[:, 0] < 1e-3"),
        "bounded": (
            "you bound the advantage",
            "return A", "return A.clamp(-3, 3)"),
        "numpy's arrays": (
            "found [[",
            "return A", "return A.numpy()"),
        "not to be shown": (
            "a Silent that cannot be shown",
            "return A", "return type('Silent', (), {'__repr__': None})()"),
    },
    "token_logprobs": {
        "shifted by one": (
            "predict the NEXT token",
            "len(prompt) + j - 1", "len(prompt) + j"),
        "padding by its id": (
            "you count padding",
            "range(length[i])", "(completions[i] != 0).nonzero()[:, 0]"),
        "no gradient": (
            "you compute without a gradient",
            "logits.log_softmax(1)", "logits.log_softmax(1).detach()"),
        "normaliser without a gradient": (
            "tried by gradient",
            "logits.log_softmax(1)", "logits - logits.logsumexp(1, keepdim=True).detach()"),
        "logarithm of softmax": (
            "nan",
            "logits.log_softmax(1)", "logits.softmax(1).log()"),
        "the model's mode": (
            "you change the argument model",
            "model(tokens)", "model.eval()(tokens)"),
        "in the model's dtype": (
            "random input",
            "[0].float()", "[0]"),
        "temperature in the model's dtype": (
            "random input",
            "model(tokens)[0].float() / temperature", "(model(tokens)[0] / temperature).float()"),
    },
    "policy_loss": {
        "clip on the wrong side": (
            "you clip on the wrong side",
            "torch.minimum", "torch.maximum"),
        "clip without a minimum": (
            "",
            "torch.minimum(ratio * advantage, clipped * advantage)", "clipped * advantage"),
        "old log-probabilities not used": (
            "you ignore old_logprobs",
            "(logprobs - old_logprobs)", "logprobs"),
        "ratio to the rollout": (
            "you divide by π_rollout",
            "- old_logprobs", "- (old_logprobs if rollout_logprobs is None else rollout_logprobs)"),
        "negative tis allowed": (
            "you take any tis",
            "tis != 0:", "tis > 0:"),
        "no rollout allowed": (
            "log π_rollout",
            "tis != 0:", "tis != 0 or rollout_logprobs is not None:"),
        "log-ratio within 1": (
            "you bound log ρ",
            "(logprobs - old_logprobs)", "(logprobs - old_logprobs).clamp(-1, 1)"),
        "a bound for negative advantages": (
            "you bound the loss of a negative advantage",
            "k3 = torch.zeros",
            "gain = gain.where(advantage > 0, gain.maximum(3 * advantage))\n    k3 = torch.zeros"),
        "advantages averaged": (
            "you average the advantages",
            "advantages if", "advantages.mean(1, keepdim=True) if"),
        "K3 without weights": (
            "you leave out the weights of kl",
            "(weights * k3)", "k3"),
        "no kl without beta": (
            "you leave out kl when beta is 0",
            "if ref_logprobs is not None:", "if ref_logprobs is not None and beta:"),
        "kl has a gradient": (
            "the second result has a gradient",
            ".sum().detach()", ".sum()"),
        "kl is a number": (
            "you give kl as a number",
            "return loss, kl", "return loss, 0.0 if ref_logprobs is None else kl"),
    },
}

# The same in another style, without help: these must lose none. In each something may differ from
# SOLUTION's: a last bit, the type of a number, what is drawn, what is padding.
RIGHT = {
    "quantize_nvfp4": {
        "by distance": (
            "codes += 8 * (x < 0)", """even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[even_first]
    nearest = (x.abs()[..., None] - magnitudes).abs().argmin(-1)
    codes = (even_first[nearest] + 8 * (x < 0)).to(torch.uint8)"""),
    },
    "lora_linear": {
        "transposed": (
            "x @ A.T @ B.T",
            "(B @ (A @ x.mT)).mT"),
    },
    "adaptive_quantization_noise": {
        "last norm first": (
            "for norm in norms:\n        z",
            "for norm in norms[::-1]:\n        z"),
    },
    "noise_sigma": {
        "by numpy": (
            "start * (end / start)",
            "start * __import__('numpy').float64(end / start)"),
        "in numpy's float32": (
            "return start *",
            "return __import__('numpy').float32(start) *"),
        "0 as a whole number": (
            "return 0.0",
            "return 0"),
    },
    "sample": {
        "by one number a row": (
            "place = torch.multinomial(ordered, 1, generator=generator)",
            """sums = ordered.double().cumsum(1)
    u = torch.rand(len(p), 1, generator=generator) * sums[:, -1:]
    place = (sums < u).sum(1, keepdim=True)"""),
    },
    "group_advantages": {
        "advantages in float64": (
            "A = (rewards - mean) / (std + 1e-4)",
            """r = rewards.double()
    A = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)
    A = A.float()"""),
    },
    "token_logprobs": {
        "all rows at once": (
            "result = torch.zeros(completions.shape)",
            """longest = max(map(len, prompts))
    rows = [p + row + [0] * (longest - len(p)) for p, row in zip(prompts, completions.tolist())]
    table = (model(torch.tensor(rows)).float() / temperature).log_softmax(-1)
    column = torch.arange(completions.shape[1])
    place = torch.tensor([[len(p)] for p in prompts]) + column - 1
    found = table[torch.arange(len(prompts))[:, None], place, completions]
    return found * (column < length[:, None])
    result = None"""),
    },
    "policy_loss": {
        "by where": (
            "torch.minimum(ratio * advantage, clipped * advantage)",
            "advantage * torch.where("
            "advantage > 0, ratio.clamp(max=1 + clip_high), ratio.clamp(min=1 - clip_low))"),
        "by expm1": (
            "x.exp() - x - 1",
            "x.expm1() - x"),
    },
}


def changed(text, replacement):
    """The solution with this replaced. What is replaced stands in it once."""
    assert SOLUTION.count(text) == 1, text
    return SOLUTION.replace(text, replacement)
