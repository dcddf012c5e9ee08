"""Tell a running training to end, so that its ranks can save their state first.

Sources: scancel(1); signal(7); libfuse, lib/fuse_signals.c; Apptainer, internal/pkg/runtime/engine/apptainer.
"""

from __future__ import annotations

from envbuild.jobs.model import JobPlan, Launcher
from envbuild.jobs.quote import fill, indented
from envbuild.site.schedulers import TITLES

# The number of SIGURG on Linux: Slurm does not know its name.
STEP_SIGNAL = 23

# A signal to a step reaches all of its processes. SIGTERM would end squashfuse, which serves a container's
# image, before a rank has saved its state. So the batch script sends SIGURG, which programs ignore by default.
# (Apptainer does not pass it on: the Go runtime uses it.) torchrun must get SIGTERM only once: after a second
# one, it would not wait for its ranks.
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

# These launchers end all nodes after one exits with an error. When the job is told to end, one node may need
# more time than another to save its state. Then a node that exits with an error writes its exit code into a
# file, for the batch script, and exits with 0.
_BEFORE = r"""ended=$ENVBUILD_RUN/ended-$restarts.$number
rm -f "$ended"
"""
_WHY = "need not know, or it would end the other nodes at once"
_AFTER = r"""if [ "$code" -ne 0 ] && [ -n "$told" ]; then @WHY@
    echo "$code" >"$ended"
    code=0
fi
"""


def records_exit_codes(plan: JobPlan, launcher: Launcher) -> bool:
    """Return whether nodes that are told to end write their exit codes into files, see _AFTER.

    With --auto-resume, srun handles every exit.
    """
    return launcher.signal != "" and plan.nodes > 1 and not plan.site.scheduler.auto_resume


def orderly_shutdown(plan: JobPlan, launcher: Launcher, last: str) -> str:
    """Return `last`, the lines that start the training, wrapped for an orderly end.

    If the launcher signals all processes of a step, the training runs as a child that gets SIGTERM once;
    otherwise, `last` is unchanged.
    """
    if not launcher.signal:
        return last
    filed = records_exit_codes(plan, launcher)
    return fill(
        _CHILD,
        title=TITLES[plan.scheduler],
        enter=indented(last.rstrip()),
        before=_BEFORE if filed else "",
        after=fill(_AFTER, why=f"# {plan.launcher} {_WHY}") if filed else "",
    )
