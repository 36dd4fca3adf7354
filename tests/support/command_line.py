"""Runs commands in this process as a terminal would."""

import pytest
from redline.cli import main


def run(capsys, *arguments):
    """Returns exit code, standard output and standard error of a command line."""
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err
