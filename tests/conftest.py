"""What holds for all tests."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """Have SIGINT's usual effect; a shell's background jobs, and their children, ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
