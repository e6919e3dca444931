"""The error for bad input on the command line."""


class BadInput(Exception):
    """A file is missing, or not what it should be, or an option asks for what can't be had; the text says.

    The command prints the text, and exits with 2.
    """


def first_line(error: BaseException) -> str:
    """Of another library's error, what there is room for."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
