"""methods/jetrl.py: training in FP8."""
import math
from unittest import mock

import pytest
import torch

import qerl
from harness import fast
from common import all_trained
from harness.layers import TrainedLinear, replace_layers
from methods import jetrl
from methods.parts import eight_bit
from test_qerl import KERNEL_DEVICE, PROMPTS, gpu, gradient_of, make_folder, relative
from test_qerl import runs_kernels, with_lora


def fp8_neighbour(variant, model):
    method = jetrl.Neighbour(None, variant)
    method.prepare(model, None, None, None)
    return method


def sampled_and_scored(method, model, group=2):
    """A step's rollout of PROMPTS, without noise, and its log π_old."""
    generator = torch.Generator(model.device).manual_seed(1)
    with method.adaptive_quantization_noise(model, 0.0, None):
        rollout = method.generate(model, PROMPTS, 64, group, eos=range(20), generator=generator)
    repeated = [prompt for prompt in PROMPTS for _ in range(group)]
    return rollout, method.token_logprobs(model, repeated, rollout.tokens, rollout.length)


def uneven(rows, columns):
    """Columns of very different size."""
    size_of_column = torch.randn(columns).mul(2).exp()
    return size_of_column * torch.randn(rows, columns)


def rounded(x, format="fp8", whole=False):
    """x as its codes say, with the gradient of x."""
    codes, scale = eight_bit.quantize(x.detach(), format, whole)
    return x + (codes.float() * scale - x).detach()


# --------------------------------------------------------------------------------------------------
# Kernels

@runs_kernels
@pytest.mark.parametrize("rows,columns,dtype", [
    (40, 300, torch.float32),
    (2, 4224, torch.bfloat16),
])
def test_kernel_fp8_rows(rows, columns, dtype):
    """Scales and bytes as the twin's. The interpreter would round wrongly; there PyTorch rounds."""
    matrix = uneven(columns, rows).to(dtype).T
    matrix[0] = 0
    # A GPU's PyTorch divides by 448 less exactly.
    with mock.patch.object(fast, "use_kernels", return_value=False):
        twin_codes, twin_scale = eight_bit.quantize(matrix, "fp8")
    codes, scale = eight_bit.quantize_rows_fused(matrix.to(KERNEL_DEVICE), dtype=torch.float32)
    codes = codes.cpu().to(torch.float8_e4m3fn)
    assert scale.cpu().equal(twin_scale)
    assert codes.view(torch.uint8).equal(twin_codes.view(torch.uint8))


@gpu
@pytest.mark.parametrize("variant,weights,largest", [
    ("unified", "bf16", 0.1), ("training", "nvfp4", 0.15)])
def test_gpu_fp8_rolls_out_and_trains(tmp_path, variant, weights, largest):
    """A rollout recorded as a CUDA graph; log-probabilities near it; gradients."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 products")
    model = with_lora(make_folder(tmp_path, "wide")[0], device="cuda", weights=weights)
    model.recompute_in_backward()
    rollout, logprobs = sampled_and_scored(fp8_neighbour(variant, model), model, group=30)
    errors = (logprobs - rollout.logprobs).abs()
    assert errors[rollout.mask].mean() < largest
    assert 0 < gradient_of(model, logprobs.sum()).norm() < math.inf


# --------------------------------------------------------------------------------------------------
# Layers and models

def through(x, weight):
    """x weightᵀ of rounded operands; each gradient is a product of what FP8 makes of its operands."""
    y = rounded(x) @ rounded(weight.detach(), whole=True).T
    y.register_hook(rounded)                                                    # dX = dY W
    if weight.requires_grad:
        x_columns = rounded(rounded(x.detach()).T).T
        z = x_columns @ weight.T
        z.register_hook(lambda grad: rounded(grad.T).T)                         # dW = dYᵀ X
        y = y + (z - z.detach())
    return y


@pytest.mark.parametrize("trained", [True, False])
def test_an_fp8_layer_and_its_gradients(tmp_path, trained):
    """With all weights trained, or LoRA, whose products stay in 32 bits."""
    folder, _ = make_folder(tmp_path, "llama")
    model = all_trained(folder) if trained else with_lora(folder)
    layers = model.quantized_layers()
    usual = [layer.weight.dequantize(torch.float32) for layer in layers]
    fp8_neighbour("unified", model)
    for layer, frozen in zip(layers, usual):
        weight = layer.master if trained else frozen
        out, columns = weight.shape
        x = uneven(37, columns).requires_grad_()
        grad = 1e-6 * uneven(37, out)
        expected = through(x, weight) + layer.bias
        if not trained:
            A, B = layer.lora(torch.float32)
            expected = expected + x @ A.T @ B.T
        y = layer(x[None])[0]
        inputs = [x, *qerl.trainable(layer).values()]
        assert len(inputs) == 3
        found, right = ((out, *torch.autograd.grad(out, inputs, grad)) for out in (y, expected))
        assert all(relative(*pair) < 2e-5 for pair in zip(found, right))


def test_a_recomputed_fp8_model_has_the_same_gradients(qwen):
    """In float32 beside activations in bfloat16. Its second forward comes when `training` is over."""
    tokens = torch.arange(48).view(4, 12)

    def gradient(recompute):
        model = with_lora(qwen, dtype=torch.bfloat16)
        if recompute:
            model.recompute_in_backward()
        method = fp8_neighbour("training", model)
        logprobs = method.token_logprobs(model, PROMPTS, tokens, torch.tensor([12, 9, 1, 12]))
        return gradient_of(model, logprobs.square().mean())
    expected = gradient(recompute=False)
    assert expected.dtype == torch.float32
    assert gradient(recompute=True).equal(expected)


def test_training_in_fp8_leaves_the_rollout_as_it_was(model):
    """Also after passes of training, which it changes. Prompts and decoding read the 4-bit weights."""

    @torch.no_grad()
    def results(method):
        rollout = method.generate(model, PROMPTS, 8, temperature=0)
        return rollout.logprobs, method.token_logprobs(model, PROMPTS, rollout.tokens, rollout.length)
    sampled, trained = results(fast)
    method = fp8_neighbour("training", model)
    for _ in range(2):
        rollout, logprobs = results(method)
        assert rollout.equal(sampled)
        assert 1e-5 < (logprobs - trained).abs().mean() < 1


@pytest.mark.parametrize("kind", ["all weights", "lora"])
def test_one_fp8_flow_is_one_policy(qwen, kind):
    """Rollout and training agree.

    Decoding has few rows and training many, and a library may sum a row's product in another order
    for another number of rows. In float32 that moves some values over the edge between two FP8
    codes, a mismatch of up to 1e-5. So the model is in float64 here, where the order is no matter.
    """
    model = with_lora(qwen, weights="bf16", dtype=torch.float64)
    if kind == "all weights":
        replace_layers(model, TrainedLinear)
    rollout, logprobs = sampled_and_scored(fp8_neighbour("unified", model), model)
    assert qerl.mismatch(logprobs, rollout.logprobs, rollout.mask)[0] < 1e-6
