"""Errors that the user can mend: one line that names the thing and the remedy."""
from qerl import UserError, reason, require

__all__ = ["UserError", "reason", "require"]
