"""NVFP4 codes other than the nearest: what methods/four_over_six.py, awq.py and gptq.py share.

Each of them has choose_codes(model, sequences), which finds the tensors that replace a 16-bit
model's. Here they are found once, written to the cache as a compressed-tensors folder and read from
there; meanwhile the device holds one block of the 16-bit model. In that folder q, k and v share a
global scale, and so do gate and up, as vLLM wants it; of layers that are rounded to nearest while
loading each has its own.
"""
import importlib
import inspect
import tempfile
import time

import torch

import qerl
from harness import calibration
from harness.demonstration import accuracy, distance, worked_problems
from harness.loading import load_with_progress
from harness.packed_folder import cached_folder, is_packed, write_packed_folder
from harness.small_policy import ByteText, warm_start
from harness.worked import worked_sequences
from methods import Method

QUANTIZERS = ("four-over-six", "awq", "gptq")      # besides "rtn", rounding to the nearest
CALIBRATION_TOKENS = 256 * 2048
SMALL_CALIBRATION = 2 ** 16        # for the built-in policy


def module_of(quantizer):
    """The module of methods/ that has this name in --quantizer."""
    return importlib.import_module(f"methods.{quantizer.replace('-', '_')}")


def round_e2m1(x):
    """x -> the nearest of E2M1's values, ties to the even code."""
    magnitude = torch.bucketize(x.abs(), qerl.E2M1_BOUNDS.to(x.device))
    return qerl.E2M1_MAGNITUDES.to(x.device)[magnitude].copysign(x)


def pieces(layer, weight):
    """(a layer's name in the folder, its rows of the stacked weight [out, in]), in order."""
    return zip(layer.names, weight.split(layer.sizes))


@torch.no_grad()
def quantized_folder(folder, quantizer, questions, tokenizer, device):
    """The compressed-tensors folder of a 16-bit folder's model, quantised so; kept in the cache.

    quantizer: a name in QUANTIZERS; questions, tokenizer: see harness.worked.worked_sequences. A
    folder that is in 4 bits already stays as it is.
    """
    if is_packed(folder):
        print(f"{folder} is in 4 bits already: its codes stay, --quantizer {quantizer} chooses none")
        return folder
    tokens = SMALL_CALIBRATION if isinstance(tokenizer, ByteText) else CALIBRATION_TOKENS
    sequences = worked_sequences(questions, tokenizer, tokens)
    module = module_of(quantizer)

    def make(path):
        print(f"finding NVFP4 codes by {quantizer}, once")
        model = load_with_progress(
            folder, "bf16", device=device, checkpoint_class=calibration.LeftInFiles)
        write_packed_folder(folder, module.choose_codes(model, sequences), path)

    code = [inspect.getsource(part) for part in (module, calibration, qerl.quantize_nvfp4)]
    key = [quantizer, sequences, torch.device(device).type, *code]
    stored = cached_folder(folder, quantizer, key, make)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()             # a run's log is of its steps
    return stored


class OtherCodes(Method):
    """QeRL with --quantizer at the name that a subclass gives, and nothing else."""
    quantizer = None

    @classmethod
    def defaults(cls, variant):
        return dict(quantizer=cls.quantizer)

    def check(self):
        given = self.settings.quantizer
        qerl.require(self.settings.weights == "nvfp4",
                     f"--method {self.settings.method}: its codes are NVFP4's, not "
                     f"{self.settings.weights}'s; use --weights nvfp4")
        qerl.require(given == self.quantizer,
                     f"--method {self.settings.method}: chooses the codes as --quantizer "
                     f"{self.quantizer} does; use --quantizer {given} alone")


# --------------------------------------------------------------------------------------------------
# The demonstrations

def example_layer():
    """(weight [48, 128], inputs x [1000, 128]), which are correlated and of unequal size."""
    torch.manual_seed(0)
    mixed = torch.randn(1000, 128) @ (torch.eye(128) + 0.1 * torch.randn(128, 128))
    return 0.05 * torch.randn(48, 128), mixed * torch.rand(128) ** 3


def show_layer(weight, x, rounded):
    """Print the errors of a layer that was rounded in several ways; rounded: {name: weight}."""
    print("One layer, its inputs correlated and of unequal size. Relative error:\n\n"
          f"  {'codes':12} of the weights   of its output")
    for name, found in rounded.items():
        difference = found - weight
        of_weights = difference.norm() / weight.norm()
        of_output = (x @ difference.T).norm() / (x @ weight.T).norm()
        print(f"  {name:12} {of_weights:14.2%} {of_output:15.2%}")
    print()


def show_quantizers(tokens=16384):
    """Print what becomes of the built-in policy under each quantizer."""
    print("The built-in policy in 16 bit and in NVFP4 by four quantizers: the error of its logits\n"
          "and the KL to its 16-bit self on held-out answers, their perplexity, and how many\n"
          f"problems it solves greedily before any RL. {tokens:,} tokens of calibration.\n")
    folder = warm_start()
    questions, held_out = worked_problems()
    sequences = worked_sequences(questions, ByteText(), tokens)
    exact = qerl.load_model(folder, "bf16")
    print(f"{'codes':14}{'error':>9}{'KL':>10}{'perplexity':>12}{'accuracy':>10}{'seconds':>9}")
    for name in ("16 bit", "rtn", *QUANTIZERS):
        started = time.perf_counter()
        model = exact if name == "16 bit" else demonstrated(folder, name, sequences)
        seconds = time.perf_counter() - started
        far = distance(model, exact, held_out)
        print(f"{name:14}{far['error']:9.4f}{far['kl']:10.5f}{far['perplexity']:12.4f}"
              f"{accuracy(model):10.1%}{seconds:9.1f}")
    print("\nAll rows but the first take 4.5 bits a weight, and the same kernels. The policy\n"
          "imitates careless answers: exact is who solves as many as in 16 bit, not the most.")


def demonstrated(folder, quantizer, sequences):
    """The built-in policy with the codes of this quantizer."""
    if quantizer == "rtn":
        return qerl.load_model(folder)
    found = module_of(quantizer).choose_codes(qerl.load_model(folder, "bf16"), sequences)
    with tempfile.TemporaryDirectory() as path:
        write_packed_folder(folder, found, path)
        return qerl.load_model(path)
