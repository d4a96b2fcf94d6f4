"""Seconds of a step's phases, GSM8K's lengths, four updates: MODES=plain,exact,noise python steps.py LABEL model..."""
import os, sys, time, traceback
import torch
import qerl
from harness import fast
from harness.machine import keep_values
T0 = time.time()
def say(*a):
    print(f"[{time.time()-T0:6.1f}]", *a, flush=True)
import gc
from functools import partial
from harness.batches import make_batch
from harness.machine import Clock, fitted
from harness.ranks import Ranks
from studies.random_models import random_model, random_prompts
from studies.step import cut_lengths
try:
    from studies.step import CutSampler
except ImportError:
    try:
        from methods.deep_grpo import CutSampler
    except ImportError:
        CutSampler = None
from train_gsm8k import Samples, Settings, make_optimizer, update
def step(model, optimizer, scaler, settings, lengths, mode):
    asked = random_prompts(model.config.vocab_size, len(lengths) // settings.group, 128)
    clock = Clock(model.device); ranks = Ranks()
    sigma = 0.01 if mode.startswith("noise") else 0.0
    if mode in ("exact", "noisex"):
        assert model.decode_exactly()
    cut = dict(sampler_class=partial(CutSampler, lengths)) if CutSampler else dict(limits=lengths)
    with clock("rollout"), qerl.adaptive_quantization_noise(model, sigma, None):
        rollout = fast.generate(model, asked, settings.max_new_tokens, settings.group, slots=settings.slots, **cut)
    with clock("reward"):
        rewards = torch.rand(len(asked), settings.group, device=model.device)
        samples = Samples([{"prompt": p} for p in asked], rollout, None, rewards, rewards)
        batch = make_batch(samples, qerl.group_advantages(rewards), fast, settings, ranks)
    with clock("logprobs"), torch.no_grad():
        if mode == "exact":
            batch.old_logprobs.copy_(rollout.logprobs)
        else:
            for rows in batch.micro_batches(batch.trained_rows(first=1), settings.micro_tokens):
                batch.old_logprobs[rows.index] = fast.token_logprobs(model, rows.prompts, rows.tokens, rows.length, settings.temperature)
    with clock("update"):
        update(fast, model, batch, optimizer, scaler, settings, ranks)
    first = batch.minibatches[0]
    differ = (batch.old_logprobs[first] != rollout.logprobs[first])[rollout.mask[first]]
    return {**clock.seconds, "step": sum(clock.seconds.values())}, f"{int(differ.sum())} of {differ.numel()} differ"
def run(name, modes, prompts, group, repeats):
    model = random_model(name, "nvfp4", 32, "cuda")
    for n, p in qerl.trainable(model).items():
        if "lora_B" in n: p.data.normal_(0, 0.005)
    keep_values(model, fast)
    settings = Settings(updates=4, lr=1e-6, device="cuda", group=group)
    optimizer, scaler = make_optimizer(model, settings)
    model.recompute_in_backward()
    own = fitted(settings, model, 128 + settings.max_new_tokens, prompts * group, fast)
    lengths = cut_lengths(torch.full((prompts * group,), settings.max_new_tokens), Ranks())
    say(name, f"slots {own.slots} micro {own.micro_tokens} mean length {lengths.float().mean().item():.0f} max {int(lengths.max())}")
    for mode in modes:
        torch.manual_seed(0)
        rows = []
        for i in range(repeats + 1):
            seconds, differ = step(model, optimizer, scaler, own, lengths, mode)
            rows.append(seconds)
        rows = sorted(rows[1:], key=lambda s: s["step"])
        say(LABEL, name, mode, {k: round(v, 3) for k, v in rows[len(rows) // 2].items()}, "all", [round(r["step"], 3) for r in rows], "rollouts", [round(r["rollout"], 3) for r in rows], differ, f"{torch.cuda.max_memory_allocated()/1e9:.1f} GB")
        model.sampler = None
    return model
def decode_table(model, modes=("plain", "exact"), sizes=(512, 256, 128, 64, 32, 16), profiled=(512, 256, 64, 16)):
    from torch.profiler import profile, ProfilerActivity
    for mode in modes:
        if mode == "exact": assert model.decode_exactly()
        for slots in sizes:
            sampler = fast.Sampler(model, slots, slots, 128 + 400, 400, 1.0, 1.0, (), None)
            prompts = random_prompts(model.config.vocab_size, slots, 128)
            sampler.admit(prompts, torch.arange(slots, device="cuda"), torch.arange(slots, device="cuda"))
            sampler.steps(100); torch.cuda.synchronize(); t = time.time(); sampler.steps(60); torch.cuda.synchronize()
            ms = (time.time() - t) / 60 * 1e3
            text = ""
            if slots in profiled:
                with profile(activities=[ProfilerActivity.CUDA]) as prof:
                    sampler.steps(5); torch.cuda.synchronize()
                rows = sorted(prof.key_averages(), key=lambda e: -e.device_time_total)[:16]
                text = "; ".join(f"{e.key[:44]} {e.count/5:.0f}x {e.device_time_total/e.count:.1f} us = {e.device_time_total/5e3:.2f} ms" for e in rows)
            say(LABEL, mode, f"{slots} slots: {ms:.3f} ms a step;", text)
            del sampler
if __name__ == "__main__":
    LABEL, names = sys.argv[1], sys.argv[2:]
    say(LABEL, names, torch.cuda.get_device_name())
    for name in names:
        name, _, prof = name.partition(",")
        size = dict(prompts=64, group=8) if "7B" not in name else dict(prompts=32, group=8)
        try:
            model = run(name, os.environ["MODES"].split(","), repeats=int(os.environ.get("REPEATS", 3)), **size)
            if prof:
                model.sampler = None; gc.collect(); torch.cuda.empty_cache()
                decode_table(model, prof.split("+"))
        except Exception:
            traceback.print_exc()
        model = None
        gc.collect(); torch.cuda.empty_cache()
