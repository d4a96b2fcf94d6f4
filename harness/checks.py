"""What ends a run before NaN or infinity reach its policy, its checkpoint or its log.

And what has to wait until a model is loaded.
"""
import json
import math

import torch
import torch.nn.functional as F

import qerl
from harness.flags import require
from qerl import UserError

KEPT = "stopped, the last checkpoint is kept"


def rank_fits(model, rank):
    """Refuse a rank of LoRA above what the smallest layer can have."""
    shapes = [(layer.lora_A.shape[1], *layer.sizes) for layer in model.quantized_layers()]
    smallest = min(map(min, shapes))
    require(rank <= smallest, "lora_rank", rank,
            f"the smallest layer has {smallest} features; lower it")


def say_what_stays(config):
    """Say so where a model's folder asks for quantised activations (W4A4): they stay as they are."""
    stored = json.dumps(getattr(config, "quantization_config", None), default=str)
    if '"input_activations": {' in stored:
        print("the model's folder asks for 4-bit activations, too; here activations stay 16 bit "
              "(32 on a CPU), only weights are 4 bit")


def finite_rollout(rollout, remedy):
    """Refuse completions of a policy whose logits are NaN or infinite."""
    sampled = torch.stack([rollout.logprobs, rollout.entropy])
    if not torch.isfinite(sampled).all():
        raise UserError(f"the policy's logits are NaN or infinite: {KEPT}; {remedy}")
    return rollout


def finite_update(losses, norm, scaler):
    """Stop before an optimiser step that would put NaN into the policy.

    A gradient that overflowed in float16 is no reason, as long as the scaler (torch.amp.GradScaler)
    can scale it less: it leaves this step out and halves its scale.
    """
    loss = sum(loss for loss, _ in losses)
    left_out = scaler.is_enabled() and scaler.get_scale() > 1
    if not math.isfinite(loss) or not (math.isfinite(norm) or left_out):
        raise UserError(
            f"loss {loss}, gradient norm {norm}: {KEPT}; start again with a lower --lr"
        )


@torch.no_grad()
def finite_policy(model, prompt):
    """After an update: refuse parameters, or logits after a prompt, that are NaN or infinite."""
    tokens = torch.tensor([prompt], device=model.device)
    logits = F.linear(model.hidden(tokens)[:, -1], model.lm_head)
    for name, tensor in {**qerl.trainable(model), "a vector of logits": logits}.items():
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"after this update {name} holds NaN or infinity: {KEPT}; "
                "start again with a lower --lr"
            )


def finite_metrics(metrics):
    """Refuse a step's figures if one is no number; JSON has none for NaN and infinity."""
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(
                f"step {metrics['step']}: {name} is {value}: {KEPT}; "
                "start again with a lower --lr or less noise (--sigma-start)"
            )
