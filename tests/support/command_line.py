"""Commands run in this process, as a terminal would run them."""

import pytest
from redline.cli import main


def run(capsys, *arguments):
    """Exit code, standard output and standard error of a command line."""
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err
