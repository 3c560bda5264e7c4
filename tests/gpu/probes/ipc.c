/* P7: legacy CUDA IPC: memory and events across processes, and what its handles are. */
#include <stdio.h>
#include <string.h>

#include "stage.h"

#define SEED  0x5eed0007
#define BYTES (2 * MIB)

enum { AGAIN = 1, CHECK, OPEN_OWN, NEW };

static CUdeviceptr new_memory(struct actor *a, uint64_t seed, struct message *ret)
{
	CUipcMemHandle handle;
	CUdeviceptr addr;

	actor_must(a, a->cuda->cuMemAlloc(&addr, BYTES), "cuMemAlloc");
	pattern_write(a, addr, BYTES, seed);
	actor_must(a, a->cuda->cuIpcGetMemHandle(&handle, addr), "cuIpcGetMemHandle");
	memcpy(ret->handle, &handle, sizeof(handle));
	ret->value[0] = addr;
	return addr;
}

/* Owns memory; does what it is told. */
static void owner(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	CUdeviceptr addr, other;
	CUipcMemHandle handle;

	actor_cuda(a);
	addr = new_memory(a, SEED, &m);
	actor_tell(a, &m);
	for (;;) {
		uint64_t what;

		actor_hear(a, &m);
		what = m.value[0];
		m = MESSAGE_NULL;
		switch (what) {
		case AGAIN: /* freed, and allocated at once: the same handle? */
			actor_must(a, a->cuda->cuMemFree(addr), "cuMemFree");
			addr = new_memory(a, SEED + 1, &m);
			break;
		case CHECK:
			actor_must(a, pattern_check(a, addr, BYTES, SEED + 2, &m.value[0]),
				   "reading");
			break;
		case OPEN_OWN:
			actor_must(a, a->cuda->cuIpcGetMemHandle(&handle, addr), "handle");
			m.value[0] = (uint64_t)a->cuda->cuIpcOpenMemHandle(
				&other, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
			actor_text(a, (CUresult)m.value[0], m.text);
			break;
		default:
			break;
		}
		actor_tell(a, &m);
	}
}

/* Opens what it is started with, checks it, writes another pattern; then, whenever it is
 * told, reads that again. */
static void opener(struct actor *a)
{
	struct message m = MESSAGE_NULL;
	CUipcMemHandle handle;
	CUdeviceptr addr;
	uint64_t begin;
	CUresult r;

	actor_cuda(a);
	memcpy(&handle, a->order->handle, sizeof(handle));
	begin = now_ns();
	actor_must(a,
		   a->cuda->cuIpcOpenMemHandle(&addr, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
		   "cuIpcOpenMemHandle");
	m.value[1] = now_ns() - begin;
	actor_must(a, pattern_check(a, addr, BYTES, SEED, &m.value[0]), "reading");
	pattern_write(a, addr, BYTES, SEED + 2);
	actor_tell(a, &m);
	for (;;) {
		actor_hear(a, &m);
		if (m.value[0]) {
			actor_must(a, a->cuda->cuIpcCloseMemHandle(addr), "cuIpcCloseMemHandle");
			actor_done(a, 0, 0);
			continue;
		}
		r = pattern_check(a, addr, BYTES, SEED + 2, &m.value[0]);
		actor_text(a, r, m.text);
		m.value[1] = (uint64_t)r;
		actor_tell(a, &m);
	}
}

static struct message ask(struct stage *s, struct role *r, uint64_t what)
{
	struct message m = MESSAGE_NULL;

	m.value[0] = what;
	role_tell(s, r, &m);
	role_must(s, r, 30000, &m);
	return m;
}

/* Its memory is opened in another process, written there, seen here. */
static struct message share(struct stage *s, struct role *own, struct role *open)
{
	struct message first, m;

	stage_step(s, "opening a handle");
	role_must(s, own, 30000, &first);
	*open = role_start(s, "the opener", opener, &first);
	role_must(s, open, 30000, &m);
	stage_number(s, "seen_by_opener", "words wrong", (double)m.value[0]);
	stage_number(s, "open", "us", (double)m.value[1] / 1e3);
	m = ask(s, own, CHECK);
	stage_number(s, "written_by_opener", "words wrong", (double)m.value[0]);
	return first;
}

/* Return: the handle of the new allocation is that of the freed one. */
static bool reused(struct stage *s, struct role *own, struct role *open,
		   const struct message *first)
{
	struct message m;
	bool same;

	stage_step(s, "free and allocate again");
	ask(s, open, 1); /* close first: freeing what is open is undefined */
	m = ask(s, own, AGAIN);
	same = memcmp(m.handle, first->handle, sizeof(CUipcMemHandle)) == 0;
	stage_text(s, "address_after_free", "%s",
		   m.value[0] == first->value[0] ? "the same" : "another");
	stage_text(s, "handle_after_free", "%s", same ? "the same" : "another");
	role_end(s, open);
	return same;
}

/* The exporter is killed while its memory is open elsewhere. */
static void orphan(struct stage *s)
{
	struct role own = role_start(s, "the owner", owner, NULL), open;
	struct message m = MESSAGE_NULL;
	char how[64];
	int rc;

	stage_step(s, "killing the owner of open memory");
	role_must(s, &own, 30000, &m);
	open = role_start(s, "the opener", opener, &m);
	role_must(s, &open, 30000, NULL);
	role_kill(s, &own);
	m = MESSAGE_NULL;
	role_tell(s, &open, &m);
	rc = role_hear(s, &open, 20000, &m);
	if (rc < 0)
		stage_text(s, "after_owner_was_killed", "%s", role_how(&open, how, sizeof(how)));
	else if (m.value[1])
		stage_text(s, "after_owner_was_killed", "reading fails: %s", m.text);
	else
		stage_text(s, "after_owner_was_killed", "%s",
			   m.value[0] ? "readable, but the data is wrong"
				      : "readable, data intact");
	role_kill(s, &open);
}

static void own_handle(struct stage *s)
{
	struct role own = role_start(s, "the owner", owner, NULL);
	struct message m = MESSAGE_NULL;
	char how[64];

	stage_step(s, "opening a handle in its own process");
	role_must(s, &own, 30000, NULL);
	m.value[0] = OPEN_OWN;
	role_tell(s, &own, &m);
	if (role_hear(s, &own, 20000, &m) < 0)
		stage_text(s, "own_handle", "the process %s", role_how(&own, how, sizeof(how)));
	else
		stage_text(s, "own_handle", "%s", m.value[0] ? m.text : "can be opened");
	role_kill(s, &own);
}

void probe_ipc(struct stage *s)
{
	struct role own = role_start(s, "the owner", owner, NULL), open;
	struct message first = share(s, &own, &open);
	bool same = reused(s, &own, &open, &first);

	role_end(s, &own);
	orphan(s);
	own_handle(s);
	stage_answer(s, "Memory is shared by handle.");
	stage_answer(s, same ? "A new allocation can have the handle of a freed one: never free "
			       "what was exported while it may be remembered."
			     : "A new allocation has another handle.");
}
