"""train_gsm8k.py, and in each step the old policy's log-probabilities of all trained rows against the rollout's."""
import json, time, torch
import train_gsm8k as t
original = t.update
def update(engine, model, batch, *others):
    settings = others[2]
    torch.cuda.synchronize(); begin = time.time()
    found = torch.zeros_like(batch.old_logprobs)
    rows = batch.trained_rows()
    with torch.no_grad():
        for part in batch.micro_batches(rows, settings.micro_tokens):
            found[part.index] = engine.token_logprobs(model, part.prompts, part.tokens, part.length, settings.temperature)
    there = t.qerl.length_mask(batch.length[rows], batch.tokens.shape[1]).to(found.device)
    a, b = found[rows][there], batch.rollout_logprobs[rows][there]
    with open("equal.jsonl", "a") as f:
        print(json.dumps({"tokens": a.numel(), "differ": int((a != b).sum()), "largest": float((a - b).abs().max()), "seconds": time.time() - begin}), file=f)
    return original(engine, model, batch, *others)
t.update = update
t.main()
