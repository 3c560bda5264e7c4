"""The Pod Security Standards of Kubernetes, `baseline` and `restricted`, for pods of Linux: what a
pod has that they forbid. Written after kubernetes.io/docs/concepts/security/pod-security-standards
and the checks of k8s.io/pod-security-admission; the API server's own check is not here to ask."""

BASELINE_CAPABILITIES = {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL",
                         "MKNOD", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID",
                         "SYS_CHROOT"}
RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral",
                      "persistentVolumeClaim", "projected", "secret"}
SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t",
                 "container_engine_t"}
SYSCTLS = {"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies",
           "net.ipv4.ping_group_range", "net.ipv4.ip_unprivileged_port_start",
           "net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time",
           "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
           "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"}


def _containers(pod):
    return pod.get("initContainers", []) + pod["containers"] + pod.get("ephemeralContainers", [])


def _profiles(where, context):
    """Of baseline: profiles of AppArmor, SELinux and seccomp."""
    if context.get("seccompProfile", {}).get("type") == "Unconfined":
        yield f"{where} has no seccomp profile"
    if context.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield f"{where} has no AppArmor profile"
    options = context.get("seLinuxOptions", {})
    if options.get("type") not in SELINUX_TYPES or options.get("user") or options.get("role"):
        yield f"{where} has SELinux options"


def _baseline(pod):
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    for v in pod.get("volumes", []):
        if "hostPath" in v:
            yield f"volume {v['name']} is a hostPath"
    context = pod.get("securityContext", {})
    yield from _profiles("the pod", context)
    for s in context.get("sysctls", []):
        if s["name"] not in SYSCTLS:
            yield f"sysctl {s['name']}"
    for c in _containers(pod):
        context = c.get("securityContext", {})
        yield from _profiles(c["name"], context)
        if context.get("privileged"):
            yield f"{c['name']} is privileged"
        if context.get("procMount", "Default") != "Default":
            yield f"{c['name']} has a procMount"
        for name in set(context.get("capabilities", {}).get("add", [])) - BASELINE_CAPABILITIES:
            yield f"{c['name']} adds {name}"
        for p in c.get("ports", []):
            if p.get("hostPort"):
                yield f"{c['name']} has a hostPort"


def _restricted(pod):
    for v in pod.get("volumes", []):
        if not set(v) - {"name"} <= RESTRICTED_VOLUMES:
            yield f"volume {v['name']} is no allowed type"
    for c in _containers(pod):
        context, both = c.get("securityContext", {}), pod.get("securityContext", {}).copy()
        both.update(context)
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{c['name']} may gain privileges"
        if both.get("runAsNonRoot") is not True:
            yield f"{c['name']} may run as root"
        if both.get("runAsUser") == 0:
            yield f"{c['name']} runs as uid 0"
        if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{c['name']} has no seccomp profile"
        capabilities = context.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []):
            yield f"{c['name']} does not drop ALL"
        for name in sorted(set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}):
            yield f"{c['name']} adds {name}"


def violations(pod):
    """Sorted; empty: the pod passes `restricted`, and so `baseline`."""
    return sorted([f"baseline: {v}" for v in _baseline(pod)] +
                  [f"restricted: {v}" for v in _restricted(pod)])
