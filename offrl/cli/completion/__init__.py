"""`offrl completion`: completion of commands by the Tab key, in bash, zsh and fish."""

from __future__ import annotations

from offrl.errors import UserError, nearest, say

SHELLS = ("bash", "zsh", "fish")
USAGE = """\
usage: offrl completion SHELL

Prints what makes a shell complete commands, settings, algorithms, datasets, files and runs. SHELL: bash, zsh or fish.

  eval "$(offrl completion bash)"                                     in ~/.bashrc
  eval "$(offrl completion zsh)"                                      in ~/.zshrc, after compinit
  offrl completion fish > ~/.config/fish/completions/offrl.fish       once"""

# A shell asks for the words that can follow a line up to the cursor. bash has parted words at = and : already.
BASH = """\
_offrl() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$'\\n'
    local word=${line##* }
    COMPREPLY=($("$1" completion candidates "$line" 2> /dev/null))
    case $word in
        *[=:]*) COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}") ;;
    esac
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/.,] ]]; then compopt -o nospace 2> /dev/null; fi
}
complete -F _offrl offrl"""
ZSH = """\
#compdef offrl
_offrl() {
    local -a all open closed
    all=(${(f)"$($words[1] completion candidates "${(j: :)words[1,CURRENT-1]} $PREFIX" 2> /dev/null)"})
    open=(${(M)all:#*[=/.,]})
    closed=(${all:#*[=/.,]})
    (( $#open )) && compadd -Q -S '' -a open
    (( $#closed )) && compadd -Q -a closed
}
if [[ $funcstack[1] == _offrl ]]; then _offrl "$@"; else compdef _offrl offrl; fi"""
FISH = """\
complete -c offrl -f -a '(offrl completion candidates (commandline -cp | string collect) 2> /dev/null)'"""


def run(arguments: list[str]) -> int:
    if arguments and arguments[0] == "candidates":
        from offrl.cli.completion.candidates import candidates

        say(*candidates(" ".join(arguments[1:])))
        return 0
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        given = arguments[0] if arguments else ""
        raise UserError(
            f"offrl completion {given}: name a shell: {', '.join(SHELLS)}.{nearest(given, SHELLS)} See offrl "
            "completion --help"
        )
    say(*{"bash": BASH, "zsh": ZSH, "fish": FISH}[arguments[0]].split("\n"))
    return 0
