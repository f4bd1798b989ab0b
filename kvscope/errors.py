"""The errors a user sees: each is one line that says what to do next."""


class KvscopeError(Exception):
    """Something the user can mend. The command line prints it as one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(KvscopeError):
    """The command was asked for something it can't do as written."""

    exit_code = 2
