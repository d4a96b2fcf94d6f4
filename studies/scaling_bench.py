"""How an RL step scales over GPUs: the rows of bench.py scaling, their table and their picture.

A row is one size of bench.py step in so many processes. Speed-ups are over the row of one process.
"""
PHASES = ["rollout", "logprobs", "update", "waiting", "exchange"]
HEAD = ["model", "size", "processes", "completions", "tokens each", "step, s",
        *(f"{phase}, s" for phase in PHASES), "completions/s", "times one", "efficiency",
        "tokens/s", "times one"]


def series_of(rows):
    """{label: rows} of the two ways to share: as many prompts for each process, or for all."""
    fewest = min(r["prompts"] for r in rows)
    label = f"{fewest} x {rows[0]['group']}"
    return {
        f"{label} a process": [r for r in rows if r["prompts"] == fewest * r["processes"]],
        f"{label} in all": [r for r in rows if r["prompts"] == fewest],
    }


def speed(row, what="completions"):
    """Completions a second, or their tokens."""
    completions = row["prompts"] * row["group"]
    return completions * (row["length"] if what == "tokens" else 1) / row["step"]


def speed_ups(rows, what="completions"):
    """Each row's speed over that of one process of the same model; none without a row of one."""
    alone = [speed(r, what) for r in rows if r["processes"] == 1]
    return [speed(r, what) / alone[0] for r in rows] if alone else []


def by_variant(rows):
    """{(model, weights): its rows}"""
    variants = {}
    for row in rows:
        variants.setdefault((row["model"], row["weights"]), []).append(row)
    return variants


def cells_of(rows):
    """The lines of the table, a list of cells each, by model and by how the prompts are shared."""
    for (name, weights), same in by_variant(rows).items():
        for label, series in series_of(same).items():
            ratios = speed_ups(series)
            token_ratios = speed_ups(series, "tokens")
            for i, row in enumerate(series):
                cells = [f"{name}, {weights.upper()}", label, row["processes"]]
                cells += [row["prompts"] * row["group"], f"{row['length']:.0f}"]
                cells += [f"{row[phase]:.3f}" for phase in ("step", *PHASES)]
                cells.append(f"{speed(row):.1f}")
                if ratios:
                    cells += [f"{ratios[i]:.2f}x", f"{ratios[i] / row['processes']:.0%}"]
                else:
                    cells += ["", ""]
                cells.append(f"{speed(row, 'tokens'):.0f}")
                cells.append(f"{token_ratios[i]:.2f}x" if token_ratios else "")
                yield cells


def plot_scaling(result, plt):
    """How many times as fast as one process, by processes: both ways to share, and the ideal."""
    variants = by_variant(result["rows"])
    figure, axes = plt.subplots(1, len(variants), figsize=(4.6 * len(variants), 4.2),
                                layout="constrained", squeeze=False)
    for axis, ((name, weights), rows) in zip(axes[0], variants.items()):
        counts = sorted({r["processes"] for r in rows})
        axis.plot(counts, counts, color="gray", linewidth=1, label="ideal")
        for label, series in series_of(rows).items():
            times = speed_ups(series)
            if times:
                axis.plot([r["processes"] for r in series], times, "o-", label=label)
        axis.set(title=f"{name}, {weights.upper()}: an RL step", xlabel="GPUs")
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(counts, counts)
        axis.set_yticks(counts, [f"{count}x" for count in counts])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("completions per second, over one GPU's")
    axes[0, 0].legend(frameon=False)
    return figure
