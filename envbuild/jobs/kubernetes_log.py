"""Copies of the pods' output in the run's folder.

The training operator removes the pods of a job that reaches backoffLimit or its deadline, and with them the logs
that kubectl shows: up to 1.9.3 all of them, from 1.9.4 on those that run or start again
(kubeflow/training-operator, pkg/controller.v1/common/job.go).
"""

from __future__ import annotations

from envbuild.jobs.model import JobPlan


def logged(plan: JobPlan) -> list[str]:
    """Return lines of POSIX shell that copy all further output to RUN/pod-NUMBER.log; none without a volume claim.

    A later pod, also of another job of that name, appends to it. The first line of each has the pod's UID and the time;
    diagnose/read.py reads what follows the last one.

    The container ends with its shell. The shell waits for tee, so that the last lines are written, but only for
    a few seconds: processes that outlive torchrun keep the pipe open.
    """
    if not plan.site.kubernetes.claim:
        return []
    return [
        # Expanded before tee starts: if this failed in tee's shell, nobody would open the pipe, and this shell
        # would wait for it.
        'log="$ENVBUILD_RUN/pod-$ENVBUILD_NODE.log"',
        'echo "envbuild: pod start: $ENVBUILD_POD_UID at `date -u +%Y-%m-%dT%H:%M:%SZ`" >> "$log" || true',
        "pipe=`mktemp -d`/log",
        'mkfifo "$pipe"',
        'tee -a "$log" < "$pipe" &',
        "tee=$!",
        'exec > "$pipe" 2>&1',
        'rm -r "${pipe%/log}"',
        "trap 'code=$?; exec > /dev/null 2>&1",
        '{ sleep 5; kill "$tee"; } & wait "$tee" || true',
        'exit "$code"\' EXIT',
    ]


def lost_log(plan: JobPlan) -> str | None:
    """Return a warning if the log of a failed job is lost, because every kind of job controller removes its pods."""
    if plan.site.kubernetes.claim:
        return None
    return (
        "when this job fails, its log is lost: Kubernetes removes the pod, and no volume keeps a copy."
        " Set [kubernetes] claim in the site file, or keep `kubectl logs --follow` running"
    )


def run(plan: JobPlan) -> list[str]:
    """Return lines of POSIX shell that run args, pass on the signal that ends a pod, and exit with the same code."""
    if not plan.site.kubernetes.claim:
        return ['exec "$@"']
    return [
        '"$@" &',
        "child=$!",
        "trap 'kill \"$child\"' TERM",
        'code=0; wait "$child" || code=$?',
        # A signal ends wait, not the child.
        'while kill -0 "$child" 2> /dev/null; do code=0; wait "$child" || code=$?; done',
        'exit "$code"',
    ]
