"""methods/jetrl.py: training in FP8."""
import itertools
import json
import os
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import qerl
import train_gsm8k
from common import QUICK, all_trained, fp8_neighbour, neighbour, refused
from common import sample_step, stopped_and_resumed
from harness.batches import Batch
from harness.full_weights import train_all_weights
from harness.mismatch import describe_mismatch
from methods import flashrl, jetrl
from methods.parts import eight_bit, fp8_blocks, fp8_layers
from studies import cross_compile, step
from test_qerl import CUDA, HERE, KERNEL_DEVICE, PROMPTS, gpu, make_folder, relative, runs_kernels
from test_qerl import with_lora


def library_block_scales(x, square):
    """compressed-tensors' FP8_BLOCK: its arguments and scales of a matrix of whole blocks, 1 x 128
    or 128 x 128.
    """
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    args = scheme.weights if square else scheme.input_activations
    height = 128 if square else 1
    blocks = x.view(x.shape[0] // height, height, -1, 128)
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    return args, scale, zero


def library_rounded(x, square):
    """x, padded to whole blocks and cut again, as compressed-tensors' FP8_BLOCK holds it, float64.
    """
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    rows, columns = x.shape
    padded = F.pad(x.float(), (0, -columns % 128, 0, -rows % 128))
    args, scale, zero = library_block_scales(padded, square)
    return fake_quantize(padded, scale, zero, args)[:rows, :columns].double()

UNEVEN = lambda rows, columns: torch.randn(rows, columns) * torch.randn(1, columns).mul(2).exp()


@pytest.mark.parametrize("square", [False, True])
def test_fp8_blocks_equal_compressed_tensors(square):
    """Scales and bytes, of blocks of very different size and one that is empty."""
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    torch.manual_seed(0)
    weight = UNEVEN(256, 384)
    weight[:128, 128:256] = 0
    ours = fp8_blocks.quantize(weight, fp8_blocks.SQUARE if square else fp8_blocks.ROW)
    args, scale, _ = library_block_scales(weight, square)
    full = ours.scale > 1e-29
    assert full.sum() == full.numel() - (1 if square else 128)
    torch.testing.assert_close(ours.scale[full], scale[full], rtol=1e-6, atol=0)
    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    scheme.weights = args
    stored = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": ours.scale},
        scheme)["weight"]
    assert torch.equal(ours.codes.view(torch.uint8), stored.view(torch.uint8))
    back = fp8_blocks.transposed(ours).dequantize() if square else ours.dequantize().T
    assert torch.equal(back, ours.dequantize().T)


@pytest.mark.parametrize("n,k,m", [(3, 128, 128), (130, 384, 256), (37, 200, 72)])
def test_fp8_products_equal_float64_of_the_librarys_operands(n, k, m):
    """Y, dX and dW; X is kept in FP8 and rounded once more for dW.

    The last shape has blocks that are not whole.
    """
    torch.manual_seed(0)
    x, weight, grad = UNEVEN(n, k), UNEVEN(m, k), UNEVEN(n, m) * 1e-6
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = jetrl.TrainedProduct.apply(*leaves, fp8_blocks.BLOCKS)
    y.backward(grad)
    X, W = library_rounded(x, False), library_rounded(weight, True)
    columns_of_x = library_rounded(X.float().T.contiguous(), False).T
    columns_of_grad = library_rounded(grad.T.contiguous(), False).T
    for ours, exact, plain in ((y, X @ W.T, x @ weight.T),
            (leaves[0].grad, library_rounded(grad, False) @ W, grad @ weight),
                               (leaves[1].grad, columns_of_grad.T @ columns_of_x, grad.T @ x)):
        assert relative(ours.double(), exact) < 2e-5 and 0.005 < relative(ours, plain) < 0.1


def test_between_fp8_layers_the_dtype_stays(qwen):
    """Activations and their gradients are in bfloat16 outside of the products, masters and their
    gradients in float32.
    """
    x, master = torch.randn(5, 256, dtype=torch.bfloat16, requires_grad=True), torch.randn(128, 256,
        requires_grad=True)
    y = jetrl.TrainedProduct.apply(x, master, fp8_blocks.BLOCKS)
    # its gradient is expanded, with strides of 0
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, master.grad.dtype) == (torch.bfloat16, torch.bfloat16,
        torch.float32)
    model = with_lora(qwen[0], dtype=torch.bfloat16)
    fp8_neighbour("unified", model)
    assert all(layer.coded.codes.codes.element_size() == 1 for layer in model.quantized_layers())
    logits = model(torch.arange(9)[None])
    logits.float().square().mean().backward()
    assert logits.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32
        and p.grad.any() for p in qerl.trainable(model).values())


def test_fp8_of_whole_rows_equals_flashrls_product():
    """Activations and gradients in whole rows, the weight as a whole, also transposed."""
    torch.manual_seed(0)
    x, weight, grad = torch.randn(20, 200), torch.randn(72, 200), torch.randn(20, 72)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = jetrl.TrainedProduct.apply(*leaves, fp8_blocks.ROWS)
    y.backward(grad)

    def rounded(a):
        codes, scale = eight_bit.quantize_rows(a, "fp8")
        return codes.float() * scale
    whole = rounded(weight.view(1, -1)).view_as(weight)
    torch.testing.assert_close(y, rounded(x) @ whole.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves[0].grad, rounded(grad) @ whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves[1].grad, rounded(grad.T) @ rounded(rounded(x).T).T, rtol=1e-5,
        atol=1e-5)


def cublas_twin(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """torch.nn.functional.scaled_mm of FP8 blocks as PyTorch's source states their layouts, on a
    CPU.
    """
    (M, K), N = a.shape, b.shape[1]
    kind, blocks = F.ScalingType, K // 128
    assert a.is_contiguous()
    assert b.stride() == (1, K)
    assert K % 128 == N % 16 == M % 16 == 0
    assert recipe_a == kind.BlockWise1x128
    assert scale_a.shape == (M, blocks)
    assert scale_a.stride(0) == 1
    assert scale_a.stride(1) == M or blocks == 1
    y = torch.zeros(M, N, dtype=torch.float64)
    for k in range(blocks):
        part = a[:, 128 * k:128 * k + 128].double() @ b[128 * k:128 * k + 128].double()
        if recipe_b == kind.BlockWise1x128:
            assert scale_b.shape == (N, blocks)
            assert scale_b.stride(0) == 1
            assert scale_b.stride(1) == N or blocks == 1
            of_columns = scale_b[:, k]
        else:
            padded = -(-blocks // 4) * 4
            assert recipe_b == kind.BlockWise128x128 and scale_b.shape == (padded, N // 128)
            assert scale_b.stride(0) == 1 and (scale_b.stride(1) == padded or N == 128)
            of_columns = scale_b[k].repeat_interleave(128)
        y += part * scale_a[:, k, None] * of_columns
    return y.to(output_dtype)


@pytest.mark.parametrize("n,k,m", [(5, 384, 256), (200, 640, 128), (16, 128, 384), (40, 512, 1024)])
def test_cublas_is_given_blocks_as_it_wants_them(monkeypatch, n, k, m):
    """All three products by the layouts that PyTorch's source states, and by the checks of its own
    shape inference.
    """
    torch.manual_seed(0)
    x, weight, grad = UNEVEN(n, k), UNEVEN(m, k), UNEVEN(n, m)
    w, rows_of_grad = fp8_blocks.quantize(weight, fp8_blocks.SQUARE), fp8_blocks.quantize(grad.T,
        fp8_blocks.ROW)
    scaled_mm = F.scaled_mm
    monkeypatch.setattr(F, "scaled_mm", cublas_twin)
    for a, b in ((fp8_blocks.quantize(x, fp8_blocks.ROW), w),
            (fp8_blocks.quantize(grad, fp8_blocks.ROW), fp8_blocks.transposed(w)),
                 (rows_of_grad, fp8_blocks.quantize(x.T, fp8_blocks.ROW))):
        shape = a.shape[0], b.shape[0]
        y = fp8_blocks.multiply_blocks(a, b, torch.float32)[:shape[0], :shape[1]]
        torch.testing.assert_close(y, fp8_blocks.multiply(a, b, torch.float32), rtol=1e-4,
            atol=1e-4 * y.abs().max().item())
        monkeypatch.setattr(F, "scaled_mm", scaled_mm)
        absent = [c._replace(codes=c.codes.to("meta"), scale=c.scale.to("meta")) for c in (a, b)]
        assert fp8_blocks.multiply_blocks(*absent, torch.bfloat16).dtype == torch.bfloat16
        monkeypatch.setattr(F, "scaled_mm", cublas_twin)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,columns", [(3, 128), (40, 300), (150, 640)])
def test_kernel_fp8_blocks(monkeypatch, dtype, rows, columns):
    """Scales and bytes as the twin's, of a matrix and its transpose.

    The interpreter would round wrongly; there PyTorch rounds.
    """
    torch.manual_seed(0)
    x = UNEVEN(rows, columns).to(dtype).to(KERNEL_DEVICE)
    x[0] = 0
    for matrix, block in itertools.product((x, x.T),
            (fp8_blocks.ROW, fp8_blocks.SQUARE, fp8_blocks.WHOLE_ROW)):
        with monkeypatch.context() as patch:
            patch.setattr(qerl, "use_kernels", lambda x: False)
            # a GPU's PyTorch divides by 448 less exactly
            twin = fp8_blocks.quantize(matrix.cpu(), block)
        fused = fp8_blocks.quantize(matrix, block)
        assert fused.shape == twin.shape
        assert fused.codes.shape == twin.codes.shape
        assert torch.equal(fused.scale.cpu(), twin.scale)
        if not CUDA:
            codes = fp8_blocks.quantize_fused(matrix, *twin.codes.shape, block,
                dtype=torch.float32).codes
            fused = fused._replace(codes=codes.to(torch.float8_e4m3fn))
        assert torch.equal(fused.codes.view(torch.uint8).cpu(), twin.codes.view(torch.uint8))
    whole = fp8_blocks.quantize(x, fp8_blocks.SQUARE).codes
    assert torch.equal(fp8_blocks.transpose_bytes(whole).view(torch.uint8),
        whole.view(torch.uint8).T)


@pytest.mark.parametrize("target", [89, 90])
def test_fp8_kernels_compile_for(target):
    """Compiled, not run: the FP8 conversion is the hardware's, loads and stores are of 16 bytes,
    nothing is spilled.
    """
    if qerl.kernels is None:
        pytest.skip("needs Triton")
    try:
        cross_compile.ptxas_path(target)
    except RuntimeError as e:
        pytest.skip(f"needs NVIDIA's assembler: {e}")
    code = f"""
import json, torch
from methods.parts import fp8_blocks
from studies import cross_compile
cross_compile.pretend({target})
found, asm = cross_compile.facts, []
def facts(kernel, *rest):
    ptx = kernel.asm["ptx"]
    words = ("satfinite.e4m3x2", "ld.global.v4", "st.global.v4")
    return found(kernel, *rest) | {{word: word in ptx for word in words}}
cross_compile.facts = facts
def launch():
    x = torch.empty(300, 3584, dtype=torch.bfloat16)
    fp8_blocks.quantize(x, fp8_blocks.ROW)
    fp8_blocks.quantize(x.T, fp8_blocks.ROW)
    fp8_blocks.quantize(x, fp8_blocks.SQUARE)
    fp8_blocks.quantize(x, fp8_blocks.WHOLE_ROW)
    fp8_blocks.transpose_bytes(torch.empty(256, 3584, dtype=torch.float8_e4m3fn))
print(json.dumps(cross_compile.compile_for({target}, launch)))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True,
        env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    kernels = json.loads(result.stdout.splitlines()[-1])
    names = [kernel["kernel"] for kernel in kernels]
    assert names == ["quantize_kernel"] * 3 + ["quantize_rows_kernel", "transpose_kernel"]
    for kernel in kernels:
        assert "error" not in kernel, kernel
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= 2 ** 15, kernel
        assert kernel["ld.global.v4"] and kernel["st.global.v4"], kernel
        assert kernel["satfinite.e4m3x2"] == (kernel["kernel"] != "transpose_kernel"), kernel


@pytest.mark.parametrize("kind", ["all weights", "lora"])
def test_fp8_gradient_is_near_the_exact_one(qwen, kind):
    """Of the whole model, against PyTorch's exact backward of the same rounded operands; LoRA's
    products stay in 32 bits.
    """
    model = all_trained(qwen[0]) if kind == "all weights" else with_lora(qwen[0])
    fp8_neighbour("unified", model)
    tokens = torch.tensor([[5, 9, 2, 77, 31, 8, 100, 3]] * 2)

    def gradients():
        model.zero_grad()
        F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        return {name: p.grad.clone() for name, p in qerl.trainable(model).items()}

    def rounded(x, square):
        return x + (library_rounded(x.detach(), square).float() - x.detach())

    def forward(layer, x):
        rows = x.flatten(0, -2)
        if kind == "all weights":
            y = F.linear(rounded(rows, False), rounded(layer.master, True))
        else:
            y = F.linear(rounded(rows, False), layer.coded.dequantize(torch.float32))
            A, B = layer.lora_A.split(layer.rank), layer.lora_B.split(layer.sizes)
            y = y + layer.alpha / layer.rank * torch.cat([rows @ a.T @ b.T for a, b in zip(A, B)],
                -1)
        return (y if layer.bias is None else y + layer.bias).unflatten(0, x.shape[:-1])

    ours = gradients()
    for layer in model.quantized_layers():
        layer.forward = types.MethodType(forward, layer)
    exact = gradients()
    for layer in model.quantized_layers():
        del layer.forward
    with fp8_layers.fp8(model, False):
        plain = gradients()
    assert ours.keys() == exact.keys() and all(layer.fp8 for layer in model.quantized_layers())
    fp8, rounded_once, unrounded = (
        torch.cat([g.flatten() for g in gradient.values()]) for gradient in (ours, exact, plain))
    assert 1e-3 < relative(fp8, rounded_once) < 0.06 < relative(fp8, unrounded) < 0.3
    for name in ours:
        assert relative(ours[name], exact[name]) < 0.1, name


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
        return describe_mismatch(batch.old_logprobs, rollout.logprobs, rollout.mask)["mismatch_kl"]
    one = model()
    assert mismatch_of(fp8_neighbour("unified", one), one) < 1e-6
    other = model()
    assert mismatch_of(fp8_neighbour("rollout", other), other) > 1e-5
    flash = flashrl.Neighbour(types.SimpleNamespace(micro_tokens=16384), "fp8")
    assert mismatch_of(flash, model()) > 1e-5


@pytest.mark.parametrize("options",
    [("jetrl", "--lora-rank", 0, "--beta", 0), ("jetrl:training", "--beta", 0.1),
    ("jetrl:rollout",)])
def test_jetrl_trains_and_resumes(qwen, data, tmp_path, monkeypatch, options):
    """Which of a step's passes are in FP8, what is logged, and the same run bit for bit after a
    stop.
    """
    variant = options[0].partition(":")[2] or "unified"
    # differs within a group
    monkeypatch.setattr(train_gsm8k, "reward", lambda text, *_: (sum(text.encode()) % 97, 0.0))
    calls, log_probs = [], qerl.token_logprobs
    decoding, generate = [], qerl.generate

    def spy_training(model, *args, **kwargs):
        calls.append((torch.is_grad_enabled(), model.blocks[0].mlp.down.fp8))
        return log_probs(model, *args, **kwargs)

    def spy_decoding(model, *args, **kwargs):
        rollout = generate(model, *args, **kwargs)
        decoding.append(isinstance(model.blocks[0].mlp.down.weight, fp8_layers.CodedWeight))
        return rollout
    options = ("--model", qwen[0], "--data", data, *QUICK, "--steps", 3, "--eval-questions", 1,
        "--skip-eval-before", "--save-every", 1,
               "--sigma-start", 0, "--sigma-end", 0, "--method", *options)
    with monkeypatch.context() as patch:
        patch.setattr(qerl, "token_logprobs", spy_training)
        patch.setattr(qerl, "generate", spy_decoding)
        metrics = stopped_and_resumed(patch, options, tmp_path)
    updates = {in_fp8 for with_gradient, in_fp8 in calls if with_gradient}
    # the second: fp8_error's
    assert updates == {variant != "rollout"} and len({in_fp8 for _, in_fp8 in calls}) == 2
    # 3 rollouts, 2 evaluations
    whole_run = decoding[:5]
    assert whole_run == {"unified": [True] * 5, "training": [False] * 5,
        "rollout": [True] * 3 + [False] * 2}[variant]
    for m in metrics:
        assert m["fp8_largest_error"] >= m["fp8_error"] > 1e-5
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())["settings"]
    assert summary["weights"] == ("nvfp4" if variant == "training" else "bf16")


def test_jetrl_wants_fp8_products(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(qerl.UserError, match="this GPU has no FP8 products"):
        neighbour("jetrl", device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert neighbour("jetrl:training", device="cuda").variant == "training"


def fp8_error_on_a_cpu(folder, variant, batch, **options):
    """What --method jetrl logs of the same completions where PyTorch multiplies."""
    model = with_lora(folder, **options)
    method = fp8_neighbour(variant, model)
    tokens, length, mask = batch.tokens.cpu(), batch.length.cpu(), batch.mask.cpu()
    here = Batch(batch.prompts, tokens, length, mask.float(), torch.ones(len(length)), mask)
    here.old_logprobs = method.old_logprobs(model, here)
    return method.before_updates(here)["fp8_error"]


@gpu
def test_gpu_fp8_blocks_equal_the_cpus(tmp_path):
    """The tensor cores' three products, of one row and of many; a rollout recorded as a CUDA graph;
    training on NVFP4.
    """
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 products")
    torch.manual_seed(0)
    either = [fp8_blocks.BLOCKS, fp8_blocks.ROWS]
    chosen = [fp8_blocks.choose_recipe(torch.device("cuda"), torch.bfloat16, recipes)
        for recipes in (either, either[::-1])]
    assert chosen == either or not qerl.kernels.is_hopper(torch.device("cuda"))
    for recipe, n in itertools.product(chosen, (1, 17, 300)):
        x, weight, grad = UNEVEN(n, 896).bfloat16(), UNEVEN(384, 896), UNEVEN(n, 384).bfloat16()
        results = []
        for device in ("cpu", "cuda"):
            leaves = [t.detach().to(device).requires_grad_() for t in (x, weight)]
            y = jetrl.TrainedProduct.apply(*leaves, recipe)
            y.backward(grad.to(device))
            results.append([t.cpu().float() for t in (y, leaves[0].grad, leaves[1].grad)])
        assert all(relative(ours, exact) < 5e-3 for exact, ours in zip(*results))
    text = types.SimpleNamespace(eos=range(20))
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    folder = make_folder(tmp_path, "wide")[0]
    for variant, options in (("unified", dict(weights="bf16")), ("training", dict(weights="nvfp4"))):
        model = with_lora(folder, device="cuda", **options)
        model.recompute_in_backward()
        method = fp8_neighbour(variant, model)
        rollout = method.generate(model, prompts, 40, 2, eos=text.eos, slots=70)
        repeated = [p for p in prompts for _ in range(2)]
        batch = Batch(repeated, rollout.tokens, rollout.length, rollout.logprobs,
            torch.ones(120, device="cuda"), rollout.mask)
        batch.old_logprobs = method.old_logprobs(model, batch)
        assert (batch.old_logprobs - rollout.logprobs).abs()[rollout.mask].mean() < (0.05
            if variant == "unified" else 0.15)
        assert method.before_updates(batch)["fp8_error"] == pytest.approx(fp8_error_on_a_cpu(folder,
            variant, batch, **options), rel=0.2)
        logprobs = qerl.token_logprobs(model, repeated, rollout.tokens, rollout.length)
        logprobs.sum().backward()
        assert all(p.grad.isfinite().all() and p.grad.any() for p in qerl.trainable(model).values())


def test_a_gpus_products_are_tried(monkeypatch):
    """A GPU that refuses blocks gets whole rows; one whose products are wrong, an error of one
    line.
    """
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
