"""methods/jetrl.py: training in FP8."""
import math
import types

import pytest
import torch

import qerl
from common import all_trained, compiled_for
from harness.batches import Batch
from harness.layers import train_all_weights
from methods import flashrl, jetrl
from methods.parts import fp8_blocks
from test_qerl import KERNEL_DEVICE, PROMPTS, gpu, gradient, make_folder, relative, runs_kernels
from test_qerl import with_lora


def fp8_neighbour(variant, model):
    method = jetrl.Neighbour(types.SimpleNamespace(micro_tokens=16384), variant)
    method.prepare(model, None, None, None)
    return method


def sample_step(algo, model, text, prompts, group=4, seed=0):
    """A step's rollout without noise, and its log pi_old -> (Rollout, Batch).

    group completions a prompt of at most 64 tokens; every advantage is 1.
    """
    sampling_rng = torch.Generator(model.device).manual_seed(seed)
    noise_rng = torch.Generator().manual_seed(seed)
    with algo.adaptive_quantization_noise(model, 0.0, noise_rng):
        rollout = algo.generate(
            model, prompts, 64, group, eos=text.eos, slots=256, generator=sampling_rng)
    batch = Batch(
        [p for p in prompts for _ in range(group)], rollout.tokens, rollout.length,
        rollout.logprobs, torch.ones_like(rollout.logprobs[:, 0]), qerl.token_weights(rollout.mask),
        torch.zeros_like(rollout.logprobs), minibatches=[list(range(len(rollout.tokens)))])
    with torch.no_grad():
        batch.old_logprobs = algo.token_logprobs(
            model, batch.prompts, batch.tokens, batch.length)
    return rollout, batch


def uneven(rows, columns):
    """Columns of very different size."""
    size_of_column = torch.randn(columns).mul(2).exp()
    return size_of_column * torch.randn(rows, columns)


def rounded(x, block):
    """x as its codes say, with the gradient of x."""
    codes = fp8_blocks.quantize(x.detach(), block)
    return x + (codes.dequantize() - x).detach()


# --------------------------------------------------------------------------------------------------
# Blocks

def test_cublas_is_given_blocks_as_it_wants_them():
    """The layouts of all three products, by PyTorch's own check of tensors without values."""
    def absent(codes):
        return fp8_blocks.Codes(codes.codes.to("meta"), codes.scale.to("meta"), codes.shape)
    x = fp8_blocks.quantize(torch.randn(40, 384), fp8_blocks.ROW)
    w = fp8_blocks.quantize(torch.randn(384, 384), fp8_blocks.SQUARE)
    columns = fp8_blocks.quantize(torch.randn(384, 384), fp8_blocks.ROW)
    for other in (w, fp8_blocks.transposed(w), columns):
        y = fp8_blocks.multiply_blocks(absent(x), absent(other), torch.bfloat16)
        assert y.shape == (48, 384)                # padded


def test_a_gpus_products_are_tried(monkeypatch):
    """A GPU that refuses blocks gets whole rows; one that multiplies wrongly is refused."""
    right = fp8_blocks.products_are_right
    multiply = fp8_blocks.multiply
    monkeypatch.setattr(
        fp8_blocks, "products_are_right", lambda recipe, _, dtype: right(recipe, "cpu", dtype))

    def refuses_blocks(x, *rest):
        if not x.whole_rows:
            raise NotImplementedError("scaling only supported for SM90")
        return multiply(x, *rest)

    def wrong(x, *rest):
        return multiply(x._replace(scale=x.scale.flip(0)), *rest)

    def chosen_with(product):
        monkeypatch.setattr(fp8_blocks, "multiply", product)
        recipes = [fp8_blocks.BLOCKS, fp8_blocks.ROWS]
        return fp8_blocks.choose_recipe(torch.device("cuda"), torch.float32, recipes)
    assert chosen_with(multiply) == fp8_blocks.BLOCKS
    assert chosen_with(refuses_blocks) == fp8_blocks.ROWS
    with pytest.raises(qerl.UserError, match="multiplies no FP8"):
        chosen_with(wrong)


# --------------------------------------------------------------------------------------------------
# Kernels

@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [fp8_blocks.ROW, fp8_blocks.WHOLE_ROW])
@pytest.mark.parametrize("rows,columns", [
    (3, 128),
    (40, 300),
    (2, 4224),
])
def test_kernel_fp8_blocks(monkeypatch, dtype, block, rows, columns):
    """Scales and bytes as the twin's. The interpreter would round wrongly; there PyTorch rounds."""
    torch.manual_seed(0)
    matrix = uneven(columns, rows).to(dtype).T
    matrix[0] = 0
    with monkeypatch.context() as patch:           # a GPU's PyTorch divides by 448 less exactly
        patch.setattr(qerl, "use_kernels", lambda x: False)
        twin = fp8_blocks.quantize(matrix, block)
    size = twin.codes.shape
    width = block[1] or size[1]
    fused = fp8_blocks.quantize_fused(matrix.to(KERNEL_DEVICE), *size, width, dtype=torch.float32)
    codes = fused.codes.cpu().to(torch.float8_e4m3fn)
    assert torch.equal(fused.scale.cpu(), twin.scale)
    assert torch.equal(codes.view(torch.uint8), twin.codes.view(torch.uint8))


@runs_kernels
def test_kernel_transposes_bytes():
    codes = torch.randint(256, (256, 384), dtype=torch.uint8, device=KERNEL_DEVICE)
    assert torch.equal(fp8_blocks.transpose_bytes(codes), codes.T)


COMPILE = """
import torch
from methods.parts import fp8_blocks
from studies import cross_compile
cross_compile.pretend({target})
x = torch.empty(300, 3584, dtype=torch.bfloat16)
fp8_blocks.quantize(x, fp8_blocks.ROW)
fp8_blocks.quantize(x, fp8_blocks.WHOLE_ROW)
fp8_blocks.transpose_bytes(torch.empty(256, 3584, dtype=torch.float8_e4m3fn))
"""


@pytest.mark.skipif(qerl.kernels is None, reason="needs Triton")
@pytest.mark.parametrize("target", [89, 90])
def test_fp8_kernels_compile_for(target):
    """Compiled, not run."""
    compiled = compiled_for(target, "-c", COMPILE.format(target=target))
    assert [name for name, _ in compiled] == ["quantize_kernel"] * 2 + ["transpose_kernel"]
    assert max(shared for _, shared in compiled) <= 2 ** 15


@gpu
@pytest.mark.parametrize("variant,weights,largest", [
    ("unified", "bf16", 0.05), ("training", "nvfp4", 0.15)])
def test_gpu_fp8_rolls_out_and_trains(tmp_path, variant, weights, largest):
    """A rollout recorded as a CUDA graph; log-probabilities near it; gradients.

    prepare tries the tensor cores' products.
    """
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 products")
    model = with_lora(make_folder(tmp_path, "wide")[0], device="cuda", weights=weights)
    model.recompute_in_backward()
    method = fp8_neighbour(variant, model)
    text = types.SimpleNamespace(eos=range(20))
    rollout, batch = sample_step(method, model, text, PROMPTS, group=30)
    errors = (batch.old_logprobs - rollout.logprobs).abs()
    assert errors[rollout.mask].mean() < largest
    logprobs = method.token_logprobs(model, batch.prompts, batch.tokens, batch.length)
    logprobs.sum().backward()
    assert 0 < gradient(model).norm() < math.inf


# --------------------------------------------------------------------------------------------------
# Layers and models

def through(x, weight, block):
    """x weightᵀ of rounded operands; each gradient is a product of what FP8 makes of its operands."""
    y = rounded(x, block) @ weight.detach().T
    y.register_hook(lambda grad: rounded(grad, block))                          # dX = dY W
    if weight.requires_grad:
        x_columns = rounded(rounded(x.detach(), block).T, block).T
        z = x_columns @ weight.T
        z.register_hook(lambda grad: rounded(grad.T, block).T)                  # dW = dYᵀ X
        y = y + (z - z.detach())
    return y


@pytest.mark.parametrize("recipe", [fp8_blocks.BLOCKS, fp8_blocks.ROWS])
@pytest.mark.parametrize("trained", [True, False])
def test_an_fp8_layer_and_its_gradients(tmp_path, trained, recipe):
    """With all weights trained, or LoRA, whose products stay in 32 bits. Not all blocks are whole."""
    folder, _ = make_folder(tmp_path, "llama")
    model = all_trained(folder) if trained else with_lora(folder)
    jetrl.put_block_layers(model, [recipe])
    jetrl.switch_fp8(model, True)
    for layer in (model.blocks[0].attention.qkv, model.blocks[0].mlp.down):
        weight = layer.master if trained else layer.usual.dequantize(torch.float32)
        out, columns = weight.shape
        x = uneven(37, columns).requires_grad_()
        grad = 1e-6 * uneven(37, out)
        product = through(x, rounded(weight, recipe.weight), recipe.activation)
        expected = product + layer.bias
        if not trained:
            A, B = layer.lora(torch.float32)
            expected = expected + x @ A.T @ B.T
        y = layer(x[None])[0]
        inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
        assert len(inputs) == 3
        found = y, *torch.autograd.grad(y, inputs, grad)
        right = expected, *torch.autograd.grad(expected, inputs, grad)
        assert all(relative(*pair) < 2e-5 for pair in zip(found, right))


def test_a_recomputed_fp8_model_has_the_same_gradients(qwen):
    """In float32 beside activations in bfloat16."""
    gradients = []
    for recompute in (False, True):
        model = with_lora(qwen[0], dtype=torch.bfloat16)
        if recompute:
            model.recompute_in_backward()
        fp8_neighbour("unified", model)
        logits = model(torch.arange(12)[None])
        logits.float().square().mean().backward()
        gradients.append(gradient(model))
    assert torch.equal(*gradients)
    assert gradients[0].dtype == torch.float32


@pytest.mark.parametrize("variant,expected", [
    ("unified", [True, True, True, True]),
    ("rollout", [False, True, False, False]),
    ("training", [False, False, True, False]),
])
def test_which_passes_are_in_fp8(qwen, variant, expected):
    """Evaluation, rollout, training, evaluation. What FP8 changes in log π is measured."""
    model = with_lora(qwen[0])
    method = fp8_neighbour(variant, model)
    layer = model.blocks[0].mlp.down
    passes = [layer.fp8]
    with method.adaptive_quantization_noise(model, 0.0, None):
        passes.append(layer.fp8)
    tokens = torch.ones(4, 3, dtype=torch.long)
    length = torch.tensor([3, 2, 1, 3])
    logprobs = method.token_logprobs(model, PROMPTS, tokens, length)
    passes.append(layer.fp8)
    method.mismatch(logprobs, logprobs, logprobs < 0)
    passes.append(layer.fp8)
    assert passes == expected
    assert method.measured["fp8_largest_error"] > method.measured["fp8_error"] > 1e-5


@pytest.mark.parametrize("kind", ["all weights", "lora"])
def test_one_fp8_flow_is_one_policy(qwen, monkeypatch, kind):
    """Rollout and training agree; trained in 32 bits they do not, nor under FlashRL's FP8 rollout.

    Decoding has few rows and training many, and a library may sum a row's product in another order
    for another number of rows. In float32 that moves some values over the edge between two FP8
    codes, a mismatch of up to 1e-5. So all sums are in float64 here, where the order is no matter.
    """
    dequantize = fp8_blocks.Codes.dequantize
    monkeypatch.setattr(fp8_blocks.Codes, "dequantize", lambda codes: dequantize(codes).double())

    def mismatch(variant):
        model = with_lora(qwen[0], weights="bf16", dtype=torch.float64)
        if kind == "all weights":
            train_all_weights(model)
        if variant == "flashrl":
            method = flashrl.Neighbour(None, "fp8")
        else:
            method = fp8_neighbour(variant, model)
        text = types.SimpleNamespace(eos=range(20))
        rollout, batch = sample_step(method, model, text, PROMPTS, seed=1)
        return qerl.mismatch(batch.old_logprobs, rollout.logprobs, rollout.mask)[0]
    assert mismatch("unified") < 1e-6
    assert mismatch("rollout") > 1e-5
    assert mismatch("flashrl") > 1e-5
