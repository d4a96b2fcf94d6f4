"""RILQ: LoRA starts where it undoes the quantisation, which the whole model's output decides.

"RILQ: Rank-Insensitive LoRA-based Quantization Error Compensation for Boosting 2-bit Large
Language Model Accuracy", arXiv 2412.01129; the recipe is that of the authors' main.py.

Problem. LoRA can make up for a part of the quantisation error. Layer by layer, the best B A is the
approximation of W - Ŵ of rank r, its truncated singular value decomposition (SVD). But the error of
few bits has a high rank, nearly as noise has, so that a small rank catches little of it.

Formula. The LoRA of all layers is trained together, on text, to give the model its output back:

    L = 1/2 MSE(h_q, h) + 1/2 CE(next token)

h [T, d] are the final hidden states of the 16-bit model, h_q those of the quantised one with LoRA.
Layers can then make up for one another's errors, and the rank matters little. The optimiser is Adam
at 1e-4, on batches of 8 of 320 texts. A fifth of the texts is for validation, every 8 steps. The LoRA
with the least loss there is kept; training ends when the loss has not fallen for 3 validations, or
after 200 steps. The defaults of main.py are longer: batches of 64, a validation every 25 steps,
patience 5, at most 10,000 steps. Its alpha of 16 scales LoRA by 16 / r; ours is scaled by 1.

What differs from QeRL. LoRA starts here and not at zero. The reference policy of the KL term has this
LoRA. The texts are the training questions and answers, up to 512 tokens of each, and the
cross-entropy is that of the answers; the authors' texts are C4 and WikiText. So this is also a little
supervised fine-tuning, which a comparison with QeRL has to count. The 16-bit teacher has to fit on
the device beside the quantised model. A resumed run finds this start again; on a GPU sums may add up
in another order.

Result of the paper. At 2 bits small ranks do nearly as well as large ones, and with SVD they do not
[from the abstract and from notes; its figures were not checked]. Ours: methods/README.md.

When would you use it? Where quantisation hurts: with 2 or 3 bits, or a small model in NVFP4. With 4
bits and 7B there is little to undo, and RL would train the same LoRA anyway.
"""
import torch
import torch.nn.functional as F

import qerl
from harness import fast
from harness.export import require_16_bit, trained_copy
from methods import Method
from methods.parts.worked import Worked, answer_logits, batches_of, fit, worked_sequences
from harness.errors import require

TEXTS = 320
LONGEST = 512                      # tokens of a text
BATCH = 8
EVERY = 8                          # steps between two validations
PATIENCE = 3                       # validations without progress, after which training ends


def rilq_loss(model, teacher_hidden, rows):
    """The loss of Rows; teacher_hidden [B, T, d]: of the 16-bit model."""
    hidden = model.hidden(rows.tokens)
    mse = F.mse_loss(hidden[rows.mask].float(), teacher_hidden[rows.mask].float())
    cross_entropy = F.cross_entropy(*answer_logits(model, rows, hidden))
    return 0.5 * mse + 0.5 * cross_entropy


def compensate(model, teacher, sequences, lr=1e-4, steps=200):
    """Train the model's LoRA by rilq_loss; returns the validation losses, first that of the start.

    sequences: those of parts/worked.py. The adapter with the least validation loss stays in the model.
    """
    device = model.device
    count = max(1, len(sequences) // 5)
    held_out = batches_of(sequences[:count], BATCH, device)
    training = sequences[count:] or sequences
    optimizer = torch.optim.Adam(qerl.trainable(model).values(), lr)

    def loss_of(rows):
        with torch.no_grad():
            target = teacher.hidden(rows.tokens)
        return rilq_loss(model, target, rows)

    @torch.no_grad()
    def validate():
        return sum(loss_of(rows).item() for rows in held_out) / len(held_out)

    losses = [validate()]
    best = trained_copy(model)
    training_steps = fit(optimizer, loss_of, training, BATCH, device)
    for step, _ in zip(range(1, steps + 1), training_steps):
        if step % EVERY == 0:
            losses.append(validate())
            waited = len(losses) - 1 - losses.index(min(losses))   # never a NaN
            if waited == 0:
                best = trained_copy(model)
            if waited == PATIENCE:
                break
    model.load_state_dict(best, strict=False)
    return losses


def texts_of(questions, tokenizer):
    """Worked questions of less than LONGEST tokens, TEXTS at most, with their answers cut to that."""
    some = worked_sequences(questions, tokenizer, tokens=TEXTS * LONGEST)[:TEXTS]
    return [Worked(s.prompt, s.answer[:LONGEST - len(s.prompt)])
            for s in some if len(s.prompt) < LONGEST]


class Neighbour(Method):
    """QeRL whose LoRA starts at RILQ's."""

    def check(self):
        settings = self.settings
        require(settings.weights != "bf16",
                "--method rilq: there is no error of quantisation to undo in bf16; use --weights nvfp4, "
                "mxfp4 or nf4")
        require(not settings.train_norms, "--method rilq: starts LoRA alone; leave --train-norms out")
        require(settings.dtype != "float16",
                "--method rilq: its gradients are too small for float16; use --dtype float32")

    def prepare(self, model, folder, questions, tokenizer):
        require_16_bit(folder, "--method rilq")
        texts = texts_of(questions, tokenizer)
        teacher = fast.load_model(folder, "bf16", device=self.settings.device)
        losses = compensate(model, teacher, texts)
        model.reference = trained_copy(model)      # of the KL term: the start, LoRA included
        print(f"RILQ: validation loss {losses[0]:.4f} -> {min(losses):.4f}, "
              f"{len(losses) - 1} validations")
