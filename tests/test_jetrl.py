"""methods/jetrl.py: training in FP8."""
import itertools
import json
import types

import pytest
import torch
import torch.nn.functional as F

import qerl
import train_gsm8k
from common import QUICK, all_trained, compiled_for, fp8_neighbour, refused
from common import sample_step, stopped_and_resumed
from harness.layers import train_all_weights
from methods import flashrl, jetrl
from methods.parts import eight_bit, fp8_blocks, fp8_layers
from studies import step
from test_qerl import CUDA, KERNEL_DEVICE, PROMPTS, gpu, make_folder, relative, runs_kernels
from test_qerl import with_lora


def uneven(rows, columns):
    """Columns of very different size."""
    return torch.randn(rows, columns) * torch.randn(1, columns).mul(2).exp()


def library_block_scales(x, block):
    """compressed-tensors' FP8_BLOCK: its arguments and scales of a matrix of whole blocks."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    args = scheme.weights if block == fp8_blocks.SQUARE else scheme.input_activations
    blocks = x.view(x.shape[0] // block[0], block[0], -1, 128)
    return args, *calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)


def library_rounded(x, block):
    """x, padded to whole blocks and cut again, as compressed-tensors holds it, float64."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    rows, columns = x.shape
    padded = F.pad(x.detach().float(), (0, -columns % 128, 0, -rows % 128))
    args, scale, zero = library_block_scales(padded, block)
    return fake_quantize(padded, scale, zero, args)[:rows, :columns].double()


@pytest.mark.parametrize("block", [fp8_blocks.ROW, fp8_blocks.SQUARE])
def test_fp8_blocks_equal_compressed_tensors(block):
    """Scales and bytes, of blocks of very different size and one that is empty."""
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    torch.manual_seed(0)
    weight = uneven(256, 384)
    weight[:128, 128:256] = 0
    ours = fp8_blocks.quantize(weight, block)
    args, scale, _ = library_block_scales(weight, block)
    full = ours.scale > 1e-29
    assert full.sum() == full.numel() - 128 // block[0]
    torch.testing.assert_close(ours.scale[full], scale[full], rtol=1e-6, atol=0)
    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    scheme.weights = args
    state = {"weight": weight, "weight_scale": ours.scale}
    stored = FloatQuantizationCompressor.compress(state, scheme)["weight"]
    assert torch.equal(ours.codes.view(torch.uint8), stored.view(torch.uint8))
    if block == fp8_blocks.SQUARE:
        assert torch.equal(fp8_blocks.transposed(ours).dequantize(), ours.dequantize().T)


def products(x, weight, grad, recipe):
    """Y, dX and dW of jetrl.Product with a trained weight."""
    x = x.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    codes = fp8_blocks.quantize(weight.detach(), recipe.weight)
    y = jetrl.Product.apply(x, weight, codes, recipe)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("n,k,m", [(3, 128, 128), (130, 384, 256), (37, 200, 72)])
def test_fp8_products_equal_float64_of_the_librarys_operands(n, k, m):
    """X is kept in FP8 and rounded once more for dW. The last shape has blocks that are not whole."""
    torch.manual_seed(0)
    x = uneven(n, k)
    weight = uneven(m, k)
    grad = uneven(n, m) * 1e-6
    X = library_rounded(x, fp8_blocks.ROW)
    W = library_rounded(weight, fp8_blocks.SQUARE)
    x_again = library_rounded(X.T.contiguous(), fp8_blocks.ROW).T
    grad_columns = library_rounded(grad.T.contiguous(), fp8_blocks.ROW)
    exact = X @ W.T, library_rounded(grad, fp8_blocks.ROW) @ W, grad_columns @ x_again
    unrounded = x @ weight.T, grad @ weight, grad.T @ x
    for ours, *theirs in zip(products(x, weight, grad, fp8_blocks.BLOCKS), exact, unrounded):
        assert relative(ours.double(), theirs[0]) < 2e-5
        assert 0.005 < relative(ours, theirs[1]) < 0.1


def test_fp8_of_whole_rows_equals_flashrls_product():
    """Activations and gradients in whole rows, the weight as a whole, also transposed."""
    torch.manual_seed(0)
    x = torch.randn(20, 200)
    weight = torch.randn(72, 200)
    grad = torch.randn(20, 72)

    def rounded(a):
        codes, scale = eight_bit.quantize_rows(a, "fp8")
        return codes.float() * scale
    W = rounded(weight.view(1, -1)).view_as(weight)
    exact = rounded(x) @ W.T, rounded(grad) @ W, rounded(grad.T) @ rounded(rounded(x).T).T
    for ours, theirs in zip(products(x, weight, grad, fp8_blocks.ROWS), exact):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["all weights", "lora"])
def test_an_fp8_layer_and_its_gradients(qwen, kind):
    """Against autograd of the rounded operands; LoRA's products and biases stay in 32 bits."""
    model = all_trained(qwen[0]) if kind == "all weights" else with_lora(qwen[0])
    fp8_neighbour("unified", model)
    layer = model.blocks[0].attention.qkv
    x = torch.randn(40, layer.coded.codes.shape[1] if kind == "lora" else layer.master.shape[1])
    grad = torch.randn(40, sum(layer.sizes))
    x.requires_grad_()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    y = layer(x[None])[0]
    ours = torch.autograd.grad(y, [x, *parameters], grad)
    A, B = layer.lora(torch.float32)
    if kind == "lora":
        weight = layer.coded.dequantize(torch.float32)
    else:
        weight = library_rounded(layer.master, fp8_blocks.SQUARE).float()
        weight = layer.master + (weight - layer.master).detach()
    rounded = x + (library_rounded(x, fp8_blocks.ROW).float() - x).detach()
    plain = F.linear(rounded, weight, layer.bias)
    if A is not None:
        plain = plain + x @ A.T @ B.T
    torch.testing.assert_close(y, plain, rtol=1e-4, atol=1e-4)
    exact = torch.autograd.grad(plain, [x, *parameters], grad)
    assert len(ours) == 3
    for gradient, theirs in zip(ours, exact):      # the gradients that a product reads are rounded
        assert relative(gradient, theirs) < 0.06


def test_between_fp8_layers_the_dtype_stays(qwen):
    """Activations are in bfloat16 outside of the products, what is trained in float32."""
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    y, dx, dw = products(x, torch.randn(128, 256), torch.ones(1, 1).bfloat16().expand(5, 128),
                         fp8_blocks.BLOCKS)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    model = with_lora(qwen[0], dtype=torch.bfloat16)
    fp8_neighbour("unified", model)
    assert all(layer.coded.codes.codes.element_size() == 1 for layer in model.quantized_layers())
    logits = model(torch.arange(9)[None])
    logits.float().square().mean().backward()
    assert logits.dtype == torch.bfloat16
    for p in qerl.trainable(model).values():
        assert p.grad.dtype == torch.float32 and p.grad.any()


def cublas_twin(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """F.scaled_mm of FP8 blocks as PyTorch's source states their layouts, on a CPU."""
    (M, K), N = a.shape, b.shape[1]
    kind = F.ScalingType
    blocks = K // 128
    assert a.is_contiguous() and b.stride() == (1, K)
    assert K % 128 == N % 16 == M % 16 == 0
    assert recipe_a == kind.BlockWise1x128
    assert scale_a.shape == (M, blocks)
    assert scale_a.stride(0) == 1 and (scale_a.stride(1) == M or blocks == 1)
    y = torch.zeros(M, N, dtype=torch.float64)
    for k in range(blocks):
        if recipe_b == kind.BlockWise1x128:
            assert scale_b.shape == (N, blocks)
            assert scale_b.stride(0) == 1 and (scale_b.stride(1) == N or blocks == 1)
            of_columns = scale_b[:, k]
        else:
            padded = -(-blocks // 4) * 4
            assert recipe_b == kind.BlockWise128x128 and scale_b.shape == (padded, N // 128)
            assert scale_b.stride(0) == 1 and (scale_b.stride(1) == padded or N == 128)
            of_columns = scale_b[k].repeat_interleave(128)
        columns = slice(128 * k, 128 * k + 128)
        y += a[:, columns].double() @ b[columns].double() * scale_a[:, k, None] * of_columns
    return y.to(output_dtype)


@pytest.mark.parametrize("n,k,m", [(5, 384, 256), (16, 128, 384), (40, 512, 1024)])
def test_cublas_is_given_blocks_as_it_wants_them(monkeypatch, n, k, m):
    """All three products, by the layouts of PyTorch's source and its own shape inference."""
    torch.manual_seed(0)
    x = uneven(n, k)
    grad = uneven(n, m)
    w = fp8_blocks.quantize(uneven(m, k), fp8_blocks.SQUARE)
    rows = [fp8_blocks.quantize(t, fp8_blocks.ROW) for t in (x, grad, grad.T, x.T)]
    for a, b in ((rows[0], w), (rows[1], fp8_blocks.transposed(w)), (rows[2], rows[3])):
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_mm", cublas_twin)
            y = fp8_blocks.multiply_blocks(a, b, torch.float32)[:a.shape[0], :b.shape[0]]
        expected = fp8_blocks.multiply(a, b, torch.float32)
        assert relative(y, expected) < 1e-5
        absent = [c._replace(codes=c.codes.to("meta"), scale=c.scale.to("meta")) for c in (a, b)]
        assert fp8_blocks.multiply_blocks(*absent, torch.bfloat16).dtype == torch.bfloat16


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,columns", [(3, 128), (40, 300), (2, 4224)])
def test_kernel_fp8_blocks(monkeypatch, dtype, rows, columns):
    """Scales and bytes as the twin's. The interpreter would round wrongly; there PyTorch rounds."""
    torch.manual_seed(0)
    matrix = uneven(columns, rows).to(dtype).to(KERNEL_DEVICE).T
    matrix[0] = 0
    for block in (fp8_blocks.ROW, fp8_blocks.WHOLE_ROW):
        with monkeypatch.context() as patch:       # a GPU's PyTorch divides by 448 less exactly
            patch.setattr(qerl, "use_kernels", lambda x: False)
            twin = fp8_blocks.quantize(matrix.cpu(), block)
        fused = fp8_blocks.quantize(matrix, block)
        assert fused.shape == twin.shape
        assert torch.equal(fused.scale.cpu(), twin.scale)
        codes = fused.codes
        if not CUDA:
            width = block[1] or codes.shape[1]
            exact = fp8_blocks.quantize_fused(matrix, *codes.shape, width, dtype=torch.float32)
            codes = exact.codes.to(torch.float8_e4m3fn)
        assert torch.equal(codes.view(torch.uint8).cpu(), twin.codes.view(torch.uint8))
    whole = fp8_blocks.quantize(matrix, fp8_blocks.SQUARE).codes
    assert torch.equal(fp8_blocks.transpose_bytes(whole).view(torch.uint8),
                       whole.view(torch.uint8).T)


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


@pytest.mark.parametrize("target", [89, 90])
def test_fp8_kernels_compile_for(target):
    """Compiled, not run."""
    if qerl.kernels is None:
        pytest.skip("needs Triton")
    compiled = compiled_for(target, "-c", COMPILE.format(target=target))
    assert [name for name, _ in compiled] == ["quantize_kernel"] * 2 + ["transpose_kernel"]
    assert all(shared <= 2 ** 15 for _, shared in compiled)


@pytest.mark.parametrize("kind", ["all weights", "lora"])
def test_one_fp8_flow_is_one_policy(qwen, monkeypatch, kind):
    """Rollout and training agree; trained in 32 bits they do not, nor under FlashRL's FP8 rollout.

    Decoding has few rows and training many, and a library may sum a row's product in another order
    for another number of rows. In float32 that moves some values over the edge between two FP8
    codes, a mismatch of up to 1e-5. So all sums are in float64 here, where the order is no matter.
    """
    dequantize = fp8_blocks.Codes.dequantize
    monkeypatch.setattr(fp8_blocks.Codes, "dequantize", lambda codes: dequantize(codes).double())

    def model():
        model = with_lora(qwen[0], weights="bf16", dtype=torch.float64)
        if kind == "all weights":
            train_all_weights(model)
        return model

    def mismatch_of(method, model):
        text = types.SimpleNamespace(eos=range(20))
        rollout, batch = sample_step(method, model, text, PROMPTS, seed=1)
        return qerl.mismatch(batch.old_logprobs, rollout.logprobs, rollout.mask)[0]
    one = model()
    assert mismatch_of(fp8_neighbour("unified", one), one) < 1e-6
    other = model()
    assert mismatch_of(fp8_neighbour("rollout", other), other) > 1e-5
    flash = flashrl.Neighbour(None, "fp8")
    assert mismatch_of(flash, model()) > 1e-5


@pytest.mark.parametrize("variant,flags,decodes", [
    ("unified", ("--lora-rank", 0, "--beta", 0), [True] * 5),
    ("training", ("--beta", 0.1), [False] * 5),
    ("rollout", (), [True] * 3 + [False] * 2),
])
def test_jetrl_trains_and_resumes(qwen, data, tmp_path, monkeypatch, variant, flags, decodes):
    """Which passes are in FP8, what is logged, and the same run bit for bit after a stop.

    decodes: whether three rollouts and two evaluations are in FP8.
    """
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))
    training = set()
    decoding = []
    logprobs = qerl.token_logprobs
    generate = qerl.generate

    def spy_training(model, *args, **kwargs):
        training.add((torch.is_grad_enabled(), model.blocks[0].mlp.down.fp8))
        return logprobs(model, *args, **kwargs)

    def spy_decoding(model, *args, **kwargs):
        rollout = generate(model, *args, **kwargs)
        decoding.append(isinstance(model.blocks[0].mlp.down.weight, fp8_layers.CodedWeight))
        return rollout
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--eval-questions", 1,
               "--skip-eval-before", "--save-every", 1, "--sigma-start", 0, "--sigma-end", 0,
               "--method", f"jetrl:{variant}", *flags)
    with monkeypatch.context() as patch:
        patch.setattr(qerl, "token_logprobs", spy_training)
        patch.setattr(qerl, "generate", spy_decoding)
        metrics = stopped_and_resumed(patch, options, tmp_path)
    in_fp8 = variant != "rollout"
    # The reference is in the trainer's arithmetic; fp8_error needs the other.
    assert training - {(False, in_fp8)} == {(True, in_fp8), (False, not in_fp8)}
    assert decoding[:5] == decodes
    assert all(m["fp8_largest_error"] >= m["fp8_error"] > 1e-5 for m in metrics)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())["settings"]
    assert summary["weights"] == ("nvfp4" if variant == "training" else "bf16")


def test_jetrl_wants_fp8_products(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    settings = types.SimpleNamespace(device="cuda", weights="bf16", lora_rank=0)
    with pytest.raises(qerl.UserError, match="this GPU has no FP8 products"):
        jetrl.Neighbour(settings, "unified").check()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    jetrl.Neighbour(settings, "unified").check()


@gpu
def test_gpu_fp8_products_equal_the_cpus():
    """The tensor cores' three products, of one row and of many."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("needs FP8 products")
    torch.manual_seed(0)
    either = [fp8_blocks.BLOCKS, fp8_blocks.ROWS]
    chosen = [fp8_blocks.choose_recipe(device, torch.bfloat16, recipes)
              for recipes in (either, either[::-1])]
    assert chosen == either or torch.cuda.get_device_capability(device)[0] != 9
    for recipe, n in itertools.product(chosen, (1, 17, 300)):
        tensors = uneven(n, 896).bfloat16(), uneven(384, 896), uneven(n, 384).bfloat16()
        ours = products(*(t.cuda() for t in tensors), recipe)
        for result, exact in zip(ours, products(*tensors, recipe)):
            assert relative(result.cpu().float(), exact.float()) < 5e-3


@gpu
@pytest.mark.parametrize("variant,weights,largest", [
    ("unified", "bf16", 0.05), ("training", "nvfp4", 0.15)])
def test_gpu_jetrl_rolls_out_and_trains(tmp_path, variant, weights, largest):
    """A rollout recorded as a CUDA graph; log-probabilities near it; gradients."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 products")
    model = with_lora(make_folder(tmp_path, "wide")[0], device="cuda", weights=weights)
    model.recompute_in_backward()
    method = fp8_neighbour(variant, model)
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    text = types.SimpleNamespace(eos=range(20))
    rollout, batch = sample_step(method, model, text, prompts, group=2)
    assert (batch.old_logprobs - rollout.logprobs).abs()[rollout.mask].mean() < largest
    repeated = [p for p in prompts for _ in range(2)]
    logprobs = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
    logprobs.sum().backward()
    for p in qerl.trainable(model).values():
        assert p.grad.isfinite().all() and p.grad.any()


def test_a_gpus_products_are_tried(monkeypatch):
    """A GPU that refuses blocks gets whole rows; one whose products are wrong, an error of one line."""
    here = torch.device("cuda")
    either = [fp8_blocks.BLOCKS, fp8_blocks.ROWS]
    right = fp8_blocks.products_are_right
    multiply = fp8_blocks.multiply
    monkeypatch.setattr(
        fp8_blocks, "products_are_right", lambda recipe, _, dtype: right(recipe, "cpu", dtype))
    assert fp8_blocks.choose_recipe(here, torch.float32, either) == fp8_blocks.BLOCKS

    def refuse_blocks(x, *rest):
        if not x.whole_rows:
            raise NotImplementedError("scaling only supported for SM90")
        return multiply(x, *rest)
    monkeypatch.setattr(fp8_blocks, "multiply", refuse_blocks)
    assert fp8_blocks.choose_recipe(here, torch.float32, either) == fp8_blocks.ROWS

    def wrong(x, *rest):
        return multiply(x._replace(scale=x.scale.flip(0)), *rest)
    monkeypatch.setattr(fp8_blocks, "multiply", wrong)
    with pytest.raises(qerl.UserError, match="multiplies no FP8"):
        fp8_blocks.choose_recipe(here, torch.float32, either)


def test_fp8_recomputed_in_backward_is_the_same(qwen):
    """As on a GPU, with whose memory it is economical."""
    gradients = []
    for recompute in (False, True):
        model = with_lora(qwen[0])
        if recompute:
            model.recompute_in_backward()
        fp8_neighbour("unified", model)
        model(torch.arange(12)[None]).square().mean().backward()
        gradients.append([p.grad for p in qerl.trainable(model).values()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("options,message", [
    (["jetrl", "--weights", "nvfp4"], "--method jetrl:unified: the rollout reads 8 bits"),
    (["jetrl:training", "--weights", "bf16", "--lora-rank", 0, "--beta", 0],
     "use --method jetrl with --lora-rank 0"),
])
def test_jetrl_refuses_what_makes_no_sense(tmp_path, monkeypatch, capsys, options, message):
    flags = ("--device", "cpu", "--out", tmp_path / "out", "--method", *options)
    assert message in refused(monkeypatch, capsys, *flags)


def test_bench_step_trains_in_fp8():
    """The same rollout, other log-probabilities."""
    settings = step.settings_for("cpu")
    plain, = step.step_rows("tiny", "nvfp4", [(1, 2)], settings)
    fp8, = step.step_rows("tiny", "nvfp4-fp8", [(1, 2)], settings)
    assert "fp8_error" not in plain
    assert fp8["fp8_error"] > 0
    assert plain["length"] == fp8["length"]
