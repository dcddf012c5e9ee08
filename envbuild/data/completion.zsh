#compdef envbuild
# Completion of envbuild for zsh. Load it with: source <(envbuild completion zsh)
_envbuild() {
    local kind value help line
    local -a values shown
    for line in ${(f)"$(_ENVBUILD_COMPLETE=zsh ${(Q)~words[1]} "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)"}; do
        IFS=$'\t' read -r kind value help <<<$line
        case $kind in
            plain) values+=("$value") shown+=("$value${help:+  -- $help}") ;;
            dir) [[ $PREFIX != --*=* ]] || compset -P 1 '*='; _files -/ ;;
            file)
                [[ $PREFIX != --*=* ]] || compset -P 1 '*='
                if [[ -n $value ]]; then _files -g "*(${value// /|})"; else _files; fi
                ;;
        esac
    done
    # With a help text, one line for each value.
    if [[ "$shown" == "$values" ]]; then compadd -a -- values; else compadd -l -d shown -a -- values; fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _envbuild "$@"
else
    compdef _envbuild envbuild
fi
