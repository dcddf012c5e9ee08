"""What a pod prints, kept in the run's folder as well.

The training operator removes all pods of a job that reaches backoffLimit or its deadline, whatever cleanPodPolicy says
(kubeflow/training-operator v1.9.3, pkg/controller.v1/common/job.go), and kubectl's logs go with them.
"""

from __future__ import annotations

from envbuild.jobs.model import JobPlan


def logged(plan: JobPlan) -> list[str]:
    """Lines of POSIX shell after which all output goes to RUN/pod-NUMBER.log, too; none where no claim keeps files.

    The container ends when its shell does. So that no last line is lost the shell waits for tee, but not for long:
    processes that outlive torchrun hold the pipe open.
    """
    if not plan.site.kubernetes.claim:
        return []
    return [
        # Before tee: a shell that fails in its place never opens the pipe, and this one would wait for it.
        'log="$ENVBUILD_RUN/pod-$ENVBUILD_NODE.log"',
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
    """What the caller is told of a job whose failure leaves no log: the controllers of all kinds of jobs remove its
    pods."""
    if plan.site.kubernetes.claim:
        return None
    return (
        "when this job fails, its log is lost: Kubernetes removes the pod, and no volume keeps a copy."
        " Set [kubernetes] claim in the site file, or keep `kubectl logs --follow` running"
    )


def run(plan: JobPlan) -> list[str]:
    """Lines of POSIX shell that run args, hand on the signal that ends a pod, and end with the same exit code."""
    if not plan.site.kubernetes.claim:
        return ['exec "$@"']
    return [
        '"$@" &',
        "child=$!",
        "trap 'kill \"$child\"' TERM",
        'code=0; wait "$child" || code=$?',
        # A signal ends wait, and not what is waited for.
        'while kill -0 "$child" 2> /dev/null; do code=0; wait "$child" || code=$?; done',
        'exit "$code"',
    ]
