#include "engine/nccl_lib.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <ifaddrs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct nccl_lib table;
static bool loaded;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char *nccl_lib_find_all(void *so, struct nccl_lib *lib)
{
	const char *missing = NULL;
	void *p;

#define FIND(name)            \
	p = dlsym(so, #name); \
	memcpy(&lib->name, &p, sizeof(p));
#define REQUIRE(name) \
	FIND(name)    \
	missing = missing || p ? missing : #name;
	NCCL_LIB_FUNCTIONS(REQUIRE)
	NCCL_LIB_OPTIONAL(FIND)
#undef REQUIRE
#undef FIND
	return missing;
}

const char *nccl_lib_version(const struct nccl_lib *lib, char *buf, size_t bytes)
{
	int v = lib->version;

	/* until 2.8 the middle had two digits and the first was worth a thousand */
	if (v >= 10000)
		snprintf(buf, bytes, "%d.%d.%d", v / 10000, v % 10000 / 100, v % 100);
	else
		snprintf(buf, bytes, "%d.%d.%d", v / 1000, v % 1000 / 100, v % 100);
	return buf;
}

const char *nccl_lib_text(const struct nccl_lib *lib, ncclResult_t r, char *buf, size_t bytes)
{
	const char *text = lib->ncclGetErrorString(r);
	const char *last = lib->ncclGetLastError(NULL);

	if (last && *last)
		snprintf(buf, bytes, "%s (%d): %s", text ? text : "an error", (int)r, last);
	else
		snprintf(buf, bytes, "%s (%d)", text ? text : "an error", (int)r);
	buf[strcspn(buf, "\n")] = '\0';
	return buf;
}

void nccl_lib_config(ncclConfig_t *ret)
{
	*ret = (ncclConfig_t){
		.size = sizeof(*ret),
		.magic = NCCL_ABI_CONFIG_MAGIC,
		.version = NCCL_ABI_CONFIG_VERSION,
		.blocking = NCCL_CONFIG_UNDEF_INT,
		.cgaClusterSize = NCCL_CONFIG_UNDEF_INT,
		.minCTAs = NCCL_CONFIG_UNDEF_INT,
		.maxCTAs = NCCL_CONFIG_UNDEF_INT,
		.netName = NCCL_CONFIG_UNDEF_PTR,
		.splitShare = NCCL_CONFIG_UNDEF_INT,
		.trafficClass = NCCL_CONFIG_UNDEF_INT,
		.commName = NCCL_CONFIG_UNDEF_PTR,
		.collnetEnable = NCCL_CONFIG_UNDEF_INT,
		.CTAPolicy = NCCL_CONFIG_UNDEF_INT,
		.shrinkShare = NCCL_CONFIG_UNDEF_INT,
		.nvlsCTAs = NCCL_CONFIG_UNDEF_INT,
		.nChannelsPerNetPeer = NCCL_CONFIG_UNDEF_INT,
		.nvlinkCentricSched = NCCL_CONFIG_UNDEF_INT,
	};
}

void nccl_lib_environment(void)
{
	setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
	setenv("NCCL_DEBUG", "WARN", 0);
	if (!getenv("NCCL_RAS_ADDR"))
		setenv("NCCL_RAS_ENABLE", "0", 0);
}

/* Return: whether it has one of them. */
static bool nccl_lib_has_address(const struct ifaddrs *a, const char *address)
{
	char text[INET6_ADDRSTRLEN] = "";
	int family = a->ifa_addr ? a->ifa_addr->sa_family : AF_UNSPEC;

	if (family == AF_INET)
		inet_ntop(family, &((const struct sockaddr_in *)a->ifa_addr)->sin_addr, text,
			  sizeof(text));
	else if (family == AF_INET6)
		inet_ntop(family, &((const struct sockaddr_in6 *)a->ifa_addr)->sin6_addr, text,
			  sizeof(text));
	return *text && strcmp(text, address) == 0;
}

void nccl_lib_between_nodes(const char *iface, const char *address)
{
	struct ifaddrs *all = NULL;
	char name[64] = "";

	setenv("NCCL_RUNTIME_CONNECT", "0", 0);
	if (iface)
		snprintf(name, sizeof(name), "=%s", iface);
	else if (getifaddrs(&all) == 0)
		for (const struct ifaddrs *a = all; a && !*name; a = a->ifa_next)
			if (nccl_lib_has_address(a, address))
				snprintf(name, sizeof(name), "=%s", a->ifa_name);
	if (all)
		freeifaddrs(all);
	if (*name)
		setenv("NCCL_SOCKET_IFNAME", name, 0);
}

static int nccl_lib_check_version(struct nccl_lib *lib, char *why, size_t bytes)
{
	char text[32];
	ncclResult_t r = lib->ncclGetVersion(&lib->version);

	if (r != ncclSuccess) {
		snprintf(why, bytes, "NCCL does not report its version (%d)", (int)r);
		return -EPROTO;
	}
	if (lib->version >= NCCL_LIB_MIN_VERSION)
		return 0;
	snprintf(why, bytes, "NCCL %s is too old: %d.%d or newer is required",
		 nccl_lib_version(lib, text, sizeof(text)), NCCL_LIB_MIN_VERSION / 10000,
		 NCCL_LIB_MIN_VERSION % 10000 / 100);
	return -EPROTO;
}

static int nccl_lib_load(char *why, size_t bytes)
{
	const char *path = getenv("SHARDD_LIBNCCL");
	const char *missing;
	struct nccl_lib lib;
	void *so;
	int r = 0;

	path = path && *path ? path : "libnccl.so.2";
	nccl_lib_environment();
	so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!so) {
		snprintf(why, bytes, "no NCCL: %s", dlerror());
		return -ENOENT;
	}
	missing = nccl_lib_find_all(so, &lib);
	if (lib.ncclGetVersion)
		r = nccl_lib_check_version(&lib, why, bytes);
	if (r == 0 && missing) {
		snprintf(why, bytes, "NCCL is too old: %s has no %s", path, missing);
		r = -ENOSYS;
	}
	if (r) {
		dlclose(so);
		return r;
	}
	lib.windows = lib.ncclCommWindowRegister && lib.ncclCommWindowDeregister;
	lib.zero_policy = lib.version >= NCCL_LIB_ZERO_VERSION;
	lib.shrink = lib.ncclCommShrink && lib.version >= 22703;
	lib.revoke = lib.ncclCommRevoke && lib.version >= 22807;
	table = lib;
	return 0;
}

int nccl_lib_open(const struct nccl_lib **ret, char *why, size_t why_bytes)
{
	int r = 0;

	pthread_mutex_lock(&lock);
	if (!loaded)
		r = nccl_lib_load(why, why_bytes);
	loaded = loaded || r == 0;
	pthread_mutex_unlock(&lock);
	if (r == 0)
		*ret = &table;
	return r;
}
