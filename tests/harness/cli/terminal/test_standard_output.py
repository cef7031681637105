"""What a terminal cannot show does not end a command."""

import io
import os
import pty
import subprocess
import sys

import pytest

from harness.cli.terminal.standard_output import LastingOutput


@pytest.mark.parametrize(
    ("encoding", "errors", "written"),
    [
        ("utf-8", "strict", "caf\\udce9 ü …".encode()),
        ("ascii", "strict", rb"caf\udce9 \xfc \u2026"),
        ("latin-1", "strict", b"caf\\udce9 \xfc \\u2026"),
        ("utf-8", "surrogateescape", b"caf\xe9 " + "ü …".encode()),
    ],
)
def test_characters_that_the_encoding_lacks_are_written_as_escapes(encoding, errors, written):
    """The first word is the name of a file whose bytes are Latin-1, as Python has it on a machine that uses UTF-8."""
    bare = io.BytesIO()
    output = LastingOutput(io.TextIOWrapper(bare, encoding, errors))
    output.write(os.fsdecode(b"caf\xe9") + " ü …")
    output.flush()
    assert bare.getvalue() == written


def test_a_terminal_that_has_gone_ends_no_command():
    """What is written then would raise an error: a job that says what it does would not save its last checkpoint."""
    there, here = pty.openpty()
    output, gone = LastingOutput(io.TextIOWrapper(os.fdopen(here, "wb"), line_buffering=True)), []
    output.when_unread = lambda: gone.append(1)
    os.close(there)
    output.write("a line\n")
    output.write("another\n")
    assert gone == [1]
    output.close()


def test_a_home_that_cannot_be_written_is_no_reason_for_warnings():
    script = (
        "import sys; from harness.cli.main import main; sys.argv[1:] = ['list', 'tuners']; main(); import matplotlib.pyplot"
    )
    where = {name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")}
    environment = where | {"HOME": "/dev/null"}
    made = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    assert made.stderr == ""
