"""The sbatch script of a job: one process for each node, restarted from its last checkpoint until it is done.

JAX finds the coordinator and the number of each process in the variables that srun sets. One process drives all GPUs of
its node, since a process of tunix takes all devices that it sees; so weights are read once for each node.

A restart is `scontrol requeue`: the same job, with the same recipe, goes back to the queue. It follows any end but
success, a user error (exit code 2) and a cancellation.
"""

import shlex

from tunix import __version__
from tunix.errors import UserError
from tunix.launch.job import USER_ERROR, Job
from tunix.util.chips import GPUS_OF_A_HOST

CPUS_OF_A_GPU = 8
"""Cores for each GPU where a job has a part of a node; of a whole node it has all."""


def script(job: Job) -> str:
    """The text of the sbatch script.

    Raises:
        UserError: an option of sbatch is malformed, or is one that the script sets itself.
    """
    place = job.placement
    values: dict[str, str | int | None] = {
        "job-name": job.name,
        "nodes": place.hosts,
        "ntasks-per-node": 1,
        "gpus-per-node": place.per_host,
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
        "requeue": None,
        "signal": f"TERM@{job.options.grace}",
    }
    whole = place.hosts > 1 or place.per_host >= GPUS_OF_A_HOST
    values |= {"exclusive": None, "mem": 0} if whole else {"cpus-per-task": CPUS_OF_A_GPU * place.per_host}
    settings = {name: name if value is None else f"{name}={value}" for name, value in values.items()}
    for option in job.options.sbatch:
        name = option.partition("=")[0]
        if option.startswith("-") or not name or any(sign.isspace() for sign in option):
            raise UserError(f"--sbatch {option}: write an option of sbatch without its hyphens, e.g. partition=gpu")
        if name in settings:
            raise UserError(f"--sbatch {option}: the script sets --{settings[name]} itself; leave it out")
    options = "\n".join(f"#SBATCH --{option}" for option in [*settings.values(), *job.options.sbatch])
    cpus = settings.get("cpus-per-task")  # srun does not take it over from sbatch
    prelude = "".join(f"{line}\n" for line in job.options.setup)
    for name, file in job.options.secrets:
        # A word of the shell, in which `~` still means the home folder.
        path = "~/" + shlex.quote(file[2:]) if file.startswith("~/") else shlex.quote(file)
        prelude += f'export {name}="$(< {path})"\n'
    end = "RECIPE"
    while end in job.recipe.splitlines():  # a word that is no line of the recipe, to end it in the script
        end += "_"
    body = _BODY.format(
        end=end,
        recipe=job.recipe,
        cpus=f" --{cpus}" if cpus else "",
        name=job.name,
        restarts=job.options.restarts,
        wait=2 * job.options.grace,
        refused=USER_ERROR,
    )
    return f"""\
#!/bin/bash
# {job.name}: {place.hosts} node(s) with {place.per_host} x {place.chip} each, written by `tunix launch` {__version__}.
# Submit it with sbatch, from the folder in which the recipe's relative paths start.
{options}

{prelude}{body}"""


# Doubled braces are braces of the shell. The inner shell outlives SIGTERM, as tunix does while it saves: a task that
# ends takes what it has started along.
_BODY = """\
recipe="$PWD/{name}-$SLURM_JOB_ID.yaml"
cat > "$recipe" <<'{end}'
{recipe}{end}
rm -f "$recipe.refused"

# scancel signals this shell too: then nothing is to be started again.
cancelled=
trap 'cancelled=1' TERM

srun --kill-on-bad-exit=0 --wait={wait} --cpu-bind=none{cpus} bash -c '
  trap : TERM
  tunix run "$0" --no-plan
  code=$?
  if [ "$code" -eq {refused} ]; then touch "$0.refused"; fi
  exit "$code"
' "$recipe"
code=$?

if [ "$code" -eq 0 ]; then exit 0; fi
if [ -e "$recipe.refused" ]; then
  echo "{name}: a user error, which a restart would not help" >&2
  exit {refused}
fi
if [ -n "$cancelled" ]; then exit "$code"; fi
if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {restarts} ]; then
  echo "{name}: started again {restarts} times already; sbatch goes on from the last checkpoint" >&2
  exit "$code"
fi
echo "{name}: ended with $code; back to the queue, to go on from the last checkpoint" >&2
scontrol requeue "$SLURM_JOB_ID"
"""
