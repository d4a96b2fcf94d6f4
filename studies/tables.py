"""What measurements are shown as: tables."""


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
