"""A run's report.html: the curves, the completions of some questions token by token, the answers before and after."""
import qerl


def write_report(folder):
    """Write report.html from the files of a run's folder."""


def one_group(samples, batch, text):
    """All completions of one question, token by token, for samples.jsonl: the first whose rewards differ, else the first."""
    chosen = int(qerl.has_signal(samples.rewards).int().argmax())
    group = samples.rewards.shape[1]
    completions = []
    for row in range(chosen * group, (chosen + 1) * group):
        length = int(batch.length[row])
        completions.append({
            "text": samples.texts[row],
            "reward": samples.rewards.flatten()[row].item(),
            "correct": bool(samples.correct.flatten()[row]),
            "advantage": round(batch.advantages[row].item(), 4),
            "tokens": [text.decode([token]) for token in batch.tokens[row, :length].tolist()],
            "entropy": rounded(samples.rollout.entropy[row, :length]),
            "rollout_logprobs": rounded(batch.rollout_logprobs[row, :length]),
            "training_logprobs": rounded(batch.old_logprobs[row, :length]),
        })
    question = samples.questions[chosen]
    return {"question": question["question"], "number": str(question["number"]), "completions": completions}


def rounded(tensor):
    return [round(value, 4) for value in tensor.tolist()]
