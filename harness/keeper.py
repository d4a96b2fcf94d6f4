"""What lasts of a run, in its folder: checkpoint and adapter, log, samples, summary, report."""
import json
import os
import time
from dataclasses import asdict

from tqdm import tqdm

from harness.checkpoint import fingerprint, read_checkpoint, restore, save_checkpoint
from harness.checkpoint import weights_checksum
from harness.checks import require_finite_metrics
from harness.instruments import command_line, environment, open_tracker
from harness.report import one_group, report_on
from harness.run_folder import append_jsonl, atomic_write, choose_folder, open_folder, read_log
from qerl import UserError

# Settings of where a run lives and how its work is cut, which another part of it may have otherwise.
FREE = ("out", "resume", "eval_only", "save_every", "slots", "micro_tokens", "keep_activations",
        "shard", "log", "preset", "save_quantized")


def lasting(settings):
    """What a checkpoint must agree with: all settings but FREE."""
    kept = {name: value for name, value in sorted(asdict(settings).items()) if name not in FREE}
    return kept | {"device": settings.device.partition(":")[0]}            # any GPU will do


def read_saved(settings, must_agree=None):
    """(state, tensors) of the run's last checkpoint or None; see read_checkpoint."""
    return read_checkpoint(settings.out, lasting(settings), must_agree)


def require_same_policy(state, model, folder):
    """Refuse to go on with another model, or other 4-bit codes, than the run in `folder` adapts."""
    changed = {
        "weights": "other weights than --model has now, or other 4-bit codes than --quantizer finds "
                   "now, with other code, libraries or hardware",
        "config": "another config.json or other EOS tokens than --model has now",
    }
    for part, ours in model.fingerprints.items():
        if state.get(part, ours) != ours:       # an older checkpoint lacks "config"
            raise UserError(f"--resume: {folder} was begun with {changed[part]}; bring back the "
                            "model's files or the cache of that time, or start a new run")


def open_run(settings):
    """Choose, create and lock the run's folder -> (folder, lock)."""
    folder = settings.out
    if folder is None:
        name = os.path.basename(os.path.normpath(settings.model)) if settings.model else "small"
        folder = choose_folder(f"runs/{name}-{settings.weights}-{settings.algo}", settings.resume)
    return folder, open_folder(folder, settings.resume)


PROGRESS = ("reward {reward:.2f}, accuracy {accuracy:.2f}, entropy {entropy:.3f}, sigma {sigma:.1e}, "
            "length {length:.0f}, {tokens_per_s:.0f} tok/s")


class Keeper:
    """Writes what lasts of a run in the folder settings.out, and reads it back with --resume.

    state is what else a checkpoint holds besides tensors: the steps done, the questions drawn so
    far, seconds, accuracies.
    """

    def __init__(self, settings, ranks):
        self.settings = settings
        self.ranks = ranks
        self.writes = ranks.main               # of several processes one
        self.folder = settings.out
        self.saved = read_saved(settings) if settings.resume else None
        self.state = self.saved[0] if self.saved else {"step": 0, "drawn": 0, "seconds": 0.0}
        log = settings.log if self.writes else None
        self.track = open_tracker(log, self.folder, lasting(settings), self.state)

    def begin(self, model, optimizer, scaler, generators, algo, fit, questions):
        """Take charge of these and put them where the saved checkpoint had them -> state.

        generators: list of torch.Generator; fit: a memory.Fit; questions: all, whose content a
        resumed run must share.
        """
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.generators = generators
        self.algo = algo
        data = fingerprint(questions)
        if self.ranks.count > 1:
            self.ranks.agree({
                "the questions' fingerprint": data[:12],
                "the weights' checksum": weights_checksum(model),
                "the checkpoint's step": self.saved[0]["step"] if self.saved else None,
            })
        if self.saved:
            _, tensors = self.saved
            if self.state["data"] != data:
                raise UserError(
                    f"--resume: {self.folder} was started with other questions, answers or prompts than "
                    "the data and the model's chat template now give; bring those back or name another "
                    "--out")
            require_same_policy(self.state, model, self.folder)
            restore(tensors, model, optimizer, generators)
            scaler.load_state_dict(self.state["scaler"])
            algo.state = self.state["method"]
            print(f"resumed {self.folder} after step {self.state['step']}")
        else:
            if self.settings.resume:
                print(f"{self.folder} has no checkpoint yet: starting over")
            self.state.update(data=data, **model.fingerprints)
        self.state.update(asdict(fit))
        self.metrics = []
        if self.saved and self.writes:
            self.metrics = read_log(self.folder, self.state["step"])
        self.ranks.differ(generators[0], self.settings.seed, self.state["step"])
        self.started = time.perf_counter() - self.state["seconds"]
        return self.state

    def steps(self, clock):
        """The numbers of the steps that are left, behind a bar on stderr; each restarts the clock."""
        total = self.settings.steps
        self.bar = tqdm(range(self.state["step"], total), initial=self.state["step"], total=total,
                        unit="step", disable=not self.writes)
        for step in self.bar:
            clock.restart()
            yield step

    def save_if_due(self, samples, batch, tokenizer):
        """Each --save-every steps: a checkpoint, and a group in samples.jsonl, which the first has, too."""
        step = self.state["step"]
        due = step % self.settings.save_every == 0 or step == self.settings.steps
        if self.writes and (due or step == 1):
            group = one_group(samples, batch, tokenizer)
            append_jsonl(f"{self.folder}/samples.jsonl", {"step": step, **group})
        if due:
            self.save()

    def save(self):
        self.state["seconds"] = time.perf_counter() - self.started
        self.state["scaler"] = self.scaler.state_dict()
        self.state["method"] = getattr(self.algo, "state", {})
        if self.writes:
            save_checkpoint(self.folder, self.model, self.optimizer, self.generators, self.state,
                            lasting(self.settings))

    def log(self, metrics):
        """Add a step's figures, of all ranks, to metrics.jsonl, and to the tracker if there is one."""
        logged = self.ranks.join(metrics)
        require_finite_metrics(logged)
        self.state["step"] = logged["step"]
        if not self.writes:
            return
        self.bar.set_postfix_str(PROGRESS.format(**logged))
        self.metrics.append(logged)
        append_jsonl(f"{self.folder}/metrics.jsonl", logged)
        self.track(logged, logged["step"])

    def finish(self, held_out_questions):
        """Write summary.json, report.html and curve.png, say what came of the run."""
        if not self.writes:
            return
        state = self.state
        seconds = time.perf_counter() - self.started
        accuracies = {k: state[k] for k in state if k.endswith(("_before", "_after"))}
        summary = {
            "command": command_line(),
            **accuracies,
            "held_out_questions": held_out_questions,
            "steps": self.settings.steps,
            "seconds": seconds,
            "settings": lasting(self.settings),
            **environment(self.settings.device),
        }
        atomic_write(f"{self.folder}/summary.json", json.dumps(summary, indent=1))

        def change(name):
            known = [state[k] for k in (f"{name}_before", f"{name}_after") if k in state]
            return " -> ".join(f"{accuracy:.1%}" for accuracy in known)

        print(f"held-out pass@1 {change('accuracy')}, greedy {change('greedy')}, in {seconds:.0f} s; "
              f"look at {self.folder}/report.html")
        report_on(self.folder)
