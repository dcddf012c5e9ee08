"""How a training in a step of its scheduler is told to end, so that its ranks save their state first.

Sources: scancel(1); signal(7); libfuse, lib/fuse_signals.c; Apptainer, internal/pkg/runtime/engine/apptainer.
"""

from __future__ import annotations

from envbuild.jobs.model import JobPlan, Launcher
from envbuild.jobs.quote import fill, indented
from envbuild.site.schedulers import TITLES

# SIGURG by its number on Linux: Slurm knows no name for it.
STEP_SIGNAL = 23

# A signal to a step reaches all of its processes. SIGTERM would end squashfuse, which holds the image of a container,
# before a rank has saved its state, so the batch script sends SIGURG, which programs ignore by default (and Apptainer
# does not pass on: it is written in Go, which uses it itself). torchrun hears SIGTERM once: a second one would stop it
# waiting for its ranks.
_CHILD = r"""begin() {
@ENTER@
}
[ "$step" = training ] || begin "$@"
told=
tell() {
    [ -n "$told" ] || kill -TERM "$child" 2>/dev/null || true
    told=yes
}
@BEFORE@begin "$@" &
child=$!
# Only now: until a child runs its program it has its parent's traps, and would lose the signal.
trap 'told=yes' TERM # @TITLE@'s own reaches the child too
trap tell URG
[ ! -e "$ENVBUILD_RUN/told-$restarts" ] || tell
while :; do
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break # else the signal ended the wait
done
@AFTER@exit "$code"
"""

# Such launchers end all nodes once one has ended with a fault. What is told to end, all at once, may need more time on
# one node than on another, to write its state: then the exit code is left in a file, for the batch script.
_BEFORE = r"""ended=$ENVBUILD_RUN/ended-$restarts.$number
rm -f "$ended"
"""
_WHY = "need not know, or it would end the other nodes at once"
_AFTER = r"""if [ "$code" -ne 0 ] && [ -n "$told" ]; then @WHY@
    echo "$code" >"$ended"
    code=0
fi
"""


def ends_in_order(plan: JobPlan, launcher: Launcher) -> bool:
    """Whether nodes that are told to end leave their exit codes in files, see _AFTER. With --auto-resume all that
    ends is srun's business."""
    return launcher.signal != "" and plan.nodes > 1 and not plan.site.scheduler.auto_resume


def in_order(plan: JobPlan, launcher: Launcher, last: str) -> str:
    """`last`, the lines by which the node program becomes the training; they are a child's
    where the launcher signals all processes."""
    if not launcher.signal:
        return last
    filed = ends_in_order(plan, launcher)
    return fill(
        _CHILD,
        title=TITLES[plan.scheduler],
        enter=indented(last.rstrip()),
        before=_BEFORE if filed else "",
        after=fill(_AFTER, why=f"# {plan.launcher} {_WHY}") if filed else "",
    )
