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
