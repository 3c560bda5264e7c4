"""Launchers for tests, the real ones: Open MPI's mpirun, Hydra's mpiexec, srun in a cluster of its
own, and shardctl run, with which the others are compared."""

import contextlib
import os
import pathlib
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import support

PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
CLUSTER = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch")
OPENMPI = ("mpirun.openmpi",)
HYDRA = ("mpiexec.hydra",)


def need(test, programs):
    """Skip @test where they are not installed; where tests/run installs what it needs, fail."""
    missing = [name for name in programs if shutil.which(name, path=PATH) is None]
    if not missing:
        return
    why = f"not installed: {', '.join(missing)} (deploy/install-deps --launchers)"
    if os.environ.get("SHARDD_TEST_INSTALLED") == "1":
        test.fail(why)
    test.skipTest(why)


def environment(socket_path, **more):
    """What trainers start with, whatever launcher the test itself was started by."""
    foreign = ("SLURM_", "OMPI_", "PMI", "PMIX_", "MPI_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(foreign) and name not in (
                "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                "MASTER_PORT", "SHARDD_JOB")}
    return {**kept, "PATH": PATH, "PYTHONPATH": str(support.ROOT / "client" / "python"),
            "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "SHARDD_SOCKET": socket_path,
            # of mpirun: two ranks on one core, and as root in a container
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **more}


def shardctl(ranks):
    return [os.path.join(support.BIN_DIR, "shardctl"), "run", "-n", str(ranks), "--"]


def openmpi(ranks):
    return ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]


def hydra(ranks):
    return ["mpiexec.hydra", "-n", str(ranks)]


def srun(ranks, *options):
    return ["srun", "-n", str(ranks), *options]


def run(command, env, seconds=60):
    """What it prints. AssertionError: it did not end well."""
    done = subprocess.run(command, env=env, text=True, timeout=seconds, stdin=subprocess.DEVNULL,
                          capture_output=True)
    assert done.returncode == 0, \
        f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def python(*arguments):
    return [sys.executable, "-B", *map(str, arguments)]


# --------------------------------------------------------------------------- a cluster


def _configuration(folder, nodes):
    """Daemons without systemd, cgroups or a database, for whoever runs this; nodes of four
    processors each, however many this machine has."""
    user, host = pwd.getpwuid(os.geteuid()).pw_name, socket.gethostname().partition(".")[0]
    controller, *ports = support.free_ports(1 + nodes)
    return f"""ClusterName=shardd-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/builtin
ReturnToService=2
""" + "".join(f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4\n"
              for i, port in enumerate(ports)) + \
        "PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=NO\n"


def _until(what, condition, processes, log, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        ended = [p.args[0] for p in processes if p.poll() is not None]
        if ended or time.monotonic() > end:
            log.seek(0)
            raise AssertionError(f"no {what}; ended: {ended}\n{log.read()}")
        time.sleep(0.02)


@contextlib.contextmanager
def slurm(nodes=1):
    """SLURM_CONF of a cluster whose nodes all are this machine; it ends with the block."""
    processes = []
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log"), "w+") as log:
        base = pathlib.Path(folder)
        conf, munge = base / "slurm.conf", base / "munge"
        conf.write_text(_configuration(folder, nodes))
        (base / "key").write_bytes(secrets.token_bytes(128))
        (base / "key").chmod(0o400)
        (base / "state").mkdir()
        env = dict(os.environ, PATH=PATH, SLURM_CONF=str(conf))

        def start(*command):
            processes.append(subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log,
                                              stdin=subprocess.DEVNULL))

        def idle():
            said = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=env, text=True,
                                  capture_output=True)
            return said.stdout.split() == ["idle"] * nodes

        try:
            start("munged", "--foreground", "--force", f"--key-file={base / 'key'}",
                  f"--socket={munge}", f"--pid-file={base / 'munge.pid'}",
                  f"--log-file={base / 'munge.log'}", f"--seed-file={base / 'munge.seed'}")
            _until("socket of munged", munge.exists, processes, log)
            start("slurmctld", "-D", "-f", str(conf))
            for node in range(nodes):
                start("slurmd", "-D", "-f", str(conf), "-N", f"node{node}")
            _until("idle nodes", idle, processes, log)
            yield str(conf)
        finally:
            for process in reversed(processes):
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
