"""What an earlier call of bench.py has measured, which a later one keeps in the same file."""
import json
import os

from qerl import UserError

TABLES = {"rows", "means", "vllm", "busy", "long"}


def read_earlier(path):
    """{table: rows} of what an earlier call measured, empty without one; raises UserError.

    Each row names the command, date and hardware of that call: the file will name this call's.
    """
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as f:
            earlier = json.load(f)
        origin = {key: earlier[key] for key in ("command", "date", "hardware") if key in earlier}
        tables = {key: [{**origin, **row} for row in earlier[key]] for key in TABLES & earlier.keys()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: not what bench.py writes; remove it, or give another --out")
    return tables


def keep_others(earlier, result):
    """Add to a result what an earlier call measured and this call did not."""
    for key in TABLES & set(result):
        measured = {subject(row) for row in result[key]}
        others = [row for row in earlier.get(key, []) if subject(row) not in measured]
        result[key] = others + result[key]


def subject(row):
    """What a row is a measurement of: as much of this as its table has."""
    return tuple(row.get(key) for key in ("model", "weights", "rank", "prompts", "group"))
