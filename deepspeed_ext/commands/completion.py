"""Writes a script with which bash or zsh completes the command line of ``deepspeed-ext``.

It is generated from the parsers; argparse lists arguments only as ``_actions``. zsh runs the bash
script through ``bashcompinit``. Where the script has no words, as after ``--config``, the shell
offers files.
"""

import argparse
from collections.abc import Mapping, Sequence

from deepspeed_ext.commands.ready_configs import config_names

__all__ = ["SHELLS", "script"]

SHELLS = ("bash", "zsh")
ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""
"""What zsh needs before ``complete``."""


def script(
    program: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], shell: str
) -> str:
    """The completion script of a program and its commands, for one of `SHELLS`."""
    arguments = {name: parser._actions for name, parser in commands.items()}
    first = " ".join([*commands, *_options(program._actions)])
    after = "".join(_after_options(*command) for command in arguments.items())
    words = "".join(_words(*command) for command in arguments.items())
    return f"""{ZSH if shell == "zsh" else ""}\
_deepspeed_ext() {{  # called with $2, the word being typed, and $3, the one before
  local words="" command="${{COMP_WORDS[1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{first}"
  else
    case "$command $3" in
{after}\
    *)
      case "$command $2" in
{words}\
      esac
      ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$2"))
}}
complete -o default -F _deepspeed_ext deepspeed-ext
"""


def _after_options(command: str, arguments: Sequence[argparse.Action]) -> str:
    """The values of each option that has one: its choices, or nothing, so that the shell offers
    files."""
    found = ""
    for argument in arguments:
        if argument.option_strings and argument.nargs != 0:
            after = " | ".join(f'"{command} {option}"' for option in argument.option_strings)
            found += f"""    {after}) words="{" ".join(_values(argument))}" ;;\n"""
    return found


def _words(command: str, arguments: Sequence[argparse.Action]) -> str:
    """The options of a command, and the choices of its positional arguments."""
    options = " ".join(_options(arguments))
    others = [argument for argument in arguments if not argument.option_strings]
    if not others:
        return f"""      "{command} "*) words="{options}" ;;\n"""
    names = " ".join(word for argument in others for word in _values(argument))
    return (
        f"""      "{command} -"*) words="{options}" ;;\n      "{command} "*) words="{names}" ;;\n"""
    )


def _options(arguments: Sequence[argparse.Action]) -> list[str]:
    return [option for argument in arguments for option in argument.option_strings]


def _values(argument: argparse.Action) -> list[str]:
    return config_names() if argument.metavar == "NAME" else [*map(str, argument.choices or ())]
