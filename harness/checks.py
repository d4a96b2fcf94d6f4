"""What ends a run before NaN or infinity reach its policy, its checkpoint or its log.

Before that, what the flags may be; and what has to wait until a model is loaded.
"""
import json
import math

import torch
import torch.nn.functional as F

import qerl
from harness.flags import check_device, require_flag
from harness.ranks import Ranks
from qerl import UserError

KEPT = "stopped, the last checkpoint is kept"


def check_settings(settings):
    """Refuse, by name, values that cannot be meant."""
    def each(names, ok, what):
        for name in names:
            require_flag(ok(getattr(settings, name)), name, getattr(settings, name), what)
    each(["steps", "prompts", "updates", "stages", "max_new_tokens", "slots", "micro_tokens",
          "save_every", "eval_samples"], lambda n: n is None or n >= 1, "must be at least 1")
    each(["lora_rank", "beta", "tis", "sigma_start", "sigma_end", "eval_questions", "seed",
          "start_seed", "weight_decay", "clip_high"],
         lambda x: 0 <= x < math.inf, "must not be negative or infinite")
    each(["lr", "gradient_clip"], lambda x: 0 < x < math.inf, "must be positive and finite")
    each(["lora_alpha"], lambda x: x is None or 0 < x < math.inf,
         "must be positive and finite")
    each(["clip_low", "warm_up"], lambda x: 0 <= x < 1, "must be in [0, 1)")
    each(["seed", "start_seed"], lambda n: n < 2 ** 63, "must be below 2**63")
    each(["group"], lambda n: n >= 2, "advantages compare samples of one prompt, use at least 2")
    require_flag(settings.start_seed == 0 or not settings.model, "start_seed", settings.start_seed,
                 "is for the small built-in policy; leave it out with --model")
    require_flag(settings.prompts % settings.updates == 0, "prompts", settings.prompts,
                 f"is not divisible by --updates {settings.updates}; change one of them")
    one_sigma_is_zero = (settings.sigma_start > 0) != (settings.sigma_end > 0)
    require_flag(settings.schedule != "exponential" or not one_sigma_is_zero, "sigma_end",
                 settings.sigma_end,
                 "an exponential schedule needs both sigmas positive (or both 0: no noise)")
    require_flag(settings.quantizer == "rtn" or settings.weights == "nvfp4", "quantizer",
                 settings.quantizer, "chooses codes of NVFP4; use --weights nvfp4, or --quantizer rtn")
    if settings.lora_rank == 0:
        require_flag(settings.weights == "bf16", "lora_rank", 0,
                     "trains the weights themselves, which 4 bits cannot take; use --weights bf16")
        require_flag(settings.beta == 0, "beta", settings.beta,
                     "the reference policy is the one without LoRA; with --lora-rank 0 use --beta 0")
    check_device(settings.device)
    if settings.save_quantized is not None:
        check_saving(settings)


def check_saving(settings):
    """Refuse what goes with no --save-quantized."""
    def fits(ok, what):
        require_flag(ok, "save_quantized", settings.save_quantized, what)
    fits(settings.model, "saves a real model; name it with --model")
    fits(settings.weights == "nvfp4",
         f"saves NVFP4, not {settings.weights}; leave --weights {settings.weights} out")
    fits(settings.method == "qerl",
         f"saves what --quantizer makes; leave --method {settings.method} out")
    fits(not settings.resume and not settings.eval_only,
         "neither trains nor measures; leave --resume and --eval-only out")
    fits(not settings.shard, "cuts no weights; leave --shard out")
    fits(Ranks().count == 1, "is done by one process; start without torchrun")


def require_noise(settings):
    """Refuse a method that does something with the noise where there is none."""
    if max(settings.sigma_start, settings.sigma_end) == 0 or settings.stages == 1:
        raise UserError(f"--method {settings.method}: there is no noise to control; use --sigma-start "
                        "0.01 and --stages 10")


def require_rank_fits(model, rank):
    """Refuse a rank of LoRA above what the smallest layer can have."""
    layers = model.quantized_layers() if rank else []
    shapes = [(layer.lora_A.shape[1], *layer.sizes) for layer in layers]
    smallest = min(map(min, shapes), default=0)
    require_flag(rank <= smallest, "lora_rank", rank,
                 f"the smallest layer has {smallest} features; lower it")


def say_what_stays(config):
    """Say so where a model's folder asks for quantised activations (W4A4): they stay as they are."""
    stored = json.dumps(getattr(config, "quantization_config", None), default=str)
    if '"input_activations": {' in stored:
        print("the model's folder asks for 4-bit activations, too; here activations stay 16 bit "
              "(32 on a CPU), only weights are 4 bit")


def require_finite_rollout(rollout, remedy):
    """Refuse completions of a policy whose logits are NaN or infinite."""
    sampled = torch.stack([rollout.logprobs, rollout.entropy])
    if not torch.isfinite(sampled).all():
        raise UserError(f"the policy's logits are NaN or infinite: {KEPT}; {remedy}")


def require_finite_update(losses, norm, scaler):
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
def require_finite_policy(model, prompt):
    """After an update: refuse parameters, or logits after a prompt, that are NaN or infinite."""
    tokens = torch.tensor([prompt], device=model.device)
    logits = F.linear(model.hidden(tokens)[:, -1], model.lm_head)
    for name, tensor in {**qerl.trainable(model), "a vector of logits": logits}.items():
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"after this update {name} holds NaN or infinity: {KEPT}; "
                "start again with a lower --lr"
            )


def require_finite_metrics(metrics):
    """Refuse a step's figures if one is no number; JSON has none for NaN and infinity."""
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(
                f"step {metrics['step']}: {name} is {value}: {KEPT}; "
                "start again with a lower --lr or less noise (--sigma-start)"
            )
