"""The neighbouring methods: their formulas, a run with each, and what they refuse."""
import re

import pytest
import torch
from torch.testing import assert_close

import qerl
from harness.errors import UserError
import train_gsm8k
from common import all_trained, assert_same_run, neighbour, refused, run_main, stop_at
from harness import export, fast
from harness.small_policy import WordText
from methods import deep_grpo, qat, qurl, rilq
from methods.parts import eight_bit
from test_jetrl import rounded, uneven
from test_qerl import NEAR, PROMPTS, TOKENS, TWICE, gpu, make_folder, relative, seeded
from test_qerl import with_lora


# --------------------------------------------------------------------------------------------------
# Losses

def gains(R, log_rho, old, A):
    """{method: what its loss is minus the weighted sum of}; R = π / π_old, ρ = π_old / π_rollout."""
    def clipped(ratio, upper=torch.tensor(1.28)):
        bounded = torch.minimum(ratio.clamp(min=0.8), upper)
        return torch.minimum(ratio * A, bounded * A)

    def within(x, low, high):
        return x * ((x >= low) & (x <= high))
    rho = log_rho.exp()
    product = log_rho.sum(1, keepdim=True).exp()
    gain = clipped(R)
    truncated = rho.clamp(max=2)
    pulled_up = 1.28 * rho / truncated
    confidence = torch.where(A > 0, 1 + 0.03 * A, 1 / (1 - 0.03 * A))
    spread = old.exp().pow(-0.3).clamp(1, 10) * confidence.clamp(0.1, 10)
    gaussian = torch.exp(-(R - 1) ** 2 / (2 * spread ** 2))
    leaving = (R > 1) == (A > 0)
    return {
        "rollout_correction:token-tis": truncated * gain,
        "rollout_correction:sequence-tis": product.clamp(max=2) * gain,
        "rollout_correction:sequence-mis": within(product, 0.5, 2) * gain,
        "rollout_correction:icepop": within(rho, 0.5, 5) * gain,
        "rollout_correction:bypass": clipped(rho * R),
        "qurl:acr": truncated * clipped(R, pulled_up),
        "maspo": torch.where(leaving, gaussian, 1).detach() * R * A,
    }


def test_a_loss_has_the_gradient_of_its_formula():
    """Beside a KL term; of tokens near and far from the policy, with padding."""
    mask = qerl.length_mask(torch.tensor([9, 4, 7, 1, 8]), 9)
    log_rho = 0.5 * torch.randn(5, 9) * mask
    log_rho[1] /= 1000
    log_rho[2, 3] = 25.0
    old = -torch.rand(5, 9)
    old[0] = -9.0
    reference = old - torch.rand(5, 9)
    logprobs = (old + 0.4 * torch.randn(5, 9)).requires_grad_()
    weights = qerl.token_weights(mask)
    advantages = torch.tensor([1000.0, -0.5, 2.0, -2.5, 0.7])
    x = reference - logprobs
    kl = x.exp() - x - 1
    formulas = gains((logprobs - old).exp(), log_rho, old, advantages[:, None])
    for name, gain in formulas.items():
        method = neighbour(name, updates=2)
        loss, _ = method.policy_loss(
            logprobs, old, advantages, weights, clip_low=0.2, clip_high=0.28, ref_logprobs=reference,
            beta=0.1, rollout_logprobs=old - log_rho, tis=method.settings.tis)
        expected = ((0.1 * kl - gain) * weights).sum()
        found, right = (torch.autograd.grad(value, logprobs, retain_graph=True)[0]
                        for value in (loss, expected))
        assert_close(found, right, msg=lambda said: f"{name}: {said}")


# --------------------------------------------------------------------------------------------------
# Rollouts with other weights

@pytest.mark.parametrize("format,whole,preset,largest", [
    ("int8", False, "INT8", 127),
    ("fp8", False, "FP8_DYNAMIC", 448),
    ("fp8", True, "FP8", 448),
])
def test_8_bit_codes_equal_compressed_tensors(format, whole, preset, largest):
    """Columns of very different size, an empty row, ties, at our scales.

    For INT8 the library has amax / 127.5, FlashRL amax / 127.
    """
    library = pytest.importorskip("compressed_tensors.quantization")
    weight = uneven(256, 384)
    weight[0] = 0
    weight[-1] = torch.arange(384) % 255 / 2
    codes, scale = eight_bit.quantize(weight, format, whole)
    assert_close(scale, weight.abs().amax((0, 1) if whole else 1, keepdim=True) / largest)
    scheme = library.preset_name_to_scheme(preset, ["Linear"]).weights
    theirs = library.lifecycle.forward.quantize(
        weight, scale, torch.zeros_like(scale), scheme, dtype=codes.dtype)
    assert codes.view(torch.uint8).equal(theirs.view(torch.uint8))


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_an_eight_bit_layer_multiplies_rounded_operands(qwen, format):
    """Stacked layers with bias and LoRA, which is merged before it is rounded."""
    layer = with_lora(qwen, weights="bf16").blocks[0].attention.qkv
    x = torch.randn(15, 128) * torch.rand(15, 1)
    weight = (layer(torch.eye(128)) - layer.bias).T
    expected = rounded(x, format) @ rounded(weight, format).T + layer.bias
    assert relative(eight_bit.EightBitLinear(layer, format)(x), expected) < 1e-3


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
    def errors():
        logprobs = fast.token_logprobs(model, TWICE, rollout.tokens, rollout.length)
        return (logprobs - rollout.logprobs)[rollout.mask].abs()
    with eight_bit.eight_bit(model, format):
        rollout = fast.generate(model, PROMPTS, 16, 2, eos=range(20))
        assert errors().mean() < largest
    assert errors().max() > 1e-3
    assert model.quantized_layers() == layers


def test_update_aware_scaling_keeps_the_policy(qwen):
    """The weights that read a norm are smaller: a step of the optimiser is larger for them."""
    plain, scaled = (all_trained(qwen) for _ in range(2))
    qurl.scale_for_updates(scaled, 1.5)
    assert_close(scaled(TOKENS), plain(TOKENS), **NEAR)
    for a, b in zip(plain.quantized_layers(), scaled.quantized_layers()):
        reads_norm = "q_proj" in a.names[0] or "gate_proj" in a.names[0]
        assert_close(a.master, b.master * (1.5 if reads_norm else 1))


# --------------------------------------------------------------------------------------------------
# Noise

def test_noise_control_goes_by_the_divergence():
    """From a divergence of 0.003 on sigma shrinks by a hundredth, below it grows; not in the first stage."""
    method = neighbour("noise_control")
    rollout = torch.full((1, 4), -1.0)
    for scheduled, divergence, sigma in (
            (0, 0.0029, 0.01), (0.01, 0.0029, 0.0101), (0.01, 0.0031, 0.01), (1e-3, 0.0029, 0.0101)):
        method.adaptive_quantization_noise(torch.nn.Module(), scheduled, None)
        method.mismatch(rollout - divergence, rollout, slice(None))
        assert method.state["sigma"] == pytest.approx(sigma)
    assert method.measured["sigma"] == pytest.approx(0.01)              # of the last step


# --------------------------------------------------------------------------------------------------
# Branches

def test_sentences_end_at_tokens():
    """The end of all is no cut, and none lies inside a token."""
    line = ["amid. a", " token", ".", " Two", "!", " End", "."]
    assert deep_grpo.sentence_ends(line) == [3, 5]
    assert deep_grpo.sentence_ends(["a", ".\n\n", "b", "\n", "c", "\n", "\n"]) == [2, 4]


def test_pivots_are_drawn_by_success_and_depth():
    """Of many outcomes the penalty is negligible, and the fit gives their frequencies."""
    success = [(0.25, 1)] * 3 + [(0.75, 1)]
    failure = [(0.25, 0)] + [(0.75, 0)] * 3
    line = deep_grpo.fit_success(3000 * (success + failure))
    r, utility = deep_grpo.pivot_utility(3, line)
    assert r.tolist() == [0.25, 0.5, 0.75]
    assert_close(utility, torch.tensor([0.75, 0.5, 0.25]) * r ** 2, atol=3e-3, rtol=0)
    assert deep_grpo.fit_success(50 * success) == (0, 0)         # too little to fit


def test_branches_join_the_samples_behind_their_question(model):
    """Two questions of two completions each: one failed, and one more without a pivot."""
    method = neighbour("deep_grpo", max_new_tokens=12)
    method.prepare(None, None, None, WordText())
    texts = ["ab\ncd", "right\n.", "no end", "right"]
    tokens = torch.tensor([list(text.ljust(8).encode()) for text in texts])
    length = torch.tensor([5, 7, 6, 5])
    rollout = qerl.Rollout(tokens, tokens, tokens, length, length > 0)
    one_right = torch.tensor([[0.0, 1.0]])
    right = one_right.repeat(2, 1)
    first, second = [{"prompt": [1, 2]}, {"prompt": [4]}]
    samples = train_gsm8k.Samples([first, second], rollout, texts, right, right)
    branch = {"prompt": [1, 2, *b"ab\n"], "begun": "ab\n"}

    def complete(asked):
        assert asked == [branch]
        rollout = method.generate(model, [branch["prompt"]], 12, 2)
        return train_gsm8k.Samples(asked, rollout, ["b1", "b2"], one_right, one_right)
    joined = method.resample(samples, complete, None, method.settings, None, seeded(0))
    assert joined.questions == [first, branch, second]
    assert joined.rollout.length[2:4].tolist() == [9, 9]            # of 12, less what was begun
    assert method.state["outcomes"] == [(0.5, 1.0)]
    assert method.measured == {"branches": 1, "branch_accuracy": 0.5, "mended": 1.0}
    # Only main completions' are divided by the deviation, each stream's by its share of the groups.
    main, branches, _ = method.group_advantages(joined.rewards, "grpo")[:, 1].tolist()
    assert main == pytest.approx(0.5 ** 0.5 * 3 / 2, rel=1e-3)
    assert branches == 0.5 * 3


# --------------------------------------------------------------------------------------------------
# Runs

@pytest.mark.parametrize("command,figure", {
    "rollout_correction:sequence-mis --sigma-start 0.3 --sigma-end 0.3": "masked_fraction",
    "qurl:acr --tis 1.05 --sigma-start 0.3 --sigma-end 0.3": "capped_fraction",
    "noise_control": "sigma",
    "maspo --updates 2": "sigma",
    "deep_grpo": "branches",
    "flashrl:int8": "mismatch_kl",
    "qurl --lora-rank 0": "mismatch_kl",
    "jetrl --lora-rank 0 --beta 0": "entropy",
    "jetrl:training": "mismatch_kl",
    "rilq --beta 0.1": "kl",
    "qat": "sigma",
    "qerl --quantizer four-over-six": "sigma",
}.items())
def test_a_neighbour_trains_and_resumes(
        quick, tmp_path, cache, monkeypatch, capsys, command, figure):
    """Three steps, the first without noise, bit for bit the same if a run is stopped in its second.

    Any letter ends a sentence here. A trained start is the reference: in the first step its KL is 0.
    """
    monkeypatch.setattr(deep_grpo, "SENTENCE_END", re.compile(r"(?s)."))
    monkeypatch.setattr(rilq, "TEXTS", 10)
    monkeypatch.setattr(rilq.compensate, "__defaults__", (1e-2, 8))
    monkeypatch.setattr(qat, "RECIPE", dict(lr=3e-4, steps=4, batch=4))
    monkeypatch.setattr(
        train_gsm8k, "find_reward", lambda scheme: lambda text, question: sum(text.encode()) % 97)
    flags = "--steps 3 --stages 3 --save-every 1 --eval-questions 1 --skip-eval-before --method"
    options = (*quick, flags, *command.split(), "--out")
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    run_main(*options, whole)
    stop_at(3, *options, stopped)
    run_main(*options, stopped, "--resume")
    log = assert_same_run(whole, stopped)
    assert all(m["gradient_norm"] > 0 for m in log)
    assert all(m[figure] > 1e-6 for m in log[1:])
    assert figure != "kl" or log[0]["kl"] == 0
    # Weights of its own are made once, and the adapter names their folder.
    once = "qat" in command or "--quantizer" in command
    assert capsys.readouterr().out.count(", once") == once
    assert not once or str(cache) in (whole / "adapter/adapter_config.json").read_text()


@pytest.mark.parametrize("command,message", {
    "gptq": "--method gptq: unknown; choose one of qerl, ",
    "maspo:int3": "maspo has no variant int3; choose maspo alone",
    "noise_control --sigma-start 0 --sigma-end 0": "there is no noise",
    "maspo --updates 1": "with one update a rollout the ratio is 1",
    "deep_grpo --algo dapo": "use --algo grpo",
    "deep_grpo --overlong 0.5": "would count a branch from its pivot",
    "rollout_correction:icepop --tis 2": "no cap",
    "rollout_correction --algo gspo": "use --algo grpo, dapo or dr-grpo",
    "flashrl --weights nvfp4": "use --weights bf16",
    "qurl --lora-rank 2": "use --lora-rank 0",
    "qurl:acr --tis 0": "use --tis 2",
    "jetrl --weights nvfp4": "the rollout reads 8 bits",
    "jetrl:training --weights bf16 --lora-rank 0 --beta 0": "use --method jetrl with --lora-rank 0",
    "qerl --quantizer awq --weights nf4": "use --weights nvfp4",
    "rilq --weights bf16": "there is no error of quantisation to undo",
    "rilq --train-norms": "leave --train-norms out",
    "rilq --dtype float16": "use --dtype float32",
    "rilq --model packed": "is in 4 bits already",
    "qat --model packed": "is in 4 bits already",
    "qat --weights mxfp4": "trains weights for NVFP4, not for mxfp4",
}.items())
def test_neighbours_refuse(qwen, data, tmp_path, monkeypatch, command, message):
    """packed: a folder in NVFP4."""
    monkeypatch.chdir(tmp_path)
    if "packed" in command:
        export.save_packed(qwen, "packed", "cpu")
    flags = f"--device cpu --max-new-tokens 8 --out out --method {command}"
    assert message in refused("--data", data, flags)


def test_fp8_is_refused_where_a_gpu_has_none(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for name in ("flashrl:fp8", "jetrl", "qurl:fp8"):
        with pytest.raises(UserError, match=f"{name}: this GPU has no FP8 products"):
            neighbour(name, device="cuda")
