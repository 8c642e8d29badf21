"""Shell completion for `python -m experiments.NAME`; Hydra's own knows only `python script.py`."""

_BASH = """\
_moejax_experiments()
{
    local line="${COMP_LINE:0:COMP_POINT}" word="" module="" i mark head
    local words=($line)
    for ((i = 1; i + 1 < ${#words[@]}; i++)); do
        if [[ "${words[i]}" == "-m" && "${words[i+1]}" == experiments.* ]]; then
            module="${words[i+1]}"
            break
        fi
    done
    [[ -n "$module" ]] || return 0
    [[ "$line" == *" " ]] || word="${words[-1]}"
    [[ "$word" == "$module" ]] && return 0
    local choices="$(COMP_LINE="$line" "${words[0]}" -m "$module" -sc query=bash 2> /dev/null)"
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
    # Readline replaces only what follows the last '=' or ':' of the word, where those break words.
    for mark in "=" ":"; do
        if [[ "$word" == *"$mark"* && "$COMP_WORDBREAKS" == *"$mark"* ]]; then
            head="${word%"${word##*"$mark"}"}"
            COMPREPLY=("${COMPREPLY[@]#"$head"}")
        fi
    done
}
complete -o nospace -o default -F _moejax_experiments python python3
"""


def print_bash_completion(name: str) -> None:
    """Prints the code for `eval "$(python -m experiments.NAME --shell-completion install=bash)"`.

    It serves every experiment, and replaces another completion for `python` where there is one.
    """
    print(f"# completion of every experiment's options; from experiments.{name}\n{_BASH}", end="")


def query_line(line: str) -> str:
    """`PYTHON -m experiments.NAME ARGS` → `app ARGS`, which Hydra's query understands.

    A blank at the end stays: it says that the last word is finished.
    """
    words = line.split()
    for i, word in enumerate(words[:-1]):
        if word == "-m" and words[i + 1].startswith("experiments."):
            return "app " + line.split(words[i + 1], 1)[1].lstrip()
    return line or "app "
