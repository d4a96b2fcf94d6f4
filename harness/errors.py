"""Errors that the user can mend: one line that names the thing and the remedy."""


class UserError(Exception):
    """Something the user can mend. Its text is one line that names the thing and the remedy."""


def require(ok, message):
    """Raise a UserError with this message unless ok."""
    if not ok:
        raise UserError(message)


def reason(error):
    """Another exception's text as one short line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
