"""The neighbouring methods: their formulas, a run with each, and what they refuse."""
import importlib
import json
import math
import os
import re
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import qerl
import train_gsm8k
from common import QUICK, all_trained, assert_same_run, loss_of, neighbour, refused, run_main
from common import stop_at
from harness import export
from harness.batches import effective_sizes
from harness.small_policy import ByteText
from methods import deep_grpo, maspo, qat, qurl, rilq, rollout_correction
from methods.parts import branches, eight_bit, fp8_blocks, quantizers
from test_qerl import PROMPTS, TWICE, gpu, make_folder, relative, scales, seeded
from test_qerl import stacked_layer, with_lora


# --------------------------------------------------------------------------------------------------
# Losses

@pytest.mark.parametrize("kind,expected", [
    ("token-tis", [2, 0.5, 2, 2, 1.1]),
    ("sequence-tis", [1, 1, 2, 2, 1.1]),
    ("sequence-mis", [1, 1, 0, 0, 1.1]),
    ("icepop", [2, 0.5, 0, 0, 1.1]),
    ("geometric", [1, 1, 0, 0, 0]),
    ("k3", [0, 0, 0, 0, 1]),
])
def test_rollout_correction_weights_by_hand(kind, expected):
    """Three completions, of which one has padding and one a ratio without end."""
    ratio = torch.tensor([[2, 0.5], [6, math.inf], [1.1, math.nan]])
    mask = ~ratio.isnan()
    weight = rollout_correction.correction(ratio.log(), mask, kind)
    assert weight[mask].tolist() == pytest.approx(expected)
    assert weight[2, 1] == 0


def clipped(ratio, advantages, upper=torch.tensor(1.28)):
    bounded = torch.minimum(ratio.clamp(min=0.8), upper)
    return torch.minimum(ratio * advantages, bounded * advantages)


@pytest.mark.parametrize("name", [
    "rollout_correction:icepop", "rollout_correction:bypass", "rollout_correction:pg-token-tis",
    "qurl:acr", "pooled_noise", "maspo"])
def test_a_loss_has_the_gradient_of_its_formula(name):
    """Beside a KL term. ρ = π_old / π_rollout, R = π / π_old."""
    torch.manual_seed(0)
    mask = qerl.length_mask(torch.tensor([9, 4, 7, 1]), 9)
    old = -torch.rand(4, 9)
    log_rho = 0.5 * torch.randn(4, 9) * mask
    reference = -torch.rand(4, 9)
    advantages = torch.tensor([1.0, -0.5, 2.0, -2.5])
    weights = qerl.token_weights(mask)
    batch = types.SimpleNamespace(
        old_logprobs=old, rollout_logprobs=old - log_rho, ref_logprobs=reference,
        advantages=advantages, weights=weights)
    logprobs = (old + 0.4 * torch.randn(4, 9)).requires_grad_()
    method = neighbour(name, beta=0.1, updates=2)
    with method.adaptive_quantization_noise(torch.nn.Module(), 0.0, None):
        loss, _ = loss_of(method, logprobs, batch)
    ours, = torch.autograd.grad(loss, logprobs)
    A = advantages[:, None]
    R = (logprobs - old).exp()
    rho = log_rho.exp()
    product = log_rho.sum(1, keepdim=True).exp()
    gain = {
        "rollout_correction:icepop": rho * (rho >= 0.5) * (rho <= 5) * clipped(R, A),
        "rollout_correction:bypass": clipped(rho * R, A),
        "rollout_correction:pg-token-tis": (rho * R).detach().clamp(max=2) * logprobs * A,
        "qurl:acr": rho.clamp(max=2) * clipped(R, A, 1.28 * (rho / 2).clamp(min=1)),
        "pooled_noise": product * (product >= 0.5) * (product <= 2) * clipped(R, A),
        "maspo": maspo.maspo_weights(R.detach(), old, A) * R * A,
    }[name]
    x = reference - logprobs
    expected = ((0.1 * (x.exp() - x - 1) - gain) * weights).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(expected, logprobs)[0])


@pytest.mark.parametrize("ratio,probability,advantage,spread", [
    (1.5, 1.0, 1.0, 1.03),
    (0.5, 1.0, -1.0, 1 / 1.03),
    (3.0, 0.01, 2.0, 0.01 ** -0.3 * 1.06),
    (3.0, 1e-9, 1000.0, 10 * 10),                      # both factors at their bounds
    (0.5, 0.9, 1.0, math.inf),                         # where the update leaves 1 it is not held
])
def test_maspo_weights_by_hand(ratio, probability, advantage, spread):
    """exp(-(rho - 1)^2 / 2 s^2)"""
    given = (torch.tensor([[x]]) for x in (ratio, math.log(probability), advantage))
    expected = math.exp(-(ratio - 1) ** 2 / (2 * spread ** 2))
    assert maspo.maspo_weights(*given).item() == pytest.approx(expected)


def test_effective_sizes_by_hand():
    """Two completions with the ratios (2, 1/2) and (3): their products are 1 and 3."""
    ratio = torch.tensor([[2, 0.5], [3, 1e9]])
    mask = torch.tensor([[True, True], [True, False]])
    assert effective_sizes(ratio.log() - 1, torch.full((2, 2), -1.0), mask) == pytest.approx({
        "mismatch_k1": -math.log(3) / 3,
        "mismatch_chi2": (4 + 0.25 + 9) / 3 - 1,
        "effective_tokens": 5.5 ** 2 / (3 * 13.25),
        "effective_completions": 4 ** 2 / (2 * 10),
    }, rel=1e-5)


# --------------------------------------------------------------------------------------------------
# 8-bit rollouts, and float16

@pytest.mark.parametrize("quantize,preset,operand", [
    (partial(eight_bit.quantize_rows, format="int8"), "INT8", "weights"),
    (partial(eight_bit.quantize_rows, format="fp8"), "FP8_DYNAMIC", "weights"),
    (partial(fp8_blocks.quantize, block=fp8_blocks.SQUARE), "FP8_BLOCK", "weights"),
    (partial(fp8_blocks.quantize, block=fp8_blocks.ROW), "FP8_BLOCK", "input_activations"),
])
def test_8_bit_codes_equal_compressed_tensors(quantize, preset, operand):
    """Columns of very different size, an empty block, ties, at our scales.

    For INT8 the library has amax / 127.5, FlashRL amax / 127.
    """
    from compressed_tensors.compressors.naive_quantized import base
    from compressed_tensors.quantization import preset_name_to_scheme
    torch.manual_seed(0)
    weight = torch.randn(256, 384) * torch.randn(384).mul(2).exp()
    weight[:128, :128] = 0
    weight[-1] = torch.arange(384) % 255 / 2
    codes, scale, *_ = quantize(weight)
    down, across = scale.shape
    blocks = weight.view(down, 256 // down, across, 384 // across)
    largest, library = {
        torch.int8: (127, base.IntQuantizationCompressor),
        torch.float8_e4m3fn: (448, base.FloatQuantizationCompressor),
    }[codes.dtype]
    torch.testing.assert_close(scale, blocks.abs().amax((1, 3)) / largest)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.weights = getattr(scheme, operand)
    stored = library.compress({"weight": weight, "weight_scale": scale}, scheme)["weight"]
    assert torch.equal(codes.view(torch.uint8), stored.view(torch.uint8))


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_an_eight_bit_layer_multiplies_rounded_operands(format):
    """Stacked layers with bias and LoRA, which is merged before it is rounded."""
    torch.manual_seed(0)
    weights = [torch.randn(48, 128), torch.randn(16, 128)]
    layer = stacked_layer("bf16", weights, torch.randn(64), lora_rank=4, lora_alpha=8)
    layer.lora_B.data.normal_()

    def rounded(a):
        codes, scale = eight_bit.quantize_rows(a, format)
        return codes.float() * scale
    x = torch.randn(15, 128) * torch.rand(15, 1)
    merged = (layer(torch.eye(128)) - layer.bias).T
    expected = F.linear(rounded(x), rounded(merged), layer.bias)
    quantised = eight_bit.EightBitLinear(layer, format)
    assert relative(quantised(x.view(3, 5, 128)).flatten(0, 1), expected) < 1e-3
    residual = torch.randn(15, 64)
    assert relative(quantised.decode(x, residual), expected + residual) < 1e-3


def test_int8_product_is_exact():
    """Sums of up to 127 * 127 * 8192, beyond float32's integers, equal PyTorch's int8 product."""
    torch.manual_seed(0)
    x, w = (torch.randint(-127, 128, (n, 8192)).to(torch.int8) for n in (3, 16))
    x[0] = w[0] = 127
    ours = eight_bit.multiply_codes(x, torch.ones(3, 1), w, torch.ones(16, 1))
    assert torch.equal(ours, torch._int_mm(x, w.T).float())


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("device,largest", [
    ("cpu", 1e-3), pytest.param("cuda", 0.05, marks=gpu)])
def test_an_eight_bit_rollout_is_one_policy_and_leaves_the_model_as_it_was(
        tmp_path, format, device, largest):
    """Prompts and decoding have the same 8-bit products, which training has not.

    On a GPU they are recorded as a CUDA graph, and FP8 rounds what bfloat16 adds in another order.
    """
    model = with_lora(make_folder(tmp_path, "wide")[0], weights="bf16", device=device)
    layers = model.quantized_layers()

    @torch.no_grad()
    def scored():
        return qerl.token_logprobs(model, TWICE, rollout.tokens, rollout.length)[rollout.mask]
    with eight_bit.eight_bit(model, format):
        rollout = qerl.generate(model, PROMPTS, 16, 2, eos=range(20))
        in_8_bits = scored()
    assert (in_8_bits - rollout.logprobs[rollout.mask]).abs().mean() < largest
    assert (in_8_bits - scored()).abs().max() > 1e-3
    assert model.quantized_layers() == layers


def test_update_aware_scaling_keeps_the_policy_and_its_codes(qwen):
    """The codes' scale is smaller, so that a step of the optimiser moves 1.5 times as many."""
    plain, scaled = (all_trained(qwen[0]) for _ in range(2))
    qurl.scale_for_updates(scaled, 1.5)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(scaled(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
    for before, after in zip(plain.quantized_layers(), scaled.quantized_layers()):
        (codes, scale), (same_codes, smaller) = (
            eight_bit.quantize_rows(layer.master.detach(), "int8") for layer in (before, after))
        assert (codes != same_codes).float().mean() < 1e-4         # a tie may tip
        reads_a_norm = len(before.names) > 1
        torch.testing.assert_close(smaller * (1.5 if reads_a_norm else 1), scale)


# --------------------------------------------------------------------------------------------------
# Noise

def steered(method, scheduled, *log_ratios):
    """The sigma of a step of which some tokens had these log π_old - log μ."""
    method.adaptive_quantization_noise(torch.nn.Module(), scheduled, None)
    log_ratios = torch.tensor(log_ratios)
    rollout = torch.full_like(log_ratios, -1)
    method.mismatch(rollout + log_ratios, rollout, rollout < 0)
    return method.measured["sigma"]


def test_noise_control_holds_a_divergence():
    """A made-up policy diverges by 100 sigma^2, and by 1e-3 of rounding: both must be found."""
    method = neighbour("noise_control:divergence")

    def step(scheduled):               # mean(e^l - 1 - l) of +x and -x is cosh(x) - 1
        sigma = method.state["sigma"] if scheduled else 0.0
        x = math.acosh(1 + 1e-3 + 100 * sigma ** 2)
        return steered(method, scheduled, x, -x)
    assert [step(0.0), step(0.01), step(0.01)] == pytest.approx([0, 0.01, 0.008])
    for scheduled, divergence in ((0.01, 3e-3), (0.005, 3e-3 / 4)):
        last = [step(scheduled) for _ in range(30)][-1]
        assert 100 * last ** 2 == pytest.approx(divergence, rel=1e-2)
    method = neighbour("noise_control:divergence")
    sigmas = [steered(method, 0.01, 0.0) for _ in range(40)]
    assert sigmas[:2] == [0.01, 0.0125] and sigmas[-1] == 0.2


def test_noise_control_by_plappert_and_by_entropy():
    method = neighbour("noise_control:plappert")
    found = [steered(method, 0.01, -last) for last in (0.0029, 0.0031, 0.0)]
    assert found == pytest.approx([0.01, 0.0101, 0.01])
    method = neighbour("noise_control:entropy")
    sigmas = []
    for method.entropy in (0.19, 0.19, 0.21):
        steered(method, 0.01, 0.0)
        sigmas.append(method.state["sigma"])
    assert sigmas == pytest.approx([0.014, 0.018, 0.014])      # steps of a 50th of 0.2


@pytest.mark.parametrize("place,noisy", [
    ("attention", [0, 2]), ("mlp", [1, 3]), ("first", [0, 1]), ("last", [2, 3])])
def test_shaped_noise_goes_to_the_norms_of_a_place(qwen, place, noisy):
    """Norms: two in each of two blocks, and the last."""
    model = qerl.load_model(qwen[0])
    method = neighbour(f"shaped_noise:{place}")
    with method.adaptive_quantization_noise(model, 0.01, None):
        found = [i for i, norm in enumerate(scales(model)) if norm.noisy_weight is not None]
    assert found == noisy


@pytest.mark.parametrize("variant,cdf", [
    ("uniform", lambda z: (z / math.sqrt(12) + 0.5).clamp(0, 1)),
    ("laplace", torch.distributions.Laplace(0, math.sqrt(0.5)).cdf),
])
def test_shaped_noise_has_its_distribution_with_variance_1(qwen, variant, cdf):
    """By Kolmogorov and Smirnov's distance, at the 0.1 % point."""
    model = qerl.load_model(qwen[0])
    method = neighbour(f"shaped_noise:{variant}")
    drawn = []
    for draw in range(100):
        with method.adaptive_quantization_noise(model, 0.01, seeded(draw)):
            drawn += [norm.noisy_weight - norm.weight.detach() for norm in scales(model)]
    z = torch.cat(drawn).sort().values / 0.01
    rank = torch.arange(len(z)) / len(z)
    assert (cdf(z) - rank).abs().max() < 1.95 / math.sqrt(len(z))


def test_pooled_noise_shares_each_group_among_four_draws(qwen):
    """Completion g of each prompt was sampled under draw g // 2, and is as likely under it, anew."""
    model = with_lora(qwen[0])
    prompts = [[5, 6, 7], [8, 9]]
    method = neighbour("pooled_noise")
    with method.adaptive_quantization_noise(model, 0.3, seeded(2)):
        rollout = method.generate(model, prompts, 6, 8, eos={300}, slots=256, generator=seeded(1))
    repeated = [p for p in prompts for _ in range(8)]
    noise = seeded(2)
    for draw in range(4):
        with qerl.adaptive_quantization_noise(model, 0.3, noise):
            scored = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
        agrees = (scored - rollout.logprobs).abs().amax(1) < 1e-4
        assert agrees.tolist() == [g % 8 // 2 == draw for g in range(16)]


# --------------------------------------------------------------------------------------------------
# Branches

@pytest.mark.parametrize("pieces,ends", [
    (["One", ".", " Two", "!", " End", "."], [2, 4]),           # the end of all is no cut
    (["a", ".\n\n", "b", "\n", "c", "\n", "\n"], [2, 4]),
    (["amid. a", " token", ".", " x"], [3]),
])
def test_sentences_end_at_tokens(pieces, ends):
    assert branches.sentence_ends(pieces) == ends


def test_pivots_are_drawn_by_success_and_depth():
    """Of many outcomes the penalty is negligible, and the fit gives their frequencies."""
    outcomes = [(0.25, 1)] * 60 + [(0.25, 0)] * 20 + [(0.75, 1)] * 30 + [(0.75, 0)] * 90
    line = branches.fit_success(outcomes * 100)
    r, utility = deep_grpo.pivot_utility(3, line)
    assert r.tolist() == [0.25, 0.5, 0.75]
    success = torch.tensor([0.75, 0.5, 0.25])
    torch.testing.assert_close(utility.float(), success * (r ** 2).float(), atol=3e-3, rtol=0)
    assert branches.fit_success([(0.5, 1)] * 50) == (0, 0)      # too little to fit


def made_samples(questions, texts, correct):
    """Samples of these texts, whose rewards are whether they are right."""
    tokens = [torch.tensor(list(text.encode())) for text in texts]
    length = torch.tensor(list(map(len, tokens)))
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    rollout = qerl.Rollout(padded, padded, padded, length, length > 0)
    return train_gsm8k.Samples(questions, rollout, texts, correct, correct)


def test_branches_join_the_samples_behind_their_question(qwen):
    """Two questions of two completions: three failed, and two of these have pivots."""
    method = neighbour("deep_grpo", max_new_tokens=12)
    method.prepare(None, None, None, ByteText())
    questions = [{"prompt": [1, 2]}, {"prompt": [4]}]
    expected = [{"prompt": [1, 2, *b"ab\n"], "begun": "ab\n"},
                {"prompt": [4, *b"x\n"], "begun": "x\n"}]

    def draw():
        texts = ["ab\ncd", "right\n.", "no end", "x\ny"]
        return made_samples(questions, texts, torch.tensor([[0.0, 1.0], [0.0, 0.0]]))

    def complete(branched, phase, **options):
        assert branched == expected
        prompts = [question["prompt"] for question in branched]
        rollout = qerl.generate(qerl.load_model(qwen[0]), prompts, 12, 2, **options)
        assert rollout.length.tolist() == [9, 9, 10, 10]           # of 12, less what was begun
        right = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        return made_samples(branched, ["b1", "b2", "b3", "b4"], right)
    both = method.sampling(draw, complete, seeded(0))()
    assert both.questions == [questions[0], expected[0], questions[1], expected[1]]
    assert both.texts == ["ab\ncd", "right\n.", "b1", "b2", "no end", "x\ny", "b3", "b4"]
    assert method.state["outcomes"] == [(0.5, 1.0), (0.5, 0.0)]
    assert method.measured == {"branches": 2, "branch_accuracy": 0.25, "mended": 0.5}
    half = math.sqrt(0.5)                          # branches' are not divided by the deviation
    each = torch.tensor([[-half, half], [0.5, -0.5], [0, 0], [0, 0]])
    advantages = method.group_advantages(both.rewards, "grpo")     # each stream is half
    torch.testing.assert_close(advantages, 2 * each, rtol=1e-3, atol=0)


# --------------------------------------------------------------------------------------------------
# Runs

def stopped_and_resumed(monkeypatch, options, tmp_path):
    """Metrics of a run of three steps, which has to be the same if it is stopped in its second."""
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    run_main(monkeypatch, *options, "--out", whole)
    stop_at(2, *options, "--out", stopped)
    run_main(monkeypatch, *options, "--out", stopped, "--resume")
    return assert_same_run(whole, stopped)


NOISY = ("--sigma-start", 0.3, "--sigma-end", 0.3)
ALL_WEIGHTS = ("--lora-rank", 0, "--beta", 0)
MADE_ONCE = ("four_over_six", "awq", "gptq", "qat:distil")          # weights of their own


@pytest.mark.parametrize("name,flags,figure,first", [
    ("rollout_correction:sequence-mis", NOISY, "masked_fraction", 1),
    ("rollout_correction:bypass", NOISY, "mismatch_kl", 1),
    ("qurl:acr", ("--tis", 1.05, *NOISY), "capped_fraction", 1),
    ("pooled_noise", ("--group", 4), "sigma", 1),
    ("shaped_noise:mlp", (), "sigma", 1),
    ("noise_control:divergence", (), "sigma", 1),
    ("maspo", ("--updates", 2), "sigma", 1),
    ("deep_grpo", (), "branches", 0),
    ("fp16", (), "loss_scale", 0),
    ("flashrl:int8", (), "mismatch_kl", 0),
    ("flashrl:fp8", ALL_WEIGHTS, "mismatch_kl", 0),
    ("qurl", ALL_WEIGHTS, "mismatch_kl", 0),
    ("jetrl", ALL_WEIGHTS, "fp8_error", 0),
    ("jetrl:training", (), "fp8_error", 0),
    ("rilq", ("--beta", 0.1), "kl", 1),                # its start is the reference
    *((name, (), "gradient_norm", 0) for name in MADE_ONCE),
])
def test_a_neighbour_trains_and_resumes(
        qwen, data, tmp_path, cache, monkeypatch, capsys, name, flags, figure, first):
    """Three steps, the first without noise, bit for bit the same after a stop.

    first: the step from which on a figure of the log is above 0. Any letter ends a sentence here.
    """
    monkeypatch.setattr(branches, "SENTENCE_END", re.compile(r"(?s)."))
    monkeypatch.setattr(rilq, "TEXTS", 10)
    monkeypatch.setattr(rilq.compensate, "__defaults__", (1e-2, 8, 0))
    monkeypatch.setattr(qat, "RECIPE", dict(lr=3e-4, steps=4, batch=4))
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))
    kind = name.partition(":")[0].replace("_", "-")
    *quick, flag, rtn = QUICK
    if kind not in quantizers.QUANTIZERS:
        quick += [flag, rtn]
    options = ["--model", qwen[0], "--data", data, *quick, "--steps", 3, "--stages", 3,
               "--save-every", 1, "--eval-questions", 1, "--skip-eval-before", "--method", name]
    log = stopped_and_resumed(monkeypatch, [*options, *flags], tmp_path)
    assert all(m["gradient_norm"] > 0 for m in log)
    assert [m[figure] > 1e-6 for m in log] == [first == 0, True, True]
    if name in MADE_ONCE:
        assert capsys.readouterr().out.count(", once") == 1
        adapter = json.loads((tmp_path / "whole/adapter/adapter_config.json").read_text())
        assert f"-{kind}-" in os.path.basename(adapter["base_model_name_or_path"])


@pytest.mark.parametrize("options,message", [
    (["nonsense"], "--method nonsense: unknown; choose one of qerl, "),
    (["gptq:int3"], "gptq has no variant int3; choose gptq alone"),
    (["noise_control", "--sigma-start", 0, "--sigma-end", 0], "there is no noise"),
    (["pooled_noise", "--group", 6], "use a --group divisible by 4"),
    (["pooled_noise", "--tis", 2], "use --tis 0"),
    (["fp16", "--dtype", "bfloat16"], "computes in float16, not in bfloat16"),
    (["maspo", "--updates", 1], "with one update a rollout the ratio is 1"),
    (["deep_grpo", "--algo", "dapo"], "use --algo grpo"),
    (["rollout_correction:bypass", "--tis", 2], "leave out --tis"),
    (["rollout_correction:icepop", "--tis", 2], "no cap"),
    (["flashrl", "--weights", "nvfp4"], "use --weights bf16"),
    (["qurl", "--weights", "nvfp4"], "frozen nvfp4 weights"),
    (["qurl"], "acr-int8"),
    (["qurl:acr", "--tis", 0], "use --tis 2"),
    (["jetrl", "--weights", "nvfp4"], "the rollout reads 8 bits"),
    (["jetrl:training", "--weights", "bf16", "--lora-rank", 0, "--beta", 0],
     "use --method jetrl with --lora-rank 0"),
    (["gptq", "--quantizer", "rtn"], "use --quantizer rtn alone"),
    (["qerl", "--quantizer", "awq", "--weights", "nf4"], "use --weights nvfp4"),
    (["rilq", "--weights", "bf16"], "there is no error of quantisation to undo"),
    (["rilq", "--train-norms"], "leave --train-norms out"),
    (["rilq", "--dtype", "float16"], "use --dtype float32"),
    (["rilq", "--model", "packed"], "is in 4 bits already"),
    (["qat", "--model", "packed"], "is in 4 bits already"),
    (["qat", "--weights", "mxfp4"], "trains weights for NVFP4, not for mxfp4"),
])
def test_neighbours_refuse(qwen, data, tmp_path, monkeypatch, capsys, options, message):
    """packed: a folder in NVFP4."""
    monkeypatch.chdir(tmp_path)
    if "packed" in options:
        export.save_packed(qwen[0], "packed", "cpu")
    flags = ("--device", "cpu", "--data", data, "--max-new-tokens", 8, "--out", "out")
    assert message in refused(monkeypatch, capsys, *flags, "--method", *options)


@pytest.mark.parametrize("name", ["flashrl:fp8", "jetrl", "qurl:acr-fp8"])
def test_fp8_is_refused_where_a_gpu_has_none(monkeypatch, name):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(qerl.UserError, match="this GPU has no FP8 products"):
        neighbour(name, device="cuda")


def test_a_table_compares_the_second_step_of_each_method(capsys):
    importlib.import_module("methods.__main__").main(["jetrl:training"])
    header, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header[:2] == ["method", "KL"]
    assert row[0] == "jetrl:training" and float(row[1]) > 0
