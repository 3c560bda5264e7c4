"""Nodes whose certificates are refused, or are renewed."""

import os
import pathlib
import re
import shutil
import time

from lab import Failed, Lab, sh, wait_for
from replicas import Elastic
from training import Training

NEW = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
NOW, OVER = 2, -1  # days that a certificate is good for
STEP_S = "4 4 0 0.1"  # with pauses, so that a job which trains beside takes little
REST = (("a", 2), ("b", 2))
THREE = (("a", 2), ("b", 1), ("c", 1))
RELOAD_S = 5  # the daemon looks at its files so often


def make_ca(folder, name):
    sh(f"{NEW} -x509 -days 2 -keyout {folder}/{name}.key -out {folder}/{name}.pem "
       f"-subj /CN={name}")


def make_cert(folder, name, ca, dns, days=NOW):
    at, extensions = f"{folder}/{name}", pathlib.Path(folder, "extensions")
    extensions.write_text(f"basicConstraints=critical,CA:FALSE\nsubjectAltName=DNS:{dns}\n")
    sh(f"{NEW} -keyout {at}.key -out {at}.csr -subj /CN={dns}")
    sh(f"openssl x509 -req -in {at}.csr -CA {folder}/{ca}.pem -CAkey {folder}/{ca}.key "
       f"-CAcreateserial -days {days} -extfile {extensions} -out {at}.pem")


def keys(folder, cert, ca="ca"):
    return {"peer_insecure": "no", "peer_ca": f"{folder}/{ca}.pem",
            "peer_cert": f"{folder}/{cert}.pem", "peer_key": f"{folder}/{cert}.key"}


def logged(node, since, *words):
    """A line, of those behind the first @since characters, with all the words."""
    return next((line for line in node.said()[since:].splitlines()
                 if all(re.search(w, line) for w in words)), None)


def refuse(x, job, name, first, said):
    """Ranks of one job on node a and on node @name. One of the two, @first, leads, because its rank
    comes first, and the other one dials it. @said: the node that says why, and with which words."""
    nodes = ("a", name)
    where, words = x[said[0]], said[1:]
    before = {n: len(x[n].said()) for n in nodes}
    t = Training(x, tuple((n, 1) for n in nodes), job=job, start=(nodes.index(first),))
    wait_for(lambda: logged(x[first], before[first], f"cluster leads job=0/{job} "), "it leads")
    t.start(1 - nodes.index(first))
    wait_for(lambda: logged(where, before[where.name], *words), f"{job}: {said}")
    if t.lines() or any(logged(x[n], before[n], "link up") for n in nodes):
        raise Failed(f"{job}: there is a link")
    t.stop()


def refusals(folder):
    """Of each: job, node, its keys, and who says what when that node is dialled, and dials."""
    unverified = ("a", "link gone node=c ", "certificate verify failed",
                  "must be signed by peer_ca of this node, and must not have expired")
    shut = ("a", "certificate verify failed")
    none = {"peer_insecure": "yes", "peer_ca": "", "peer_cert": "", "peer_key": ""}
    return (
        ("name", "c", keys(folder, "name"),
         ("a", "link gone node=c ", "has the DNS names 'b': 'c' must be one of them"),
         ("a", "link refused ", "node 'c' has a certificate with the DNS names 'b': its own name")),
        ("other", "c", keys(folder, "other-c", "other"), unverified,
         ("c", "link gone node=a ", "certificate verify failed")),
        ("foreign", "c", keys(folder, "other-c"), unverified, shut),
        ("expired", "c", keys(folder, "expired"), unverified, shut),
        ("none", "c", none,
         ("a", "link gone node=c ", "it has no certificate, and this node has one"),
         ("a", "wrong version number")),
        ("allow", "d", keys(folder, "d"),
         ("a", "leader not dialled .* node=d ", "node 'd' is not among the nodes"),
         ("a", "link refused ", "node 'd' is not among the nodes that may connect to node 'a'")))


def refused_certificates():
    """A node is refused if its certificate is wrong, or if it is not allowed; the others train on.

    The log has its name and the reason: the certificate is of another node, of another CA, expired
    or missing, or the node is not in peer_allow."""
    with Lab(4, start=False) as x:
        for ca in ("ca", "other"):
            make_ca(x.folder, ca)
        for name, ca, dns, days in (("a", "ca", "a", NOW), ("b", "ca", "b", NOW),
                                    ("d", "ca", "d", NOW), ("name", "ca", "b", NOW),
                                    ("other-c", "other", "c", NOW), ("expired", "ca", "c", OVER)):
            make_cert(x.folder, name, ca, dns, days)
        for name in "ab":
            x[name].start(replicas=1, peer_allow="a,b,c", **keys(x.folder, name))
        rest = Elastic(x, REST, 100000, options=STEP_S, job="rest")
        rest.wait_step(3)
        for job, name, options, dialled, dials in refusals(x.folder):
            x[name].start(**options)
            step = rest.step()
            refuse(x, f"{job}-dialled", name, name, dialled)
            refuse(x, f"{job}-dials", name, "a", dials)
            rest.wait_step(step + 3)
            x[name].stop()
        if any(logged(x[name], 0, "cluster epoch ends") for name in "ab"):
            raise Failed("the epoch of nodes a and b has ended")
        rest.stop()


def replace(folder, name):
    """As a program that renews certificates does: files are whole at any time."""
    for kind in ("key", "pem"):
        os.replace(f"{folder}/new-{name}.{kind}", f"{folder}/{name}.{kind}")


def renewed_certificates():
    """New certificates, of a new CA, are read while nodes train, and their links stay.

    The next links are made with them, and refused with the old ones."""
    with Lab(3, start=False) as x:
        f = x.folder
        make_ca(f, "ca")
        make_ca(f, "new")
        for name in "abc":
            make_cert(f, name, "ca", name)
            make_cert(f, f"new-{name}", "new", name)
            x[name].start(held=True, replicas=1, **keys(f, name))
        for kind in ("pem", "key"):
            shutil.copy(f"{f}/c.{kind}", f"{f}/old.{kind}")
        shutil.copy(f"{f}/ca.pem", f"{f}/old-ca.pem")
        t = Elastic(x, THREE, 100000, options=STEP_S)
        t.wait_step(3)
        for name in "abc":
            replace(f, name)
        os.replace(f"{f}/new.pem", f"{f}/ca.pem")
        time.sleep(RELOAD_S + 1)
        t.wait_step(t.step() + 3)
        if any(logged(n, 0, "link gone|epoch ends") for n in x.nodes.values()):
            raise Failed("a link has ended with the old certificates")
        x["c"].kill_held()
        wait_for(lambda: t.check() or logged(x["c"], 0, "epoch ends") or
                 logged(x["a"], 0, "epoch ends"), "the daemon has died")
        t.wait_step(t.step() + 3)
        t.stop()
        x["c"].stop()
        x["c"].start(**keys(f, "old", "old-ca"))
        refuse(x, "old", "c", "c", ("a", "link gone node=c ", "certificate verify failed"))


DEFAULT = [refused_certificates, renewed_certificates]
