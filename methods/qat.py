"""QAT: weights are trained to work in NVFP4, and reinforcement learning begins with them.

"What Makes Low-Bit Quantization-Aware Training Work for Reasoning LLMs?", arXiv 2601.14888 [from
notes, the paper itself was not read], and the distillation of NVIDIA's Model-Optimizer (QAD).

Problem. Rounding after training costs accuracy in reasoning. In QeRL LoRA has to make up for it; here
the weights themselves learn to, before RL starts (a cold start).

Formula. The forward pass reads the rounded weight, and the gradient ignores the rounding:

    Ŵ = s · E2M1(W / s),    ∂L/∂W := ∂L/∂Ŵ             (straight-through estimator, STE)

The block scales s stay as the quantiser has set them, so that training starts at the quantised model
itself and ends in NVFP4 bytes with the same scales [ours; I]. W is float32. It starts at the 16-bit
weights, or at GPTQ's decoded codes, each of which lies in the middle of what rounds to it. The loss:

    KL(π_teacher || π_Ŵ) of each answer token, T = 1; the teacher is the 16-bit model

The paper: this distillation beats supervised fine-tuning; start from GPTQ's weights (`--quantizer
gptq`); RL without such a cold start may collapse; calibrate on text like the training text. The
optimiser is AdamW, with a cosine from 1e-5 and a warm-up of 5 %. Here the start is rounding by
default, so that the cold start is the only change [I].

What differs from QeRL. Only the frozen weights differ, as with --quantizer: after the cold start they
are packed into NVFP4, written to the cache and frozen, and RL trains LoRA on top. The paper goes on
to train the weights in RL, too [I]; we keep QeRL's loop, kernels and memory. Weights and biases of
the linear layers are trained; norms, embeddings and output layer stay. The cold start needs the
memory of full fine-tuning, 16 bytes a weight, and that of the teacher. It learns from the training
questions and answers. The numbers of steps are not from the paper.

Result of the paper: the claims above; we did not read its figures. Ours: methods/README.md.

When would you use it? If better codes (gptq.py) leave an error that still costs accuracy, and you can
once use a machine for full fine-tuning.
"""
import torch
import torch.nn.functional as F
from transformers import get_cosine_schedule_with_warmup

import qerl
from harness import fast
from harness.errors import require
from harness.export import require_16_bit, stacked_parts, write_folder
from harness.layers import TrainedLinear, replace_layers
from methods import Method
from methods.parts.quantizers import cached_folder
from methods.parts.worked import answer_logits, fit, worked_sequences

TOKENS = 2 ** 20                   # of worked answers to draw from
RECIPE = dict(lr=1e-5, steps=500, batch=16)
SMALL_RECIPE = dict(lr=3e-5, steps=60, batch=16)       # for the built-in policy


class WithScales(fast.WeightReader):
    """Hands out 16-bit weights. The attribute nvfp4 of each has the parts of the same weight in NVFP4."""

    def stacked(self, names, sizes, in_features):
        weight = super().stacked(names, sizes, in_features)
        layers = [self.quantized(name, size, in_features, "nvfp4") for name, size in zip(names, sizes)]
        weight.nvfp4 = qerl.stack_parts(layers)
        return weight


class FakeQuantLinear(TrainedLinear):
    """A QuantLinear's layers with trained weights that each forward pass rounds to NVFP4.

    scales: block_scale [out, in/16] and global_scale [out, 1], which stay; scale: float32
    [out, in/16], by which the codes are multiplied.
    """

    def __init__(self, layer):
        super().__init__(layer)
        _, *self.scales = layer.weight.nvfp4
        block_scale, global_scale = self.scales
        self.scale = block_scale.float() / global_scale

    def cast(self, dtype):
        _, bias = super().cast(dtype)
        W = self.master.detach()
        packed = qerl.encode_e2m1(W, self.scale)
        rounded = qerl.dequantize_blocks(packed, qerl.E2M1, self.scale, torch.float32)
        return (rounded + (self.master - W)).to(dtype), bias       # the gradient of W is Ŵ's

    def packed_tensors(self):
        """{tensor name: tensor} of the NVFP4 that the forward pass multiplies with."""
        packed = qerl.encode_e2m1(self.master.detach(), self.scale)
        found = stacked_parts(self.names, self.sizes, packed, *self.scales)
        if self.bias is not None:
            biases = self.bias.detach().split(self.sizes)
            found |= {f"{name}.bias": bias for name, bias in zip(self.names, biases)}
        return found


def fake_quantised(folder, device="cpu"):
    """The model of a folder in 16 bit or NVFP4, with FakeQuantLinear layers."""
    model = fast.load_model(folder, "bf16", device=device, reader_class=WithScales)
    replace_layers(model, FakeQuantLinear)
    return model


def packed_tensors(model):
    """{tensor name: tensor} of all layers that fake_quantised made."""
    return {name: tensor for layer in model.quantized_layers()
            for name, tensor in layer.packed_tensors().items()}


def answer_loss(student, teacher, rows):
    """KL(teacher || student), the mean over answer tokens."""
    logits, _ = answer_logits(student, rows)
    with torch.no_grad():
        target = answer_logits(teacher, rows)[0].log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), target, log_target=True, reduction="batchmean")


def cold_start(student, teacher, sequences, lr, steps, batch):
    """Train the student's weights and return the losses."""
    optimizer = torch.optim.AdamW(qerl.trainable(student).values(), lr, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, round(0.05 * steps), steps)
    losses = []
    training_steps = fit(
        optimizer, lambda rows: answer_loss(student, teacher, rows), sequences, batch, student.device)
    for _, loss in zip(range(steps), training_steps):
        losses.append(loss)
        schedule.step()
    return losses


class Neighbour(Method):
    """QeRL on weights that were trained for NVFP4; --quantizer chooses where they start."""

    @classmethod
    def defaults(cls, variant):
        return dict(quantizer="rtn")

    def check(self):
        given = self.settings.weights
        require(given == "nvfp4", "--method qat: trains weights for NVFP4, not for "
                                       f"{given}; use --weights nvfp4")

    def stored_model(self, start, folder, questions, tokenizer):
        require_16_bit(folder, "--method qat")
        device = self.settings.device
        recipe = RECIPE if self.settings.model else SMALL_RECIPE
        sequences = worked_sequences(questions, tokenizer, TOKENS)

        def make(path):
            print(f"cold start, {recipe['steps']} steps, once")
            student = fake_quantised(start, device)
            if device != "cpu":
                student.recompute_in_backward()
            teacher = fast.load_model(folder, "bf16", device=device)
            losses = cold_start(student, teacher, sequences, **recipe)
            write_folder(folder, packed_tensors(student), path)
            print(f"cold start: loss {losses[0]:.5f} -> {losses[-1]:.5f}")

        key = [start, sequences, recipe, torch.device(device).type]
        return cached_folder(folder, "qat", key, make)
