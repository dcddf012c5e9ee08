# Completion of envbuild for bash. Load it with: source <(envbuild completion bash)
_envbuild() {
    local kind value suffix
    while IFS=$'\t' read -r kind value _; do
        case $kind in
            plain)
                # Inside of an open quote, readline inserts the text as it is.
                case ${COMP_LINE:0:COMP_POINT-${#2}} in
                    *[\"\']) COMPREPLY+=("$value") ;;
                    *) COMPREPLY+=("$(printf %q "$value")") ;;
                esac
                ;;
            dir)
                compopt -o filenames
                mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -d -- "$2")
                ;;
            file)
                compopt -o filenames
                if [ -z "$value" ]; then
                    mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -- "$2")
                    continue
                fi
                mapfile -t COMPREPLY < <(compgen -d -- "$2")
                for suffix in $value; do
                    mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -X "!*$suffix" -- "$2")
                done
                ;;
        esac
    done < <(_ENVBUILD_COMPLETE=bash "${1/#\~/$HOME}" "${COMP_LINE:0:COMP_POINT}" "$2" 2>/dev/null)
}
complete -F _envbuild envbuild
