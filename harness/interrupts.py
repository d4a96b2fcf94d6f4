"""Ctrl-C while a program still imports its libraries, which takes seconds: one line, no traceback.

To be imported before all else. An exception would not do: it ends up in the middle of a library.
"""
import os
import signal


def leave(signal_number, frame):
    os.write(2, b"\nstopped\n")
    os._exit(130)


def while_importing():
    """From here on Ctrl-C ends the process at once, unless the shell has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def as_exception():
    """From here on Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
