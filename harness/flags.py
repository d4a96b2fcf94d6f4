"""The settings of a run: what the flags may be, and what is taken where none is given."""
from dataclasses import replace

import torch

import qerl
from harness.command import full_name, parse_flags, require_flag
from harness.engines import find_method, is_neighbour, may_be_exact, neighbours, usual_engine
from harness.export import adapter_settings
from harness.loading import default_dtype
from harness.run import resumed
from harness.errors import require

RANGES = {                          # the least and the greatest value of numbers
    int: (0, 1e18),                 # unless their name stands below
    float: (0, 1e38),
    **dict.fromkeys(["steps", "updates", "stages", "max_new_tokens", "slots", "micro_tokens",
                     "save_every"], (1, 1e18)),
    **dict.fromkeys(["prompts", "eval_samples"], (1, 10000)),
    "group": (2, 10000),            # advantages compare the samples of a prompt
    "lora_rank": (0, 10000),
    **dict.fromkeys(["gradient_clip", "lora_alpha"], (1e-30, 1e38)),
    "lr": (1e-30, 1e30),            # AdamW multiplies it by up to 1000
    "weight_decay": (0, 1000),
    "temperature": (1e-3, 1e38),
    **dict.fromkeys(["top_p", "eval_top_p"], (1e-30, 1)),
    **dict.fromkeys(["warm_up", "clip_low", "overlong"], (0, 1)),
    "clip_high": (0, 10),
}


# All that --save-quantized reads.
SAVING = {"save_quantized", "model", "quantizer", "preset", "device", "data", "eval", "validation", "reward",
          "chat_template_kwargs", "seed"}


def check_settings(settings, processes, given):
    """Refuse, by name, values that cannot be meant, and flags (their settings) that nothing reads."""
    read = {                # what some settings are for
        "lora_alpha": settings.lora_rank,
        "chat_template_kwargs": settings.model,
        "start_seed": not settings.model,
        "validation_samples": settings.eval_every,
        "gpu": settings.dry_run,
        # Evaluations sample by --eval-temperature and --eval-top-p.
        "temperature": not settings.eval_only,
        "top_p": not settings.eval_only,
    }
    if settings.save_quantized:
        read = {name: name in SAVING for name in given}
    unread = ["--" + name.replace("_", "-") for name in given if not read.get(name, True)]
    require(not unread, f"{' '.join(unread)}: changes nothing with the other flags; leave it out")
    for name, value in vars(settings).items():
        if type(value) in RANGES:
            least, greatest = RANGES.get(name, RANGES[type(value)])
            require_flag(least <= value <= greatest, name, value,
                         f"must be from {least:g} to {greatest:g}")
    updates = settings.updates
    together = [            # a flag, when it counts, what must then be so
        ("prompts", True, settings.prompts % (updates * processes) == 0,
         f"is not divisible by --updates {updates} in {processes} process(es); change one of them"),
        ("eval_every", settings.eval_every, settings.validation,
         "needs questions to evaluate on; give --validation, how many"),
        ("eval_temperature", settings.eval_temperature, settings.eval_temperature >= 1e-3,
         "must be 0 or at least 0.001"),
        ("sigma_end", settings.schedule == "exponential",
         (settings.sigma_start > 0) == (settings.sigma_end > 0),
         "an exponential schedule needs both sigmas positive (or both 0: no noise)"),
        ("quantizer", settings.quantizer != "rtn", settings.weights == "nvfp4",
         "chooses codes of NVFP4; use --weights nvfp4, or --quantizer rtn"),
        ("lora_rank", settings.lora_rank == 0,
         settings.weights == "bf16" and not settings.beta and not settings.shard,
         "trains the weights themselves; use --weights bf16 and --beta 0, and leave --shard out"),
        ("dry_run", settings.dry_run, settings.model and not settings.shard,
         "counts real models alone, without --shard; name a model with --model"),
        ("method", settings.method != "qerl", processes == 1,
         "the neighbours run in one process; start without torchrun (--quantizer alone runs in several)"),
        ("engine", settings.engine == "plain",
         not settings.shard and settings.lora_rank and not is_neighbour(settings.method),
         "computes by qerl.py alone; leave out --shard, --lora-rank 0 and the methods of methods/"),
        ("method", settings.method.endswith(".py"), settings.engine == "plain",
         "is a file whose functions take the place of qerl.py's; leave out --engine fast"),
        ("exact", settings.exact, may_be_exact(settings, processes),
         "is for --engine fast, one process, and no --method; else give --no-exact"),
        ("shard", settings.shard, processes > 1,
         "cuts the weights over several processes, but this is one; start by torchrun "
         "--nproc_per_node=2 or more"),
        ("save_quantized", settings.save_quantized, settings.model and processes == 1,
         "saves a real model as --quantizer makes it; name it with --model, and leave torchrun out"),
    ]
    for name, counts, ok, what in together:
        require_flag(not counts or ok, name, getattr(settings, name), what)
    check_device(settings.device)


def check_device(name):
    """Refuse a --device that is neither the CPU nor a GPU of this machine."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    known = ["cpu", *["cuda"] * bool(gpus), *gpus]
    require_flag(name in known, "device", name, f"is none of {', '.join(known)} (Apple's GPUs have no "
                                                "float8, in which NVFP4 keeps its scales)")


def settings_of(settings_class, description, presets, choices, argv, processes):
    """The settings of a command line, checked: flags win over the preset, it over the defaults.

    With --resume the settings of the run that goes on come before preset and defaults. The model has
    its full name; engine and dtype are the usual ones, if no flag names them. processes: how many
    torchrun started.
    """
    typed = given = parse_flags(settings_class, description, presets, choices, argv)
    if "model" in given:
        given["model"] = full_name(given["model"])
    if given.get("resume"):
        given = {name: value for name, value in resumed(given).items() if hasattr(settings_class, name)}
    flags = settings_class(**given)
    for name, known in choices.items():                  # of a run of another version, too
        value = getattr(flags, name)
        require_flag(value is None or value in known, name, value, f"is none of {', '.join(known)}")
    preset = flags.preset or (None if flags.model else "small")
    values = dict(presets.get(preset, {}))
    values |= qerl.OBJECTIVES[flags.algo].defaults or {}
    if is_neighbour(flags.method):
        values |= neighbours().defaults(flags.method)
    weights = (values | given).get("weights", flags.weights)
    if preset == "paper" and weights == "bf16":
        values["lr"] = 5e-6                     # Table 4: half the learning rate for 16-bit weights
    if weights != "nvfp4" or flags.shard:
        values["quantizer"] = "rtn"             # the others are for NVFP4, and take long for large models
    if flags.adapter:
        values |= adapter_settings(flags.adapter, given)
    settings = settings_class(**(values | given))
    settings = replace(settings, engine=settings.engine or usual_engine(settings))
    check_settings(settings, processes, typed)
    if is_neighbour(settings.method):
        find_method(settings)                            # it refuses settings that it cannot use
    usual = str(default_dtype(settings.device)).removeprefix("torch.")
    return replace(settings, dtype=settings.dtype or usual)
