#compdef envbuild
# Completion of envbuild for zsh. Load it with: source <(envbuild completion zsh)
_envbuild() {
    local kind value help line found=1
    local -a values shown
    for line in ${(f)"$(_ENVBUILD_COMPLETE=zsh ${(Q)~words[1]} "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)"}; do
        IFS=$'\t' read -r kind value help <<<$line
        if [[ $kind == plain ]]; then
            values+=("$value") shown+=("$value${help:+  -- $help}")
            continue
        fi
        # zsh lists files for the value alone of --option=value.
        [[ $PREFIX != --*=* ]] || compset -P 1 '*='
        if [[ $kind == dir ]]; then
            _files -/ && found=0
        elif [[ -n $value ]]; then
            _files -g "*(${value// /|})" && found=0
        else
            _files && found=0
        fi
    done
    # Values with a help text have one line each.
    if [[ "$shown" == "$values" ]]; then
        compadd -a -- values && found=0
    else
        compadd -l -d shown -a -- values && found=0
    fi
    return found
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _envbuild "$@"
else
    compdef _envbuild envbuild
fi
