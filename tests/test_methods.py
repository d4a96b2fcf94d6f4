"""The neighbouring methods."""
import copy
import functools
import importlib
import math
import re
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import qerl
import train_gsm8k
import common
from common import QUICK, refused, sample_step, stopped_and_resumed
from harness.batches import Batch, effective_sizes, make_batch
from harness.layers import train_all_weights
from harness.ranks import Ranks
from harness.small_policy import ByteText
from methods import deep_grpo, maspo, qurl, rollout_correction
from methods.parts import branches, eight_bit
from test_qerl import PROMPTS, WEIGHTS, compressed_tensors_nvfp4, gpu, make_folder, relative
from test_qerl import stacked_layer, trl_trainer, with_lora


def neighbour(name, *flags):
    """The neighbour that --method NAME finds, with the small preset's settings and these flags."""
    given = ["--device", "cpu", "--method", name, *map(str, flags)]
    return train_gsm8k.find_algo(train_gsm8k.arguments(given))


def loss_of(algo, logprobs, batch):
    """(loss, KL) of a whole Batch after a rollout of a model without norms."""
    with algo.adaptive_quantization_noise(torch.nn.Module(), 0.0, None):
        return common.loss_of(algo, logprobs, batch)


def batch_with_log_ratios(log_ratios, advantages=(1.0,)):
    """A Batch whose log pi_old - log mu are these, float [N, C]; all tokens weigh the same."""
    log_ratios = torch.tensor(log_ratios)
    shape = log_ratios.shape
    old = torch.full(shape, -1.0)
    return Batch([[1]] * shape[0], torch.zeros(shape, dtype=torch.long),
                 torch.full(shape[:1], shape[1]), old - log_ratios, torch.tensor(advantages),
                 torch.full(shape, 1 / log_ratios.numel()), old)


def mismatched_batch(seed=0, spread=0.5):
    """4 completions of up to 9 tokens; the log-probabilities of who sampled are `spread` off."""
    torch.manual_seed(seed)
    length = torch.tensor([9, 4, 7, 1])
    mask = qerl.length_mask(length, 9)
    old = -torch.rand(4, 9) * mask
    rollout = (old - spread * torch.randn(4, 9)) * mask
    advantages = torch.tensor([1.0, -0.5, 2.0, -2.5])
    tokens = torch.randint(20, 250, (4, 9)) * mask
    return Batch([[5, 6, 7, 8]] * 4, tokens, length, rollout, advantages, qerl.token_weights(mask),
                 old)


@pytest.mark.parametrize("variant,trl", [
    ("token-tis", dict(mode="token_truncate", clip_max=2.0)),
    ("sequence-tis", dict(mode="sequence_truncate", clip_max=2.0)),
    ("sequence-mis", dict(mode="sequence_mask", clip_min=0.5, clip_max=2.0)),
    ("icepop", dict(mode="token_mask", clip_min=0.5, clip_max=5.0)),
])
def test_rollout_correction_weights_and_gradient_equal_trl(qwen, tmp_path, variant, trl):
    """TRL takes our log-probabilities for its vLLM's and for those of its old policy."""
    options = {f"vllm_importance_sampling_{name}": value for name, value in trl.items()}
    trainer = trl_trainer(qwen[0], tmp_path, loss_type="grpo", **options)
    trainer.use_vllm = True
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    score = trainer._get_per_token_logps_and_entropies
    model = qerl.load_model(qwen[0], weights="bf16", lora_rank=2, train_norms=True)
    batch = mismatched_batch()
    mask = batch.weights > 0
    logprobs = qerl.token_logprobs(model, batch.prompts, batch.tokens, batch.length)
    batch.old_logprobs = (logprobs.detach() + 0.1 * torch.randn(4, 9)) * mask
    batch.rollout_logprobs = (batch.old_logprobs - 0.6 * torch.randn(4, 9)) * mask
    rows, sampled = ([row[:n].tolist() for row, n in zip(t, batch.length)]
                     for t in (batch.tokens, batch.rollout_logprobs))
    trainer._generate = lambda _: (batch.prompts, rows, None, ["a"] * 4, sampled, {}, None, None)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.old_logprobs, None, None)
    theirs = trainer._generate_and_score_completions([{"prompt": "a"}] * 4)
    trainer._get_per_token_logps_and_entropies = score
    weight = rollout_correction.correction(
        batch.old_logprobs - batch.rollout_logprobs, mask, variant)
    torch.testing.assert_close(weight, theirs["importance_sampling_ratio"] * mask)
    assert (weight == 0)[mask].any() == (variant in ("sequence-mis", "icepop"))
    theirs["advantages"] = batch.advantages
    loss, _ = loss_of(neighbour(f"rollout_correction:{variant}"), logprobs, batch)
    their_loss = trainer._compute_loss(trainer.model, theirs)
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-4)
    loss.backward()
    their_loss.backward()
    for norm in (m for m in model.modules() if isinstance(m, qerl.RMSNorm)):
        expected = trainer.model.get_parameter(f"{norm.name}.weight").grad
        torch.testing.assert_close(norm.weight.grad, expected, rtol=1e-3, atol=1e-5)


def test_rollout_correction_masks_by_hand():
    """Completions whose ratios are 1.0005 everywhere, 2 and 1/2 in turn, and 1 but for one token."""
    ratio = torch.tensor([[1.0005] * 4, [2, 0.5, 2, 0.5], [1, 1, 6, 1], [1.1, 1.1, 1, 1]])
    mask = torch.tensor([[True] * 4, [True] * 4, [True] * 4, [True, True, False, False]])
    nan = torch.full_like(ratio, math.nan)
    # what stands at padding must not matter
    log_ratio = torch.where(mask, ratio.log(), nan)
    weight = {kind: rollout_correction.correction(log_ratio, mask, kind, 2.0)
        for kind in rollout_correction.KEPT}
    # the second's mean log is exactly 0
    assert weight["geometric"].tolist() == [[1] * 4, [1] * 4, [0] * 4, [0] * 4]
    k3 = [(r - 1 - math.log(r)) for r in (1.0005, 2, 0.5, 6, 1.1)]
    assert k3[0] < 0.01 < (k3[1] + k3[2]) / 2 and k3[3] / 4 > 0.01 > k3[4]
    assert weight["k3"].tolist() == [[1] * 4, [0] * 4, [0] * 4, [1, 1, 0, 0]]
    assert weight["icepop"][2].tolist() == [1, 1, 0, 1]
    assert weight["token-tis"][2].tolist() == [1, 1, 2, 1]
    assert weight["sequence-mis"][2].tolist() == [0] * 4
    assert weight["sequence-tis"][2].tolist() == [2] * 4
    torch.testing.assert_close(weight["sequence-mis"][3], torch.tensor([1.21, 1.21, 0, 0]))
    far = rollout_correction.correction(torch.full((1, 3), 200.0),
        torch.ones(1, 3, dtype=torch.bool), "icepop")
    # not infinity times 0
    assert far.tolist() == [[0, 0, 0]]


def test_effective_sizes_by_hand():
    """Two completions with the ratios (2, 1/2) and (3): their products are 1 and 3."""
    ratio = torch.tensor([[2, 0.5], [3, 1]])
    mask = torch.tensor([[True, True], [True, False]])
    old = torch.where(mask, ratio.log() - 1, 5.0)
    assert effective_sizes(old, torch.full((2, 2), -1.0), mask) == pytest.approx({
        "mismatch_k1": -math.log(3) / 3,
        "mismatch_chi2": (4 + 0.25 + 9) / 3 - 1,
        "effective_tokens": 5.5 ** 2 / (3 * 13.25),
        "effective_completions": 4 ** 2 / (2 * 10),
    }, rel=1e-5)


def compressed_tensors_scheme(format):
    """The library's 8-bit scheme, a scale per output channel and per token, and its compressor."""
    from compressed_tensors.compressors.naive_quantized import base
    from compressed_tensors.quantization import preset_name_to_scheme
    if format == "int8":
        return preset_name_to_scheme("INT8", ["Linear"]), base.IntQuantizationCompressor
    return preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]), base.FloatQuantizationCompressor


@pytest.mark.parametrize("format,factor", [("int8", 127 / 127.5), ("fp8", 1)])
@pytest.mark.parametrize("kind", ["odd rows", "zero blocks", "ties", "wide range"])
def test_eight_bit_bytes_equal_compressed_tensors(kind, format, factor):
    """At our scale: for FP8 the library's own; for INT8 it has amax / 127.5, FlashRL amax / 127."""
    from compressed_tensors.quantization.utils import calculate_qparams
    torch.manual_seed(0)
    weight = WEIGHTS[kind]()
    codes, scale = eight_bit.quantize_rows(weight, format)
    scheme, compressor = compressed_tensors_scheme(format)
    state = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    assert codes.dtype == state["weight"].dtype
    assert torch.equal(codes.view(torch.uint8), state["weight"].view(torch.uint8))
    ends = [end(1, keepdim=True) for end in (weight.amin, weight.amax)]
    theirs, _ = calculate_qparams(*ends, scheme.weights)
    full = scale > 1e-29                           # an empty row has any scale
    torch.testing.assert_close(scale[full] * factor, theirs[full], rtol=1e-6, atol=0)


@pytest.mark.parametrize("format,largest", [("int8", 0.02), ("fp8", 0.06)])
def test_eight_bit_product_equals_the_librarys_operands(format, largest):
    """Stacked layers with bias and LoRA."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    torch.manual_seed(0)
    weights = [torch.randn(48, 128), torch.randn(16, 128)]
    layer = stacked_layer("bf16", weights, torch.randn(64), lora_rank=4, lora_alpha=8)
    layer.lora_B.data.normal_()
    x = torch.randn(15, 128) * torch.rand(15, 1)
    residual = torch.randn(15, 64)
    quantised = eight_bit.EightBitLinear(layer, format)
    merged = eight_bit.current_weight(layer)
    torch.testing.assert_close(F.linear(x, merged, layer.bias), layer(x), rtol=1e-4, atol=1e-4)
    scheme, _ = compressed_tensors_scheme(format)
    w, z = (fake_quantize(t, eight_bit.quantize_rows(t, format)[1], torch.zeros(1), args)
            for t, args in ((merged, scheme.weights), (x, scheme.input_activations)))
    expected = F.linear(z, w, layer.bias)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(quantised(x.view(3, 5, 128)).flatten(0, 1), expected)
    close(quantised.decode(x, residual), expected + residual)
    assert 1e-3 < relative(expected, layer(x)) < largest


def test_int8_product_is_exact():
    """Sums of up to 127 * 127 * 8192, beyond float32's integers, equal PyTorch's int8 product."""
    torch.manual_seed(0)
    x, w = (torch.randint(-127, 128, (n, 8192)).to(torch.int8) for n in (3, 16))
    x[0] = w[0] = 127
    ours = eight_bit.multiply_codes(x, torch.ones(3, 1), w, torch.ones(16, 1))
    assert torch.equal(ours, torch._int_mm(x, w.T).float()) and ours.max() == 127 * 127 * 8192
    scales = torch.rand(3, 1), torch.rand(16, 1)
    scaled = eight_bit.multiply_codes(x, scales[0], w, scales[1])
    torch.testing.assert_close(scaled, ours * scales[0] * scales[1].T)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_eight_bit_rollout_is_one_policy_and_leaves_the_model_as_it_was(qwen, format):
    """Prompts and decoding have the same 8-bit products, which training has not."""
    model = with_lora(qwen[0], weights="bf16")
    before = {name: p.clone() for name, p in model.named_parameters()}
    rng = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def difference():
        logprobs = qerl.token_logprobs(model, prompts, rollout.tokens, rollout.length)
        return qerl.mismatch(logprobs, rollout.logprobs, rollout.mask)[0]
    prompts = [p for p in PROMPTS for _ in range(2)]
    with eight_bit.eight_bit(model, format):
        rollout = qerl.generate(model, PROMPTS, 16, 2, eos=range(20), generator=rng)
        assert difference() < 1e-5             # the order of a sum can tip a rounding
    assert difference() > 1e-5
    after = dict(model.named_parameters())
    assert list(before) == list(after) and len(model.quantized_layers()) == 8
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_adaptive_clipping_is_the_clipping_of_the_whole_weight():
    """In the untruncated ratio ρ and in r R, whose bound stays 1 + ε; below, the bound is TIS's."""
    batch = mismatched_batch(spread=1.0)
    logprobs = (batch.old_logprobs + 0.5 * torch.randn(4, 9)).requires_grad_()
    method = neighbour("qurl:acr")
    loss, _ = loss_of(method, logprobs, batch)
    z = logprobs.detach().requires_grad_()
    rho = (batch.old_logprobs - batch.rollout_logprobs).exp()
    R = (z - batch.old_logprobs).exp()
    r = (2 / rho).clamp(max=1)
    A = batch.advantages[:, None]
    upper = rho * (r * R).clamp(max=1.28) * A
    lower = rho * r * R.clamp(min=0.8) * A
    expected = -(torch.where(A > 0, upper, lower) * batch.weights).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    ours, = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, z)[0])
    capped = (rho > 2) & (batch.weights > 0)
    fraction = (capped.sum() / batch.length.sum()).item()
    assert method.measured["capped_fraction"] == pytest.approx(fraction) and fraction > 0
    tis, _ = qerl.policy_loss(
        logprobs, batch.old_logprobs, batch.advantages, batch.weights,
        rollout_logprobs=batch.rollout_logprobs, tis=2.0)
    differs = torch.autograd.grad(tis, logprobs)[0] != ours
    assert differs.any() and not (differs & ~capped).any()


def test_update_aware_scaling_keeps_the_policy_its_codes_and_its_error(qwen):
    """A step of one size in the weights is 1.5 of them in the codes; compressed-tensors' NVFP4
    bytes do not change.
    """
    torch.manual_seed(0)
    model = qerl.load_model(qwen[0], "bf16")
    train_all_weights(model)
    scaled = copy.deepcopy(model)
    qurl.scale_for_updates(scaled, 1.5)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(scaled(tokens), model(tokens), rtol=1e-4, atol=1e-4)
        for norm, other in ((m, n) for m, n in zip(model.modules(), scaled.modules())
                            if isinstance(m, qerl.RMSNorm)):
            assert torch.allclose(other.weight,
                norm.weight * (1 if norm.name == "model.norm" else 1.5))
        moved = []
        for layers in zip(model.quantized_layers(), scaled.quantized_layers()):
            masters = [layer.master for layer in layers]
            before = [eight_bit.quantize_rows(master, "int8")[0] for master in masters]
            # a tie may tip
            assert (before[0] != before[1]).float().mean() < 1e-4
            for master in masters:
                master += 2e-4 * torch.sign(torch.sin(torch.arange(master.numel()))).view_as(master)
            moved.append([(eight_bit.quantize_rows(m, "int8")[0] != c).float().mean().item()
                          for m, c in zip(masters, before)])
        for layer, (plain, by_uaq) in zip(model.quantized_layers(), moved):
            reads_a_norm = len(layer.names) > 1
            assert by_uaq / plain == pytest.approx(1.5 if reads_a_norm else 1, rel=0.1)
    weight = torch.randn(512, 1024)
    (theirs, _), (theirs_scaled,
        _) = compressed_tensors_nvfp4(weight), compressed_tensors_nvfp4(weight / 1.5)
    for name in ("weight_packed", "weight_scale"):
        assert torch.equal(theirs[name].view(torch.uint8), theirs_scaled[name].view(torch.uint8))


@gpu
@pytest.mark.parametrize("format,largest", [("int8", 1e-6), ("fp8", 5e-3)])
def test_gpu_eight_bit_products_equal_the_cpus(tmp_path, format, largest):
    """The tensor cores' products, of one row and of many, and a rollout recorded as a CUDA graph."""
    torch.manual_seed(0)
    weight = eight_bit.quantize_rows(torch.randn(96, 256), format)
    for n in (1, 17, 300):
        operands = *eight_bit.quantize_rows(torch.randn(n, 256), format), *weight
        ours = eight_bit.multiply_codes(*(t.cuda() for t in operands))
        assert relative(ours.cpu().float(), eight_bit.multiply_codes(*operands)) < largest
    model = with_lora(make_folder(tmp_path, "wide")[0], weights="bf16", device="cuda")
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    repeated = [p for p in prompts for _ in range(2)]
    with eight_bit.eight_bit(model, format), torch.no_grad():
        rollout = qerl.generate(model, prompts, 40, 2, slots=70)
        logprobs = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
    # What bfloat16 adds in another order FP8 rounds otherwise.
    assert (logprobs - rollout.logprobs).abs()[rollout.mask].mean() < 0.05


def steered(method, scheduled, log_ratios):
    """The sigma that a step had, whose completions had these log ratios."""
    method.adaptive_quantization_noise(torch.nn.Module(), scheduled, None)
    batch = batch_with_log_ratios(log_ratios)
    method.mismatch(batch.old_logprobs, batch.rollout_logprobs, batch.weights > 0)
    return method.measured["sigma"]


def test_noise_control_holds_a_divergence():
    """A made-up policy diverges by 100 sigma^2, and by 1e-3 of rounding: both must be found."""
    method = neighbour("noise_control:divergence")

    def divergent(sigma):              # mean(e^l - 1 - l) of +x and -x is cosh(x) - 1
        x = math.acosh(1 + 1e-3 + 100 * sigma ** 2)
        return [[x, -x]]

    def run(scheduled):
        return [steered(method, scheduled, divergent(method.state["sigma"])) for _ in range(30)]
    assert steered(method, 0.0, divergent(0)) == 0         # without noise K_0 alone is measured
    assert method.state["sigma"] == 0.01
    assert method.state["rounding"] == pytest.approx(1e-3, rel=1e-3)
    sigmas = run(0.01)
    assert sigmas[:2] == pytest.approx([0.01, 0.008])      # down by 0.8 at most
    assert 100 * sigmas[-1] ** 2 == pytest.approx(3e-3, rel=1e-2)
    # Half of Eq. 8's sigma is a quarter of the divergence.
    assert 100 * run(0.005)[-1] ** 2 == pytest.approx(3e-3 / 4, rel=1e-2)
    up = neighbour("noise_control:divergence")
    sigmas = [steered(up, 0.01, [[0.0, 0.0]]) for _ in range(40)]
    assert sigmas[:2] == [0.01, 0.0125] and sigmas[-1] == 0.2


def test_noise_control_by_plappert_and_by_entropy():
    method = neighbour("noise_control:plappert")
    # mean(-l) = 0.003 is near enough
    assert steered(method, 0.01, [[-0.002, -0.004]]) == 0.01
    assert steered(method, 0.01, [[-0.002, -0.0041]]) == pytest.approx(0.0101)
    assert method.state["sigma"] == pytest.approx(0.01)
    method = neighbour("noise_control:entropy")
    method.state["sigma"] = 0.05
    for nats, sigma in ((0.19, 0.054), (0.21, 0.05)):      # steps of a 50th of 0.2
        method.entropy = nats
        steered(method, 0.01, [[0.0]])
        assert method.state["sigma"] == pytest.approx(sigma)


INPUT = [f"model.layers.{i}.input_layernorm" for i in range(2)]
POST = [f"model.layers.{i}.post_attention_layernorm" for i in range(2)]


@pytest.mark.parametrize("variant,noisy", [
    ("noise_control:divergence", [*INPUT, *POST, "model.norm"]),
    ("shaped_noise:attention", INPUT),
    ("shaped_noise:mlp", POST),
    ("shaped_noise:first", [INPUT[0], POST[0]]),
    ("shaped_noise:last", [INPUT[1], POST[1]]),
])
def test_noise_control_where_the_noise_goes(qwen, variant, noisy):
    """In those norms it is QeRL's own draw, in the others there is none."""
    model = qerl.load_model(qwen[0])
    norms = {m.name: m for m in model.modules() if isinstance(m, qerl.RMSNorm)}
    with qerl.adaptive_quantization_noise(model, 0.01, torch.Generator().manual_seed(3)):
        expected = {name: norm.noisy_weight for name, norm in norms.items()}
    with neighbour(variant).adaptive_quantization_noise(
            model, 0.01, torch.Generator().manual_seed(3)):
        found = {name for name, norm in norms.items() if norm.noisy_weight is not None}
        assert found == set(noisy)
        assert all(torch.equal(norms[name].noisy_weight, expected[name]) for name in noisy)
    assert all(norm.noisy_weight is None for norm in norms.values())


@pytest.mark.parametrize("variant,kurtosis,cdf", [
    ("uniform", 1.8, lambda z: np.clip(z / math.sqrt(12) + 0.5, 0, 1)),
    ("laplace", 6.0, lambda z: 0.5 - 0.5 * np.sign(z) * np.expm1(-math.sqrt(2) * abs(z))),
])
def test_noise_control_distributions(qwen, variant, kurtosis, cdf):
    """Moments of the noise, and Kolmogorov and Smirnov's distance from the formula."""
    model = qerl.load_model(qwen[0])
    norms = [m for m in model.modules() if isinstance(m, qerl.RMSNorm)]
    rng = torch.Generator().manual_seed(0)
    method = neighbour(f"shaped_noise:{variant}")
    drawn = []
    for _ in range(100):
        with method.adaptive_quantization_noise(model, 0.01, rng):
            drawn += [(norm.noisy_weight - norm.weight.detach()) / 0.01 for norm in norms]
    z = np.sort(torch.cat(drawn).double().numpy())
    assert abs(z.mean()) < 0.02
    assert abs(z.var() - 1) < 0.04
    assert abs((z ** 4).mean() / kurtosis - 1) < 0.1
    steps = np.arange(len(z) + 1) / len(z)
    distance = max(np.abs(cdf(z) - steps[1:]).max(), np.abs(cdf(z) - steps[:-1]).max())
    assert distance < 1.95 / math.sqrt(len(z))             # the 0.1 % point


def test_noise_control_pools_draws_within_each_group(qwen):
    """Completion g of each prompt was sampled under draw g // 2, and is as likely under it, anew."""
    model = with_lora(qwen[0])
    prompts = [[5, 6, 7], [8, 9]]
    noise = torch.Generator().manual_seed(2)
    method = neighbour("pooled_noise")
    with method.adaptive_quantization_noise(model, 0.3, noise):
        rollout = method.generate(model, prompts, 6, 8, eos={300}, slots=256,
                                  generator=torch.Generator().manual_seed(1))
    repeated = [p for p in prompts for _ in range(8)]
    noise.manual_seed(2)
    for draw in range(4):
        with qerl.adaptive_quantization_noise(model, 0.3, noise):
            scored = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
        agrees = (scored - rollout.logprobs).abs().amax(1) < 1e-4
        assert agrees.tolist() == [g % 8 // 2 == draw for g in range(16)]


def test_noise_control_drops_completions_far_from_the_policy():
    """Sequence-MIS by hand: products 1.5, 4, 1/4 and 2 count 1.5, 0, 0 and 2 times."""
    method = neighbour("pooled_noise")
    log_ratio = torch.tensor([1.5, 4.0, 0.25, 2.0 - 1e-6]).log()[:, None]
    batch = batch_with_log_ratios((log_ratio * torch.tensor([[0.75, 0.25]])).tolist(),
                                  [1.0, 1.0, -1.0, -2.0])
    logprobs = batch.old_logprobs.clone().requires_grad_()
    loss, kl = loss_of(method, logprobs, batch)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.5 - 2 * 2) / 4, abs=1e-5) and kl == 0
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.5, 0, 0, 4]).repeat(2, 1).T / 8)
    assert method.measured["kept_fraction"] == 0.5


def test_fp16_rounds_more_finely_than_bfloat16(qwen):
    """By transformers' float32 log-probabilities: 3 more bits, up to 64 times less K3."""
    folder, theirs = qwen
    errors = {}
    mismatches = {}
    for dtype in (torch.bfloat16, torch.float16):
        model = qerl.load_model(folder, "bf16", dtype=dtype)
        text = types.SimpleNamespace(eos={300})
        rollout, batch = sample_step(qerl, model, text, [[5, 6, 7]], group=16)
        old = batch.old_logprobs
        tokens = torch.cat([torch.tensor([[5, 6, 7]] * 16), rollout.tokens], 1)
        exact = theirs(tokens).logits[:, 2:-1].log_softmax(-1)
        exact = exact.gather(-1, rollout.tokens[..., None])[..., 0]
        errors[dtype] = (old - exact).std().item()
        mismatches[dtype], _ = qerl.mismatch(old, rollout.logprobs, rollout.mask)
    assert 5 < errors[torch.bfloat16] / errors[torch.float16] < 13             # 2^-8 to 2^-11
    assert mismatches[torch.bfloat16] > 20 * mismatches[torch.float16] > 0


def test_maspo_weights_by_hand():
    """exp(-(rho - 1)^2 / 2 s^2) with s of the paper's two factors, where the update leaves 1."""
    def w(ratio, probability, advantage):
        given = ratio, math.log(probability), advantage
        return maspo.maspo_weights(*(torch.tensor([[x]]) for x in given)).item()
    assert w(1.5, 1.0, 1.0) == pytest.approx(math.exp(-0.25 / (2 * 1.03 ** 2)))
    assert w(0.5, 1.0, -1.0) == pytest.approx(math.exp(-0.25 * 1.03 ** 2 / 2))
    assert w(3.0, 0.01, 2.0) == pytest.approx(math.exp(-4 / (2 * (0.01 ** -0.3 * 1.06) ** 2)))
    # both factors at their bounds
    assert w(3.0, 1e-9, 1000.0) == pytest.approx(math.exp(-4 / (2 * (10 * 10) ** 2)))
    assert w(0.1, 1.0, -1000.0) == pytest.approx(math.exp(-0.81 / (2 * 0.1 ** 2)))
    assert w(0.5, 0.9, 1.0) == w(1.5, 0.9, -1.0) == w(1.0, 0.9, 1.0) == w(2.0, 0.9, 0.0) == 1


def test_maspo_loss_is_weighted_and_detached():
    """Its gradient is -w rho A and that of the KL term; w itself has none."""
    batch = mismatched_batch()
    batch.ref_logprobs = -torch.rand(4, 9)
    logprobs = (batch.old_logprobs + 0.5 * torch.randn(4, 9)).requires_grad_()
    loss_of(neighbour("maspo", "--beta", 0.1), logprobs, batch)[0].backward()
    x = batch.ref_logprobs - logprobs.detach()
    ratio = (logprobs.detach() - batch.old_logprobs).exp()
    A = batch.advantages[:, None]
    w = maspo.maspo_weights(ratio, batch.old_logprobs, A)
    assert (w < 0.99).any()
    expected = batch.weights * (0.1 * (1 - x.exp()) - w * ratio * A)
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.mark.parametrize("variant", ["bypass", "pg-token-tis", "pg-icepop"])
def test_rollout_correction_without_an_old_policy(variant):
    """bypass: the clipped ratio to the rollout. pg: the gradient of w log π A, with w a constant."""
    batch = mismatched_batch(spread=0.1)
    logprobs = (batch.old_logprobs + 0.3 * torch.randn(4, 9)).requires_grad_()
    batch.old_logprobs = torch.full((4, 9), math.nan)      # nobody reads it
    method = neighbour(f"rollout_correction:{variant}")
    loss_of(method, logprobs, batch)[0].backward()
    z = logprobs.detach().requires_grad_()
    ratio = (z - batch.rollout_logprobs).exp()
    A = batch.advantages[:, None]
    gain = {
        "bypass": torch.minimum(ratio * A, ratio.clamp(0.8, 1.28) * A),
        "pg-token-tis": ratio.clamp(max=2).detach() * z * A,
        "pg-icepop": (ratio * ((ratio >= 0.5) & (ratio <= 5))).detach() * z * A,
    }[variant]
    (-gain * batch.weights).sum().backward()
    torch.testing.assert_close(logprobs.grad, z.grad)


@pytest.mark.parametrize("pieces,ends", [
    (["One", ".", " Two", "!", " End", "."], [2, 4]),           # the end of all is no cut
    (["a", ".\n\n", "b", "\n", "c", "\n", "\n"], [2, 4]),
    (["pi", " is", " 3", ".", "5", "."], []),
    (["amid. a", " token", ".", " x"], [3]),
    ([], []),
])
def test_sentences_end_at_tokens(pieces, ends):
    assert branches.sentence_ends(pieces) == ends


def test_pivots_are_drawn_by_success_and_depth():
    """Of many outcomes the penalty is negligible, and the fit gives their frequencies."""
    outcomes = [(0.25, 1)] * 60 + [(0.25, 0)] * 20 + [(0.75, 1)] * 30 + [(0.75, 0)] * 90
    a, b = branches.fit_success(outcomes * 100)
    fitted = [1 / (1 + math.exp(-a - b * r)) for r in (0.25, 0.75)]
    assert fitted == pytest.approx([0.75, 0.25], abs=3e-3)
    assert branches.fit_success([(0.5, 1)] * 50) == (0, 0)      # too little to fit
    r, utility = deep_grpo.pivot_utility(3, (a, b))
    assert r.tolist() == [0.25, 0.5, 0.75]
    expected = torch.tensor([0.75 / 16, 0.5 / 4, 0.25 * 9 / 16]) / 0.3125
    torch.testing.assert_close((utility / utility.sum()).float(), expected, rtol=0, atol=3e-3)


def made_samples(questions, texts, correct):
    """Samples of these texts; the reward is 2 where an answer is right."""
    tokens = [torch.tensor(list(text.encode())) for text in texts]
    length = torch.tensor(list(map(len, tokens)))
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    zeros = torch.zeros(padded.shape)
    rollout = qerl.Rollout(padded, zeros, zeros, length, length > 0)
    correct = torch.tensor(correct)
    return train_gsm8k.Samples(questions, rollout, texts, 2 * correct, correct)


def test_branches_join_the_samples_behind_their_question(qwen):
    """Two questions of two completions: three failed, and two of these have pivots."""
    method = neighbour("deep_grpo", "--max-new-tokens", 12, "--group", 2, "--updates", 1)
    method.prepare(None, None, None, ByteText())
    model = qerl.load_model(qwen[0])
    questions = [{"question": "p", "prompt": [1, 2], "right": 3},
                 {"question": "q", "prompt": [4], "right": 5}]
    texts = ["ab\ncd", "right\n.", "no end", "x\ny"]
    asked = []

    def complete(branched, phase, sampler_class):
        prompts = [q["prompt"] for q in branched]
        rollout = qerl.generate(model, prompts, 12, 2, sampler_class=sampler_class)
        asked.append((branched, rollout.length.tolist()))
        return made_samples(branched, ["b1", "b2", "b3", "b4"], [[1.0, 0.0], [0.0, 0.0]])

    def draw():
        return made_samples(questions, texts, [[0.0, 1.0], [0.0, 0.0]])
    both = method.sampling(draw, complete, torch.Generator().manual_seed(0))()
    (branched, length), = asked
    first = {"question": "p", "prompt": [1, 2, *b"ab\n"], "right": 3, "begun": "ab\n"}
    second = {"question": "q", "prompt": [4, *b"x\n"], "right": 5, "begun": "x\n"}
    assert branched == [first, second]
    assert length == [9, 9, 10, 10]                        # of 12, less what was begun
    assert both.questions == [questions[0], first, questions[1], second]
    assert both.texts == ["ab\ncd", "right\n.", "b1", "b2", "no end", "x\ny", "b3", "b4"]
    assert method.state["outcomes"] == [(0.5, 1.0), (0.5, 0.0)]
    assert method.measured == {"branches": 2, "branch_accuracy": 0.25, "mended": 0.5}
    advantages = method.group_advantages(both.rewards, "grpo")
    half = math.sqrt(0.5)                          # branches' are not divided by the deviation
    expected = 2 * torch.tensor([[-half, half], [1, -1], [0, 0], [0, 0]])      # each stream is half
    torch.testing.assert_close(advantages, expected, rtol=1e-3, atol=0)
    batch = make_batch(both, advantages, method, method.settings, Ranks())
    assert len(batch.prompts) == 8 and batch.weights.sum() == pytest.approx(1)


NOISY = ("--sigma-start", 0.3, "--sigma-end", 0.3)
FULL = ("--lora-rank", 0, "--beta", 0)


def divergence_grows(log):
    """The first stage is without noise."""
    assert log[0]["mismatch_kl"] < 1e-6
    assert all(m["mismatch_kl"] > 1e-4 for m in log[1:])


def rollout_is_quantised(log):
    assert all(m["mismatch_kl"] > 1e-6 and m["sigma"] == 0 for m in log)


def some_are_masked(log):
    divergence_grows(log)
    assert log[0]["masked_fraction"] == 0
    assert any(m["masked_fraction"] > 0 for m in log[1:])


def truncates(log):
    assert [m["capped_fraction"] > 0 for m in log] == [False, True, True]


def steers(log):
    """Random weights diverge little, so that sigma rises as fast as it may."""
    assert [m["sigma"] for m in log] == pytest.approx([0, 0.01, 0.0125])


def follows_the_schedule(log):
    assert [m["sigma"] for m in log] == [qerl.noise_sigma(step, 3, 3) for step in range(3)]


def scales_the_loss(log):
    assert [m["loss_scale"] for m in log] == [2.0 ** 16] * 3


def has_branches(log):
    assert sum(m["branches"] for m in log) > 3


@pytest.mark.parametrize("name,flags,check", [
    ("rollout_correction:sequence-mis", NOISY, some_are_masked),
    ("rollout_correction:bypass", NOISY, divergence_grows),
    ("flashrl:int8", (), rollout_is_quantised),
    ("flashrl:fp8", FULL, rollout_is_quantised),
    ("qurl", FULL, rollout_is_quantised),
    ("qurl:acr", ("--tis", 1.05, *NOISY), truncates),
    ("noise_control:divergence", (), steers),
    ("pooled_noise", ("--group", 4), follows_the_schedule),
    ("shaped_noise:mlp", (), follows_the_schedule),
    ("fp16", (), scales_the_loss),
    ("deep_grpo", (), has_branches),
    ("maspo", ("--updates", 2), follows_the_schedule),
])
def test_a_neighbour_trains_and_resumes(qwen, data, tmp_path, monkeypatch, name, flags, check):
    """Three steps, bit for bit the same after a stop. Any letter ends a sentence here."""
    monkeypatch.setattr(branches, "SENTENCE_END", re.compile(r"(?s)."))
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3,
               "--stages", 3, "--save-every", 1, "--eval-questions", 1, "--skip-eval-before",
               "--method", name, *flags)
    log = stopped_and_resumed(monkeypatch, options, tmp_path)
    assert all(m["gradient_norm"] > 0 for m in log)
    check(log)


@pytest.mark.parametrize("options,message", [
    (["noise_control", "--sigma-start", 0, "--sigma-end", 0], "there is no noise"),
    (["noise_control:louder"], "choose noise_control:divergence, "),
    (["pooled_noise", "--group", 6], "use a --group divisible by 4"),
    (["pooled_noise", "--tis", 2], "use --tis 0"),
    (["fp16", "--dtype", "bfloat16"], "computes in float16, not in bfloat16"),
    (["maspo", "--updates", 1], "with one update a rollout the ratio is 1"),
    (["rollout_correction:bypass", "--tis", 2], "leave out --tis"),
    (["rollout_correction:icepop", "--tis", 2], "no cap"),
    (["flashrl", "--weights", "nvfp4"], "use --weights bf16"),
    (["qurl", "--weights", "nvfp4"], "frozen nvfp4 weights"),
    (["qurl"], "acr-int8"),
    (["qurl:acr", "--tis", 0], "use --tis 2"),
    (["nonsense"], "--method nonsense: unknown; choose one of qerl, "),
])
def test_neighbours_refuse(tmp_path, monkeypatch, capsys, options, message):
    flags = ("--device", "cpu", "--out", tmp_path / "out", "--method", *options)
    assert message in refused(monkeypatch, capsys, *flags)


def test_a_table_compares_the_second_step_of_each_method(capsys):
    """FP8 in training adds to the noise's divergence."""
    comparison = importlib.import_module("methods.__main__")
    comparison.main(["qerl", "jetrl:training"])
    header, plain, jetrl = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header[:2] == ["method", "KL"]
    assert (plain[0], jetrl[0]) == ("qerl", "jetrl:training")
    assert 0 < float(plain[1]) < float(jetrl[1])
