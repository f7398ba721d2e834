"""What ends a command with one line and exit code 2."""


class UsageError(Exception):
    """Something the user can put right; the message is one line that says what was expected, what came, what to do."""
