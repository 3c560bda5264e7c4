#!/usr/bin/env python3
"""Started by real launchers: the ranks find one another without any code for it."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import zlib
from unittest import mock

import launchers
import support

import shardd
from shardd import _launch
from shardd._launch import launched

PROGRAM = pathlib.Path(__file__).with_name("launched.py")
ALONE = launchers.python("-c", "import shardd; print(shardd.environment())")


class Trained(unittest.TestCase):
    """A daemon, and programs that train with it."""

    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()
        cls.expected = cls.weights(cls.train(launchers.shardctl(2)))

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    @classmethod
    def env(cls, **more):
        return launchers.environment(cls.socket, **more)

    @classmethod
    def train(cls, launcher, *arguments, **more):
        """What each rank says, sorted by job and rank."""
        with tempfile.TemporaryDirectory() as folder:
            launchers.run([*launcher, *launchers.python(PROGRAM, folder, *arguments)],
                          cls.env(**more))
            return [json.loads(path.read_text())
                    for path in sorted(pathlib.Path(folder).glob("said.*"))]

    @classmethod
    def weights(cls, said):
        return [one["weights"] for one in said]

    def check(self, said, name, jobs=1):
        """They were @jobs jobs of two ranks, named so, and trained as `shardctl run`'s."""
        self.assertEqual([(one["rank"], one["world"]) for one in said], [(0, 2), (1, 2)] * jobs)
        self.assertEqual(len({one["job"] for one in said}), jobs)
        for one in said:
            self.assertRegex(one["job"], name)
        self.assertEqual(self.weights(said), self.expected * jobs)


class OpenMpi(Trained):
    def setUp(self):
        launchers.need(self, launchers.OPENMPI)

    def test_trains_as_shardctl_run(self):
        self.assertEqual(len({str(w) for w in self.expected}), 1)
        self.check(self.train(launchers.openmpi(2)), r"^mpi-\d+$")

    def test_two_runs_at_once_are_two_jobs(self):
        # In one folder for both, one mpirun fails when the other makes or removes it first.
        with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
            one, other = (" ".join([*launchers.openmpi(2), "--mca", "orte_tmpdir_base", folder])
                          + ' "$@"' for folder in (a, b))
            self.check(self.train(["sh", "-ec", f"{one} & {other}; wait $!", "-"], "2"),
                       r"^mpi-\d+$", jobs=2)

    def test_a_name_that_is_given(self):
        self.check(self.train(launchers.openmpi(2), SHARDD_JOB="mine"), "^mine$")


class Hydra(Trained):
    def setUp(self):
        launchers.need(self, launchers.HYDRA)

    def test_trains_as_shardctl_run(self):
        self.check(self.train(launchers.hydra(2)), r"^mpi-\d+-\d+$")

    def test_with_a_shell_in_between(self):
        shell = ["sh", "-c", '"$@"; exit $?', "-"]
        self.check(self.train([*launchers.hydra(2), *shell]), r"^mpi-\d+-\d+$")

    def test_two_runs_at_once_are_two_jobs(self):
        twice = " ".join(launchers.hydra(2)) + ' "$@"'
        self.check(self.train(["sh", "-ec", f"{twice} & {twice}; wait $!", "-"], "2"),
                   r"^mpi-\d+-\d+$", jobs=2)


class Slurm(Trained):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cluster = None

    def setUp(self):
        launchers.need(self, launchers.CLUSTER)
        if self.cluster is None:
            type(self).cluster = launchers.slurm(nodes=2)
            type(self).conf = self.cluster.__enter__()

    @classmethod
    def tearDownClass(cls):
        if cls.cluster is not None:
            cls.cluster.__exit__(None, None, None)
        super().tearDownClass()

    @classmethod
    def env(cls, **more):
        # before there is a cluster: shardctl run, for the others to be compared with
        return super().env(**({"SLURM_CONF": cls.conf} if hasattr(cls, "conf") else {}), **more)

    def inside(self, *command):
        """Run in the shell of an allocation of four tasks."""
        return launchers.run(["salloc", "-Q", "-N", "1", "-n", "4", *command], self.env())

    def test_trains_as_shardctl_run(self):
        for options, name in (((), r"^slurm-\d+\.0$"), (("--mpi=pmi2",), r"^mpi-\d+\.0$")):
            with self.subTest(options):
                self.check(self.train(launchers.srun(2, "-Q", *options)), name)

    def test_two_steps_of_an_allocation_are_two_jobs(self):
        step = 'srun --exact -n 2 "$@"'
        said = self.train(["salloc", "-Q", "-N", "1", "-n", "4", "sh", "-ec",
                           f"{step} & {step}; wait $!", "-"], "2")
        self.check(said, r"^slurm-\d+\.[01]$", jobs=2)
        self.assertEqual(len({one["job"].partition(".")[0] for one in said}), 1)

    def test_mpirun_in_an_allocation(self):
        for launcher, programs, name in (
                (launchers.openmpi(2), launchers.OPENMPI, r"^mpi-\d+$"),
                (launchers.hydra(2), launchers.HYDRA, r"^mpi-\d+-\d+$")):
            launchers.need(self, programs)
            with self.subTest(launcher[0]):
                self.check(self.train(["salloc", "-Q", "-N", "1", "-n", "4", *launcher]), name)

    def test_shardctl_run_in_a_step(self):
        step = launchers.srun(1, "-Q")
        self.check(self.train([*step, *launchers.shardctl(2)]), "^run-")

    def test_one_process_in_an_allocation_is_alone(self):
        self.assertEqual(self.inside(*ALONE), "(0, 1)\n")
        with tempfile.TemporaryDirectory() as folder:
            script, out = pathlib.Path(folder, "script"), pathlib.Path(folder, "out")
            script.write_text("#!/bin/sh\n" + " ".join(f"'{word}'" for word in ALONE) + "\n")
            launchers.run(["sbatch", "-Q", "--wait", "-n", "4", "-o", str(out), str(script)],
                          self.env())
            self.assertEqual(out.read_text(), "(0, 1)\n")

    def test_what_python_m_shardd_says(self):
        said = launchers.run([*launchers.srun(2, "-Q", "--label"),
                              *launchers.python("-m", "shardd")], self.env())
        for rank in range(2):
            self.assertRegex(said, rf"(?m)^{rank}: this process: rank {rank} of 2 of job "
                                   r"slurm-\d+\.0, by srun$")

    def test_a_daemon_that_is_alone_refuses_ranks_on_two_nodes(self):
        command = [*launchers.srun(2, "-Q", "-N", "2"), *launchers.python("-m", "shardd")]
        done = subprocess.run(command, env=self.env(), text=True, capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("srun has started 1 of 2 ranks on this machine, and the daemon is in no "
                      "cluster", done.stderr)


class TwoNodes(unittest.TestCase):
    """Launchers that take this machine for two nodes, each of which has a daemon and two ranks."""

    @classmethod
    def setUpClass(cls):
        cls.context = cls.at = None

    def setUp(self):
        support.need_etcd(self)
        if self.context is None:
            type(self).context = support.cluster("node0", "node1")
            type(self).at = self.context.__enter__()
            with support.daemon() as alone:
                self.at["alone"] = alone
                type(self).expected = self.train(launchers.shardctl(4), "alone")

    @classmethod
    def tearDownClass(cls):
        if cls.context is not None:
            cls.context.__exit__(None, None, None)

    def train(self, launcher, node, **more):
        """What each rank says. @node: the shell's expression for the node that it is on."""
        sockets = {f"AT_{name}": at for name, at in self.at.items()}
        choose = f'eval "export SHARDD_SOCKET=\\$AT_{node}"; exec "$@"'
        with tempfile.TemporaryDirectory() as folder:
            launchers.run([*launcher, "sh", "-c", choose, "-",
                           *launchers.python(PROGRAM, folder)],
                          launchers.environment("", **sockets, **more))
            return [json.loads(path.read_text())
                    for path in sorted(pathlib.Path(folder).glob("said.*"))]

    def check(self, said, name):
        self.assertEqual([(one["rank"], one["world"]) for one in said],
                         [(rank, 4) for rank in range(4)])
        self.assertEqual(len({one["job"] for one in said}), 1)
        self.assertRegex(said[0]["job"], name)
        for one, other in zip(said, self.expected):
            for value, right in zip(one["weights"], other["weights"]):
                self.assertAlmostEqual(float.fromhex(value), float.fromhex(right), delta=1e-6)

    def test_mpirun(self):
        launchers.need(self, launchers.OPENMPI)
        with tempfile.TemporaryDirectory() as folder:
            shell = pathlib.Path(folder, "shell")  # in place of ssh NODE
            # of two daemons with one folder each makes or removes it first
            shell.write_text(f'#!/bin/sh\nmkdir {folder}/$1\nexport TMPDIR={folder}/$1\nshift\n'
                             'exec sh -c "$*"\n')
            shell.chmod(0o700)
            said = self.train(
                ["mpirun.openmpi", "--mca", "plm_rsh_agent", str(shell), "-H", "one:2,two:2",
                 "--bind-to", "none", "-n", "4"], "node$((OMPI_COMM_WORLD_RANK / 2))")
        self.check(said, r"^mpi-\d+$")

    def test_mpiexec(self):
        launchers.need(self, launchers.HYDRA)
        said = self.train(["mpiexec.hydra", "-launcher", "fork", "-hosts", "one,two", "-ppn", "2",
                           "-n", "4"], "node$((PMI_RANK / 2))")
        self.check(said, r"^mpi-.+-\d+-[0-9a-f]{8}$")

    def test_srun(self):
        launchers.need(self, launchers.CLUSTER)
        with launchers.slurm(nodes=2) as conf:
            said = self.train(launchers.srun(4, "-Q", "-N", "2", "--distribution=block"),
                              "node$SLURM_NODEID", SLURM_CONF=conf)
        self.check(said, r"^slurm-\d+\.0$")


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
            "TORCHELASTIC_RUN_ID": "r"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
          "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
          "OMPI_MCA_ess_base_jobid": "77"}
MPIEXEC = {"PMI_RANK": "0", "PMI_SIZE": "5", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "5",
           "PMI_JOBID": "p"}
STEP = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "6",
        "SLURM_NODEID": "0", "SLURM_LOCALID": "5", "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "2",
        "SLURM_NTASKS": "8"}


class Variables(unittest.TestCase):
    """What there is no launcher for here, and what is wrong."""

    def see(self, *sets, **more):
        found = launched({k: v for one in (*sets, more) for k, v in one.items()})
        return found and (found.rank, found.world_size, found.job)

    def test_the_innermost_launcher_counts(self):
        self.assertIsNone(self.see())
        self.assertEqual(self.see(TORCHRUN, MPIRUN, MPIEXEC, STEP), (1, 4, "torch-r"))
        self.assertEqual(self.see(MPIRUN, MPIEXEC, STEP), (2, 3, "mpi-77"))
        self.assertEqual(self.see(MPIRUN, PMIX_NAMESPACE="prterun-h-4@1"),
                         (2, 3, f"mpi-prterun-h-4-1-{zlib.crc32(b'prterun-h-4@1'):08x}"))
        self.assertEqual(self.see(MPIEXEC, STEP), (0, 5, "mpi-p"))
        self.assertEqual(self.see(STEP), (5, 6, "slurm-9.2"))

    def test_what_is_left_of_another_launcher_does_not_count(self):
        self.assertIsNone(self.see(SLURM_PROCID="0", SLURM_NTASKS="8", SLURM_JOB_ID="9"))
        self.assertEqual(self.see(STEP, WORLD_SIZE="6"), (5, 6, "slurm-9.2"))

    def test_names_of_runs(self):
        ranks = {"RANK": "0", "WORLD_SIZE": "6"}
        none = {**ranks, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}
        self.assertEqual(self.see(ranks), (0, 6, None))
        self.assertEqual(self.see(none), (0, 6, "torch-29500"))
        self.assertEqual(self.see(ranks, MPIRUN), (0, 6, "mpi-77"))
        # a script's RANK=$SLURM_PROCID; and torchrun in a step of one task
        self.assertEqual(self.see(none, STEP), (0, 6, "slurm-9.2"))
        self.assertEqual(self.see(none, STEP, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1"),
                         (0, 6, "torch-29500"))

    def test_a_name_that_is_long_or_has_other_characters_is_still_its_own(self):
        names = [self.see(TORCHRUN, TORCHELASTIC_RUN_ID=run)[2]
                 for run in ("x" * 80 + "1", "x" * 80 + "2", "a/b", "a-b", "a b", "\u00e4")]
        self.assertEqual(len(set(names)), len(names))
        for name in names:
            self.assertLessEqual(len(name), 60)
            self.assertRegex(name, r"^torch-[A-Za-z0-9._-]+$")

    def test_what_is_no_number_is_named(self):
        for bad in ({"RANK": "x"}, {"RANK": "-1"}, {"RANK": "4"}, {"RANK": ""}, {"RANK": "1_0"},
                    {"RANK": " 1"}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "4.0"},
                    {"WORLD_SIZE": "\u0664"}, {"WORLD_SIZE": "99999999999"}):
            with self.subTest(bad), self.assertRaises(shardd.InvalidArgument) as caught:
                launched({**TORCHRUN, **MPIRUN, **bad})
            [(name, value)] = bad.items()
            self.assertIn(f"{name}={value!r}", str(caught.exception))
            self.assertEqual(caught.exception.field, "RANK")
        with self.assertRaisesRegex(shardd.InvalidArgument, "OMPI_COMM_WORLD_RANK='y'"):
            launched({**MPIRUN, "OMPI_COMM_WORLD_RANK": "y"})

    def test_one_of_two_is_missing(self):
        for half in ({"RANK": "0"}, {"WORLD_SIZE": "2"}):
            self.assertIsNone(launched(half))
            with self.assertRaisesRegex(shardd.InvalidArgument, "set both to whole numbers"):
                shardd.environment(half)
        self.assertEqual(shardd.environment({}), (0, 1))

    def here(self, *sets, **more):
        return launched({k: v for one in (*sets, more) for k, v in one.items()}).local

    def test_ranks_on_this_machine(self):
        self.assertEqual(self.here(TORCHRUN, STEP), (1, 4))
        self.assertEqual(self.here(TORCHRUN, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"), (0, 2))
        self.assertEqual(self.here(MPIRUN, OMPI_COMM_WORLD_LOCAL_RANK="0",
                                   OMPI_COMM_WORLD_LOCAL_SIZE="1"), (0, 1))
        self.assertEqual(self.here(MPIEXEC, MPI_LOCALNRANKS="3"), (0, 3))
        cray = {"PMI_RANK": "4", "PMI_SIZE": "6", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "3"}
        self.assertEqual(self.here(cray), (1, 3))

    def test_tasks_of_a_node_of_srun(self):
        for tasks, node, local, expected in (("6", "0", "5", (5, 6)), ("2(x3)", "1", "1", (1, 2)),
                                             ("1,2(x2),1", "2", "1", (1, 2)),
                                             ("3(x2)", "2", "0", (0, 0)), ("", "0", "0", (0, 0)),
                                             ("2(y3)", "0", "0", (0, 0)), ("6", "0", "x", (0, 0))):
            with self.subTest(tasks=tasks):
                self.assertEqual(self.here(STEP, SLURM_STEP_TASKS_PER_NODE=tasks,
                                           SLURM_NODEID=node, SLURM_LOCALID=local), expected)
        # a script's RANK=$SLURM_PROCID; srun --mpi=pmi2
        node = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_NODEID": "1",
                "SLURM_LOCALID": "1"}
        self.assertEqual(self.here(node, RANK="5", WORLD_SIZE="6"), (1, 2))
        self.assertEqual(self.here(node, PMI_RANK="5", PMI_SIZE="6"), (1, 2))
        # torchrun in a step of one task for each node
        self.assertEqual(self.here(node, RANK="5", WORLD_SIZE="8", LOCAL_RANK="1",
                                   LOCAL_WORLD_SIZE="4"), (1, 4))

    def test_numbers_of_another_launcher_do_not_count(self):
        for more in ({"LOCAL_WORLD_SIZE": "5"}, {"LOCAL_RANK": "4"}, {"LOCAL_RANK": "x"},
                     {"LOCAL_WORLD_SIZE": "0"}):
            self.assertEqual(self.here(TORCHRUN, more), (0, 0), more)
        self.assertEqual(self.here({"RANK": "0", "WORLD_SIZE": "2"}, STEP), (0, 0))

    def test_hydra_is_looked_for_above(self):
        tree = {os.getppid(): ("sh", 40, "5"), 40: ("hydra_pmi_proxy", 1, "77")}
        env = {k: v for k, v in MPIEXEC.items() if k != "PMI_JOBID"}
        with mock.patch.object(_launch, "_stat", tree.get):
            self.assertEqual(self.see(env), (0, 5, "mpi-40-77"))
            tree[40] = ("mpd", 1, "77")
            self.assertEqual(self.see(env), (0, 5, None))
            del tree[40]  # of another namespace
            self.assertEqual(self.see(env), (0, 5, None))

    def test_proxies_of_several_machines_have_one_mpiexec(self):
        tree = {os.getppid(): ("hydra_pmi_proxy", 1, "77")}
        said = ["hydra_pmi_proxy", "--control-port", "head:4242", "--proxy-id", "1"]
        env = {k: v for k, v in MPIEXEC.items() if k != "PMI_JOBID"}
        env["MPI_LOCALNRANKS"] = "2"
        with mock.patch.object(_launch, "_stat", tree.get), \
                mock.patch.object(_launch, "_arguments", lambda pid: said):
            self.assertEqual(self.see(env)[:2], (0, 5))
            self.assertRegex(self.see(env)[2], r"^mpi-head-4242-[0-9a-f]{8}$")
            said = said[:1]
            self.assertEqual(self.see(env), (0, 5, None))

    def test_a_process_with_any_name_is_read(self):
        ready = "import os; os.write(1, b'.'); os.read(0, 1)"
        with tempfile.TemporaryDirectory() as folder:
            link = os.path.join(folder, "a) R (b")
            os.symlink(sys.executable, link)
            child = subprocess.Popen([link, "-c", ready], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE)
            child.stdout.read(1)
            name, parent, began = _launch._stat(child.pid)
            child.communicate(b".")
        self.assertEqual((name, parent), ("a) R (b", os.getpid()))
        self.assertTrue(re.fullmatch(r"\d+", began))
        self.assertIsNone(_launch._stat(child.pid))


if __name__ == "__main__":
    support.main()
