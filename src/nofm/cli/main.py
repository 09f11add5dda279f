"""`nofm COMMAND ...`: find the command, run it, and turn errors into one message and an exit code.

Exit codes: 0 done; 1 `nofm check` found weights that are not N:M; 2 the user can mend it (one message, no traceback without
--debug); 130 and 143 stopped by SIGINT and SIGTERM, by a run after writing a checkpoint. Anything else that goes wrong is a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import itertools
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from .streams import flush_or_forget, open_closed_streams, print_as_long_as_possible

__all__ = ["COMMANDS", "main"]


def _train(args: list[str]) -> int:
    from .train import command

    return command(args)


def _resume(args: list[str]) -> int:
    from .train import resume

    return resume(args)


def _study(args: list[str]) -> int:
    from .study import command

    return command(args)


def _evaluate(args: list[str]) -> int:
    from .evaluate import command

    return command(args)


def _function(name: str) -> Callable[[list[str]], int]:
    def run(args: list[str]) -> int:
        import tyro

        from . import commands
        from .given import check_options, check_positionals
        from .pages import fitted, fitting

        function = getattr(commands, name)
        if not {"-h", "--help"} & set(args):
            texts = check_options(name, function, args)
            _check_patterns(name, args)
            check_positionals(name, function, texts)
        about = fitted((inspect.getdoc(function) or "").partition("\n\n")[0], indent=2)
        with fitting() if {"-h", "--help"} & set(args) else contextlib.nullcontext():
            result: Any = tyro.cli(function, args=args, prog=f"nofm {name}", description=about, use_underscores=True)
        return int(result)

    return run


def _check_patterns(name: str, args: Sequence[str]) -> None:
    """Raise where a pattern stands by itself, as one may well write it: tyro would call it unrecognized."""
    from ..engine.config import ConfigError

    for before, arg in itertools.pairwise(["", *args]):
        if re.fullmatch(r"\d+:\d+", arg) and before != "--pattern" and name in ("bench", "check", "cost"):
            raise ConfigError(f"{arg}: a pattern is given by its option: --pattern {arg}")


_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENAMETOOLONG, errno.EIO)

COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (_train, "train a network by a recipe"),
    "resume": (_resume, "go on with a run that was interrupted, as its folder says"),
    "study": (_study, "train all rows of a table or figure of the paper, and write it"),
    "evaluate": (_evaluate, "measure finished runs on other data"),
    "recipes": (_function("recipes"), "list the recipes"),
    "report": (_function("report"), "make one HTML page of one or more runs"),
    "analyse": (_function("analyse"), "SAD between two saved steps of a run, layer by layer"),
    "check": (_function("check"), "is a safetensors or ONNX file, or what a run has ended with, really N:M?"),
    "export": (_function("export"), "write a network's file without its zeros, or with them again"),
    "cost": (_function("cost"), "parameters and multiply-adds of a network, dense and sparse"),
    "bench": (_function("bench"), "how fast a network is on this CPU, dense and without its zeros"),
    "completion": (_function("completion"), "print a completion script for bash, zsh or tcsh"),
}

_WORKING = ("train", "resume", "study", "evaluate")  # which do more than print
# Which write files that the same command writes again, each of them whole or not at all.
_WRITING = ("report", "study", "evaluate", "export")

_HELP = """nofm: keep N of every M. Trains, measures and ships N:M sparse networks.

usage: nofm COMMAND ...

commands:
{commands}

nofm COMMAND --help says more.
A first run, on real data that comes along:

  nofm train digits
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    open_closed_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    python_format = warnings.formatwarning
    if not debug:
        warnings.formatwarning = _without_place
    try:
        code = _dispatch([arg for arg in args if arg != "--debug"])
        sys.stdout.flush()  # here, where a reader that has gone is no error
        return code
    except SystemExit as leaving:  # tyro prints its own message
        return leaving.code if isinstance(leaving.code, int) else 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone, for example `nofm recipes | head`
        return 0
    except KeyboardInterrupt:  # Ctrl-C while nothing is trained or measured; runs have an answer of their own
        if debug:
            raise
        flush_or_forget()
        left = "; no file is half-written, give the same command again" if args and args[0] in _WRITING else ""
        print(f"nofm: interrupted{left}", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        code_of_error = _exit_code(error)
        if code_of_error is None or (debug and code_of_error == 2):
            raise
        print(f"nofm: {_message(error)}", file=sys.stderr)
        return code_of_error
    finally:
        warnings.formatwarning = python_format


def _without_place(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Of a command the place in the code that a warning points at is its own first line."""
    return f"warning: {message}\n"


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        from .pages import fitted

        print(fitted(_HELP.format(commands="\n".join(f"  {name:10}  {text}" for name, (_, text) in COMMANDS.items()))))
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        from ..version import __version__

        print(f"nofm {__version__}")
        return 0
    from ..engine.config import ConfigError
    from ..engine.resolve import near

    if args[0] in _WORKING:
        print_as_long_as_possible()
    if args[0] not in COMMANDS:
        raise ConfigError(f"{args[0]!r} is no command; there are {', '.join(COMMANDS)}{near(args[0], COMMANDS)}")
    return COMMANDS[args[0]][0](args[1:])


def _exit_code(error: Exception) -> int | None:
    """The exit code of an error that is not a bug of ours, or None."""
    from ..engine.signals import Stopped
    from ..errors import NofmError

    if isinstance(error, Stopped):
        return error.exit_code
    if isinstance(error, NofmError):
        return 2
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        return 2
    if isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(error):
        return 2
    return None


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror  # no name: what it prints to
    return str(error)
