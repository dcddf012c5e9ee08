#!/bin/sh
export PATH='/opt/env/bin:/usr/bin:/bin'
[ -n "${LANG:-}" ] || LANG='C.UTF-8'
export LANG
[ -n "${ODD:-}" ] || ODD='it'"'"'s "q" $HOME `x`
2'
export ODD
[ -n "${E:-}" ] || E=''
export E
