# Completion of envbuild for fish. Load it with: envbuild completion fish | source
function __envbuild_complete
    set -l words (commandline -opc)
    set -l word (commandline -ct)
    # The shell lists files for the value alone of --option=value.
    set -l option (string match -r -- '^--[^=]*=' $word)
    for line in (env _ENVBUILD_COMPLETE=fish $words "$word" 2>/dev/null)
        set -l parts (string split -m 2 \t -- $line)
        switch $parts[1]
            case plain
                string join \t -- $parts[2..]
            case dir
                __fish_complete_directories (string replace -- "$option" '' $word) | string replace -r -- '^' "$option"
            case file
                set -l suffixes (string escape --style=regex -- (string split -n ' ' -- $parts[2]))
                set -l wanted '^[^\t]*('(string join '|' -- / $suffixes)')(\t|$)'
                test -n "$suffixes"; or set wanted '^'
                __fish_complete_path (string replace -- "$option" '' $word) | string match -r -e -- $wanted \
                    | string replace -r -- '^' "$option"
        end
    end
end
complete -c envbuild -f -a '(__envbuild_complete)'
