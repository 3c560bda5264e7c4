"""An etcd of others with TLS and passwords, of which daemons are told wrongly and rightly."""

import pathlib
import subprocess

from lab import BIN, ETCD_AT, Failed, Lab, Process, environment, sh, wait_for
from training import TWO, Training

URL = f"https://{ETCD_AT}:2379"
NEW = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


def make_ca(folder, name):
    sh(f"{NEW} -days 2 -keyout {folder}/{name}.key -out {folder}/{name}.pem -subj /CN={name}")


def make_cert(folder, ca, name, subject, more="-days 2"):
    """Signed by @ca; @subject: its common name, which is a user of etcd."""
    at = f"{folder}/{name}"
    sh(f"openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {at}.key "
       f"-out {at}.req -subj /CN={subject} -addext subjectAltName=IP:{ETCD_AT}")
    sh(f"openssl x509 -req -in {at}.req -CA {folder}/{ca}.pem -CAkey {folder}/{ca}.key "
       f"-CAcreateserial -copy_extensions copyall -out {at}.pem {more}")


def start_etcd(x, cert, clients=None):
    """With that certificate; also again, with the data of before. @clients: the CA of certificates
    that its clients must have."""
    peer = "http://127.0.0.1:2380"
    more = ["--client-cert-auth", "--trusted-ca-file", f"{x.folder}/{clients}.pem"]
    x.etcd = Process("etcd", [
        "etcd", "--name", "one", "--data-dir", f"{x.folder}/etcd", "--logger", "zap",
        "--listen-client-urls", URL, "--advertise-client-urls", URL,
        "--cert-file", f"{x.folder}/{cert}.pem", "--key-file", f"{x.folder}/{cert}.key",
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"one={peer}", *more * bool(clients)], f"{x.folder}/etcd.log")


def own_cert(x, name, before):
    """Options for a client with that certificate, if there is one."""
    files = pathlib.Path(x.folder, f"{name}.pem"), pathlib.Path(x.folder, f"{name}.key")
    return [f"{before}cert={files[0]}", f"{before}key={files[1]}"] * files[0].exists()


def etcdctl(x, *args):
    r = subprocess.run(
        ["nsenter", "--net=/run/netns/etcd", "--", "etcdctl", "--endpoints", URL, "--cacert",
         f"{x.folder}/ca.pem", *own_cert(x, "root", "--"), *args],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env=environment(ETCDCTL_API="3"))
    return r.returncode == 0


def add_users(x):
    """root, and shardd, who may use the keys below /shardd/."""
    wait_for(lambda: etcdctl(x, "endpoint", "health"), "etcd serves")
    for args in ("user add root:secret", "user grant-role root root", "role add node",
                 "role grant-permission node --prefix=true readwrite /shardd/",
                 "user add shardd:right", "user grant-role shardd node", "auth enable"):
        if not etcdctl(x, *args.split()):
            raise Failed(f"etcdctl {args}")


def keys(x, password="right", ca="ca", **more):
    path = pathlib.Path(x.folder, f"password-{password}")
    path.write_text(f"{password}\n")
    path.chmod(0o600)
    return {"coord": f"etcd://{ETCD_AT}:2379", "coord_user": "shardd", "coord_password_file": path,
            "coord_ca": f"{x.folder}/{ca}.pem"} | more


def check_config(node, options):
    """Return: what --check-config says of a mistake; "": there is none."""
    argv = [BIN / "shardd", "--check-config", "--socket", node.socket]
    for key, value in {"peer_listen": "10.0.0.1:7400", "peer_insecure": "yes", **options}.items():
        argv += ["--set", f"{key}={value}"]
    r = subprocess.run(argv, capture_output=True, text=True, env=environment())
    return r.stderr if r.returncode else ""


def is_refused(node, options, words):
    """Before it starts, by the daemon and by --check-config."""
    node.options = {}
    node.start(wait=False, **options)
    node.may_end = True
    if node.daemon.wait() != 2:
        raise Failed(f"the daemon has ended with {node.daemon.code}")
    for said in (node.said(), check_config(node, options)):
        if words not in said:
            raise Failed(f"nobody says '{words}': {said}")
    node.log.write_text("")


def is_out(node, options, words):
    """The files are good, and etcd is of another mind: the log and shardctl say why."""
    if said := check_config(node, options):
        raise Failed(said)
    node.options = {}
    node.start(wait=False, **options)
    wait_for(lambda: any(words in line and "not a member yet" in line
                         for line in node.said().splitlines()), f"the log says '{words}'")
    status = node.ctl("status")["cluster"]
    if status["state"] != "JOINING" or words not in status["why"]:
        raise Failed(f"{status}, and not '{words}'")
    node.stop()
    if node.joined():
        raise Failed("it was a member")
    node.log.write_text("")


def etcd_of_others():
    """An etcd with TLS and a password: what is wrong is said, and what is right trains."""
    with Lab(2, start=False, etcd=False) as x:
        make_ca(x.folder, "ca")
        make_ca(x.folder, "other")
        make_cert(x.folder, "ca", "good", "etcd")
        make_cert(x.folder, "ca", "old", "etcd", "-days -1")
        start_etcd(x, "good")
        add_users(x)
        wrong_files(x, x["a"])
        for options, words in (
                (keys(x, "wrong"), "etcd does not accept coord_user with the password"),
                (keys(x, coord_user="", coord_password_file=""), "etcd wants a user"),
                (keys(x, ca="other"), "etcd's certificate is not accepted"),
                (keys(x, coord_ca=""), "if it wants TLS set coord_ca")):
            is_out(x["a"], options, words)
        x.etcd.kill()
        start_etcd(x, "old")
        is_out(x["a"], keys(x), "has expired")
        x.etcd.kill()
        start_etcd(x, "good")
        for node in x.nodes.values():
            node.options = {}
            node.start(**keys(x))
        Training(x, TWO).finish()


def etcd_wants_certificates():
    """An etcd whose clients have certificates, of which the common name is their user."""
    with Lab(2, start=False, etcd=False) as x:
        for ca in ("ca", "clients"):
            make_ca(x.folder, ca)
        for ca, name in (("ca", "good"), ("clients", "root"), ("clients", "shardd"),
                         ("clients", "nobody"), ("ca", "stranger")):
            make_cert(x.folder, ca, name, name)
        start_etcd(x, "good", clients="clients")
        add_users(x)

        def with_cert(name):
            return keys(x, coord_user="", coord_password_file="", **dict(
                option.split("=", 1) for option in own_cert(x, name, "coord_")))
        for name, words in (("none", "if its clients need a certificate set coord_cert"),
                            ("stranger", "if it does not accept coord_cert, that has expired"),
                            ("nobody", "or the node's certificate, to use the cluster's keys")):
            is_out(x["a"], with_cert(name), words)
        for node in x.nodes.values():
            node.options = {}
            node.start(**with_cert("shardd"))
        Training(x, TWO).finish()


def wrong_files(x, node):
    broken = pathlib.Path(x.folder, "broken.pem")
    broken.write_text("nothing\n")
    opened = pathlib.Path(x.folder, "opened")
    opened.write_text("right\n")
    opened.chmod(0o644)
    for options, words in (
            (keys(x, coord_password_file=opened), "other users have access to it"),
            (keys(x, coord_password_file=f"{x.folder}/none"), "there is no such file"),
            (keys(x, coord_user=""), "coord_user is not; it must be set, too"),
            (keys(x, coord_ca=f"{x.folder}/none"), "which cannot be read: No such file"),
            (keys(x, coord_ca=broken), "which has no text in PEM form")):
        is_refused(node, options, words)


DEFAULT = [etcd_of_others, etcd_wants_certificates]
