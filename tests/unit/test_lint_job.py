"""Faults in hand-written job scripts: each fault, its like without it, the guides' scripts, and our own."""
# ruff: noqa: E501  (scripts stand on one line)

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cases import each_case
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.golden import assert_golden_table, read_golden_cases
from lab.lint import lint, lint_file

from envbuild.cli.diagnose import lint_job_command
from envbuild.data.schedulers import TITLES
from envbuild.jobcheck.lint.engine import Problem
from envbuild.jobcheck.lint.faults import load_faults
from envbuild.jobcheck.lint.shell import Command, Reader, commands_of

DATA = Path(__file__).parent / "data"
DOCS = Path(__file__).parents[2] / "docs/reference/job-faults.md"
RENDERED = {
    f"{table.stem}-{case}{'.yaml' if table.stem == 'kubernetes' else '.sh'}": text
    for table in sorted((DATA / "jobs").glob("*.txt"))
    for case, text in read_golden_cases(table).items()
}
# Its site says purge = false: the modules of login nodes are meant, and a warning is right.
MEANT = {("slurm-login-modules.sh", "modules-not-purged")}

SLURM = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
set -euo pipefail
export OMP_NUM_THREADS=4
"""
PBS = """#!/bin/bash
#PBS -l select=2:ncpus=8:mpiprocs=1
#PBS -l walltime=01:00:00
set -euo pipefail
export OMP_NUM_THREADS=4
"""
RUN = (
    'torchrun --nnodes=2 --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --local-addr "$a"'
)
CLEAN = f"{SLURM}srun {RUN} train.py\n"
NO_E = SLURM.replace("set -euo pipefail\n", "")
CPUS = SLURM.replace("set -e", "#SBATCH --cpus-per-task=8\nset -e")
GPUS = SLURM.replace("set -e", "#SBATCH --gpus-per-node=4\nset -e")
EIGHT = SLURM.replace("per-node=1", "per-node=8")
ONE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=4\nset -euo pipefail\nexport OMP_NUM_THREADS=4\n"
# What `srun ./node.sh` starts on each node.
BARE = '#!/bin/bash\nset -e\nexec torchrun --nnodes="$SLURM_NNODES" --rdzv-endpoint="$head:$port" train.py\n'
TWO_GPU_NODES = "#!/bin/bash\n#PBS -l select=2:ncpus=32:ngpus=4\n#PBS -l place=scatter\nset -e\ncd /x\n"
LSF = "#!/bin/bash\n#BSUB -nnodes 4\n#BSUB -W 1:00\nset -e\n"
SWEEP = (
    "for lr in 1 2; do\n srun --nodes=1 --ntasks=1 --exclusive torchrun --standalone --nnodes=1 x $lr &\ndone\nwait\n"
)


def parse(text: str) -> list[Command]:
    return list(commands_of(Reader(text, 1)))


def ids(text: str, name: str = "job.sh") -> list[str]:
    return [one.fault.id for one in lint(text, name)]


def found(text: str, fault: str, name: str = "job.sh") -> Problem | None:
    return next((one for one in lint(text, name) if one.fault.id == fault), None)


def srun(options: str) -> str:
    """CLEAN with other options: of two alike, torchrun's last counts."""
    return f"{SLURM}srun {RUN} {options} train.py\n"


def on_pods(spec: str, image: str = "r.example.org/pt@sha256:" + "ab" * 32, more: str = "") -> str:
    return f"""apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {{name: ddp}}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: pytorch
              image: "{image}"
              {spec}
              volumeMounts: [{{name: shm, mountPath: /dev/shm}}]
{more}          volumes: [{{name: shm, emptyDir: {{medium: Memory}}}}]
"""


GPU_JOB = """apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: train
          image: pt:1.2.3
          command: [python, train.py, "--device=cuda"]
          resources:
            limits: {nvidia.com/gpu: 1}
"""
INDEXED = """apiVersion: batch/v1
kind: Job
metadata: {name: ddp}
spec:
  completionMode: Indexed
  template:
    spec:
      containers:
        - name: trainer
          image: r.example.org/pt:1.2.3
          env: [{name: MASTER_ADDR, value: ddp-0}]
"""
SIDECAR = INDEXED.replace("ddp-0", "head") + "        - {name: exporter, image: r.example.org/node:1.2.3}\n"
UNNUMBERED = """apiVersion: batch/v1
kind: Job
metadata: {name: shards}
spec:
  parallelism: 3
  template:
    spec:
      containers:
        - name: tokenizer
          image: r.example.org/pt:1.2.3
          env: [{name: SHARD, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}]
"""
INFINIBAND = on_pods("command: [torchrun, t.py]").replace(
    "volumeMounts: [", "volumeMounts: [{name: ib, mountPath: /dev/infiniband}, "
)


def test_a_launcher_alone_and_variables_of_the_shell_itself_are_no_fault() -> None:
    assert "head-only" not in ids(SLURM + "time srun \nsrun python train.py\n")
    assert "variable-unset" not in ids(CLEAN + 'echo "$SECONDS s"\nwhile getopts n: flag; do nodes=$OPTARG; done\n')
    assert "variable-unset" in ids(CLEAN + 'echo "$ELAPSED s"\n')


def test_a_script_without_faults_has_none() -> None:
    assert ids(CLEAN) == []
    assert ids(f"{PBS}mpiexec --hostfile $PBS_NODEFILE {RUN} /data/train.py\n") == []
    assert ids(on_pods("command: [torchrun, train.py]"), "job.yaml") == []


# fault: (scripts that have it, in the line that the text stands in; scripts that are like them and do not)
CASES: dict[str, tuple[list[tuple[str, str]], list[str]]] = {
    "option-wrong": (
        [(SLURM + "pip3 install --yes einops\nsrun python train.py", "pip3")],
        [SLURM + "pip uninstall -y einops\nsrun python train.py"],
    ),
    "gres-form": (
        [(SLURM.replace("set -e", "#SBATCH --gres=gpu=2\nset -e"), "gres")],
        [SLURM.replace("set -e", "#SBATCH --gres=gpu:a100:2\nset -e")],
    ),
    "time-short": (
        [(SLURM.replace("set -e", "#SBATCH --time=00:00:45\nset -e"), "00:45")],
        [SLURM.replace("set -e", "#SBATCH --time=00:45:00\nset -e")],
    ),
    "memory-small": (
        [(GPUS.replace("set -e", "#SBATCH --mem=2G\nset -e"), "--mem")],
        [GPUS.replace("set -e", "#SBATCH --mem=200G\n#SBATCH --mem-per-gpu=2G\nset -e")],
    ),
    "output-lost": (
        [(SLURM.replace("set -e", "#SBATCH --output=/dev/null\nset -e"), "/dev/null")],
        [SLURM.replace("set -e", "#SBATCH --output=/dev/shm/%j\nset -e")],
    ),
    "debugger-left": (
        [(SLURM + "srun ddt --connect python train.py", "ddt"), (SLURM + "python -m pdb train.py", "pdb")],
        [SLURM + "srun python train.py --pdb no"],
    ),
    "device-missing": (
        [
            (ONE.replace("node=4", "node=2") + "export CUDA_VISIBLE_DEVICES=6,7\ntorchrun --standalone x", "CUDA"),
            (ONE.replace("node=4", "node=1") + "export CUDA_VISIBLE_DEVICES=1\npython train.py", "CUDA"),
        ],
        [
            ONE + "export CUDA_VISIBLE_DEVICES=2,3\ntorchrun --standalone x",
            "#!/bin/bash\nexport CUDA_VISIBLE_DEVICES=6\npython x",
            ONE.replace("node=4", "node=4\n#SBATCH --exclusive") + "export CUDA_VISIBLE_DEVICES=6,7\npython train.py",
        ],
    ),
    "nodes-reduced": (
        [(SLURM.replace("--ntasks-per-node=1", "--ntasks=1") + "srun python train.py", "ntasks")],
        [
            SLURM.replace("--ntasks-per-node=1", "--ntasks=2") + "srun python train.py",
            SLURM + "srun -n 1 python train.py",
        ],
    ),
    "step-exceeds-job": (
        [(EIGHT + "srun --nodes=8 python train.py", "srun"), (EIGHT + "srun -N4 ./run.sh", "srun")],
        [EIGHT + "srun --nodes=2 python train.py", EIGHT + "srun -N 1 python train.py", EIGHT + "srun ./run.sh -N 8"],
    ),
    "nodelist-longer": (
        [
            (CLEAN.replace("set -e", "#SBATCH --nodelist=gpu[001-016]\nset -e"), "nodelist"),
            (CLEAN.replace("set -e", "#SBATCH -w a,b,c\nset -e"), "-w"),
        ],
        [
            CLEAN.replace("set -e", "#SBATCH -w gpu[01,07]\nset -e"),
            CLEAN.replace("set -e", "#SBATCH -w gpu01\nset -e"),
            CLEAN.replace("set -e", "#SBATCH -w a[1-2]b\nset -e"),
        ],
    ),
    "ranks-unplaced": (
        [(TWO_GPU_NODES + "mpiexec -n 8 python /x/train.py", "mpiexec")],
        [
            TWO_GPU_NODES + "mpiexec -n 8 --ppn 4 python /x/train.py",
            TWO_GPU_NODES + "mpiexec -n 2 python /x/train.py",
            TWO_GPU_NODES.replace("ngpus=4", "ngpus=4:mpiprocs=4") + "mpiexec -n 8 python /x/train.py",
            TWO_GPU_NODES.replace(":ngpus=4", "") + "mpiexec -n 8 python /x/train.py",
        ],
    ),
    "jsrun-gpus": (
        [(LSF + "jsrun -n 4 -a 1 -c 7 python train_torch.py", "jsrun")],
        [
            LSF + "jsrun -n 4 -g 1 -c 7 python train_torch.py",
            LSF + "jsrun -n 4 -gALL_GPUS python train_torch.py",
            LSF + "jsrun $OPTS python train_torch.py",
            LSF + "jsrun -n 4 ./solver.exe",
            LSF + "jsrun -n 1 nvidia-smi torch",
        ],
    ),
    "environment-lost": (
        [
            (PBS + "export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)\npbsdsh /x/train.sh", "pbsdsh"),
            (PBS + "module load conda\npbsdsh python /x/train.py", "pbsdsh"),
            (
                SLURM
                + "conda activate llm\nfor n in $nodes; do\n ssh $n 'cd /x && torchrun --nnodes=2 t.py' &\ndone\nwait",
                "ssh",
            ),
            (SLURM + "source /x/env/bin/activate\npdsh -w $nodes python /x/train.py", "pdsh"),
        ],
        [
            PBS + "export MASTER_ADDR=$h\npbsdsh -- bash -lc 'cd /x; ./train.sh'",
            PBS + "pbsdsh /x/train.sh",
            PBS + 'export MASTER_ADDR=$h\npbsdsh -- bash -c "export MASTER_ADDR=$h; /x/train.sh"',
            PBS + "module load conda\nmpiexec python /x/train.py",
            SLURM + "conda activate llm\nssh $n 'source /x/env/bin/activate; python t.py'",
            SLURM + "conda activate llm\nssh $n /x/env/bin/python t.py",
            SLURM + "conda activate llm\nssh $n nvidia-smi",
            SLURM + "conda activate llm\nssh $n bash /x/run.sh",
            SLURM + "ssh $n python /x/t.py",
        ],
    ),
    "hosts-fixed": (
        [
            (SLURM + "mpirun -H node1:4,node2:4 python train.py", "node1"),
            (SLURM + "deepspeed --hostfile=hosts.txt train.py", "hosts.txt"),
            (PBS + "mpiexec --hostfile ~/hosts python /x/train.py", "hosts"),
            (SLURM + "horovodrun -np 8 -H 10.0.0.1:4,10.0.0.2:4 python t.py", "10.0"),
        ],
        [
            SLURM + "scontrol show hostnames > hosts.txt\ndeepspeed --hostfile=hosts.txt train.py",
            SLURM + "mpirun -H $nodes python train.py",
            SLURM + "mpirun -H localhost:4 python train.py",
            PBS + "mpiexec --hostfile $PBS_NODEFILE python /x/train.py",
            SLURM + "python make_hosts.py hosts.txt\ndeepspeed --hostfile hosts.txt train.py",
            "#!/bin/bash\nmpirun -H a:4,b:4 python t.py",
            SLURM.replace("set -e", "#SBATCH -w node1,node2\nset -e") + "mpirun -H node1:4,node2:4 python train.py",
        ],
    ),
    "terminal-missing": (
        [
            (SLURM + "docker run -it --rm --gpus all pt:1 python t.py", "docker"),
            (SLURM + "srun docker run --gpus all -i -t pt python t.py", "docker"),
            (SLURM + "docker exec -ti trainer python t.py", "docker"),
            (SLURM + "docker run --interactive --tty pt python t.py", "docker"),
        ],
        [
            SLURM + "docker run --rm --gpus all pt:1 python t.py",
            SLURM + "docker run -itd pt sleep 9",
            "#!/bin/bash\ndocker run -it pt bash",
            SLURM + "docker run -i pt:1 python t.py -t 3",
            SLURM + "srun --pty docker run -it pt bash",
            SLURM + "docker run --rm pt:1 bash -it",
        ],
    ),
    "syntax-error": (
        [
            (SLURM + "for i in 1 2; do\n srun python train.py", "for i"),
            (SLURM + "if [ -f a ]; then\n srun python train.py", "if ["),
            (SLURM + "srun python train.py --name 'a run\n", "a run"),
            (SLURM + 'srun python train.py --name "a run\n', "a run"),
            (SLURM + "srun python train.py\ndone", "done"),
            (SLURM + "f() {\n srun python train.py\n", "f() {"),
        ],
        [
            SLURM + "if true; then { echo a; } fi\nwhile read x; do case $x in a) srun python t.py;; esac; done < f",
            SLURM + "cat <<E\nit's \"\nE\nfor ((i=0; i<2; i++)) do srun python t.py; done  # it's",
            SLURM + "function f { echo a; }\nselect x in a b; do echo $x; done\ngit log `# it isn't` -1\n",
            "#!/bin/zsh\n#SBATCH -N 1\nfor i (a b) { python t.py }\nfor i in a; { echo b }",
        ],
    ),
    "directive-repeated": (
        [("#!/bin/bash\n#SBATCH -C ib\n#SBATCH -C a100\nset -e\nsrun python t.py", "-C ib")],
        [
            "#!/bin/bash\n#SBATCH -C ib\n#SBATCH -C ib\n#SBATCH --exclude=a\n#SBATCH --exclude=b\nset -e",
            "#!/bin/bash\n#PBS -l select=1\n#PBS -l walltime=1:00:00\n#BSUB -R a\n#BSUB -R b\nset -e",
        ],
    ),
    "option-unknown": (
        [
            ("#!/bin/bash\n#SBATCH --node=2\n#SBATCH --gpu-per-node=4\nset -e\nsrun python t.py", "gpu-per"),
            ("#!/bin/bash\n#SBATCH --cpu-per-task=4\nset -e\nsrun python t.py", "cpu-per"),
        ],
        [SLURM.replace("set -e", "#SBATCH --ntasks-per-n=2\n#SBATCH --container-image=a+b\nset -e") + "srun hostname"],
    ),
    "variable-unknown": (
        [(SLURM + 'srun python t.py --nodes "$SLURM_NNODE"', "NNODE"), (SLURM + "N=${SLURM_NODE_RANK}", "NODE_RANK")],
        [SLURM + "srun python t.py --nodes $SLURM_NNODES", SLURM + "SLURM_NUM_GPUS=4\necho $SLURM_NUM_GPUS"],
    ),
    "variable-unset": (
        [
            (SLURM + "config=a.yaml\nsrun python t.py --config $confg", "confg"),
            (SLURM + "srun python t.py --data $DATASET", "DATASET"),
        ],
        [
            SLURM + "source settings.sh\nsrun python t.py --data $DATASET",
            SLURM + "for DATASET in a b; do srun python t.py --data $DATASET; done",
            SLURM + "srun python t.py --data ${DATASET:-a} --out $SCRATCH --job $SLURM_JOB_ID",
        ],
    ),
    "rank-unset": (
        [(SLURM + "export MASTER_ADDR=$(hostname)\nsrun --cpus-per-task=4 python train.py", "srun")],
        [
            SLURM + "export MASTER_ADDR=$(hostname)\nsrun bash -c 'RANK=$SLURM_PROCID python train.py'",
            SLURM + "srun python train.py",
        ],
    ),
    "output-captured": (
        [(SLURM + "conda run -n pt python train.py", "conda run"), (SLURM + "mamba run -p /e python t.py", "mamba")],
        [SLURM + "conda run --no-capture-output -n pt python train.py", SLURM + "micromamba run -n pt hostname"],
    ),
    "download-in-job": (
        [
            (SLURM + "wget https://data.example/a.tar\nsrun python train.py", "wget"),
            (SLURM + "huggingface-cli download a/b\nsrun python train.py", "huggingface"),
        ],
        [SLURM + "wget --version\nsrun python train.py", SLURM + "aws s3 ls\nsrun python train.py"],
    ),
    "cd-lost": (
        [(SLURM + "srun --nodes=1 cd /data & bash run.sh", "cd /data")],
        [SLURM + "cd /data && srun python train.py", SLURM + "srun bash -c 'cd /data && python train.py'"],
    ),
    "typographic": (
        [
            (SLURM + "srun python train.py –lr 3", "–lr"),
            (SLURM + "srun python train.py --name “a”", "“a”"),
        ],
        [SLURM + "echo a –b\n# a –b\nsrun python train.py --span 1–2 --title 'a – b'"],
    ),
    "time-unit": (
        [(SLURM.replace("set -e", "#SBATCH --time=24\nset -e"), "24"), ("#!/bin/bash\n#PBS -l walltime=24\n", "24")],
        [SLURM.replace("set -e", "#SBATCH --time=24:00:00\n#SBATCH --time=600\nset -e")],
    ),
    "output-fixed": (
        [
            (SLURM.replace("set -e", "#SBATCH -o train.log\nset -e"), "train.log"),
            (SLURM.replace("set -e", "#SBATCH -o train-%j.log\n#SBATCH --error=%x\nset -e"), "%x"),
            (PBS.replace("set -e", "#PBS -e error.log\nset -e"), "error.log"),
            (SLURM + "srun python train.py > train.log", "train.log"),
        ],
        [
            SLURM.replace("set -e", "#SBATCH -o train-%j.log\n#SBATCH --error=e%A\nset -e"),
            PBS.replace("set -e", "#PBS -o logs/\nset -e"),
            "#BSUB -o a.log\npython t.py",
            SLURM + "srun python train.py > train-$SLURM_JOB_ID.log",
        ],
    ),
    "merge-conflict": (
        [("#!/bin/bash\n#SBATCH --nodes=1\n<<<<<<< HEAD\nsrun a\n=======\nsrun b\n>>>>>>> side\n", "<<<<")],
        ["#!/bin/bash\ncat <<E\n=======\n>>>>>>> a\nE", SLURM + "cat <<E\n<<<<<<< a\nE"],
    ),
    "port-invalid": (
        [
            (ONE + "torchrun --nproc-per-node=4 --master-port 66670 t.py", "66670"),
            (ONE + 'run="torchrun --master_port 70000 t.py"\neval $run', "eval"),
        ],
        [ONE + "torchrun --nproc-per-node=4 --master-port 65535 t.py"],
    ),
    "not-exported": (
        [
            (ONE + "NCCL_DEBUG=WARN\npython train.py", "NCCL_DEBUG"),
            (SLURM + "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))\nsrun python train.py", "MASTER_PORT"),
        ],
        [
            ONE + "export NCCL_DEBUG=WARN\npython train.py",
            ONE + "NCCL_DEBUG=WARN\nexport NCCL_DEBUG\npython train.py",
            ONE + "NCCL_DEBUG=WARN \\\npython train.py",
            ONE + "set -a\nNCCL_DEBUG=WARN\npython train.py",
            SLURM + "MASTER_PORT=29500\nsrun python train.py --port $MASTER_PORT",
            ONE + "CUDA_VISIBLE_DEVICES=0,1\npython train.py",
        ],
    ),
    "prompt": (
        [(ONE + "conda install numpy\npython train.py", "conda"), (ONE + "apt-get install git\nsrun a", "apt-get")],
        [
            ONE + "conda install -y numpy\npython train.py",
            ONE + "conda install -qy numpy\npython train.py",
            "#!/bin/bash\nconda install numpy\n",
            ONE + "conda list\npython train.py",
            ONE + "apt-get update\npython train.py",
        ],
    ),
    "array-output": (
        [
            (ONE.replace("set -e", "#SBATCH --array=0-9\nset -e") + "python train.py > out/log.txt", "out/log"),
            (ONE.replace("set -e", "#SBATCH -a 1,2\nset -e") + "srun python train.py \\\n  --x 1 > log 2>&1", "> log"),
            ("#!/bin/bash\n#PBS -J 0-2\ncd /x\npython train.py $PBS_ARRAY_INDEX > log\n", "> log"),
        ],
        [
            ONE.replace("set -e", "#SBATCH --array=0-9\nset -e") + "python train.py > log_$SLURM_ARRAY_TASK_ID",
            ONE.replace("set -e", "#SBATCH --array=0-9\nset -e") + "python train.py > /dev/null 2>&1",
            ONE.replace("set -e", "#SBATCH --array=0-9\nset -e") + "cd run_$SLURM_ARRAY_TASK_ID\npython train.py > log",
            ONE.replace("set -e", "#SBATCH -J 2-3\nset -e") + "python train.py >> log",
            ONE + "python train.py > log",
        ],
    ),
    "operator-quoted": (
        [
            (ONE + 'CMD="python t.py | tee log"\n$CMD', "$CMD"),
            (ONE + "SHOW=\"tail -n1 | awk '{print 1}'\"\nsrun ./a | $SHOW", "$SHOW"),
            (ONE + 'CMD="python t.py > log.txt"\nsrun --label $CMD', "srun"),
        ],
        [
            ONE + 'CMD="python t.py | tee log"\neval $CMD',
            ONE + 'CMD="python t.py | tee log"\nsrun bash -c "$CMD"',
            ONE + 'CMD="python t.py"\n$CMD | tee log',
            ONE + 'A="a | b"\necho "$A"',
            ONE + 'CMD="python t.py --when x>3"\n$CMD',
        ],
    ),
    "variable-commented": (
        [
            (SLURM + "#STAGE_NO=1\nsrun python train.py --strategy zero_${STAGE_NO}", "train.py"),
            (SLURM + "# export WORK=/x\ncp a $WORK/b", "cp"),
        ],
        [
            SLURM + "#EXTRA=--debug\nsrun python train.py $EXTRA",
            SLURM + "#STAGE_NO=1\nSTAGE_NO=2\nsrun python train.py --strategy zero_${STAGE_NO}",
            SLURM + "#DATA_DIR=/x\nsrun python train.py $DATA_DIR/a",
            SLURM + "source vars.sh\n#STAGE_NO=1\nsrun python train.py zero_${STAGE_NO}",
        ],
    ),
    "head-copy": (
        [
            (SLURM + f"cp /data/set.tar $SLURM_TMPDIR\nsrun {RUN} x --data $SLURM_TMPDIR/set.tar", "cp"),
            (SLURM + f"D=/tmp/data\nrsync -a /data/set $D\nsrun {RUN} x --data $D", "rsync"),
            (SLURM + f"cp -r /data/set /dev/shm/set\nsrun {RUN} x --data /dev/shm/set", "cp"),
        ],
        [
            SLURM + f"srun cp /data/set.tar $SLURM_TMPDIR\nsrun {RUN} x --data $SLURM_TMPDIR/set.tar",
            SLURM.replace("nodes=2", "nodes=1") + "cp /d $SLURM_TMPDIR\ntorchrun --standalone x --data $SLURM_TMPDIR/d",
            SLURM + f"cp /data/set.tar /scratch/me\nsrun {RUN} x --data /scratch/me/set.tar",
            SLURM + f"cp a /tmp/a\nsrun {RUN} x --data /data",
        ],
    ),
    "ssh-alone": (
        [(SLURM + "for node in $nodes; do\n ssh -q $node\n mkdir /scratch/a\ndone", "ssh")],
        [
            SLURM + "for node in $nodes; do\n ssh -q $node mkdir /scratch/a\ndone",
            SLURM + "ssh $node <<END\nhostname\nEND",
            SLURM + "echo hostname | ssh $node",
            SLURM + "ssh -o BatchMode=yes $node \\\n  hostname",
        ],
    ),
    "assignment-malformed": (
        [
            (SLURM + f"$MASTER_ADDR=$h srun {RUN} x", "$MASTER_ADDR="),
            (SLURM + "export $PORT=1", "export"),
            (SLURM + "HEAD = $(hostname)", "HEAD ="),
        ],
        [
            SLURM + f"MASTER_ADDR=$h srun {RUN} x",
            SLURM + '[ "$a" = b ] && true',
            SLURM + "test a = b",
            SLURM + "$CMD a=b",
        ],
    ),
    "assignment-set": (
        [(SLURM + "set PYTHONPATH=/x", "set")],
        [SLURM + "export PYTHONPATH=/x", SLURM + "set -- A=b", SLURM + "setenv A b"],
    ),
    "setting-unknown": (
        [
            (SLURM + "export NCCL_DEBUG=DEBUG", "NCCL"),
            (SLURM + "export NCCL_DISABLE_IB=1", "NCCL"),
            (SLURM + "export TORCH_DISTRIBUTED_DETAIL=DEBUG", "TORCH"),
        ],
        [
            SLURM + "export NCCL_DEBUG=warn",
            SLURM + "export NCCL_DEBUG=$LEVEL",
            SLURM + "export TORCH_DISTRIBUTED_DEBUG=OFF",
        ],
    ),
    "output-folder": (
        [
            (SLURM.replace("set -e", "#SBATCH -o logs/%j.out\nset -e") + f"srun {RUN} x --log logs/x.txt", "logs/"),
            (SLURM.replace("set -e", "#SBATCH --output=logs/%j.out\nset -e") + f"srun {RUN} x", "logs/"),
            (SLURM.replace("set -e", "#SBATCH -e logs/%j.err\nset -e") + f"srun {RUN} x", "logs/"),
            (PBS.replace("set -e", "#PBS -o logs/\nset -e") + "mpiexec python x.py", "logs/"),
            (SLURM.replace("set -e", "#SBATCH -o /logs/%x_%j/out\nset -e") + f"srun {RUN} x", "%j"),
        ],
        [
            SLURM.replace("set -e", "#SBATCH --output=%x_%j.out\nset -e") + f"srun {RUN} x",
            SLURM.replace("set -e", "#SBATCH --output=/data/me/logs/%j.out\nset -e")
            + f"cd /data/me/logs\nsrun {RUN} x",
            SLURM.replace("set -e", "#SBATCH --output=/data/%j.out\nset -e") + f"srun {RUN} x",
            SLURM.replace("set -e", "#SBATCH --output=logs/%j.out\n# mkdir -p logs before\nset -e") + f"srun {RUN} x",
            PBS.replace("set -e", "#PBS -o logs/\nset -e") + "mkdir -p logs\nmpiexec python /x.py",
            SLURM.replace("set -e", "#SBATCH -o runs/a/%j.out\nset -e")
            + f'A=a D=/data/runs/$A\nsrun {RUN} x --config "$D/x.toml"',
        ],
    ),
    "directive-variable": (
        [
            (SLURM.replace("nodes=2", "nodes=$NODES") + f"srun {RUN} x", "nodes="),
            (PBS.replace("set -e", "#PBS -o out_$PBS_NUM_NODES\nset -e") + "mpiexec python /x.py", "NUM"),
        ],
        [
            SLURM.replace("set -e", "#SBATCH --comment=a$\nset -e").replace("a$", "a") + f"srun {RUN} x",
            CLEAN,
            PBS.replace("set -e", "#PBS -o $HOME/$PBS_JOBID\nset -e") + "mpiexec python /x.py",
        ],
    ),
    "no-interpreter": (
        [
            (CLEAN.replace("#!/bin/bash\n", "# Copyright\n#!/bin/bash\n"), "#SBATCH"),
            (CLEAN.replace("#!/bin/bash\n", "#!BATCH --nodes=2\n"), "#SBATCH"),
            (CLEAN.replace("#!/bin/bash\n", "#!/bin/sh \u2013l\n"), "#SBATCH"),
        ],
        [CLEAN, CLEAN.replace("#!/bin/bash", "#! /bin/bash -l"), f"# a shell script\n{RUN} x"],
    ),
    "nodes-missing": (
        [(SLURM + "srun torchrun --nproc-per-node=4 --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$h:$p x", "torchrun")],
        [CLEAN, SLURM + "export PET_NNODES=2\nsrun torchrun --rdzv-endpoint=$h:$p --rdzv-id=$SLURM_JOB_ID x"],
    ),
    "home-folder": (
        [
            (f"{PBS}cd ..\nmpiexec python train.py", "cd"),
            (f"{PBS}mpiexec python train.py", "mpiexec"),
            (f"{PBS}BASE=$PWD\nmpiexec python $BASE/x.py", "BASE="),
            (f'{PBS}BASE=$PWD\nssh $node "cd $BASE; sh train.sh"', "BASE="),
        ],
        [
            f"{PBS}cd $PBS_O_WORKDIR\nmpiexec python train.py",
            f"{PBS}mpiexec python /data/train.py",
            CLEAN,
            f'{PBS}mpiexec bash -c "cd /x; python train.py"',
        ],
    ),
    "directive-ignored": (
        [(f"{CLEAN}#SBATCH --mem=64G\n", "--mem"), (SLURM + "#SBATCH --mem=0\ntrue", "--mem")],
        [
            CLEAN,
            "cat >job.sh <<END\n#SBATCH --nodes=2\nEND\nsbatch job.sh\n",
            CLEAN + "cat <<'END' >eval.sh\n#!/bin/bash\n#SBATCH --nodes=9\nEND\nsbatch eval.sh\n",
        ],
    ),
    "export-none": (
        [(SLURM.replace("set -e", "#SBATCH --export=NONE\nset -e") + f"srun {RUN} x", "NONE")],
        [
            SLURM.replace("set -e", "#SBATCH --export=NONE\nset -e") + f"srun --export=ALL {RUN} x",
            SLURM.replace("set -e", "#SBATCH --export=NONE\nset -e") + f"unset SLURM_EXPORT_ENV\nsrun {RUN} x",
            SLURM.replace("set -e", "#SBATCH --export=ALL\nset -e") + f"srun {RUN} x",
        ],
    ),
    "status-lost": (
        [
            (f"{SLURM}srun apptainer exec x.sif bash -c '{RUN} x | tee log'", "tee"),
            (f"{SLURM}srun bash -c '{RUN} x\necho end'", "echo end"),
            (NO_E + f"for lr in 1 2; do\n srun {RUN} x $lr\ndone", "srun"),
            (
                NO_E.replace("set -", "#SBATCH --gpus-per-node=4\nset -").replace(
                    "export", "#SBATCH --gres=gpu:4\nexport"
                )
                + "bash run.sh\necho end",
                "echo",
            ),
            (NO_E + f"srun {RUN} x\necho done", "echo"),
            (NO_E + f"srun {RUN} x | tee log", "tee"),
            (NO_E + "set -e\n" + f"srun {RUN} x | tee log", "tee"),
            (NO_E + f"srun {RUN} x &\nwait\ndate", "date"),
            (NO_E + "python train.py\nconda deactivate", "deactivate"),
            (NO_E + "${TORCHRUN} --standalone x.py\necho $?", "echo"),
            (f"#!/bin/bash\n{RUN} x 2>&1 | tee log", "tee"),
            (f"{SLURM}srun {RUN} x || true", "true"),
            (f"#!/bin/bash\n{RUN} x\nEOS", "EOS"),
            (NO_E + f'srun {RUN} x\nif [ "$n" -gt 5 ]; then\n sbatch next.sh\nfi', "sbatch"),
            (NO_E + f"srun {RUN} x\nif [ $? -eq 0 ]; then\n echo good\nelse\n echo bad\nfi", "bad"),
            (NO_E + f"timeout 11h srun {RUN} x\nexit 0", "exit"),
            (NO_E + f"srun {RUN} x && echo good || echo bad", "bad"),
            (NO_E + f'if [ -z "$gpu" ]; then\n echo "No GPU; exiting"\n exit 0\nfi\nsrun {RUN} x', "exit 0"),
        ],
        [
            CLEAN + "echo done",
            NO_E + f"echo start\nsrun {RUN} x",
            NO_E + f"srun {RUN} x\ncode=$?\necho done\nexit $code",
            NO_E + "set -o pipefail\n" + f"srun {RUN} x | tee log",
            NO_E + f"srun {RUN} \\\n  $(date)",
            NO_E + f"srun {RUN} x || exit 1\necho done",
            NO_E + f"srun {RUN} x &\npid=$!\necho started\nwait $pid",
            NO_E + f"srun {RUN} x\nexit",
            f"#!/bin/bash\nset -o pipefail\n{RUN} x 2>&1 | tee log",
            "#!/bin/bash\npython prepare.py\necho done",
            NO_E + f'if [ -f done ]; then\n echo "all done"\n exit 0\nfi\nsrun {RUN} x',
            f"{NO_E}test -d data || echo 'Error: no data' && exit 1\nsrun {RUN} x",
            f"{SLURM}srun bash -c 'set -o pipefail; {RUN} x | tee log'",
            f"{SLURM}srun bash -o pipefail -c '{RUN} x | tee log'",
            f"{SLURM}srun bash -c 'set -e\n{RUN} x\necho end'",
            f"{SLURM}srun bash -c '{RUN} x && echo end'",
            f"{SLURM}for lr in 1 2; do\n srun {RUN} x $lr\ndone",
            NO_E + f"for lr in 1 2; do\n srun {RUN} x $lr || exit 1\ndone",
            NO_E + f"for lr in 1 2; do\n echo $lr\ndone\nsrun {RUN} x",
            GPUS + "bash run.sh\necho end",
        ],
    ),
    "cpus-not-passed": (
        [
            (CPUS + f"ARGS='--label'\nsrun $ARGS {RUN} x", "srun"),
            (CPUS.replace("set -e", "#SBATCH --gres=gpu:2\nset -e") + "srun papermill a.ipynb b.ipynb", "srun"),
            (CPUS + "srun Rscript fit.R", "srun"),
            (CPUS + f"srun {RUN} x", "srun"),
            (CPUS + "srun bash -c 'torchrun --nnodes=2 x'", "srun"),
            (CPUS + "srun singularity run x.sif python train.py", "srun"),
            (CPUS + "srun singularity exec x.sif bash -c '$WITH_CONDA && python train.py'", "srun"),
            (CPUS + f"export SLURM_CPU_BIND=cores\nsrun {RUN} x", "srun"),
            (CPUS + f"srun --cpu-bind=cores {RUN} x", "srun"),
            (CPUS + f"timeout -k 60 11h srun {RUN} x", "timeout"),
            (CPUS + f"srun ./prepare.sh\nsrun {RUN} x", "torchrun"),
            (CPUS + "srun -N 1 -n 1 ray start --head --block &", "ray"),
            (CPUS + 'CMD="srun python train.py"\neval $CMD', "eval"),
        ],
        [
            CPUS + f"srun --cpus-per-task=8 {RUN} x",
            CPUS + f"srun -c $SLURM_CPUS_PER_TASK {RUN} x",
            CPUS + f"export SRUN_CPUS_PER_TASK=8\nsrun {RUN} x",
            CPUS + f"head=$(srun --nodes=1 hostname)\nsrun --cpu-bind=none {RUN} x",
            CLEAN,
            CPUS + f"export SLURM_CPU_BIND=none\nsrun {RUN} x",
            CPUS + f"srun --cpu-bind=map_cpu:0,8 {RUN} x",
            CPUS + "srun ./copy_data.sh",
            CPUS + "srun bash -c 'mkdir -p /tmp/a && ln -s /data /tmp/a/'",
            CPUS + 'CMD="srun -c 8 python train.py"\neval $CMD',
            CPUS + 'CMD="python prepare.py"\neval $CMD',
            CPUS + f"ARGS='--label --cpus-per-task=8'\nsrun $ARGS {RUN} x",
            CPUS + "srun docker compose run dev python train.py",
            CPUS.replace("set -e", "#SBATCH --gres=gpu:2\nset -e") + "srun nvidia-smi",
            CPUS + "srun ./stage_in.sh",
        ],
    ),
    "node-rank": (
        [
            (SLURM + "srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master-addr=$h x", "--node_rank"),
            (SLURM + 'srun bash -c "torchrun --nnodes=2 --node_rank $SLURM_PROCID --master-addr $h x"', "--node_rank"),
            (SLURM + "srun accelerate launch --num_machines 2 --machine_rank $SLURM_PROCID x.py", "--machine_rank"),
            (SLURM + "export NODE_RANK=$SLURM_NODEID\nsrun torchrun --nnodes=2 --node-rank=$NODE_RANK x", "torchrun"),
            (EIGHT + "export RANK=$SLURM_PROCID\nsrun python train.py", "RANK="),
            (EIGHT + "export LOCAL_RANK=${SLURM_LOCALID}\nsrun python train.py", "RANK="),
        ],
        [
            SLURM + "srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master-addr=$h x'",
            SLURM + 'srun bash -c "torchrun --nnodes=2 --node_rank \\$SLURM_PROCID --master-addr $h x"',
            SLURM + "srun bash -c '\\\n  '\"$ENV\"'/bin/torchrun --nnodes=2 \\\n --node_rank $SLURM_NODEID x'",
            SLURM.replace("nodes=2", "nodes=1") + "srun torchrun --node_rank=$SLURM_NODEID x",
            EIGHT + "srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID python train.py'",
            EIGHT + "export NODE_NUMBER=$SLURM_NODEID\nsrun python train.py",
        ],
    ),
    "node-rank-unused": (
        [(SLURM + f"srun {RUN} --node-rank $SLURM_PROCID x", "torchrun")],
        [SLURM + f"srun bash -c '{RUN} --node-rank $SLURM_PROCID x'", CLEAN],
    ),
    "ranks-exceed-gpus": (
        [
            (GPUS + f"srun {RUN} --nproc-per-node=8 x", "nproc"),
            (PBS.replace("ncpus=8", "ncpus=8:ngpus=1") + "torchrun --standalone --nproc_per_node=2 /x.py", "torchrun"),
            (f"#!/bin/bash\nCUDA_VISIBLE_DEVICES=0,1 {RUN} --nproc-per-node=4 x", "nproc"),
            (GPUS.replace("ntasks-per-node=1", "ntasks-per-node=8") + "srun python train.py", "srun"),
        ],
        [
            GPUS + f"srun {RUN} --nproc-per-node=4 x",
            srun("--nproc-per-node=8"),
            f"#!/bin/bash\nexport CUDA_VISIBLE_DEVICES=0,1,2,3\n{RUN} --nproc-per-node=4 x",
            GPUS.replace("ntasks-per-node=1", "ntasks-per-node=4") + "srun python train.py",
        ],
    ),
    "one-rank": (
        [
            (
                GPUS.replace("nodes=2", "nodes=1").replace("ntasks-per-node=1", "ntasks-per-node=4") + "torchrun x.py",
                "torchrun",
            ),
            (GPUS + f"srun {RUN} x", "torchrun"),
            (GPUS + f"srun {RUN} --nproc-per-node=1 x", "torchrun"),
            (
                GPUS + f'srun bash -c "{RUN.replace(chr(34), "")} --nproc-per-node=\\$SLURM_NTASKS_PER_NODE x"',
                "torchrun",
            ),
            (
                GPUS + "srun accelerate launch --num_machines=2 --num_processes=2 --main_process_ip=$h x.py",
                "accelerate",
            ),
        ],
        [
            GPUS + f"srun {RUN} --nproc-per-node=gpu x",
            GPUS + "export PET_NPROC_PER_NODE=4\nsrun torchrun x",
            GPUS.replace("ntasks-per-node=1", "ntasks-per-node=4") + f"srun {RUN} --nproc-per-node=1 x",
            GPUS + "srun accelerate launch --num_machines=2 --num_processes=8 --main_process_ip=$h x.py",
            GPUS + f"srun {RUN} $MORE x",
        ],
    ),
    "one-gpu-visible": (
        [(GPUS + f"export CUDA_VISIBLE_DEVICES=0\nsrun {RUN} --nproc-per-node=4 x", "CUDA")],
        [GPUS + f"export CUDA_VISIBLE_DEVICES=0,1,2,3\nsrun {RUN} --nproc-per-node=4 x"],
    ),
    "one-process": (
        [
            (
                ONE.replace("gpus-per-node", "ntasks=4\n#SBATCH --gpus-per-node") + "python train.py --deepspeed",
                "python",
            ),
            (GPUS + "python train.py", "python"),
            (GPUS.replace("nodes=2", "nodes=1") + "srun python train.py", "srun"),
            (GPUS + "srun python train.py", "srun"),
            (GPUS + "uv run solve.py", "uv"),
        ],
        [
            GPUS + "python evaluate.py --data /train",
            GPUS + "deepspeed train.py\npython train.py",
            SLURM + "python train.py",
            GPUS + "srun -N 2 -n 8 python train.py",
            ONE + "python evaluate.py --deepspeed",
        ],
    ),
    "endpoint-unset": (
        [
            (SLURM + f"srun {RUN} --rdzv-endpoint=$MASTER_ADDR:$PORT x", "torchrun"),
            (EIGHT + "# export MASTER_ADDR=$(hostname)\nsrun python train.py", "srun"),
            (SLURM + f"source env/bin/activate\nsrun {RUN} --rdzv-endpoint=$MASTER_ADDR:$PORT x", "torchrun"),
        ],
        [
            SLURM
            + f"PORT=$((20000 + SLURM_JOB_ID % 10000)) MASTER_ADDR=$head\nsrun {RUN} --rdzv-endpoint=$MASTER_ADDR:$PORT x",
            SLURM + f"source nodes.sh\nsrun {RUN} --rdzv-endpoint=$MASTER_ADDR:$PORT x",
            SLURM + f"srun --container-image=/x.sqsh {RUN} --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT x",
            SLURM + f": ${{MASTER_ADDR:=$head}} ${{PORT:=1}}\nsrun {RUN} --rdzv-endpoint=$MASTER_ADDR:$PORT x",
            SLURM.replace("nodes=2", "nodes=1") + "torchrun --standalone --rdzv-endpoint=$MASTER_ADDR:$PORT x",
            EIGHT + "# export MASTER_ADDR=$(hostname)\nexport MASTER_ADDR=$head\nsrun python train.py",
            EIGHT + "# export MASTER_ADDR=$(hostname)\nCOMM_PATH=/data/comm srun python train.py",
        ],
    ),
    "secret": (
        [
            (CLEAN + "export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567\n", "WANDB"),
            (CLEAN + "wandb login 0123456789abcdef0123456789abcdef01234567\n", "login"),
        ],
        [
            CLEAN + "BUDGET_TOKENS=4_500_000_000_000\nexport EVAL_TOKENS=1.250.000.000.000\n",
            CLEAN + "export WANDB_API_KEY=$(cat ~/.wandb)\n",
            CLEAN + "export WANDB_API_KEY='<your-key-goes-here>'\n",
            CLEAN + "export TOKENIZERS_PARALLELISM=false\n",
            CLEAN + "PARAMS+=(--read_only_and_more)\n",
        ],
    ),
    "no-nv": (
        [
            (GPUS + f"srun apptainer exec x.sif {RUN} --nproc-per-node=4 x", "apptainer"),
            (f"#!/bin/bash\ndocker run --ipc=host pt@sha256:{'0' * 64} {RUN} x", "docker"),
        ],
        [
            GPUS + f"srun apptainer exec --nv x.sif {RUN} --nproc-per-node=4 x",
            GPUS + f"export APPTAINER_NV=1\nsrun apptainer exec x.sif {RUN} --nproc-per-node=4 x",
            SLURM + f"srun apptainer exec x.sif {RUN} x",
            GPUS.replace("set -e", "#SBATCH --partition=standard-g\nset -e")
            + f"srun apptainer exec x.sif {RUN} --nproc-per-node=4 x",
            f"#!/bin/bash\ndocker run --ipc=host --gpus all pt@sha256:{'0' * 64} {RUN} x",
        ],
    ),
    "interface-fixed": (
        [(CLEAN + "export NCCL_SOCKET_IFNAME=ib0\n", "ib0")],
        [CLEAN + "export NCCL_SOCKET_IFNAME=hsn\n", CLEAN + "export NCCL_SOCKET_IFNAME=^lo\n"],
    ),
    "script-folder": (
        [
            (SLURM + f'HERE="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"\nsrun {RUN} "$HERE/x.py"', "HERE="),
            (SLURM + f"cd ${{0%/*}}\nsrun {RUN} x.py", "cd"),
            (PBS + f'source "$(dirname "$0")/env.sh"\nmpiexec {RUN} /x.py', "source"),
        ],
        [
            SLURM + f'HERE="${{SLURM_SUBMIT_DIR:-$(cd "$(dirname "$0")" && pwd)}}"\nsrun {RUN} "$HERE/x.py"',
            SLURM + f'echo "$(basename "$0")"\nsrun {RUN} x.py',
            f'#!/bin/bash\nset -e\ncd "$(dirname "$0")"\n{RUN} x.py',
            SLURM + f"srun bash -c 'cd $(dirname $0); {RUN} x.py'",
        ],
    ),
    "cpus-missing": (
        [
            (ONE + "srun apptainer run --nv x.sif accelerate launch --num_processes 4 x.py", "accelerate"),
            (ONE + "torchrun --standalone --nproc-per-node=4 x.py", "torchrun"),
            (ONE + "srun torchrun --standalone --nproc-per-node=gpu x.py", "torchrun"),
            (ONE + "N=${N:-4}\ntorchrun --standalone --nproc-per-node=$N x.py", "torchrun"),
            (ONE + "/env/bin/accelerate launch x.py", "accelerate"),
            (
                ONE.replace("set -e", "#SBATCH -c 2\nset -e") + "torchrun --standalone --nproc-per-node=4 x.py",
                "torchrun",
            ),
            ("#!/bin/bash\n#BSUB -n 1\n#BSUB -gpu num=4\ntorchrun --standalone --nproc-per-node=4 x.py", "torchrun"),
            ("#!/bin/bash\n#PBS -l select=1:ngpus=4\ntorchrun --standalone --nproc-per-node=4 /x.py", "torchrun"),
            (ONE + "torchrun --standalone --nproc-per-node=1 x.py", "torchrun"),
        ],
        [
            ONE.replace("set -e", "#SBATCH -c 32\nset -e") + "torchrun --standalone --nproc-per-node=4 x.py",
            ONE.replace("set -e", "#SBATCH --exclusive\nset -e") + "torchrun --standalone --nproc-per-node=4 x.py",
            ONE.replace("set -e", "#SBATCH -C gpu\nset -e") + "torchrun --standalone --nproc-per-node=4 x.py",
            ONE + "srun -c 32 apptainer run --nv x.sif accelerate launch --num_processes 4 x.py",
            ONE + "srun --cpus-per-task=32 torchrun --standalone --nproc-per-node=4 x.py",
            "#!/bin/bash\n#BSUB -n 8\n#BSUB -R span[hosts=1]\ntorchrun --standalone --nproc-per-node=4 x.py",
            "#!/bin/bash\n#PBS -l select=1:ncpus=16:ngpus=4\ntorchrun --standalone --nproc-per-node=4 /x.py",
            SLURM + "srun -n 16 -c 7 --gpus-per-task=1 --cpu-bind=cores python train.py",
            CPUS + "srun -n 16 --gpus-per-task=1 --cpu-bind=cores python train.py",
            ONE.replace("set -e", "#SBATCH --mincpus=32\nset -e") + "torchrun --standalone --nproc-per-node=4 x.py",
        ],
    ),
    "slots-missing": (
        [(ONE + "mpirun -np 4 python x.py", "mpirun"), (SLURM + "N=16\nmpirun -n $N python x.py", "mpirun")],
        [
            EIGHT + "mpirun -n 16 python x.py",
            ONE + "mpirun --oversubscribe -np 4 python x.py",
            ONE + "mpirun --host $hosts -np 4 python x.py",
            f"{PBS}mpiexec -n 8 python /x.py",
        ],
    ),
    "tasks-missing": (
        [(SLURM.replace("ntasks-per-node", "ntasks") + f"srun {RUN} x", "srun"), (SLURM + f"srun -n1 {RUN} x", "srun")],
        [
            SLURM.replace("ntasks-per-node=1", "ntasks=2") + f"srun {RUN} x",
            SLURM + f"for n in $nodes; do\nsrun -n 1 -w $n {RUN} x &\ndone\nwait",
            CLEAN,
        ],
    ),
    "gpus-uneven": (
        [(SLURM.replace("set -e", "#SBATCH --gpus=a100:4\nset -e") + f"srun {RUN} x", "--gpus=")],
        [
            SLURM.replace("set -e", "#SBATCH --gpus=16\nset -e") + f"srun {RUN} x",
            ONE.replace("gpus-per-node", "gpus") + "torchrun --standalone --nproc-per-node=4 x",
            GPUS + f"srun {RUN} --nproc-per-node=4 x",
        ],
    ),
    "chunks-together": (
        [(PBS.replace("ncpus=8", "ncpus=8:ngpus=1") + f"mpiexec {RUN} /x", "select")],
        [
            PBS.replace("ncpus=8", "ncpus=8:ngpus=1").replace("set -e", "#PBS -l place=scatter\nset -e")
            + f"mpiexec {RUN} /x",
            PBS.replace("ncpus=8", "ncpus=8:ngpus=8") + f"mpiexec {RUN} /x",
            PBS.replace("select=2:ncpus=8", "select=1:ncpus=8:ngpus=1") + f"mpiexec {RUN} /x",
            PBS.replace("ncpus=8", "ncpus=8:ngpus=1") + "launch-nodes.sh /x.py",
        ],
    ),
    "option-variable": (
        [
            (SLURM + f"export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\nsrun {RUN} x", "OMP_NUM_THREADS=$"),
            (SLURM + f"srun --cpus-per-task=$SLURM_CPUS_PER_TASK {RUN} x", "srun"),
            (SLURM + f"srun {RUN} --nproc-per-node=${{SLURM_GPUS_PER_NODE}} x", "srun"),
        ],
        [
            CPUS + f"srun --cpus-per-task=$SLURM_CPUS_PER_TASK {RUN} x",
            SLURM + f"srun --cpus-per-task=${{SLURM_CPUS_PER_TASK:-8}} {RUN} x",
            NO_E + f"export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\nsrun {RUN} x",
            SLURM + f"echo $SLURM_GPUS\nsrun {RUN} x",
        ],
    ),
    "unset-variable": (
        [
            (CLEAN + "export PYTHONPATH=$PWD:$PYTHONPATH", "PYTHONPATH"),
            (CLEAN + "export LD_LIBRARY_PATH=/x:${LD_LIBRARY_PATH}", "LD_LIB"),
        ],
        [
            CLEAN + "export PYTHONPATH=$PWD:${PYTHONPATH:-}",
            NO_E + f"srun {RUN} x\nexport PYTHONPATH=$PWD:$PYTHONPATH",
            CLEAN + "module load cuda\nexport LD_LIBRARY_PATH=/x:$LD_LIBRARY_PATH",
            CLEAN + "export PYTHONPATH=/a\nexport PYTHONPATH=/b:$PYTHONPATH",
        ],
    ),
    "endpoint-missing": (
        [
            (SLURM + "export MASTER_ADDR=$head\nsrun torchrun --nnodes=2 --nproc-per-node=4 x.py", "torchrun"),
            (SLURM + "srun accelerate launch --num_machines 2 --num_processes 8 x.py", "accelerate"),
        ],
        [
            CLEAN,
            SLURM + "srun torchrun --nnodes=2 $ARGS x.py",
            SLURM + "export PET_MASTER_ADDR=$head\nsrun torchrun --nnodes=2 x.py",
            SLURM + "srun accelerate launch --config_file c.yaml --num_machines 2 --num_processes 8 x.py",
            SLURM
            + 'L="torchrun --nnodes=$(sort -u $HOSTS | wc -l) "\nL+="--rdzv_endpoint=$h:1 "\nAll="cd /x && $L"\nssh $node "$All"',
        ],
    ),
    "endpoint-list": (
        [
            (SLURM + "export MASTER_ADDR=$(echo $SLURM_NODELIST | cut -d, -f1)\nsrun python x.py", "MASTER_ADDR"),
            (SLURM + "export MASTER_ADDR=${SLURM_JOB_NODELIST%%,*}\nsrun python x.py", "MASTER_ADDR"),
            (
                SLURM + "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST)\nsrun python x.py",
                "MASTER_ADDR",
            ),
            (PBS + "export MASTER_ADDR=$(cat $PBS_NODEFILE)\nmpiexec python /x.py", "MASTER_ADDR"),
        ],
        [
            SLURM + "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\nsrun python x.py",
            SLURM + "export MASTER_ADDR=$(echo $SLURM_NODELIST | sed 's/\\[//;s/[-,].*//')\nsrun python x.py",
            SLURM + "head_nodes=$(scontrol show hostnames $SLURM_JOB_NODELIST)\nsrun python x.py",
            PBS + "export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)\nmpiexec python /x.py",
        ],
    ),
    "world-size": (
        [(EIGHT + "export WORLD_SIZE=8\nsrun python train.py", "WORLD_SIZE")],
        [
            EIGHT + "export WORLD_SIZE=16\nsrun python train.py",
            GPUS + "export WORLD_SIZE=8\nsrun python train.py",
            EIGHT + "export WORLD_SIZE=$SLURM_NTASKS\nsrun python train.py",
            SLURM + f"export WORLD_SIZE=8\nsrun {RUN} x",
        ],
    ),
    "one-after-another": (
        [
            (f"{PBS}for h in $hosts; do\n ssh $h {RUN} x\ndone", "ssh"),
            (f"{SLURM}for h in $hosts; do\n srun -N1 -n1 -w $h {RUN} x\ndone", "srun"),
        ],
        [
            f"{PBS}for h in $hosts; do\n ssh $h {RUN} x &\ndone\nwait",
            f"{PBS}for h in $hosts; do\n ssh $h '{RUN} x > log 2>&1 &'\ndone\nwait",
            f"{PBS}for h in $hosts; do\n ssh $h bash <<E &\n{RUN} x\nE\ndone\nwait",
            CLEAN,
        ],
    ),
    "ends-early": (
        [(SLURM + f"srun {RUN} x &", "srun"), (SLURM + f"nohup srun {RUN} x > log &\necho started", "srun")],
        [SLURM + f"srun {RUN} x &\nwait", SLURM + f"srun {RUN} x & \nsrun --overlap nvidia-smi dmon", CLEAN],
    ),
    "line-not-continued": (
        [
            (SLURM + f"srun {RUN} \\\n  # --more \\\n  --less x", "--less"),
            (SLURM + f"srun {RUN} \\ \n  --less x", "--less"),
            (SLURM + f"srun {RUN} x \n  --name='a b'", "--name"),
        ],
        [
            SLURM + f"srun {RUN} \\\n  --less x",
            SLURM + f'if [[ -z "$a" ||\n  -z "$b" ]]; then exit 2; fi\nsrun {RUN} x',
            SLURM + f'A=(\n  --less # one\n  --more\n)\nsrun {RUN} "${{A[@]}}" x',
            SLURM + f"case $1 in\n  -h|--help) exit 2;;\n  --more) true;;\nesac\nsrun {RUN} x",
            SLURM + f"cat > a.sh <<E\n--less\nE\nsrun {RUN} x",
        ],
    ),
    "options-late": (
        [(SLURM + "srun torchrun train.py --nproc_per_node=4", "nproc")],
        [SLURM + f"srun {RUN} train.py --nproc 4", SLURM + "srun torchrun $ARGS --nproc_per_node=4 train.py"],
    ),
    "dos-lines": ([(CLEAN.replace("\n", "\r\n"), "#!")], [CLEAN]),
    "directive-comment": (
        [
            ("#!/bin/bash\n# SBATCH --nodes=1\n# SBATCH --gres=gpu:4\npython train.py", "--nodes"),
            (
                SLURM.replace("#SBATCH --requeue", "#--gres=gpu:4\n#SBATCH --requeue") + "srun python train.py",
                "#--gres",
            ),
        ],
        [
            SLURM.replace("#SBATCH --requeue", "# SBATCH --nodes=4\n#SBATCH --requeue") + "srun python train.py",
            GPUS.replace("#SBATCH --requeue", "#--gres=gpu:4\n#SBATCH --requeue") + "srun python train.py",
            SLURM.replace("#SBATCH --requeue", "##SBATCH --gres=gpu:4\n#SBATCH --requeue") + "srun python train.py",
            "#!/bin/bash\n# submit with # SBATCH --nodes=2\npython train.py",
        ],
    ),
    "placeholder": (
        [
            (SLURM.replace("set -e", "#SBATCH --account=<project>\nset -e") + f"srun {RUN} x", "<project>"),
            (SLURM.replace("set -e", "#SBATCH -A abxxxxxx\nset -e") + f"srun {RUN} x", "xxx"),
            (f"{SLURM}cd /path/to/project\nsrun {RUN} x", "cd"),
            (f"{SLURM}wd=path_to_data\nsrun {RUN} x $wd", "path_to"),
            (f"{SLURM}docker pull your-registry/pt:1.0.0", "docker"),
        ],
        [
            SLURM.replace("set -e", "#SBATCH --account=ab1234\nset -e") + f"srun {RUN} x",
            f'{SLURM}: "${{DATA:?set it, as /path/to/data}}"\necho "see /path/to/x"\nsrun {RUN} x',
            f"{SLURM}D=${{DATA:-/path/to/data}}\nsrun {RUN} x --path_to_data=$D",
        ],
    ),
    "node-rank-missing": (
        [(SLURM + "srun torchrun --nnodes=2 --nproc-per-node=4 --master-addr=$h x.py", "torchrun")],
        [
            CLEAN,
            SLURM + "srun bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=$h x.py'",
            SLURM + "srun torchrun --nnodes=2 --rdzv-backend=c10d --master-addr=$h x.py",
            SLURM + "srun torchrun --nnodes=2 --master-addr=$h $ARGS x.py",
            ONE + "torchrun --nnodes=1 --master-addr=$h x.py",
        ],
    ),
    "python-twice": (
        [(srun("python"), "torchrun"), (SLURM + f'C=(python3 -m a.b)\nsrun {RUN} "${{C[@]}}"', "torchrun")],
        [
            CLEAN,
            srun("--no-python python"),
            srun("-m python.train"),
            ONE + 'if [ "$n" -gt 1 ]; then L="torchrun --standalone"; else L=python; fi\n$L train.py',
        ],
    ),
    "endpoint-fixed": (
        [
            (
                SLURM
                + "h=$(scontrol show hostnames | head -n 1)\nsrun torchrun --nnodes=2 --rdzv-endpoint=node01:$p x",
                "node01",
            )
        ],
        [
            SLURM + "h=$(scontrol show hostnames | head -n 1)\nsrun torchrun --nnodes=2 --rdzv-endpoint=$h:$p x",
            SLURM + "srun torchrun --nnodes=2 --rdzv-endpoint=etcd.example.org:2379 --rdzv-backend=etcd x",
            ONE + "h=$(scontrol show hostnames)\ntorchrun --nnodes=1 --rdzv-endpoint=localhost:0 x",
        ],
    ),
    "launch-blocking": (
        [(f"{CLEAN}export CUDA_LAUNCH_BLOCKING=1", "BLOCKING")],
        [f"{CLEAN}export CUDA_LAUNCH_BLOCKING=0", f"{CLEAN}# export CUDA_LAUNCH_BLOCKING=1"],
    ),
    "directive-malformed": (
        [
            (SLURM.replace("--nodes=2", "\u2013nodes=2") + f"srun {RUN} x", "nodes"),
            (SLURM.replace("--nodes=2", "--nodes = 2") + f"srun {RUN} x", "nodes"),
            (GPUS.replace("--gpus-per-node=4", "-gres=gpu:4") + f"srun {RUN} x", "gres"),
        ],
        [
            CLEAN,
            SLURM.replace("set -e", "#SBATCH --account=\n#SBATCH --comment='a = b'\nset -e") + f"srun {RUN} x",
            GPUS.replace("--gpus-per-node=4", "-G4") + f"srun {RUN} x",
        ],
    ),
    "remote-code": (
        [
            (f"curl -fsSL https://example.org/x | bash\n{CLEAN}", "curl"),
            (f"{CLEAN}source <(curl -fsSL https://example.org/x)\n", "source"),
            (f'{CLEAN}bash -c "$(curl -fsSL https://example.org/x)"\n', "bash"),
            (f"{CLEAN}wget https://raw.githubusercontent.com/a/b/main/train.py\n", "wget"),
        ],
        [
            f"{CLEAN}curl -O https://example.org/data.tar\n",
            f"{CLEAN}curl -s https://example.org/x | grep y\n",
            f"{CLEAN}curl -s https://example.org/x | python3 -c 'import json'\n",
            f"{CLEAN}wget https://raw.githubusercontent.com/a/b/{'0' * 40}/train.py\n",
        ],
    ),
    "head-only": (
        [
            (f"{SLURM}{RUN} train.py", "torchrun"),
            (f"{PBS}{RUN} train.py", "torchrun"),
            (f"{SLURM}train() {{\n{RUN} x\n}}\ntrain", "torchrun"),
            (f"{SLURM}apptainer exec x.sif {RUN} x", "torchrun"),
            (f"{SLURM}python -m torch.distributed.run --nnodes=2 x", "python"),
            (f'{SLURM}ARGS=(\n --nnodes 2 # two\n)\ntorchrun "${{ARGS[@]}}" x', "torchrun "),
        ],
        [
            f"{SLURM}for h in $hosts; do\n ssh $h {RUN} x &\ndone\nwait",
            f"{SLURM}srun bash -c '{RUN} x'",
            f"{SLURM}srun bash <<'E'\n{RUN} x\nE\n",
            f"{SLURM}cat >run.sh <<'E'\n{RUN} x\nE\nsrun sh run.sh",
            f"{SLURM}train() {{\n{RUN} x\n}}\nexport -f train\nsrun bash -c train",
            f"{SLURM}echo torchrun; which torchrun",
            "#!/bin/bash\n#SBATCH -N 1\ntorchrun --nproc-per-node 4 x",
            f"{SLURM}mpirun --bind-to none {RUN} x",
            f"{PBS}pbsdsh -n 0 -- {RUN} x",
            f"{SLURM}torchrun --nproc-per-node 4 x",
            f"{SLURM}torchrun --standalone x",
            BARE,
            f"{CLEAN}torchrun --standalone evaluate.py",
        ],
    ),
    "started-here": (
        [(BARE, "torchrun")],
        [BARE.replace("$SLURM_NNODES", "1"), f"ssh n2 true\n{BARE}", f"{SLURM}{RUN} x"],
    ),
    "idle-nodes": (
        [
            (f"{SLURM}torchrun --nproc-per-node 4 x", "torchrun"),
            (f"{SLURM}torchrun --standalone x", "torchrun"),
            (f"{PBS}hostname\ntorchrun --nnodes=1 x", "torchrun"),
            (f"{SLURM}python train.py", "python"),
            (f"{SLURM}deepspeed train.py", "deepspeed"),
        ],
        [
            f"{SLURM}{RUN} x",
            CLEAN,
            f"{CLEAN}torchrun --standalone evaluate.py",
            f"{SLURM}export PET_NNODES=2\ntorchrun x",
            f"{SLURM}deepspeed --hostfile hosts train.py",
            f"{SLURM}srun python train.py",
            f"{SLURM.replace('nodes=2', 'nodes=1')}python train.py",
            "#!/bin/bash\n#SBATCH --gres=gpu:4\ntorchrun --nnodes=1:2 --nproc-per-node=4 x",
        ],
    ),
    "standalone": (
        [
            (f"{SLURM}srun torchrun --standalone --nproc-per-node 4 x", "standalone"),
            (f"{SLURM}srun -n 2 apptainer exec x.sif torchrun --standalone x", "standalone"),
        ],
        [
            "#!/bin/bash\n#SBATCH -N1\ntorchrun --standalone x",
            f"{SLURM}{SWEEP}",
            f"{SLURM}srun -N1 -n1 bash -c 'torchrun --standalone --nnodes=1 x'",
            f"{CLEAN}torchrun --standalone evaluate.py",
        ],
    ),
    "localhost-endpoint": (
        [
            (srun("--rdzv_endpoint=localhost:29500"), "localhost"),
            (srun("--rdzv-endpoint 127.0.0.1:0"), "127"),
            (srun("--master_addr=localhost"), "master_addr"),
            (f"{SLURM}export MASTER_ADDR=localhost\nsrun python t.py", "MASTER_ADDR"),
            (f"{SLURM}export NODE=localhost\nsrun torchrun --nnodes=2 --rdzv-endpoint=$NODE:1 x", "rdzv"),
            ("#!/bin/bash\n#SBATCH --gres=gpu:4\ntorchrun --nnodes=1:2 --rdzv-endpoint=localhost:6000 x", "rdzv"),
        ],
        ["#!/bin/bash\n#SBATCH -N1\nMASTER_ADDR=localhost torchrun --rdzv-endpoint localhost:0 x"],
    ),
    "endpoint-per-node": (
        [
            (f"{SLURM}srun bash -c 'torchrun --nnodes=2 --rdzv_endpoint=$(hostname):$p x'", "hostname"),
            (f'{SLURM}srun bash -c "torchrun --nnodes=2 --rdzv_endpoint=\\$(hostname):$p x"', "hostname"),
            (f"{SLURM}srun bash -c 'MASTER_ADDR=$(hostname) python train.py'", "hostname"),
        ],
        [
            f"{SLURM}srun bash -c 'torchrun --nnodes=2 --rdzv_endpoint=$head:$p x'",
            f'{SLURM}srun bash -c "torchrun --nnodes=2 --node-rank=\\$SLURM_NODEID --rdzv_endpoint=$(hostname):$p x"',
        ],
    ),
    "hostname-endpoint": (
        [
            (srun("--rdzv_endpoint=$(hostname):$port"), "hostname"),
            (f'{SLURM}A=(\n --nnodes=2\n --rdzv_endpoint=$(hostname)\n)\nsrun torchrun "${{A[@]}}" x', "hostname"),
        ],
        [
            CLEAN,
            ONE + "torchrun --rdzv-endpoint=$(hostname):$port x",
            "#!/bin/bash\n#BSUB -n 1\nblaunch torchrun --nnodes=$N --rdzv-endpoint=$HOSTNAME:$port x",
        ],
    ),
    "first-address": (
        [
            (f"{CLEAN}ip() {{\n hostname -I\n}}", "hostname -I"),
            (f"{CLEAN}echo $(hostname -I) > hosts", "hosts"),
            (f"{CLEAN}ip=$(hostname -I | awk '{{print $1}}')", "hostname"),
        ],
        [
            f"{CLEAN}name=$(hostname -s)",
            f"{CLEAN}ip=$(hostname -i)",
            f"{CLEAN}echo \"on $(hostname -I | cut -d' ' -f1)\"",
            f"{CLEAN}hostname -I",
        ],
    ),
    "own-address": (
        [(f"{CLEAN}ip=$(hostname -i)", "hostname"), (f"{CLEAN}ip=$(srun -N1 hostname --ip-address)", "hostname")],
        [f"{CLEAN}name=$(hostname -s)", f"{CLEAN}ip=$(hostname -I)"],
    ),
    "memory-unit": (
        [
            (GPUS.replace("set -e", "#SBATCH --mem=80\nset -e") + f"srun {RUN} x", "--mem"),
            (GPUS.replace("set -e", "#SBATCH --mem-per-gpu 64\nset -e") + f"srun {RUN} x", "--mem"),
        ],
        [GPUS.replace("set -e", f"#SBATCH --mem={size}\nset -e") + f"srun {RUN} x" for size in ("0", "80G", "80000")],
    ),
    "gpus-differ": (
        [
            (GPUS.replace("set -e", "#SBATCH --gres=nvme:1,gpu:a100:2\nset -e") + f"srun {RUN} x", "gres"),
            ("#!/bin/bash\n#BSUB -gpu num=1\n#BSUB -gpu num=4\nblaunch python x.py", "num=4"),
        ],
        [
            GPUS.replace("set -e", "#SBATCH --gres=nvme:100,gpu:4\nset -e") + f"srun {RUN} x",
            GPUS.replace("set -e", "#SBATCH --gres=lscratch:100\n#SBATCH --gpus=8\nset -e") + f"srun {RUN} x",
        ],
    ),
    "tasks-spread": (
        [
            (
                "#!/bin/bash\n#SBATCH --ntasks=2\n#SBATCH --gres=gpu:2\ntorchrun --standalone --nproc-per-node=2 x",
                "ntasks",
            )
        ],
        [
            "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks=2\ntorchrun --standalone --nproc-per-node=2 x",
            "#!/bin/bash\n#SBATCH --ntasks=1\ntorchrun --standalone --nproc-per-node=2 x",
            "#!/bin/bash\n#SBATCH --ntasks=2\nsrun --ntasks-per-node=1 torchrun --nproc-per-node=2 x",
        ],
    ),
    "signal-late": (
        [
            (f"{SLURM}trap requeue USR1\nsrun {RUN} x", "trap"),
            (
                SLURM.replace("set -e", "#SBATCH --signal=USR1@120\nset -e")
                + f"trap requeue SIGUSR1\nsrun {RUN} x &\nwait",
                "--signal",
            ),
        ],
        [
            SLURM.replace("set -e", "#SBATCH --signal=B:USR1@120\nset -e")
            + f"trap requeue SIGUSR1\nsrun {RUN} x &\nwait",
            f"{SLURM}trap '' USR1\nsrun {RUN} x",
            f"{SLURM}trap requeue USR1\nsrun {RUN} x &\nwhile kill -0 $!; do sleep 1; done",
            f"{SLURM}trap clean EXIT\nsrun {RUN} x",
            SLURM.replace("set -e", "#SBATCH --signal=USR1@120\nset -e") + f"srun {RUN} x",
        ],
    ),
    "command-unknown": (
        [
            (f"{SLURM}soruce env.sh\nsrun {RUN} x", "soruce"),
            (f'{SLURM}[ -n "$1" ] || die "no name"\nsrun {RUN} x', "die"),
        ],
        [
            f'{SLURM}die() {{ echo "$1"; exit 1; }}\n[ -n "$1" ] || die "no name"\nsrun {RUN} x',
            f'{SLURM}. lib.sh\n[ -n "$1" ] || die "no name"\nsrun {RUN} x',
            f'{SLURM}case "$1" in\n help|usage) echo x;;\n usage) echo y;;\nesac\nsrun {RUN} x',
            f"{SLURM}./runs\nsrun {RUN} x",
        ],
    ),
    "variable-case": (
        [
            (f"{SLURM}OUT_DIR=/data\nsrun {RUN} x --out=$OUTDIR", "$OUTDIR"),
            (f"{SLURM}SCALE=4\nsrun {RUN} x --name=$scale", "$scale"),
        ],
        [
            f"{SLURM}SCALE=$scale\nsrun {RUN} x --name=$SCALE",
            f"{SLURM}HTTP_PROXY=x\ncurl -x $http_proxy y\nsrun {RUN} x",
            f"{SLURM}NODE=1\nfor node in a b; do echo $node; done\nsrun {RUN} x",
            f"{SLURM}N=1\nawk '{{ print $n }}' log\nsrun {RUN} x",
            f"{SLURM}OUT_DIR=$OUTDIR\nOUTDIR=/data\nsrun {RUN} x $OUT_DIR",
            f"{SLURM}source env.sh\nOUT_DIR=/data\nsrun {RUN} x $OUTDIR",
        ],
    ),
    "run-id-per-node": (
        [(f"{SLURM}srun bash -c 'torchrun --nnodes=2 --rdzv_id=$RANDOM x'", "RANDOM")],
        [f'{SLURM}srun bash -c "torchrun --nnodes=2 --rdzv_id=$SLURM_JOB_ID x"'],
    ),
    "run-id": ([(srun("--rdzv_id=$RANDOM"), "RANDOM"), (srun("--rdzv-id 456"), "456")], [CLEAN]),
    "fixed-port": (
        [
            (ONE.replace("node=4", "node=2") + "accelerate launch --multi_gpu x.py", "accelerate"),
            (ONE.replace("node=4", "node=2") + "deepspeed x.py", "deepspeed"),
            (ONE.replace("node=4", "node=2") + "export MASTER_PORT=${MASTER_PORT:-29500}\npython x.py", "29500"),
            (srun("--rdzv_endpoint=$head:29500"), "29500"),
            (f"{SLURM}port=29400\nsrun torchrun --nnodes=2 --rdzv_endpoint=$head:$port x", "29400"),
            (f"{SLURM}export MASTER_PORT=12355\nsrun python t.py", "12355"),
            (ONE.replace("node=4", "node=2") + "torchrun --nproc-per-node=2 x", "torchrun"),
            (
                ONE.replace("node=4", "node=2") + "srun tune run --nnodes 1 --nproc_per_node 2 --master_port 29500 x",
                "tune",
            ),
        ],
        [
            f"{SLURM}port=$((20000 + SLURM_JOB_ID % 10000))\nsrun torchrun --nnodes=2 --rdzv_endpoint=$head:$port x",
            ONE.replace("gpus-per-node=4", "ntasks-per-node=8\n#SBATCH --gpus-per-task=1")
            + "export MASTER_PORT=1234\nsrun python x",
            ONE.replace("node=4", "node=2") + "torchrun --standalone --nproc-per-node=2 x",
            ONE.replace("node=4", "node=2") + "torchrun --nproc-per-node=2 --master-port=$port x",
            ONE.replace("node=4", "node=2") + "torchrun $ARGS x",
            ONE.replace("node=4", "node=2") + "accelerate launch --main_process_port $port x.py",
            ONE.replace("node=4", "node=1") + "accelerate launch x.py",
            ONE.replace("node=4", "node=2") + "deepspeed --master_port=$port x.py",
            ONE.replace("node=4", "node=2") + "export MASTER_PORT=${MASTER_PORT:-$port}\npython x.py",
        ],
    ),
    "nodes-differ": (
        [(srun("--nnodes=4"), "nnodes"), (f"{PBS}mpiexec torchrun --nnodes 1:4 x", "nnodes")],
        [
            srun("--nnodes=$SLURM_NNODES"),
            srun("--nnodes=1:2"),
            f"{SLURM}{SWEEP}",
            f"{SLURM.replace('nodes=2', 'nodes=4')}srun -N 2 --ntasks-per-node=1 {RUN} x",
            f"{SLURM.replace('nodes=2', 'nodes=4')}for n in 0 1; do\nsrun --nodes=1 -w ${{h[$n]}} {RUN} x &\ndone",
            f"{CLEAN}torchrun --nnodes=1 evaluate.py",
        ],
    ),
    "local-address": (
        [(f"{SLURM}srun torchrun --nnodes=2 --rdzv-endpoint=$h:$p x", "srun")],
        [CLEAN, f"{SLURM}srun torchrun --nnodes=2 --rdzv-endpoint=$h:$p --rdzv-conf=is_host=$x x"],
    ),
    "tasks-per-node": (
        [
            (EIGHT + f"srun {RUN} x", "ntasks-per-node"),
            (EIGHT + f"srun -n 16 {RUN} x", "ntasks-per-node"),
            (EIGHT + f"srun -n $SLURM_NTASKS {RUN} x", "ntasks-per-node"),
            (EIGHT + f"srun apptainer exec x.sif bash -c '{RUN} x'", "ntasks-per-node"),
            (SLURM.replace("ntasks-per-node=1", "ntasks=8") + f"srun {RUN} x", "ntasks"),
        ],
        [
            CLEAN,
            EIGHT + f"srun --ntasks-per-node=1 {RUN} x",
            EIGHT + f"srun --ntasks-per-node=1 apptainer exec x.sif bash -c '{RUN} x'",
            EIGHT + f"srun --ntasks-per-node=1 bash <<'E'\n{RUN} x\nE\n",
            EIGHT + f"srun -N 2 -n 2 {RUN} x",
            EIGHT + f"srun -n2 {RUN} x",
            EIGHT + f"srun --ntasks=$SLURM_JOB_NUM_NODES {RUN} x",
            EIGHT + f"N=2\nsrun -n $N bash -c '{RUN} x'",
            EIGHT + "srun python train.py",
            EIGHT.replace("set -e", "#SBATCH --ntasks=2\nset -e") + f"srun {RUN} x",
        ],
    ),
    "scontrol-in-container": (
        [
            (f"{SLURM}srun --container-image=/fsx/x.sqsh bash -c 'scontrol show hostnames'", "scontrol"),
            (f'{SLURM}apptainer exec x.sif sh -c "head=\\$(scontrol show hostnames)"', "scontrol"),
            (f'{SLURM}srun --container-image=/x.sqsh bash -c "scontrol show hostnames"', "scontrol"),
            (f'{SLURM}srun --container-image=/x.sqsh bash -c "h=\\`scontrol show hostnames\\`"', "scontrol"),
            (f'{SLURM}srun --container-image=/x.sqsh bash -c "h=\\"\\$(scontrol show hostnames)\\""', "scontrol"),
            (f"{SLURM}srun apptainer exec x.sif bash <<E\necho \\$(scontrol show hostnames)\nE\n", "scontrol"),
        ],
        [
            f'{CLEAN}hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            f'{SLURM}srun --container-image=/x.sqsh bash -c "torchrun --rdzv-endpoint=$(scontrol show hostnames | head -1):1 x"',
            f"{SLURM}srun --container-image=/x.sqsh bash -c \"bash -c 'echo $(scontrol show hostnames)'\"",
            f"{SLURM}srun apptainer exec x.sif bash <<E\necho $(scontrol show hostnames)\nE\n",
        ],
    ),
    "mpi-binding": (
        [
            (f"{SLURM}mpirun -np 2 {RUN} x", "mpirun"),
            (f"{SLURM}mpirun -np 2 bash -c '{RUN} x'", "mpirun"),
            (f'{SLURM}mpiArgs="\n -np 2\n --map-by ppr:1:node\n"\nmpirun $mpiArgs torchrun --nnodes=2 x', "mpirun $"),
        ],
        [
            f"{SLURM}mpirun --bind-to none {RUN} x",
            f"{SLURM}mpirun --map-by ppr:1:node --bind-to none bash -c '{RUN} x'",
            f"{SLURM}O='--bind-to none'\nmpirun $O apptainer exec x.sif sh -c '{RUN} x'",
            f'{SLURM}mpiArgs="\n -np 2\n --bind-to none\n"\nmpirun $mpiArgs {RUN} x',
            f"{SLURM}mpirun python horovod.py",
        ],
    ),
    "pbs-one-line": ([("#!/bin/bash\n#PBS -l select=2:ncpus=4,walltime=01:00:00\nset -e\n", "select")], [PBS]),
    "efa-elsewhere": (
        [
            (f"{PBS}export FI_PROVIDER=efa\nexport NCCL_SOCKET_IFNAME=hsn0\n", "FI_PROVIDER"),
            (f'{SLURM}export NCCL_SOCKET_IFNAME=hsn0\nexport FI_PROVIDER="efa"\n', "FI_PROVIDER"),
        ],
        [f"{SLURM}export FI_PROVIDER=efa\n", f"{PBS}export FI_PROVIDER=efa\n", f"{PBS}export FI_PROVIDER=cxi\n"],
    ),
    "loopback-interface": (
        [(f"{CLEAN}export NCCL_SOCKET_IFNAME=lo\n", "NCCL_S")],
        [f"{CLEAN}export NCCL_SOCKET_IFNAME=eth0\n"],
    ),
    "network-disabled": (
        [
            (GPUS + f"export NCCL_P2P_DISABLE=1\nsrun {RUN} x", "P2P"),
            (ONE + "export NCCL_P2P_DISABLE=1\ntorchrun --standalone x", "P2P"),
            (f"{CLEAN}export NCCL_IB_DISABLE=1\n", "IB_D"),
            (f"{CLEAN}srun --export=ALL,NCCL_P2P_DISABLE=1 x\n", "P2P"),
        ],
        [
            f"{CLEAN}export NCCL_IB_DISABLE=0\n",
            f"{CLEAN}export NCCL_IB_DISABLE=1 NCCL_NSOCKS_PERTHREAD=8\n",
            ONE + "export NCCL_IB_DISABLE=1\ntorchrun --standalone x",
            ONE.replace("per-node=4", "per-node=rtx4090:4") + "export NCCL_P2P_DISABLE=1\ntorchrun --standalone x",
            "#!/bin/bash\nexport NCCL_IB_DISABLE=1\ntorchrun --standalone x",
        ],
    ),
    "image-unpinned": (
        [
            (f"{SLURM}srun --container-image=nvcr.io#nvidia/pytorch:latest x", "container"),
            (f"{SLURM}apptainer pull docker://pytorch/pytorch", "docker://"),
            (f"{SLURM}IMG=docker://pytorch/pytorch:latest\nenroot import -o x.sqsh $IMG", "enroot"),
            (SLURM.replace("set -e", "#SBATCH --image=docker:a/b:latest\nset -e") + f"srun {RUN} x", "--image"),
            (f"{SLURM}docker pull ${{REGISTRY}}pt:latest", "docker"),
        ],
        [
            f"{SLURM}srun --container-image /fsx/pt.sqsh x",
            f"{SLURM}srun --container-image ./pt.sqsh x",
            f"{SLURM}apptainer pull docker://pytorch/pytorch@sha256:{'ab' * 32}",
            f"{SLURM}docker pull example.org:5000/pt:2.7.1-cu126",
            SLURM.replace("set -e", "#SBATCH --container-image=/fsx/x.sqsh\nset -e") + f"srun {RUN} x",
            f"{SLURM}docker pull ${{REGISTRY}}pt:$TAG",
            f"{SLURM}docker pull your-registry/pt:latest",
            f"{SLURM}apptainer pull 'docker://<user>/pt'",
        ],
    ),
    "image-tag": (
        [(f"{SLURM}docker pull example.org:5000/pt:stable", "stable")],
        [f"{SLURM}docker pull example.org:5000/pt:2.7.1-cu126"],
    ),
    "install-in-job": (
        [
            (f"{CLEAN}pip install torch", "pip"),
            (f"{CLEAN}srun python3 -V; python3 -m pip install x", "pip"),
            (f"{CLEAN}conda create -n x", "conda"),
        ],
        [f"{CLEAN}pip list", f"{CLEAN}echo pip install"],
    ),
    "conda-activate": (
        [(f"{CLEAN}conda activate pt", "activate"), (f"{CLEAN}source ~/wandb_key.sh\nconda activate pt", "activate")],
        [
            f"{CLEAN}module load Mamba/23.11.0\nconda activate pt",
            f"{CLEAN}module load open-ce\nconda activate pt",
            f"{CLEAN}. ~/start-me\nconda activate pt",
            CLEAN.replace("#!/bin/bash", "#!/bin/bash -l") + "conda activate pt",
            f"{CLEAN}source /opt/conda/etc/profile.d/conda.sh\nconda activate pt",
            f'{CLEAN}eval "$(conda shell.bash hook)"\nconda activate pt',
        ],
    ),
    "modules-not-purged": (
        [(f"{CLEAN}module load cuda/12.6\nmodule purge", "load"), (f"{CLEAN}module -q load cuda/12.6", "load")],
        [
            f"{CLEAN}module purge\nmodule load cuda/12.6\nmodule load x",
            f"{CLEAN}module --quiet purge\nmodule load x",
            f"{CLEAN}ml --force purge\nml -q load x",
            f"{CLEAN}module list",
        ],
    ),
    "error-ignored": (
        [(CLEAN.replace("set -euo pipefail\n", ""), "#!")],
        [
            CLEAN,
            CLEAN.replace("set -euo pipefail", "set -o errexit"),
            CLEAN.replace("set -euo pipefail\n", "").replace("/bash", "/bash -e"),
        ],
    ),
    "threads": (
        [(CLEAN.replace("export OMP_NUM_THREADS=4\n", ""), "torchrun")],
        [CLEAN, f"{SLURM.replace('export OMP_NUM_THREADS=4', '')}srun --export=ALL,OMP_NUM_THREADS=2 {RUN} x"],
    ),
    "debug": (
        [
            (f"{CLEAN}export NCCL_DEBUG=INFO", "NCCL_D"),
            (f"{SLURM}mpirun --bind-to none -x NCCL_DEBUG=info {RUN} x", "NCCL_D"),
        ],
        [f"{CLEAN}export NCCL_DEBUG=WARN", f"{CLEAN}# export NCCL_DEBUG=INFO"],
    ),
    "requeue": (
        [(CLEAN.replace("#SBATCH --requeue\n", "").replace("train.py", "train.py --snapshot s.pt"), "#SBATCH")],
        [CLEAN.replace("train.py", "train.py --snapshot s.pt"), CLEAN.replace("#SBATCH --requeue\n", "")],
    ),
    "gpus-missing": (
        [
            (SLURM + "module load a/1 CUDA/12.4\nsrun python train.py", "CUDA"),
            (SLURM + "nvidia-smi\nsrun python train.py", "nvidia-smi"),
            (SLURM + "srun python train.py --accelerator gpu", "accelerator"),
            (SLURM + "apptainer exec --nv a.sif python train.py", "--nv"),
            (SLURM.replace("set -e", "#SBATCH -p gpu\nset -e") + "srun python train.py", "-p gpu"),
            (PBS + "torchrun --nproc_per_node=4 /x.py", "nproc"),
        ],
        [
            GPUS + "module load cuda\nsrun python train.py",
            SLURM.replace("set -e", "#SBATCH -C gpu\nset -e") + "nvidia-smi\nsrun python train.py",
            SLURM + "srun --gres=gpu:4 python train.py --accelerator gpu",
            SLURM + "nvidia-smi || true\nsrun python train.py --accelerator cpu",
            "#!/bin/bash\n#BSUB -nnodes 2\nmodule load cuda\njsrun -n 2 -g 6 python train.py",
            "#!/bin/bash\nnvidia-smi\npython train.py --accelerator gpu",
        ],
    ),
    "environment-missing": (
        [
            (SLURM + "srun python train.py", "train.py"),
            (SLURM + "# conda activate a\ncd /code\npython evaluate.py", "evaluate.py"),
        ],
        [
            SLURM + "conda activate a\nsrun python train.py",
            SLURM + "srun /venv/bin/python train.py",
            SLURM + "srun apptainer exec a.sif python train.py",
            "#!/bin/bash\npython train.py",
        ],
    ),
    "secret-argument": (
        [(SLURM + "huggingface-cli login --token $HF_TOKEN", "login"), (SLURM + "python t.py --hf_token $T", "t.py")],
        [SLURM + "python t.py --tokenizer $T --max_token $N"],
    ),
    "mpi-cores": (
        [(PBS + "mpirun -np 2 python /t.py", "mpirun"), (PBS + "mpirun -np 2 ./dist_run.sh", "mpirun")],
        [PBS + "mpirun --bind-to none -np 2 python /t.py", PBS + "mpiexec --ppn 1 -np 2 python /t.py"],
    ),
    "sudo-in-job": ([(SLURM + "sudo apt update", "sudo")], [SLURM + "echo sudo", "#!/bin/bash\nsudo apt update"]),
    "never-ends": (
        [(SLURM + "srun python t.py &\ntail -f train.log", "tail"), (SLURM + "watch -n 5 nvidia-smi", "watch")],
        [SLURM + "tail -f train.log &\nsrun python t.py", SLURM + "tail -n 5 train.log", SLURM + "nvidia-smi -L"],
    ),
    "interactive": ([(SLURM + "srun --pty bash", "--pty")], [SLURM + "srun bash a.sh"]),
    "cache-home": (
        [(SLURM + "export HF_HOME=$HOME/.cache/hf\nsrun python t.py", "HF_HOME")],
        [SLURM + "export HF_HOME=/scratch/hf\nsrun python t.py", "#!/bin/bash\nexport HF_HOME=~/hf\npython t.py"],
    ),
    "devices-fixed": (
        [(ONE + "export CUDA_VISIBLE_DEVICES=0,1,2,3\npython train.py", "VISIBLE")],
        [
            ONE + "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID\npython train.py",
            ONE + "CUDA_VISIBLE_DEVICES=0 python a.py &\nCUDA_VISIBLE_DEVICES=1 python b.py &\nwait",
        ],
    ),
    "threads-many": (
        [
            (CPUS.replace("S=4", "S=8") + "srun torchrun --nproc-per-node=4 t.py", "THREADS"),
            (CPUS.replace("S=4", "S=$SLURM_CPUS_PER_TASK") + "srun -N 2 torchrun --nproc-per-node=4 t.py", "THREADS"),
        ],
        [CPUS.replace("S=4", "S=2") + "srun torchrun --nproc-per-node=4 t.py", CPUS + "srun python train.py"],
    ),
    "option-misplaced": (
        [
            (ONE + "torchrun --nproc_per_node=4 --epochs 40 t.py --lr 1", "epochs"),
            (ONE + "python -m torch.distributed.launch --batch-size 4 t.py", "batch-size"),
        ],
        [
            ONE + "torchrun --nproc_per_node=4 t.py --epochs 40",
            ONE + "torchrun --nproc-per-node 4 --nnode 1 --log_dir l --tee 3 -m t --epochs 40",
            ONE + "python -m torch.distributed.launch --use_env t.py --epochs 40",
            ONE + "torchrun --$more t.py",
            ONE + "accelerate launch --num_machines 1 --mixed_precision bf16 t.py",
        ],
    ),
    "file-shared": (
        [(SLURM + 'scontrol show hostnames "$SLURM_JOB_NODELIST" > hostfile\nsrun python t.py', "hostfile")],
        [
            SLURM + "scontrol show hostnames > hostfile.$SLURM_JOB_ID\nsrun python t.py",
            SLURM + "scontrol show hostnames > $HOSTFILE\nsrun python t.py",
        ],
    ),
    "environment-shared": (
        [(SLURM + "pip uninstall -y torch", "uninstall"), (SLURM + "rm -rf venv", "rm")],
        [SLURM + "pip list", SLURM + "rm -rf environments.txt"],
    ),
    "launcher-deprecated": (
        [(SLURM + "srun python -m torch.distributed.launch --nproc_per_node=2 x.py", "launch")],
        [SLURM + "# python -m torch.distributed.launch x.py\nsrun torchrun x.py", SLURM + "srun torchrun x.py"],
    ),
    "status-late": (
        [(ONE + "python train.py\necho over\n\ncode=$?\nexit $code", "code=")],
        [ONE + "python train.py\ncode=$?\necho over\nexit $code"],
    ),
    "array-missing": (
        [
            (ONE + "python train.py --fold $SLURM_ARRAY_TASK_ID", "fold"),
            (PBS + "cd /x\npython train.py --fold ${PBS_ARRAY_INDEX}", "fold"),
        ],
        [
            ONE.replace("set -e", "#SBATCH -a 0-3\nset -e") + "python train.py --fold $SLURM_ARRAY_TASK_ID",
            ONE + "python train.py --fold ${SLURM_ARRAY_TASK_ID:-0}",
        ],
    ),
    "slots-spread": (
        [("#!/bin/bash\n#BSUB -n 8\nset -e\npython train.py", "-n 8")],
        [
            '#!/bin/bash\n#BSUB -n 8\n#BSUB -R "span[hosts=1]"\nset -e\npython train.py',
            "#!/bin/bash\n#BSUB -n 8\nset -e\nmpirun python train.py",
            "#!/bin/bash\n#BSUB -n 1\nset -e\npython train.py",
        ],
    ),
    "span-unknown": (
        [('#!/bin/bash\n#BSUB -n 8\n#BSUB -R "span[block=1]"\npython train.py', "block")],
        ['#!/bin/bash\n#BSUB -n 8\n#BSUB -R "span[ptile=4]"\npython train.py'],
    ),
    "signal-steps": (
        [(ONE.replace("set -e", "#SBATCH --signal=USR1@60\nset -e") + "python train.py", "--signal")],
        [
            ONE.replace("set -e", "#SBATCH --signal=USR1@60\nset -e") + "srun python train.py",
            ONE.replace("set -e", "#SBATCH --signal=B:USR1@60\nset -e") + "python train.py",
        ],
    ),
    "results-late": (
        [
            (ONE + "cd $SLURM_TMPDIR\npython train.py\ncp -r out /project/me", "cp -r"),
            (ONE + "python train.py --out $TMPDIR/out\nrsync -a $TMPDIR/out /project/me", "rsync"),
        ],
        [
            ONE + "cd $SLURM_TMPDIR\ntrap 'cp -r out /project/me' EXIT\npython train.py\ncp -r out /project/me",
            ONE + "cp -r /project/data $SLURM_TMPDIR\npython train.py --data $SLURM_TMPDIR/data",
        ],
    ),
    "container-left": (
        [(ONE + "singularity run --nv /a/b.sif\npython train.py", "b.sif")],
        [ONE + "singularity exec --nv /a/b.sif python train.py", ONE + "apptainer exec b.sif \\\n  python train.py"],
    ),
    "kill-fails": (
        [(ONE + "watch_gpu.sh &\npid=$!\npython train.py\nkill $pid", "kill")],
        [
            ONE + "watch_gpu.sh &\npid=$!\npython train.py\nkill $pid || true",
            ONE.replace("set -euo pipefail", "") + "watch_gpu.sh &\npid=$!\npython train.py\nkill $pid",
        ],
    ),
    "quotes-comment": (
        [(ONE + "'''\npython old.py\n'''\npython train.py", "'''")],
        [ONE + "python - <<EOF\n'''\nwords\n'''\nEOF"],
    ),
    "environment-commented": (
        [(ONE + "module load conda\n# conda activate pt\npython train.py", "# conda")],
        [
            ONE + "# conda activate old\nconda activate pt\npython train.py",
            ONE + "# conda activate pt\n/envs/pt/bin/python train.py",
        ],
    ),
    "module-late": (
        [(ONE + "source ~/venv/bin/activate\nmodule load python/3.11\npython train.py", "module")],
        [
            ONE + "module load python/3.11\nsource ~/venv/bin/activate\npython train.py",
            ONE + "source ~/venv/bin/activate\nmodule load cuda/12\npython train.py",
        ],
    ),
    "docker-in-job": (
        [(ONE + "docker run --gpus all pt python train.py", "docker")],
        [ONE + "apptainer run docker://pt python train.py", "#!/bin/bash\ndocker run --gpus all pt python train.py"],
    ),
    "rank-in-batch": (
        [(SLURM + "part=$SLURM_PROCID\nsrun python train.py", "part=")],
        [
            SLURM + "srun bash -c 'python train.py --part $SLURM_PROCID'",
            SLURM + "srun python train.py --procs $SLURM_NPROCS",
        ],
    ),
    "wrap-directive": (
        [(ONE.replace("set -e", '#SBATCH --wrap "sleep 9"\nset -e') + "python train.py", "--wrap")],
        [ONE + 'sbatch --wrap "sleep 9"'],
    ),
    "mpirun-inside": (
        [(GPUS + "singularity exec --nv x.sif mpirun -np 8 python train.py", "singularity")],
        [
            GPUS + "mpirun -np 8 singularity exec --nv x.sif python train.py",
            ONE + "singularity exec --nv x.sif mpirun -np 4 python train.py",
        ],
    ),
    "cpus-default": (
        [(GPUS + "srun python train.py", "--ntasks-per-node")],
        [
            GPUS.replace("set -e", "#SBATCH --cpus-per-task=8\nset -e") + "srun python train.py",
            SLURM + "srun python train.py",
            GPUS + "srun hostname",
        ],
    ),
    "memory-of-gpus": (
        [(ONE.replace("set -e", "#SBATCH --mem=16G\nset -e") + "python train.py", "--mem")],
        [
            ONE.replace("set -e", "#SBATCH --mem=160G\nset -e") + "python train.py",
            ONE.replace("node=4", "node=1\n#SBATCH --mem=16G") + "python train.py",
        ],
    ),
    "image-registry": (
        [(SLURM + "srun --container-image=nvcr.io/nvidia/pytorch:25.03-py3 python train.py", "nvcr")],
        [
            SLURM + "srun --container-image=nvcr.io#nvidia/pytorch:25.03-py3 python train.py",
            SLURM + "srun --container-image=pytorch/pytorch:2.7.0 python train.py",
            SLURM + "srun --container-image=/x.sqsh python train.py",
        ],
    ),
    "launcher-empty": (
        [(SLURM + "time srun \npython train.py", "srun")],
        [SLURM + "srun \\\n python train.py", "#!/bin/bash\nsrun"],
    ),
    "path-overwritten": (
        [(SLURM + "export LD_LIBRARY_PATH=/opt/cuda/lib64", "LD_LIBRARY_PATH")],
        [SLURM + "export PATH=/opt/bin:$PATH", SLURM + "export PATH=`make_path`"],
    ),
    "login-prompt": ([(SLURM + "wandb login", "login")], [SLURM + "export WANDB_API_KEY=$(cat ~/k)\nwandb login"]),
    "time-missing": (
        [(ONE + "srun python train.py", "gpus-per-node"), (PBS.replace("l walltime=01:00:00", "l ngpus=2"), "ngpus")],
        [
            ONE.replace("set -e", "#SBATCH -t 10:00\nset -e") + "srun python train.py",
            TWO_GPU_NODES.replace("set -e", "#PBS -l walltime=1:00:00\nset -e"),
            SLURM + "srun python train.py",
        ],
    ),
    "ranks-doubled": (
        [(EIGHT + "srun python -m deepspeed.launcher.launch t.py", "deepspeed")],
        [SLURM + "srun python -m deepspeed.launcher.launch t.py", EIGHT + "srun python -m deepspeed.env_report"],
    ),
    "tasks-unused": (
        [
            (SLURM.replace("set -e", "#SBATCH -n 16\nset -e").replace("node=1", "node=8") + "python train.py", "-n 16"),
            (EIGHT + "torchrun --standalone --nproc-per-node=8 t.py", "per-node"),
        ],
        [EIGHT + "srun python train.py", EIGHT + "mpirun -n 16 python train.py", SLURM + "python train.py"],
    ),
    "tasks-uneven": (
        [(SLURM.replace("-per-node=1", "=3") + "srun python train.py", "ntasks=3")],
        [SLURM.replace("-per-node=1", "=4") + "srun python train.py"],
    ),
}
PODS: dict[str, tuple[list[tuple[str, str]], list[str]]] = {
    "pods-kept": (
        [("kind: RayJob\nspec:\n  shutdownAfterJobFinishes: false\napiVersion: ray.io/v1\n", "shutdown")],
        ["kind: RayJob\nspec:\n  shutdownAfterJobFinishes: true\napiVersion: ray.io/v1\n"],
    ),
    "live-object": (
        [(INDEXED.replace("{name: ddp}", "\n  name: ddp\n  resourceVersion: '12'"), "resourceVersion")],
        [INDEXED.replace("{name: ddp}", "\n  name: ddp\n  creationTimestamp: null")],
    ),
    "runs-overlap": (
        [("apiVersion: batch/v1\nkind: CronJob\nspec: {schedule: '* * * * *'}\n", "CronJob")],
        ["apiVersion: batch/v1\nkind: CronJob\nspec:\n  concurrencyPolicy: Forbid\n"],
    ),
    "field-unknown": (
        [
            (INDEXED.replace("      containers:", "      backoffLimit: 0\n      containers:"), "backoffLimit"),
            (INDEXED.replace("spec:\n  comp", "spec:\n  restartPolicy: Never\n  comp"), "restartPolicy"),
        ],
        [INDEXED.replace("spec:\n  comp", "spec:\n  backoffLimit: 0\n  comp")],
    ),
    "restart-policy": (
        [
            (INDEXED, "containers"),
            (INDEXED.replace("      containers:", "      restartPolicy: Always\n      containers:"), "Always"),
        ],
        [
            INDEXED.replace("      containers:", "      restartPolicy: OnFailure\n      containers:"),
            INDEXED.replace("batch/v1", "batch.volcano.sh/v1alpha1"),
            on_pods("command: [torchrun, t.py]"),
        ],
    ),
    "gpus-missing": (
        [(on_pods("command: [torchrun, --nproc-per-node=4, t.py]"), "command")],
        [
            on_pods(
                "command: [torchrun, --nproc-per-node=4, t.py]\n              resources: {limits: {nvidia.com/gpu: 4}}"
            )
        ],
    ),
    "placeholder": (
        [
            (on_pods("command: [torchrun, t.py]", "your-registry/pt:latest"), "image:"),
            (on_pods("command: [torchrun, t.py]", "r.example.org/<user>/pt:1.0.0"), "image:"),
        ],
        [on_pods("command: [torchrun, t.py]", "r.example.org/yours/pt:1.0.0")],
    ),
    "secret": (
        [(on_pods("env: [{name: WANDB_API_KEY, value: 0123456789abcdef0123456789abcdef01234567}]"), "WANDB")],
        [on_pods("env: [{name: WANDB_API_KEY, valueFrom: {secretKeyRef: {name: wandb, key: key}}}]")],
    ),
    "ranks-exceed-gpus": (
        [
            (
                on_pods(
                    "command: [torchrun, --nproc-per-node=8, t.py]\n              resources: {limits: {nvidia.com/gpu: 4}}"
                ),
                "command",
            )
        ],
        [
            on_pods(
                "command: [torchrun, --nproc-per-node=4, t.py]\n              resources: {limits: {nvidia.com/gpu: 4}}"
            )
        ],
    ),
    "shared-memory": (
        [
            (on_pods("command: [python, t.py, --num-workers=2]").replace("/dev/shm", "/data"), "image:"),
            (
                on_pods("command: [torchrun, t.py]\n              resources: {limits: {nvidia.com/gpu: 4}}").replace(
                    "/dev/shm", "/data"
                ),
                "image:",
            ),
        ],
        [
            on_pods("command: [torchrun, t.py]").replace("/dev/shm", "/data"),
            on_pods(
                "command: [torchrun, t.py, --workers=0]\n              resources: {limits: {nvidia.com/gpu: 1}}"
            ).replace("/dev/shm", "/data"),
            on_pods("command: [sleep, infinity]\n              resources: {limits: {nvidia.com/gpu: 1}}").replace(
                "/dev/shm", "/data"
            ),
            on_pods("command: [python, t.py, --num-workers=0]").replace("/dev/shm", "/data"),
        ],
    ),
    "container-name": (
        [(on_pods("command: [torchrun, t.py]").replace("name: pytorch", "name: trainer"), "name: trainer")],
        [on_pods("command: [torchrun, t.py]")],
    ),
    "shm-missing": (
        [("kind: TrainJob\nspec:\n  trainer: {numNodes: 2}\n", "TrainJob")],
        ["kind: TrainJob\nspec: {volumes: [{mountPath: /dev/shm}]}\n", "kind: Service\n"],
    ),
    "gpu-limit-missing": (
        [(GPU_JOB.replace("nvidia.com/gpu", "cpu"), "kind: Job")],
        [GPU_JOB, GPU_JOB.replace("nvidia.com/gpu", "cpu").replace("--device=cuda", "")],
    ),
    "results-in-pod": (
        [(GPU_JOB.replace("--device=cuda", "--output_dir=/out"), "output_dir")],
        [
            GPU_JOB.replace("--device=cuda", "--output_dir=/out") + "      volumes: [{hostPath: {path: /out}}]\n",
            GPU_JOB.replace("--device=cuda", "--output_dir=s3://out"),
        ],
    ),
    "volume-missing": (
        [("kind: PyTorchJob\nspec:\n  args: [--model_name=x]\n", "PyTorchJob")],
        ["kind: PyTorchJob\nspec:\n  args: [--model_name=x]\n  volumes: [{hostPath: {path: /x}}]\n"],
    ),
    "endpoint-of-operator": (
        [("kind: PyTorchJob\nspec:\n  env:\n    - name: RANK\n      value: '0'\n", "RANK")],
        ["kind: Job\nspec:\n  env:\n    - name: RANK\n      value: '0'\n"],
    ),
    "manifest-variable": (
        [(GPU_JOB.replace("pt:1.2.3", "${IMAGE}"), "IMAGE")],
        [GPU_JOB, GPU_JOB.replace("--device=cuda", "--name=$(NAME)")],
    ),
    "value-comment": (
        [(GPU_JOB.replace("pt:1.2.3", "pt:1.2.3  # CHANGE THIS"), "CHANGE")],
        [GPU_JOB.replace("pt:1.2.3", "pt:1.2.3  # the image of the training"), f"# change this\n{GPU_JOB}"],
    ),
    "requests-missing": (
        [(GPU_JOB, "gpu")],
        [GPU_JOB.replace("limits: {", "limits: {cpu: 8, ")],
    ),
    "backoff-default": (
        [(GPU_JOB, "kind: Job")],
        [GPU_JOB.replace("spec:\n", "spec:\n  backoffLimit: 0\n", 1), GPU_JOB.replace("nvidia.com/gpu", "cpu")],
    ),
    "devices-in-pod": (
        [(GPU_JOB + "          env: [{name: CUDA_VISIBLE_DEVICES, value: '0'}]\n", "CUDA")],
        [GPU_JOB + "          env: [{name: CUDA_DEVICE_ORDER, value: PCI_BUS_ID}]\n"],
    ),
    "efa-device": (
        [(on_pods("env: [{name: FI_PROVIDER, value: efa}]"), "FI_PROVIDER")],
        [
            on_pods(
                "env: [{name: FI_PROVIDER, value: efa}]\n              resources: {limits: {vpc.amazonaws.com/efa: 1}}"
            )
        ],
    ),
    "image-unpinned": (
        [
            (on_pods("command: [torchrun, t.py]", "r.example.org/pt:latest"), "image:"),
            (on_pods("{}", "pt").replace("{}", ""), "image:"),
            (on_pods("command: [torchrun, t.py]", "${REGISTRY}pt:latest"), "image:"),
        ],
        [on_pods("command: [torchrun, t.py]"), on_pods("command: [torchrun, t.py]", "${IMAGE_URI}")],
    ),
    "localhost-endpoint": (
        [
            (on_pods("command: [torchrun, --rdzv-endpoint=localhost:29500, t.py]"), "torchrun"),
            (on_pods('command: [bash, -c, "torchrun --rdzv-endpoint=localhost:1 t.py"]'), "torchrun"),
            (
                on_pods("env: [{name: MASTER_ADDR, value: localhost}]\n              command: [torchrun, t.py]"),
                "MASTER_ADDR",
            ),
        ],
        [on_pods("command: [torchrun, --rdzv-endpoint=ddp-worker-0:29500, t.py]")],
    ),
    "standalone": (
        [(on_pods("command: [torchrun, --standalone, t.py]"), "torchrun")],
        [on_pods("command: [torchrun, t.py]")],
    ),
    "install-in-job": (
        [(on_pods('command: [bash, -c, "pip install x && torchrun t.py"]'), "pip")],
        [on_pods('command: [bash, -c, "torchrun t.py"]')],
    ),
    "pod-index": (
        [
            (UNNUMBERED, "SHARD"),
            (
                UNNUMBERED.replace("SHARD", "X").replace("job-completion-index", "x")
                + "          command: [bash, -c, 'python t.py $JOB_COMPLETION_INDEX']\n",
                "command",
            ),
        ],
        [
            UNNUMBERED.replace("spec:\n", "spec:\n  completionMode: Indexed\n", 1),
            UNNUMBERED.replace("job-completion-index", "other"),
            UNNUMBERED.replace("kind: Job", "kind: Other"),
        ],
    ),
    "pod-name": (
        [(INDEXED, "MASTER_ADDR")],
        [
            INDEXED.replace("containers:", "subdomain: ddp\n      containers:"),
            INDEXED.replace("ddp-0", "head.example.org"),
            INDEXED.replace("Indexed", "NonIndexed"),
        ],
    ),
    "one-process": (
        [(on_pods('command: [python, train.py]\n              resources: {limits: {nvidia.com/gpu: "4"}}'), "command")],
        [
            on_pods('command: [python, train.py]\n              resources: {limits: {nvidia.com/gpu: "1"}}'),
            on_pods("command: [python, serve.py]\n              resources: {limits: {nvidia.com/gpu: 4}}").replace(
                "PyTorchJob", "Deployment"
            ),
        ],
    ),
    "cpus-missing": (
        [
            (
                on_pods("command: [torchrun, t.py]\n              resources: {limits: {nvidia.com/gpu: 4, cpu: 1}}"),
                "resources",
            )
        ],
        [
            on_pods(
                f"command: [torchrun, t.py]\n              resources: {{limits: {{nvidia.com/gpu: 4, cpu: {cpus}}}}}"
            )
            for cpus in ("32", "500m")
        ],
    ),
    "status-lost": (
        [(on_pods('command: [bash, -c, "python train.py | tee log"]'), "command")],
        [
            on_pods('command: [bash, -c, "set -o pipefail; python train.py | tee log"]'),
            on_pods('command: [bash, -c, "python serve.py | tee log"]').replace("PyTorchJob", "Server"),
        ],
    ),
    "debug": (
        [(on_pods('env: [{name: NCCL_DEBUG, value: "INFO"}]'), "NCCL_DEBUG")],
        [on_pods('env: [{name: NCCL_DEBUG, value: "WARN"}]')],
    ),
}


def flat(cases: dict[str, tuple[list[tuple[str, str]], list[str]]], name: str) -> list[object]:
    return [(fault, text, name, place) for fault, (bad, _) in cases.items() for text, place in bad]


@each_case(("fault", "text", "name", "place"), [*flat(CASES, "job.sh"), *flat(PODS, "job.yaml")])
def test_a_fault_is_found_in_its_line(fault: str, text: str, name: str, place: str) -> None:
    problem = found(text, fault, name)
    assert problem is not None, ids(text, name)
    assert place in text.splitlines()[problem.line - 1]
    assert "{" not in (problem.message + problem.hint).replace("${", "")


@each_case(
    ("fault", "text", "name"),
    [
        (fault, text, name)
        for cases, name in ((CASES, "job.sh"), (PODS, "job.yaml"))
        for fault, (_, good) in cases.items()
        for text in good
    ],
)
def test_what_is_like_a_fault_and_none_is_passed_over(fault: str, text: str, name: str) -> None:
    assert found(text, fault, name) is None


def test_scripts_that_have_a_fault_are_shell_scripts() -> None:
    """Else the tests above would test something that nobody writes."""
    refused = {"merge-conflict", "syntax-error"}  # by the shell, too
    texts = [text for fault, (bad, _) in CASES.items() for text, _ in bad if fault not in refused]
    texts += [text for _, good in CASES.values() for text in good if "zsh" not in text]
    # One bash parses all, as `bash -n` parses each.
    parse_all = """for text; do (eval "set -n\n$text") || printf '%s\\0' "$text"; done"""
    wrong = ["if true; then\n", "echo 'a\n", "}\n", "x=$(\n"]
    done = subprocess.run(["bash", "-c", parse_all, "bash", *wrong, *texts], text=True, capture_output=True)
    assert done.returncode == 0 and done.stdout.split("\0") == [*wrong, ""], done.stderr


def test_carriage_returns_are_one_fault() -> None:
    text = f"{SLURM}srun {RUN} \\\n  --max-restarts=0 x"
    assert ids(text) == []
    assert ids(text.replace("\n", "\r\n")) == ["dos-lines"]


def test_every_fault_is_tested() -> None:
    assert set(CASES) | set(PODS) == set(load_faults())


def test_the_table_in_the_docs() -> None:
    def shown(text: str) -> str:
        filled = text.replace("{nodes}", "*N*").replace("{value}", "*value*")
        return filled.replace("{{", "{").replace("}}", "}").replace("|", "\\|")

    levels = ["error", "warning", "hint"]
    rows = ["| fault | level | problem | write instead |", "| --- | --- | --- | --- |"]
    for name, fault in sorted(load_faults().items(), key=lambda row: (levels.index(row[1].level), row[0])):
        own = [(TITLES[kind], shown(text)) for kind, text in fault.of_scheduler.items()]
        advice = "; ".join([shown(fault.hint), *(f"{title}: {text}" for title, text in own)])
        rows.append(f"| `{name}` | {fault.level} | {shown(fault.message)} | {advice} |")
    assert_golden_table(rows, DOCS, "tests/unit/test_lint_job.py")


# ---- the guides' scripts

GUIDES = {
    "seed-000-image.sh": [],
    "seed-002-images.sh": [],
    "seed-003-by-hand.sh": [],
    "seed-003-single-gpu.sh": ["placeholder"],
    "seed-003-one-node.pbs": ["placeholder", "ranks-exceed-gpus", "status-lost"],
    "seed-003-two-nodes.pbs": ["placeholder", "head-only", "status-lost"],
    "seed-003-plugin.pbs": ["placeholder", "efa-elsewhere", "head-only", "status-lost"],
    "seed-004-apptainer.sh": [],
    "seed-004-horovod.sh": [],
}


@pytest.mark.parametrize("name", GUIDES)
def test_the_faults_of_the_guides_are_found(name: str) -> None:
    problems = lint_file(DATA / "lint" / name)
    assert list(dict.fromkeys(one.fault.id for one in problems if one.fault.level != "hint")) == GUIDES[name]


def test_all_scripts_of_the_guides_are_there_with_where_they_are_from() -> None:
    files = {path.name for path in (DATA / "lint").iterdir()} - {"README.md"}
    assert files == set(GUIDES)
    assert all(name in (DATA / "lint/README.md").read_text() for name in GUIDES)


# ---- our own


@pytest.mark.parametrize("name", RENDERED)
def test_what_envbuild_renders_has_no_fault(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(RENDERED[name])
    problems = [one for one in lint_file(path) if (name, one.fault.id) not in MEANT]
    assert [(one.line, one.fault.id, one.text) for one in problems] == []


def test_there_are_rendered_scripts() -> None:
    assert len(RENDERED) >= 64


# ---- reading shell


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b c' \"d $x\" e\\ f", ["a", "b c", "d $x", "e f"]),
        ("a \\\n  b # c", ["a", "b"]),
        ("a >f 2>&1 <g b", ["a", "b"]),
        ('a ${x:-"q r"} $((1 + 2)) `d`', ["a", '${x:-"q r"}', "$((1 + 2))", "$(d)"]),
        ("if ! a b; then :; fi", ["a", "b"]),
        ("timeout -k 5 --signal TERM 11h a b", ["a", "b"]),
        ("time -p nice -n 5 numactl --cpunodebind=0 -m 0 a -n 1", ["a", "-n", "1"]),
        ("timeout $TIME_LIMIT a b", ["a", "b"]),
        ("a /home/<you>/x", ["a", "/home/<you>/x"]),
        ("a#b #c", ["a#b"]),
        ('a "$(b ")" \'c)\')"', ["a", "$(b \")\" 'c)')"]),
    ],
)
def test_words_are_those_of_the_shell(text: str, words: list[str]) -> None:
    assert list(parse(text)[0].words) == words


def test_a_quote_in_an_ansi_c_string_does_not_hide_the_rest_of_the_script() -> None:
    commands = [c.words for c in parse("echo $'it\\'s' x\ntorchrun t.py\n")]
    assert commands == [("echo", "it\\'s", "x"), ("torchrun", "t.py")]


@pytest.mark.parametrize(
    ("text", "ends", "background"),
    [
        ("a && b || c &", ["&&", "||", "&"], [False, False, True]),
        ("a | b |& c; d", ["|", "|&", ";", ""], [False] * 4),
        ("a <<E &\nE\nb\n", ["&", "\n"], [True, False]),
        ("ssh h 'a & b'", ["", "&", ""], [False, True, False]),
    ],
)
def test_the_operator_behind_a_command_is_known(text: str, ends: list[str], background: list[bool]) -> None:
    commands = parse(text)
    assert [one.end for one in commands] == ends
    assert [one.background for one in commands] == background


def test_a_command_in_the_default_of_a_variable_is_found() -> None:
    commands = [c.words for c in parse("IP=${IP:-$(hostname -I)}\n")]
    assert ("hostname", "-I") in commands


@pytest.mark.parametrize("head", ["f() {", "function f {", "function f() {"])
def test_a_functions_commands_belong_to_it_however_it_is_defined(head: str) -> None:
    found = {c.words[0]: c.function for c in parse(f"{head}\n  a\n}}\nb\n") if c.words}
    assert (found["a"], found["b"]) == ("f", "")


def test_here_documents_are_no_commands_unless_a_shell_reads_them() -> None:
    text = "cat <<A\npip install x\nA\nssh h bash <<'B'\npip install y\nB\n"
    commands = {c.words: c for c in parse(text)}
    assert commands["pip", "install", "x"].file
    assert commands["pip", "install", "y"].started_by == ("ssh",)
    assert (commands["pip", "install", "y"].line, commands["pip", "install", "x"].line) == (5, 2)


@settings(deadline=None)
@given(st.text(alphabet="ab '\"\\$(){}`<>|;&#\n=-E", max_size=60))
def test_no_script_is_too_strange(text: str) -> None:
    lint(text, "job.sh")


@pytest.mark.parametrize(
    "command", ["[torchrun, t.py]", "[python, -m, torch.distributed.run, t.py]", '[sh, -c, "torchrun t.py"]']
)
@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ("", ""),
        ('nprocPerNode: "4"', ""),
        ("elasticPolicy: {nProcPerNode: 4}", ""),
        ('nprocPerNode: "1"', "one-rank"),
        ('nprocPerNode: "8"', "ranks-exceed-gpus"),
    ],
)
def test_the_operator_tells_torchrun_the_ranks_of_a_pod(command: str, told: str, fault: str) -> None:
    text = on_pods(f"command: {command}\n              resources: {{limits: {{nvidia.com/gpu: 4, memory: 9Gi}}}}")
    text = text.replace("spec:\n", f"spec:\n  {told}\n", 1)
    assert ids(text, "job.yaml") == [fault] * bool(fault)
    assert ids(text.replace("PyTorchJob", "MyJob"), "job.yaml") == ["one-rank"]
    given = text.replace("torchrun", "torchrun --nproc-per-node=1").replace("run, t", "run, --nproc-per-node=1, t")
    assert "torchrun, t" in text or ids(given, "job.yaml") == ["one-rank"]


@settings(deadline=None)
@given(st.text(max_size=80))
def test_no_manifest_is_too_strange(text: str) -> None:
    from envbuild.base.errors import UsageError

    try:
        lint(text, "job.yaml")
    except UsageError as error:
        assert "job.yaml" in error.message


@pytest.mark.parametrize("containers", ["5", "[5]", "[{env: 5}]", "[{env: [5], volumeMounts: x}]", "x"])
def test_lists_of_a_manifest_that_are_none_are_passed_over(containers: str) -> None:
    assert ids(INDEXED[: INDEXED.index("containers:")] + f"containers: {containers}\n", "job.yaml") in (
        [],
        ["field-unknown"],
        ["restart-policy"],
    )


@settings(deadline=None)
@given(
    st.lists(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])), min_size=1, max_size=4)
)
def test_quoted_words_come_out_as_they_went_in(words: list[str]) -> None:
    import shlex

    (command,) = parse(shlex.join(["run", *words]))
    assert list(command.words) == ["run", *words]


# ---- the command


def test_an_error_is_exit_code_5_and_says_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "x.sbatch"
    path.write_text(f"{SLURM}{RUN} train.py\n")
    done = CliRunner().invoke(lint_job_command, [str(path)])
    assert getattr(done.exception, "exit_code", None) == 5
    assert f"{path}:7: error: torchrun is started on the head alone" in done.stdout
    assert "instead: start one torchrun on every node" in done.stdout
    assert "1 error, 0 warnings" in str(done.exception)


def test_hints_and_warnings_alone_are_exit_code_0(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f"{CLEAN}export NCCL_DEBUG=INFO\n")
    (tmp_path / "b.sh").write_text(f"{CLEAN}pip install x\n")
    done = CliRunner().invoke(lint_job_command, [str(tmp_path / "a.sh"), str(tmp_path / "b.sh"), "--json"])
    assert done.exit_code == 0
    made = json.loads(done.stdout)
    assert made["count"] == {"error": 0, "warning": 1, "hint": 1}
    assert [one["id"] for one in made["problems"]] == ["debug", "install-in-job"]


PBS_FAULTS = f"""{PBS}head=$(head -1 "$PBS_NODEFILE")
mpiexec --bind-to none torchrun --nnodes=3 --rdzv-id=job --rdzv-backend=c10d --rdzv-endpoint="$head:29500" x
"""


def test_advice_for_pbs_names_nothing_of_slurm() -> None:
    """There SLURM_JOB_ID is not set, and every job would have port 20000."""
    problems = lint(PBS_FAULTS, "job.pbs")
    named = {one.fault.id for one in problems}
    assert {"fixed-port", "run-id", "nodes-differ"} <= named
    assert not [one.hint for one in problems if "SLURM" in one.hint or "srun" in one.hint]
    sourced = PBS_FAULTS.replace("#PBS", "##")  # what a job's script starts, without directives
    advice = {one.fault.id: one.hint for one in lint(sourced, "node.sh")}
    assert "PBS_JOBID" in advice["fixed-port"]
    for fault in load_faults().values():
        advice_for_pbs = fault.of_scheduler.get("pbs", "")
        assert "SLURM" not in advice_for_pbs and "srun" not in advice_for_pbs
        assert advice_for_pbs or "SLURM" not in fault.hint, fault.id


@pytest.mark.parametrize(
    ("script", "variables", "port"),
    [
        (PBS_FAULTS, {"PBS_JOBID": "1234567.head"}, 24567),
        (PBS_FAULTS, {"PBS_JOBID": "123[4].head"}, 20123),
        (f"{SLURM}srun {RUN.replace('$port', '29500')} x", {"SLURM_JOB_ID": "1234567"}, 24567),
    ],
)
def test_the_port_that_is_advised_is_one_of_the_job(script: str, variables: dict[str, str], port: int) -> None:
    problem = found(script, "fixed-port")
    assert problem is not None
    advised = problem.hint[problem.hint.index("$((") :]
    line = ["bash", "-c", f"set -euo pipefail; echo {advised}"]
    done = subprocess.run(line, env=variables, text=True, capture_output=True)
    assert (done.stdout, done.stderr) == (f"{port}\n", "")


def test_the_number_of_nodes_that_is_advised_for_pbs_counts_hosts(tmp_path: Path) -> None:
    problem = found(PBS_FAULTS, "nodes-differ")
    assert problem is not None
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    advised = problem.hint[problem.hint.index("--nnodes") :]
    line = ["bash", "-c", f"printf '%s ' {advised}"]
    env = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(line, env=env, text=True, capture_output=True)
    assert done.stdout == "--nnodes 2 "


def test_advice_names_the_number_that_is_meant() -> None:
    problem = found(f"{EIGHT}srun {RUN} x", "tasks-per-node")
    assert problem and problem.as_json()["instead"].endswith("torchrun --nproc-per-node 8")


def test_a_torchrun_for_one_node_in_a_job_of_several_does_not_wait() -> None:
    problem = found(f"{SLURM}torchrun --nproc-per-node=4 x", "idle-nodes")
    assert problem and problem.fault.level == "warning"
    assert "trains on one of 2 nodes" in problem.message
    assert "error" not in {one.fault.level for one in lint(BARE, "node.sh")}


@pytest.mark.parametrize(
    ("text", "fault", "level"),
    [
        # Nodes of many clusters have four GPUs.
        (ONE + "torchrun --nproc-per-node=4 x", "fixed-port", "hint"),
        (ONE.replace("node=4", "node=2") + "torchrun --nproc-per-node=2 x", "fixed-port", "warning"),
        # One node is enough to begin with.
        (
            "#!/bin/bash\n#SBATCH -c 8\ntorchrun --nnodes=1:2 --rdzv-endpoint=localhost:1 x",
            "localhost-endpoint",
            "warning",
        ),
        (srun("--rdzv-endpoint=localhost:1"), "localhost-endpoint", "error"),
        # A script that only installs is meant to.
        ("#!/bin/bash\npip install torch", "install-in-job", "hint"),
        (f"{CLEAN}pip install torch", "install-in-job", "warning"),
        # A program that starts processes itself.
        (GPUS + "python train.py --gpus 4", "one-process", "hint"),
        (GPUS + "python train.py", "one-process", "hint"),
        (ONE.replace("--gpus", "--ntasks-per-node=4\n#SBATCH --gpus") + "python train.py", "one-process", "warning"),
        (
            ONE.replace("node=4", "node=2") + "accelerate launch --num_machines 1 --num_processes 2 x.py",
            "fixed-port",
            "warning",
        ),
        # Nobody's dependencies read the exit code of a script without directives.
        (f"#!/bin/bash\n{RUN} x\necho done", "status-lost", "hint"),
    ],
)
def test_a_fault_that_may_be_none_has_a_lower_level(text: str, fault: str, level: str) -> None:
    problem = found(text, fault)
    assert problem and problem.fault.level == level


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            SLURM.replace("set -e", "#SBATCH -o logs/%j.out\n#SBATCH -e logs/%j.err\nset -e") + f"srun {RUN} x",
            "output-folder",
        ),
        (CPUS + f"srun {RUN} x\nsrun {RUN} y", "cpus-not-passed"),
        (f"{CLEAN}pip install a\npip install b", "install-in-job"),
    ],
)
def test_one_cause_is_one_problem(text: str, fault: str) -> None:
    assert ids(text).count(fault) == 1


def test_a_line_can_be_excepted() -> None:
    assert ids(f"{CLEAN}export NCCL_DEBUG=INFO # lint-job: ignore") == []
    assert ids(f"{CLEAN}export NCCL_DEBUG=INFO # lint-job: ignore debug, threads") == []
    assert ids(f"{CLEAN}export NCCL_DEBUG=INFO # lint-job: ignore threads") == ["debug"]


def test_passwords_are_not_repeated() -> None:
    problems = lint(f"{CLEAN}pip install https://ada:hunter2@example.org/x\n", "job.sh")
    assert problems
    assert "hunter2" not in repr(problems)


@pytest.mark.parametrize(
    ("content", "says"), [(b"\x7fELF\xff\xfe", "is no text"), (None, "No such file"), (b"a: [", "not YAML")]
)
def test_what_cannot_be_read_is_named(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_bytes(content)
    done = CliRunner().invoke(lint_job_command, [str(path)])
    assert getattr(done.exception, "exit_code", None) == 2
    assert str(path) in str(done.exception)
    assert says in str(done.exception)


# ---- what a neighbour of a fault is not

HET = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH hetjob
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
set -euo pipefail
export OMP_NUM_THREADS=4
"""


@pytest.mark.parametrize("word", ["hetjob", "packjob"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_nodes_of_a_component_are_not_those_of_a_heterogeneous_job(word: str, turned: bool) -> None:
    text = HET.replace("hetjob", word)
    if turned:
        text = (
            text.replace("--nodes=4", "--nodes=9").replace("--nodes=1", "--nodes=4").replace("--nodes=9", "--nodes=1")
        )
    levels = {
        one.fault.level for one in lint(f"{text}srun --het-group=1 {RUN.replace('nnodes=2', 'nnodes=4')} x", "j.sh")
    }
    assert levels <= {"hint"}
    # Without the word, the last number counts, and the nodes differ.
    plain = text.replace(f"#SBATCH {word}\n", "")
    assert "nodes-differ" in ids(f"{plain}srun {RUN.replace('nnodes=2', 'nnodes=8')} x")


def test_a_network_that_one_pod_or_node_does_not_use_is_a_hint() -> None:
    off = "env: [{name: NCCL_IB_DISABLE, value: '1'}]"
    alone, several = found(f"{GPU_JOB}          {off}\n", "network-disabled", "job.yaml"), on_pods(off)
    assert alone is not None and alone.fault.level == "hint"
    problem = found(several, "network-disabled", "job.yaml")
    assert problem is not None and problem.fault.level == "warning"
    unknown = "#!/bin/bash\n#SBATCH --gres=gpu:4\nset -e\nexport NCCL_IB_DISABLE=1\npython train.py"
    problem = found(unknown, "network-disabled")
    assert problem is not None and problem.fault.level == "hint"


def test_a_step_that_prints_an_address_needs_no_cpus() -> None:
    assert "cpus-not-passed" not in ids(f"{CPUS}ip=$(srun -n 1 -w $host /bin/hostname -I)\n")
    assert "cpus-not-passed" in ids(f"{CPUS}srun -n 1 -w $host ./train.sh\n")


def test_tasks_that_a_launcher_in_a_container_starts_are_used() -> None:
    tasks = ONE.replace("set -e", "#SBATCH --ntasks-per-node=4\nset -e")
    assert "tasks-unused" in ids(f"{tasks}singularity exec --nv x.sif python train.py\n")
    assert "tasks-unused" not in ids(f"{tasks}singularity exec --nv x.sif mpirun -np 4 python train.py\n")
    assert "tasks-unused" not in ids(f"{tasks}horovodrun -np $SLURM_NTASKS python train.py\n")
    assert "tasks-unused" in ids(f"{tasks}srun -l hostname\npython train.py\n")


def test_a_bare_wait_loses_the_exit_codes_of_steps_under_set_e_too() -> None:
    text = f"{SLURM}for i in 0 1; do\n srun -N 1 -r $i python train.py &\ndone\nwait\necho end\n"
    assert "status-lost" in ids(text) and "status-lost" not in ids(text.replace("\nwait\n", "\nwait -n\n"))


def test_memory_that_ranks_share_is_no_network() -> None:
    assert "network-disabled" not in ids(SLURM + f"export NCCL_SHM_DISABLE=1\nsrun {RUN} x")
    assert "network-disabled" in ids(SLURM + f"export NCCL_IB_DISABLE=1\nsrun {RUN} x")
    efa = "export FI_PROVIDER=efa NCCL_IB_DISABLE=1"  # NCCL reaches it through libfabric
    assert "network-disabled" not in ids(SLURM + f"{efa}\nsrun {RUN} x")


def test_a_port_is_that_of_the_job_alone_on_whole_nodes_of_lsf_too() -> None:
    run = "export MASTER_PORT=29500\njsrun -n 4 -g 6 python train.py\n"
    assert "fixed-port" not in ids(LSF + run)
    assert "fixed-port" not in ids(LSF.replace("-nnodes 4", "-n 4\n#BSUB -x") + run)
    assert "fixed-port" in ids(LSF.replace("-nnodes 4", "-n 4\n#BSUB -gpu num=1:j_exclusive=yes") + run)


@pytest.mark.parametrize(
    ("marker", "other"), [("#BSUB -n 4", "LSB"), ("#flux: -N 2", "flux"), ("#PBS -l select=2", "PBS")]
)
def test_no_advice_names_variables_of_another_scheduler(marker: str, other: str) -> None:
    problem = found(f"#!/bin/bash\n{marker}\nexport MASTER_PORT=29500\npython train.py", "fixed-port")
    assert problem is not None and "SLURM" not in problem.hint and other in problem.hint
    scheduler = {"LSB": "lsf", "flux": "flux", "PBS": "pbs"}[other]
    own = {"cpus-not-passed", "option-variable", "script-folder"}  # of Slurm alone, or told above
    for fault in load_faults().values():
        if "SLURM_" in fault.hint and fault.id not in own:
            assert "SLURM_" not in fault.of_scheduler.get(scheduler, "SLURM_"), fault.id


def test_ray_mounts_shared_memory_and_one_rank_may_need_none() -> None:
    pod = "containers: [{name: ray-worker, image: 'r.example.org/a:1.2.3', resources: {limits: {nvidia.com/gpu: 8}}}]"
    ray = f"apiVersion: ray.io/v1\nkind: RayJob\nspec: {{rayClusterSpec: {{headGroupSpec: {{template: {{spec: {{{pod}}}}}}}}}}}\n"
    assert "shared-memory" not in ids(ray, "job.yaml")
    job = f"apiVersion: batch/v1\nkind: Job\nspec: {{template: {{spec: {{{pod}}}}}}}\n"
    several, one = (
        found(job, "shared-memory", "job.yaml"),
        found(job.replace(": 8", ": 1"), "shared-memory", "job.yaml"),
    )
    assert several is not None and one is not None
    assert (several.fault.level, one.fault.level) == ("warning", "hint")


def test_a_bare_exit_ends_the_script_with_the_code_of_the_training() -> None:
    assert "status-lost" not in ids(NO_E + f"srun {RUN} x\nexit\necho 'old notes'\nrm -f core")
    assert "status-lost" in ids(NO_E + f"srun {RUN} x\nexit 0\n")
    asked = 'if [ ! -f a ]; then\n echo "Error: not found"\n exit\nfi\n'
    problem = found(NO_E + f"{asked}srun {RUN} x", "status-lost")
    assert problem is not None and problem.fault.level == "hint"
    problem = found(NO_E + f"{asked.replace('exit', 'exit 0')}srun {RUN} x", "status-lost")
    assert problem is not None and problem.fault.level == "warning"


@each_case(
    ("text", "fault"),
    [
        (
            f'hosts=$(scontrol show hostnames $SLURM_JOB_NODELIST)\na=("$hosts")\nhead=${{a[0]}}\nsrun {RUN} x',
            "endpoint-list",
        ),
        (f'a=("$(scontrol show hostnames)")\nhead=$a\nsrun {RUN} x', "endpoint-list"),
        ("srun python a/train.py --lr 1\nsrun python a/train.py --lr 2", "status-lost"),
        ("srun ./train_a.sh 1\nsrun ./train_b.sh 2", "status-lost"),
        (f"cd WORK_FOLDER\nsrun {RUN} x", "placeholder"),
        (f"cd /home/<your name>/run\nsrun {RUN} x", "placeholder"),
        (f"D='{{your_path}}/data'\nsrun {RUN} x $D", "placeholder"),
        ("#SBATCH --account={{ account }}\nsrun python train.py", "placeholder"),
        ("#SBATCH --mail-user=me --account=<my project>\nsrun python train.py", "placeholder"),
        ("#SBATCH --container-image=/x.sqsh\nH=$(scontrol show hostnames | head -n 1)", "scontrol-in-container"),
        (
            "#SBATCH --array=0-7\n#SBATCH --gpus-per-node=4\nexport MASTER_PORT=29500\nsrun python train.py",
            "fixed-port",
        ),
        ("export MASTER_ADDR=10.1.2.3\nsrun python train.py", "endpoint-fixed"),
        ("srun python train.py \\\n  --a=1 \\\n  model.lr=2\nmodel.size=3 \\\n  b=4", "line-not-continued"),
        ("\u200b\nsrun python train.py", "command-unknown"),
        (f"# wandb login {'ab' * 20}\nsrun python train.py", "secret"),
        ("srun python train.py | tee log", "status-lost"),
        ("for p in $pids; do\n wait $p\ndone".replace("for", "srun python train.py &\nfor", 1), "status-lost"),
        ("conda activate YourEnv\nsrun python train.py", "placeholder"),
        ("#SBATCH --qos=your_assigned_qos\nsrun python train.py", "placeholder"),
        (
            "#SBATCH --array=0-7\nexport MASTER_PORT=$((20000 + SLURM_ARRAY_JOB_ID % 9999))\nsrun python train.py",
            "fixed-port",
        ),
        ("srun python train.py &\nwait\ncode=$?\nexit $code", "status-lost"),
        ("./with_db.sh srun -n 4 ./run.exe a\necho end", "status-lost"),
        ("srun --ntasks-per-node=1 torchrun --nproc-per-node=4 train.py", "nodes-missing"),
        ("STEPS=5\nsrun python train.py --steps=$STEP", "variable-case"),
        ("horovodrun -np 8 python train.py", "idle-nodes"),
        ("srun python train.py --num_nodes=1", "nodes-differ"),
        ("srun python train.py --workers $((SLURM_CPUS_PER_TASK / 2))", "option-variable"),
        ('run="deepspeed train.py"\neval "${run}"\nset +x', "status-lost"),
    ],
)
def test_a_fault_of_a_kind_that_was_missed_is_found(text: str, fault: str) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" + "trap 'echo late' USR1\n" * ("tee" in text)
    before = head if text.startswith("#SBATCH") is False else head.replace("trap", "#trap")
    problem = found(before + text, fault)
    assert problem is not None and problem.fault.level != "hint"


@each_case(
    ("text", "fault"),
    [
        (
            f"hosts=$(scontrol show hostnames $SLURM_JOB_NODELIST)\na=($hosts)\nhead=${{a[0]}}\nsrun {RUN} x",
            "endpoint-list",
        ),
        (f'h=$(scontrol show hostnames | head -n 1)\na=("$h")\nhead=${{a[0]}}\nsrun {RUN} x', "endpoint-list"),
        (
            f"head=$(perl -e '$_=$ENV{{SLURM_JOB_NODELIST}}; s/,.*//; s/-.*//; print')\nMASTER_ADDR=$head\nsrun {RUN} x",
            "endpoint-list",
        ),
        ("set -e\nsrun python a/train.py --lr 1\nsrun python a/train.py --lr 2", "status-lost"),
        ("srun python prepare.py\nsrun python train.py", "status-lost"),
        ("srun python train.py &\nfor p in $pids; do\n wait $p || exit 1\ndone", "status-lost"),
        ("horovodrun -np 8 -H $hosts python train.py", "idle-nodes"),
        (f"export ID=$RANDOM\nsrun bash -c '{RUN.replace('$SLURM_JOB_ID', '$ID')} x'", "run-id-per-node"),
        ("#SBATCH --gpus-per-node=4\ntorchrun --standalone --nproc-per-node=4 x", "cpus-missing"),
        (
            "export MASTER_PORT=$((9999 + SLURM_ARRAY_JOB_ID % 99 + SLURM_ARRAY_TASK_ID))\nsrun python train.py",
            "fixed-port",
        ),
        ("srun python train.py &\nwait $!\ncode=$?\nexit $code", "status-lost"),
        ("srun -N 1 torchrun --nproc-per-node=4 train.py", "nodes-missing"),
        ("export PET_NNODES=2\nsrun torchrun --nproc-per-node=4 train.py", "nodes-missing"),
        ("srun torchrun $OPTIONS train.py", "nodes-missing"),
        ("srun python train.py --num_nodes=2", "nodes-differ"),
        (
            "source helper.sh\nrun_with_retry torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$h:$p x",
            "head-only",
        ),
        ("if $a; then\n srun python train.py\nelse\n srun python train.py 2\nfi", "status-lost"),
        ("for a in 1; do\n srun python train.py\ndone", "status-lost"),
        ("srun python train.py || exit 1\nsrun python train.py 2", "status-lost"),
        (f"cd $WORK_FOLDER\nsrun {RUN} x -x LD_LIBRARY_PATH\nunset LD_LIBRARY_PATH", "placeholder"),
        ("#SBATCH --container-mounts=/x\nH=$(scontrol show hostnames | head -n 1)", "scontrol-in-container"),
        ("#SBATCH --nodelist=a,b\nexport MASTER_ADDR=10.1.2.3\nsrun python train.py", "endpoint-fixed"),
        ("# do not remove, or it will hang\nexport CUDA_LAUNCH_BLOCKING=1\nsrun python train.py", "launch-blocking"),
        ("pip install --no-index wheels/a.whl", "install-in-job"),
        (f"N=1\nif $a; then\n N=2\nfi\nsrun {RUN.replace('nnodes=2', 'nnodes=$N')} x", "nodes-differ"),
    ],
)
def test_a_script_that_is_like_one_with_a_fault_has_none(text: str, fault: str) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n"
    problem = found(head + text, fault)
    assert problem is None or problem.fault.level == "hint"


def test_visible_gpus_of_one_command_are_not_those_of_the_job() -> None:
    own = ONE + "CUDA_VISIBLE_DEVICES=0 python train.py\n"
    assert "one-gpu-visible" not in ids(own + "mpirun -np 8 -x CUDA_VISIBLE_DEVICES=0,1,2,3 python train.py")
    assert "one-gpu-visible" in ids(ONE + "CUDA_VISIBLE_DEVICES=0 torchrun --standalone --nproc-per-node=4 x")


def test_ranks_that_an_operator_is_told_are_compared_with_a_pods_gpus() -> None:
    job = """apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: ddp}
spec:
  trainer:
    image: r.example.org/a:1.2.3
    numNodes: 2
    numProcPerNode: 8
    resourcesPerNode: {limits: {nvidia.com/gpu: 4}}
"""
    assert "ranks-exceed-gpus" in ids(job, "job.yaml")
    assert "ranks-exceed-gpus" not in ids(job.replace("numProcPerNode: 8", "numProcPerNode: 4"), "job.yaml")
    assert "ranks-exceed-gpus" in ids(job + "    command: [torchrun, t.py]\n", "job.yaml")


def test_pods_that_no_operator_numbers_need_their_number() -> None:
    text = """apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
spec:
  replicatedJobs:
  - name: w
    template:
      spec:
        parallelism: 4
        template:
          spec:
            containers:
            - name: t
              image: r.example.org/a:1.2.3
              command: [bash, -c, "torchrun --nproc_per_node=1 --master_addr=a --master_port=3 t.py"]
"""
    assert "nodes-missing" in ids(text, "job.yaml")
    assert "nodes-missing" not in ids(text.replace("--nproc", "--nnodes=4 --node_rank=$R --nproc"), "job.yaml")
    assert "nodes-missing" not in ids(text.replace("parallelism: 4", "parallelism: 1"), "job.yaml")


def test_a_pbs_script_without_an_interpreter_may_run_in_another_shell() -> None:
    text = "#PBS -l select=1:ncpus=8\nset -e\ncd /x\nif [[ -n $a ]]; then true; fi\npython train.py\n"
    problem = found(text, "no-interpreter")
    assert problem is not None and problem.fault.level == "warning"
    assert "no-interpreter" not in ids("#!/bin/bash\n" + text)
    assert "no-interpreter" not in ids(text.replace("select", "select").replace("#PBS -l", "#PBS -S /bin/bash -l"))
    plain = found(text.replace("[[", "[").replace("]]", "]"), "no-interpreter")
    assert plain is not None and plain.fault.level == "hint"


WRITTEN = "#!/bin/bash\nfor n in 1 2; do\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=$n\nmodule load a\n#SBATCH --job-name=$n\nEOF\ndone\n"
TEXT = 'time=1:00\nJOB="#!/bin/bash\n#SBATCH --time=$time\nsrun python t.py"\necho "$JOB" | sbatch\n'


@pytest.mark.parametrize("text", [WRITTEN, TEXT, WRITTEN.replace("sbatch <<EOF", "cat <<EOF > job.sh")])
def test_directives_of_a_script_that_is_written_have_the_writers_values(text: str) -> None:
    assert not {"directive-variable", "directive-ignored", "no-interpreter"} & {*ids(text)}


def test_a_job_in_a_here_document_is_read_as_a_script() -> None:
    job = "#!/bin/bash\n#SBATCH --gres=gpu:1\npython train.py\ndate\n"
    assert "status-lost" in ids(job)
    for begin in ("sbatch <<'E'", "cat <<'E' | sbatch", "cat > job.sh <<'E'"):
        problem = found(f"#!/bin/bash\n{begin}\n{job}E\n", "status-lost")
        assert problem is not None, begin
        assert problem.line == 6
    assert "status-lost" not in ids(f"{CLEAN}cat > next.sh <<'E'\n{job}E\n")


def test_sbatch_reads_a_directive_without_a_blank() -> None:
    text = ONE.replace("#SBATCH --gpus", "#SBATCH--gpus") + "export CUDA_VISIBLE_DEVICES=6\npython train.py"
    assert "device-missing" in ids(text)


@each_case(
    ("text", "fault", "level"),
    [
        (SLURM.replace("set -e", "#SBATCH --job-name=$NAME\nset -e"), "directive-variable", "warning"),
        (SLURM.replace("set -e", "#SBATCH -o a_$SLURM_JOB_ID.out\nset -e"), "directive-variable", "warning"),
        (SLURM.replace("set -e", "#SBATCH -o $DIR/a.out\nset -e"), "directive-variable", "warning"),
        (SLURM.replace("set -e", "#SBATCH --mem=$MEM\nset -e"), "directive-variable", "warning"),
        (SLURM.replace("set -e", "#SBATCH --mem=$MEM\nMEM=9G\nset -e"), "directive-variable", "error"),
        (CLEAN + "#SBATCH --array=1-9\n", "directive-ignored", "warning"),
        (SLURM + f"#SBATCH --mail-type=END\nsrun {RUN} x", "directive-ignored", "warning"),
        (SLURM + f"#SBATCH --mem=9G\nsrun {RUN} x", "directive-ignored", "error"),
        (ONE.replace("gpus-per-node=4", "ntasks=1") + "mpiexec -n 4 python t.py", "slots-missing", "warning"),
        (
            ONE.replace("gpus-per-node=4", "ntasks=1") + "mpirun --bind-to none -n 4 python t.py",
            "slots-missing",
            "warning",
        ),
        (EIGHT + "export RANK=$SLURM_PROCID\nsrun python train.py", "node-rank", "warning"),
        (EIGHT + "export NODE_RANK=$SLURM_NODEID\nsrun python train.py", "node-rank", "hint"),
        (EIGHT + "export WORLD_SIZE=4\nsrun python train.py", "world-size", "warning"),
        ("#!/bin/bash\nexport A=1\n#SBATCH --nodes=2\nsrun python train.py", "directive-ignored", "error"),
        ("#!/bin/bash\nexport A=1\n#SBATCH --nodes={{ nodes }}\nsrun python train.py", "directive-ignored", "warning"),
        ("#!/bin/bash\nexport A=1\n#SBATCH --account=<your account>\nsrun python t.py", "directive-ignored", "warning"),
        (SLURM + 'ROOT="${ROOT:-$(cd "$(dirname "$0")" && pwd)}"\nsrun python $ROOT/x.py', "script-folder", "hint"),
        (SLURM + 'ROOT="$(cd "$(dirname "$0")" && pwd)"\nsrun python $ROOT/x.py', "script-folder", "warning"),
        (
            "#!/bin/bash\n#SBATCH -N 2\nmodule load openmpi\nmpirun --map-by core -np 32 python x.py",
            "slots-missing",
            "warning",
        ),
        (
            "#!/bin/bash\nA=true\n#SBATCH --time=1:00\n$A\n#SBATCH --nodes=2\nsrun python t.py",
            "directive-ignored",
            "error",
        ),
        ("#!/bin/bash\ntorchrun --nnodes=$1 --master-addr localhost t.py", "localhost-endpoint", "hint"),
        (
            "#!/bin/bash\n#SBATCH --gres=gpu:4\ntorchrun --nnodes=$COUNT --node_rank=$SLURM_NODEID --master_addr=$h t.py",
            "head-only",
            "hint",
        ),
        ("#!/bin/bash\ntorchrun --nnodes=8 --nproc_per_node=8 t.py", "endpoint-missing", "warning"),
        (SLURM + "torchrun --nnodes=2 t.py", "endpoint-missing", "error"),
    ],
)
def test_an_error_is_one_for_every_program_and_site(text: str, fault: str, level: str) -> None:
    problem = found(text, fault)
    assert problem is not None
    assert problem.fault.level == level


@each_case(
    ("before", "launch", "level"),
    [
        ("", "torchrun --nnodes=2 x.py", "error"),
        ("N=2\n", "torchrun --nnodes=$N x.py", "error"),
        ("source $HOME/.bashrc\n", "torchrun --nnodes=2 x.py", "error"),
        ("srun hostname; echo $(srun true)\n", "torchrun --nnodes=2 x.py", "error"),
        # The caller, the environment, another file, or a branch may decide.
        ("N=${N:-2}\n", "torchrun --nnodes=2 --nproc-per-node=$N x.py", "warning"),
        ("", "torchrun --nnodes=2 --nproc-per-node=$GPUS x.py", "warning"),
        ("", "torchrun --nnodes=2 $OPTIONS x.py", "warning"),
        ("", "$LAUNCHER torchrun --nnodes=2 x.py", "warning"),
        ("source vars.sh\n", "torchrun --nnodes=2 x.py", "warning"),
        ("export PET_NNODES=1\n", "torchrun --nnodes=2 x.py", "warning"),
        ("if [ $1 = two ]; then\n", "torchrun --nnodes=2 x.py\nfi", "warning"),
        ("case $1 in\ntwo)\n", "torchrun --nnodes=2 x.py\n;;\nesac", "warning"),
        ('[ "$1" = two ] && ', "torchrun --nnodes=2 x.py", "warning"),
        ("exit 0\n", "torchrun --nnodes=2 x.py", "warning"),
        ("train() {\n", "torchrun --nnodes=2 x.py\n}\ntrain", "warning"),
        ("#SBATCH --ntasks=1\n", "torchrun --nnodes=2 x.py", "warning"),
        ("export NAME=YOUR_NAME\n", "torchrun --nnodes=2 x.py", "warning"),
        ("salloc --nodes=2\n", "torchrun --nnodes=2 x.py", "warning"),
        ("#SBATCH hetjob\n#SBATCH --nodes=2\n", "srun --het-group=1 hostname", None),
    ],
)
def test_only_what_the_script_alone_proves_is_an_error(before: str, launch: str, level: str | None) -> None:
    problem = found(f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n{before}{launch}\n", "head-only")
    assert (problem.fault.level if problem else None) == level


@each_case(
    ("text", "fault"),
    [
        (
            SLURM + "export MASTER_ADDR=${SLURM_NODELIST:0:4}${SLURM_NODELIST:5:3}\nsrun python train.py",
            "endpoint-list",
        ),
        (SLURM + "cat <<E\nThen type\nssh $USER@login\nE\nsrun python train.py", "ssh-alone"),
        (NO_E + "{ python train.py & date; } | mail -s done me", "ends-early"),
        (
            SLURM + "if [ -z $SLURM_JOB_ID ]; then\n SLURM_NNODES=1\nfi\nsrun torchrun --nnodes=$SLURM_NNODES x",
            "nodes-differ",
        ),
        (ONE + "torchrun --nnodes=4 --node-rank=$1 --master-addr=$h x", "nodes-differ"),
        (
            "#!/bin/bash\n#SBATCH -o logs/%j.out\nif [ -z $SLURM_JOB_ID ]; then\n mkdir -p logs\n sbatch $0\nfi\npython t.py",
            "output-folder",
        ),
        ("#!/bin/bash\n#SBATCH --gres=gpu:1\npython -m venv env\npip install torch", "install-in-job"),
        (
            ONE.replace("--gpus", "--ntasks-per-node=4\n#SBATCH --gpus") + "source x/bin/activate tf\npython train.py",
            "one-process",
        ),
        (
            "#!/bin/bash\n#SBATCH --ntasks=10\n#SBATCH --ntasks-per-node=1\nmpirun --bind-to none -n 10 python train.py",
            "slots-missing",
        ),
        (SLURM + 'python -u -c "import a; \\\nt0 = a.now(); \\\nprint(t0)"', "assignment-malformed"),
        ("#!/usr/bin/env julia\n#SBATCH --nodes=2\nhosts = gethostname()", "assignment-malformed"),
        (SLURM + "if (( $tasks==1 )); then\n srun python train.py\nfi", "assignment-malformed"),
        (SLURM + 'while read -r k v; do export "$k"="$v"; done < .env\nsrun python train.py', "assignment-malformed"),
        (SLURM + 'case $1 in --*) k=${1#--}; declare $k="$2";; esac\nsrun python train.py', "assignment-malformed"),
        (SLURM + "f() { local $1=2; }\nsrun python train.py", "assignment-malformed"),
        # A program fills the template in.
        ("#!/bin/bash\n${ACCOUNT_OPTION}\n#SBATCH --nodes=2\nsrun python train.py", "directive-ignored"),
        ("#!/bin/bash\n#SBATCH --time=1:00\n{{ node_line }}\n#SBATCH --nodes=2\nsrun python t.py", "directive-ignored"),
        (
            "#!/bin/bash\n{% if nodes > 1 %}\n#PBS -l select=2\n{% endif %}\n@SETUP@\nmpiexec python t.py",
            "directive-ignored",
        ),
        (SLURM + 'cp "$(dirname "$0")/$(basename "$0")" /results/\nsrun python train.py', "script-folder"),
        (SLURM + 'ME=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")\nsrun python /x.py "$ME"', "script-folder"),
        (
            SLURM
            + 'D="$(cd "$(dirname "$0")" && pwd)"\n[ -z "$SLURM_JOB_ID" ] || D="${X:-$SLURM_SUBMIT_DIR}"\nsrun python $D/x.py',
            "script-folder",
        ),
        (SLURM + 'D="$(cd "$(dirname "$0")" && pwd)"\necho "$D"\nsrun python /x.py', "script-folder"),
        ("#!/bin/bash\n#SBATCH --time=1:00\n{job.lines}\n#SBATCH --nodes=2\nsrun python t.py", "directive-ignored"),
        (
            WRITTEN.replace("for n", 'pushd "$(dirname "$0")"\nfor n').replace("sbatch <<EOF", "cat <<EOF > job.sh"),
            "script-folder",
        ),
        # Notes of several scripts.
        ("#!/bin/bash\nsudo docker run -it x\n\n#!/bin/bash -l\n#SBATCH -N 1\nsrun python t.py", "directive-ignored"),
        ("#!/bin/bash\nsudo docker run -it x\n\n#!/bin/bash -l\n#SBATCH -N 1\nsrun python t.py", "terminal-missing"),
        (
            SLURM.replace("set -e", '#SBATCH --job-name=" two words"\nset -e') + "srun python train.py",
            "directive-malformed",
        ),
        (
            ONE + "CUDA_VISIBLE_DEVICES=0 dask-worker a &\nCUDA_VISIBLE_DEVICES=1 dask-worker a &\nwait",
            "one-gpu-visible",
        ),
        (SLURM + "BAM=a\necho $BAM\\_b\nmkdir $BAM\\_c", "variable-case"),
        (SLURM + "trap \"echo 'USR1 came'\" USR1\nsrun python train.py", "signal-late"),
        (SLURM + "export NCCL_P2P_DISABLE=1 # these cards do not support it\nsrun python train.py", "network-disabled"),
        (
            ONE
            + "singularity exec images/tools-cpu.sif python prepare.py\nsingularity exec --nv a.sif python train.py",
            "no-nv",
        ),
        (SLURM + "mpirun ./solver.x -f input.dat", "hosts-fixed"),
        (NO_E + "trap 'rm -rf $TMP' EXIT; trap 'exit 1' ERR\nsrun python train.py\ndate", "status-lost"),
        (SLURM + "for RUN in a b; do\n ls $RUN\ndone\nRUNS=2\nsrun python train.py", "variable-case"),
        (ONE + "python train.py --data_parallel", "one-process"),
        ("#!/bin/bash\nMASTER_PORT=30005\npython worker.py --port $MASTER_PORT", "fixed-port"),
        ("#!/bin/bash\nMASTER_PORT=29501\ntorchrun --nproc_per_node=2 --master_port=$MASTER_PORT t.py", "fixed-port"),
        (
            SLURM.replace("nodes=2", "nodes=4")
            + "for n in $a; do\n srun --nodes=1 -w $n torchrun --nnodes=2 --rdzv-endpoint=$h:$p x &\ndone\nwait",
            "nodes-differ",
        ),
        (SLURM + "srun --export ALL,A=1 env B=2 python train.py", "assignment-malformed"),
        (SLURM + "srun deepspeed --hostfile $h train.py", "nodes-missing"),
        (ONE + "srun deepspeed train.py", "nodes-missing"),
        (SLURM + "#SETUP -x\n#SBATCH -J a\nsrun python train.py", "directive-comment"),
        (SLURM + 'L="A=1 torchrun"\nsrun bash -c "$L --nnodes=2 t.py"', "assignment-malformed"),
        (SLURM + 'L="A=1 python t.py"\neval $L', "assignment-malformed"),
        (ONE + "srun --label \\\n python t.py", "line-not-continued"),
        (ONE + "srun $ARGS\npython t.py", "line-not-continued"),
        (NO_E + "/usr/bin/ssh -N -f -R 1:localhost:1 $host\njupyter lab", "status-lost"),
        (SLURM + "docker() { command docker run -it $@; }\nsrun python train.py", "terminal-missing"),
    ],
)
def test_what_looks_like_an_error_and_is_none_is_passed_over(text: str, fault: str) -> None:
    assert [one.fault.id for one in lint(text, "job.sh") if one.fault.level != "hint" and one.fault.id == fault] == []


@pytest.mark.parametrize(
    "text",
    [
        SLURM.replace("nodes=2", "nodes={1. number of nodes}"),
        SLURM.replace("set -e", "#SBATCH --mail-user=[replace with yours]\nset -e"),
        SLURM + "cd {3.where your project is}",
        SLURM + "conda activate <name of the environment>",
        SLURM + "conda activate <env_path>",
        SLURM.replace("set -e", "#SBATCH --account=placeholder\nset -e"),
        SLURM.replace("set -e", "#SBATCH --mail-user=<NETID>@example.edu\nset -e"),
        SLURM + "mkdir -p <OUTPUT_DIR>logs/wandb",
        SLURM + "export WB_KEY=KEY # your key",
        SLURM + "export PYTHONPATH=$HOME/user/.../code/",
    ],
)
def test_placeholders_of_any_form_are_found(text: str) -> None:
    assert "placeholder" in ids(text)
    assert "placeholder" not in ids(SLURM + "sort <in.txt >out.txt\nsort <in >\\\n out\necho {1..3} {a,b}")
    mine = SLURM.replace("set -e", "#SBATCH --mail-user=ann@my.unt.edu\nset -e")
    assert "placeholder" not in ids(mine + "ssh ${USER}@$node run.sh\nexport API_KEY=$KEY WANDB_ENTITY=lab")


def test_a_template_may_have_variables_and_placeholders() -> None:
    text = SLURM.replace("nodes=2", "nodes=$nodes") + "cd /path/to/run"
    assert {"directive-variable", "placeholder"} <= {*ids(text)}
    for name in ("job.sh.tmpl", "templates_x/job_template.sh", "a/job.mako"):
        problems = [one for one in lint(text, name) if one.fault.id in ("directive-variable", "placeholder")]
        assert {one.fault.level for one in problems} == {"hint"}


@each_case(
    ("text", "fault", "place"),
    [
        (
            NO_E + "cleanup() { rm -rf $TMP; }\ntrap cleanup TERM EXIT\nsrun python train.py\nrsync a b",
            "status-lost",
            "rsync",
        ),
        (NO_E + "python -m torch.distributed.launch a.py\naccelerate launch b.py", "status-lost", "a.py"),
        (
            SLURM.replace("pipefail", "noclobber") + "srun python train.py | tee log\npython summary.py",
            "status-lost",
            "tee",
        ),
        (NO_E + 'RUN="python train.py"\nfor lr in 1 2; do\n $RUN --lr $lr > log\ndone', "status-lost", "$RUN"),
        (ONE + "pip install --no-index torch\npip install wget\npython train.py", "install-in-job", "wget"),
        (
            SLURM + "for n in $a; do\n srun --nodes=1 -w $n torchrun --nnodes=8 --rdzv-endpoint=$h:$p x &\ndone\nwait",
            "nodes-differ",
            "nnodes",
        ),
        (
            ONE.replace("node=4", "node=2") + "PORT=${PORT:-29500}\ntorchrun --nproc-per-node=2 --master_port=$PORT x",
            "fixed-port",
            "PORT=",
        ),
        (
            ONE.replace("node=4", "node=2") + "torchrun --nproc-per-node=2 --master_port=${PORT:-29500} x",
            "fixed-port",
            "torchrun",
        ),
        (
            "#!/bin/bash\n#SBATCH --ntasks=4\n#SBATCH --ntasks-per-node=1\ntorchrun --standalone x",
            "idle-nodes",
            "torchrun",
        ),
        (ONE.replace("#SBATCH --gpus", "#SBTACH --gpus") + "python train.py", "directive-comment", "SBTACH"),
        (SLURM + "srun --ntasks=2 LD_PRELOAD=/x.so python train.py", "assignment-malformed", "LD_PRELOAD"),
        (SLURM + "srun deepspeed --num_gpus=1 --master_addr=$h train.py", "nodes-missing", "deepspeed"),
        (ONE + "srun --cpu_bind=v --accel-bind=gn\npython -m eval", "line-not-continued", "eval"),
        (ONE + 'CMD="A=1 python t.py"\n$CMD --debug', "assignment-malformed", "$CMD"),
        (ONE + "RUN=(A=1 B=2 torchrun t.py)\n${RUN[@]}", "assignment-malformed", "RUN["),
        (
            ONE.replace("node=4", "node=2") + "accelerate launch --config_file a.yaml --main_process_port 29501 t.py",
            "fixed-port",
            "29501",
        ),
        (ONE + "cp -r /your/model/dir .", "placeholder", "/your/"),
        (SLURM + "srun pip3 install wandb\nsrun python train.py", "install-in-job", "pip3"),
        (
            NO_E.replace("set -", "#SBATCH --gpus-per-node=4\nset -").replace("export", "#SBATCH --gres=gpu:4\nexport")
            + "./sweep.sh\ndate",
            "status-lost",
            "date",
        ),
        ("#!/bin/bash\nCKPT=<Specify path>\ntorchrun --standalone t.py --save $CKPT", "placeholder", "CKPT="),
    ],
)
def test_a_fault_of_a_blind_set_is_found_in_its_line(text: str, fault: str, place: str) -> None:
    problem = found(text, fault)
    assert problem is not None and problem.fault.level != "hint"
    assert place in text.splitlines()[problem.line - 1]


DS = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=4\nset -e\n"


@each_case(
    ("text", "fault", "place", "level"),
    [
        # placeholders
        (SLURM + "srun python train.py --out <folder for results> --lr 3", "placeholder", "--out", "warning"),
        (SLURM + "srun python train.py --data path_to/shards", "placeholder", "shards", "warning"),
        (SLURM + "export HF_TOKEN=...\nsrun python train.py", "placeholder", "HF_TOKEN", "warning"),
        (SLURM + "export OUT=REPLACE_WITH_FOLDER\nsrun python train.py", "placeholder", "OUT=", "warning"),
        (SLURM + "conda activate your_venv\nsrun python train.py", "placeholder", "your_venv", "warning"),
        (SLURM + 'export NCCL_SOCKET_IFNAME="YOUR CARD"\nsrun python train.py', "placeholder", "CARD", "warning"),
        (SLURM + "srun python PYTHON_SCRIPT.py", "placeholder", "PYTHON_SCRIPT", "warning"),
        (SLURM + "export D=/gpfs/xxx/shards\nsrun python train.py", "placeholder", "xxx", "warning"),
        (SLURM + "A=CHANGE_ME\nB=TODO\nsrun python train.py", "placeholder", "A=", "warning"),
        (SLURM + "cd {the folder of your code}\nsrun python train.py", "placeholder", "cd {", "warning"),
        (SLURM + "export MASTER_ADDR=192.168.x.x\nsrun python train.py", "placeholder", "192.", "warning"),
        (SLURM + "torchrun --nnodes=2 --node_rank=node_rank t.py", "placeholder", "node_rank", "warning"),
        (SLURM + "accelerate launch --num_processes NUM_GPUS t.py", "placeholder", "NUM_GPUS", "warning"),
        (SLURM + "torchrun --nnodes=2 --master_addr MASTER_IP t.py", "placeholder", "MASTER_IP", "warning"),
        (SLURM.replace("set -e", "#SBATCH --mail-user=first.last@uni.edu\nset -e"), "placeholder", "mail", "warning"),
        (SLURM.replace("set -e", "#SBATCH --mail-user=me@example.org\nset -e"), "placeholder", "mail", "warning"),
        (SLURM.replace("set -e", "#SBATCH -A ACCOUNT_NAME\nset -e"), "placeholder", "-A", "warning"),
        (SLURM.replace("set -e", "#SBATCH -w {host}\nset -e"), "placeholder", "{host}", "warning"),
        (SLURM.replace("set -e", "#SBATCH -o {{ folder }}/%j\nset -e"), "placeholder", "folder", "hint"),
        (
            SLURM.replace("set -e", "# SBATCH --gres=gpu:4\nset -e") + "srun python t.py",
            "directive-comment",
            "gres",
            "hint",
        ),
        (SLURM + "srun python train.py > out/run.log", "output-folder", "out/", "hint"),
        (LSF + "jsrun -n 4 -a 1 -g 4 python train.py", "one-process", "jsrun", "hint"),
        (SLURM + "srun torchrun --nnodes=2 --rdzv-endpoint=$SITE_HEAD:1 t.py", "endpoint-unset", "SITE", "hint"),
        # statuses
        (NO_E + "srun ./solver in.dat\necho finished", "status-lost", "echo", "hint"),
        (
            GPUS.replace("set -euo pipefail\n", "") + "srun ./solver in.dat\necho finished",
            "status-lost",
            "echo",
            "warning",
        ),
        (NO_E + "run() {\n python train.py\n date\n}\nrun", "status-lost", "date", "hint"),
        (NO_E + "python first.py\npython second.py", "status-lost", "first", "hint"),
        (NO_E + "python train.py\nrc=$?\necho $rc", "status-lost", "echo", "warning"),
        (NO_E + 'script -q -c "python train.py" log', "status-lost", "script", "warning"),
        ("#!/bin/bash\nfor s in 1 2; do\n python train.py $s\ndone\n", "status-lost", "train", "hint"),
        (NO_E + 'A="mpirun ./a"\nB="mpirun ./b"\n$A\n$B', "status-lost", "$A", "warning"),
        # slips
        (SLURM + "for s in 1 2; do\n srun python train.py\ndone25", "syntax-error", "for s", "error"),
        (SLURM + "A=1\nB=2\nsrun python train.py run_$A_$B", "variable-case", "run_", "warning"),
        (SLURM + "folder=/d\nsrun python train.py $foldr", "variable-unset", "foldr", "warning"),
        (SLURM.replace("set -e", "#SBATCH --time\nset -e"), "directive-malformed", "--time", "error"),
        (SLURM.replace("set -e", "#SBATCH --mail-users=a@b.c\nset -e"), "option-unknown", "users", "warning"),
        (SLURM.replace("set -e", "#SBATCH --fpga=2\nset -e"), "option-unknown", "fpga", "hint"),
        (SLURM + "export NCLL_DEBUG=WARN\nsrun python train.py", "setting-unknown", "NCLL", "warning"),
        (SLURM + "export OMP_NUM_THREADS= 4\nsrun python train.py", "assignment-malformed", "= 4", "error"),
        # resources
        (DS + "deepspeed --num_gpus 2 train.py", "one-rank", "deepspeed", "warning"),
        (DS + "accelerate launch --num_processes=8 train.py", "ranks-exceed-gpus", "launch", "warning"),
        (DS + "export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --standalone t.py", "one-gpu-visible", "0,1", "warning"),
        (DS + "docker run img python train.py", "no-nv", "docker", "warning"),
        (DS + "srun nvidia-smi\npython single.py", "one-process", "single", "hint"),
        (DS + "srun python train.py", "one-process", "srun", "hint"),
        (SLURM + "python solve.py", "idle-nodes", "solve", "hint"),
        (SLURM + "srun --gres=gpu:2 python train.py", "step-exceeds-job", "gpu:2", "hint"),
        (SLURM + "srun -n 9 python train.py", "step-exceeds-job", "-n 9", "warning"),
        ("#!/bin/bash\n#SBATCH --ntasks=8\nset -e\npython solve.py", "tasks-spread", "ntasks", "hint"),
        (CPUS + "srun matlab -r run", "cpus-not-passed", "matlab", "warning"),
        (SLURM.replace("set -e", "#SBATCH -a 1-9\n#SBATCH -o all.log\nset -e"), "array-output", "all.log", "warning"),
        (
            "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=$N\nsrun torchrun --nproc_per_node=$N t.py",
            "tasks-per-node",
            "per-node",
            "warning",
        ),
        # the rendezvous
        (
            SLURM + "srun torchrun --nnodes=2 --rdzv-backend=c10d --master-addr=$head t.py",
            "endpoint-missing",
            "torchrun",
            "error",
        ),
        (SLURM + "export MASTER_PORT=1234\nsrun python train.py", "fixed-port", "1234", "hint"),
        # secrets
        (SLURM + "# wandb login --relogin " + "0a" * 20, "secret", "wandb", "warning"),
        (SLURM + "srun python t.py --api_key=" + "a1b2" * 5, "secret", "api_key", "warning"),
        (SLURM + "export NEPTUNE_API_TOKEN=" + "aB3/" * 12 + "==", "secret", "NEPTUNE", "warning"),
        (SLURM + "# export HF_TOKEN=hf_" + "aB3x" * 8, "secret", "hf_", "warning"),
        # data
        (
            SLURM + "cp a.tar /lscratch/$SLURM_JOB_ID/\nsrun python t.py /lscratch/$SLURM_JOB_ID/a",
            "head-copy",
            "cp",
            "hint",
        ),
    ],
)
def test_a_kind_that_strangers_named_is_found(text: str, fault: str, place: str, level: str) -> None:
    problem = found(text, fault)
    assert problem is not None, ids(text)
    assert place in text.splitlines()[problem.line - 1]
    assert problem.fault.level == level


@each_case(
    ("text", "fault"),
    [
        (
            SLURM + "# cp -r /path/to/data .\necho '<name>'\ncat <<E\n<name> /path/to/x\nE\nsrun python t.py",
            "placeholder",
        ),
        (
            SLURM + "sed 's/<name>/x/' a > b\nD=${D:-/path/to/d}\nT=$(mktemp /tmp/xxx.XXX)\nsrun python t.py",
            "placeholder",
        ),
        (SLURM + "srun python t.py --nnodes auto --path_to_data /d --out $path_to_out --n=gpu", "placeholder"),
        (SLURM + "torchrun --nproc_per_node=gpu --master_addr=$MASTER_ADDR --node_rank=$R t.py", "placeholder"),
        (SLURM.replace("set -e", "#SBATCH --time=#LIMIT#\nset -e") + "srun python t.py", "directive-malformed"),
        (SLURM + "srun ./solver in.dat\necho finished", "status-lost"),
        (NO_E + "if srun ./solver; then\n echo good\nelse\n echo bad\n exit 1\nfi", "status-lost"),
        (NO_E + "case $1 in\na) srun ./solver;;\n*) echo no;;\nesac", "status-lost"),
        (NO_E + "srun ./solver || exit 1\necho finished", "status-lost"),
        (NO_E + "cat <<E > a.job\n#\nE\npython train.py --dry\nsbatch a.job", "status-lost"),
        (NO_E + 'script -qec "python train.py" log', "status-lost"),
        (NO_E + "module load jup\njupyter lab", "status-lost"),
        (SLURM + "cat > a.nml <<!\nfile = 'x'\n!\nsrun python t.py", "assignment-malformed"),
        (SLURM + "a=`echo b | tr '=' '_'`\nIFS= read -r x\nsrun python t.py", "assignment-malformed"),
        (SLURM + "AB=1\nABC=2\nsrun python train.py $AB_$ABC", "variable-unset"),
        (SLURM + "node1=a\nsrun python train.py $node2x", "variable-case"),
        (DS + "deepspeed --num_gpus 4 train.py", "one-rank"),
        (DS + "deepspeed --num_gpus 2 a.py &\ndeepspeed --num_gpus 2 b.py &\nwait", "one-rank"),
        (DS + "srun --gres=gpu:2 python train.py", "step-exceeds-job"),
        (CPUS + "srun -n 8 python train.py", "step-exceeds-job"),
        (SLURM.replace("set -e", "#SBATCH -a 1-9\n#SBATCH -o %a.log\nset -e"), "array-output"),
        ("#!/bin/bash\n#BSUB -N\n#BSUB -B\npython t.py", "directive-malformed"),
        (SLURM + "metric_key=mean_of_all_losses\nexport TOTAL_TOKENS=2_000_000_000_000\nsrun python t.py", "secret"),
        (SLURM + "srun python t.py --env-secret R2_ACCESS_KEY_ID=R2_ACCESS_KEY_ID # basic usage123", "secret"),
        (
            "#!/bin/bash\ncat <<E > a.job\n#PBS -N a\nE\nmkdir -p ./jobs\npython ./check.py\nqsub a.job",
            "home-folder",
        ),
        (SLURM + "srun --nodes=1 cd /d & bash run.sh", "cpus-not-passed"),
    ],
)
def test_a_script_that_is_like_one_of_strangers_has_no_warning(text: str, fault: str) -> None:
    assert not [one for one in lint(text, "job.sh") if one.fault.id == fault and one.fault.level != "hint"]


@pytest.mark.parametrize("more", ["env: [{name: HF_TOKEN, value: YOUR_HF_TOKEN}]", "args: [--data, /path/to/data]"])
def test_placeholders_of_a_pod_are_found(more: str) -> None:
    problem = found(on_pods(f"command: [torchrun, t.py]\n              {more}"), "placeholder", "job.yaml")
    assert problem is not None and problem.fault.level == "warning"
    assert found(on_pods("command: [torchrun, t.py, --data, /data]"), "placeholder", "job.yaml") is None


def test_a_script_whose_directives_all_come_too_late_is_read() -> None:
    text = "#!/bin/bash\necho a\n#SBATCH --nodes=1\ntorchrun --standalone t.py --checkpoint x"
    assert "directive-ignored" in ids(text)


def test_every_placeholder_of_a_script_is_named() -> None:
    text = SLURM + "export A=/path/to/a\nsrun python train.py \\\n  --b <your b> \\\n  --c /path/to/c\n"
    problems = [one for one in lint(text, "job.sh") if one.fault.id == "placeholder"]
    assert [text.splitlines()[one.line - 1].strip(" \\") for one in problems] == [
        "export A=/path/to/a",
        "--b <your b>",
        "--c /path/to/c",
    ]


TWO = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=2\nset -eu\n"


@each_case(
    ("text", "fault", "level"),
    [
        # A variable of the scheduler has its value, and not the default.
        (TWO + "n=${SLURM_GPUS_ON_NODE:-1}\ntorchrun --standalone --nproc_per_node=$n t.py", "one-rank", None),
        (TWO + "torchrun --standalone --nproc_per_node=1 t.py", "one-rank", "warning"),
        (TWO + 'export LD_LIBRARY_PATH="/o${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"', "unset-variable", None),
        (TWO + 'export LD_LIBRARY_PATH="/o:$LD_LIBRARY_PATH"', "unset-variable", "warning"),
        (TWO + "if [ ! -d env ]; then\n pip install x\nfi\npython train.py", "install-in-job", "hint"),
        (TWO + "if [ ! -d env ]; then\n true\nfi\npip install x\npython train.py", "install-in-job", "warning"),
        (TWO + "pip show x || pip install x\npython train.py", "install-in-job", "hint"),
        (TWO + "if ! command -v uv; then\n curl -L x.org/i | sh\nfi\npython train.py", "remote-code", "hint"),
        (TWO + "curl -L x.org/i | sh\npython train.py", "remote-code", "warning"),
        (TWO + "export NCCL_P2P_DISABLE=1\npython train.py", "network-disabled", "hint"),
        (TWO.replace("node=2", "node=1") + "export NCCL_P2P_DISABLE=1\npython train.py", "network-disabled", None),
        (GPUS + "export NCCL_P2P_DISABLE=1\nsrun python train.py", "network-disabled", "warning"),
        (GPUS + "export NCCL_IB_DISABLE=1 # see https://x.org/9\nsrun python train.py", "network-disabled", None),
        (
            GPUS + "h=$(host a | awk '{print $NR}')\nsrun torchrun --nnodes=2 --master-addr $h t.py",
            "endpoint-unset",
            None,
        ),
        (LSF + "jsrun -n1 -a1 -g1 python3 train.py", "idle-nodes", "warning"),
        (LSF + "jsrun -n4 -a1 -g1 python3 train.py", "idle-nodes", None),
        (TWO + "img=/i/pt.sif\napptainer exec $img python train.py", "no-nv", "warning"),
        (TWO + "img='--nv /i/pt.sif'\napptainer exec $img python train.py", "no-nv", None),
        (TWO.replace("set -eu\n", "") + "conda run wandb agent x\nwandb offline", "status-lost", "warning"),
        (TWO + "conda run wandb agent x", "output-captured", "hint"),
        (TWO.replace("node=2", "node=2\n#SBATCH --gres=gpu=2"), "gres-form", "hint"),
        # The exit code of the first run.
        (TWO[:-8] + "torchrun --standalone t.py --use_cache\ntorchrun --standalone t.py", "status-lost", "warning"),
        (TWO[:-8] + "bash tune.sh 0.5B\nbash tune.sh 1.5B", "status-lost", "hint"),
        (TWO + "bash tune.sh 0.5B\nbash tune.sh 1.5B", "status-lost", None),
        (TWO[:-8] + "./run 1\nif [ $? -eq 0 ]; then\n echo a\nelse\n echo b\nfi", "status-lost", "hint"),
        (TWO[:-8] + "./run 1\nif [ $? -ne 0 ]; then\n exit 1\nfi", "status-lost", None),
        (LSF[:-7] + "jsrun -n4 python m.py --stage 1\njsrun -n4 python m.py --stage 2", "status-lost", "warning"),
        (TWO[:-8] + "for i in 1 2; do\napptainer exec --nv a.sif python t.py $i\ndone", "status-lost", "warning"),
        # Folders of logs
        (TWO.replace("set", "#SBATCH -o /work/me/logs/%j.out\nset"), "output-folder", "hint"),
        (TWO.replace("set", "#SBATCH -a 1-9 -o %A.out\nset"), "array-output", "warning"),
        # Ports: accelerate's own option, and CPUs that fill a node.
        (TWO + "accelerate launch train.py --config c.yaml", "fixed-port", "warning"),
        (TWO + "accelerate launch --config_file c.yaml train.py", "fixed-port", None),
        (TWO + "torchrun --nproc_per_node=2 --master_port=1234 t.py", "fixed-port", "warning"),
        (
            TWO.replace("set", "#SBATCH -J job-1-2 -c 96\nset") + "torchrun --master_port=1234 t.py",
            "fixed-port",
            "hint",
        ),
        # Ranks of srun and mpirun
        (GPUS + "srun -n 2 python train.py", "one-rank", "hint"),
        (TWO + "mpirun -np 4 python train.py", "ranks-exceed-gpus", "hint"),
        (TWO + "mpirun -np 2 python train.py", "ranks-exceed-gpus", None),
        (TWO + "source ~/.bashrc", "unset-variable", "hint"),
        (TWO + "cd $SUBMITDIR", "variable-unset", "hint"),
        (TWO + "cd $SCRATCH", "variable-unset", None),
    ],
)
def test_what_a_second_blind_set_showed(text: str, fault: str, level: str | None) -> None:
    problem = found(text, fault)
    assert (problem.fault.level if problem else None) == level, ids(text)


def test_a_folder_of_shared_memory_may_lack_its_slash() -> None:
    text = on_pods("resources: {limits: {nvidia.com/gpu: 2}}\n              command: [torchrun, t.py]")
    assert found(text, "shared-memory", "job.yaml") is None
    assert found(text.replace("/dev/shm", "dev/shm"), "shared-memory", "job.yaml") is None
    assert found(text.replace("/dev/shm", "/dev/sha"), "shared-memory", "job.yaml") is not None
