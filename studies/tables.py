"""What measurements are shown as: tables."""
from statistics import fmean, stdev


def grouped(rows, *keys):
    """{values of the keys: the rows, dicts, that have them}."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def table(titles, rows):
    """The lines of a Markdown table. rows: lists of cells."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (titles, *rows)]
    return [lines[0], "|" + "---|" * len(titles), *lines[1:]]


def with_error(values, scale, digits):
    """"mean ± standard error" of the values times scale.

    Without ± if they are all the same, or one.
    """
    values = list(values)
    text = f"{round(scale * fmean(values), digits) + 0.0:.{digits}f}"            # never -0.0
    spread = stdev(values) if len(values) > 1 else 0
    return text + (f" ± {scale * spread / len(values) ** 0.5:.{digits}f}" if spread else "")
