"""The command line's frame: help, unknown commands, exit status."""

from __future__ import annotations

import pytest

from fused_lw.cli import COMMANDS, main


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"fused-lw {name}" in capsys.readouterr().out


def test_unknown_command_and_missing_command_are_usage_errors(capsys):
    for argv in (["no-such-command"], []):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
    assert "no-such-command" in capsys.readouterr().err
